"""``python -m peerway.bench``: the table of ``peerway bench``, measured from Python.

It shows the cost of the binding. This process issues the transfers. A second process, started by
`second`, owns the memory that is read and written. `plan` defines the rows. `session` opens a path
and measures each row and its limit with `timing`. `calls` and `awaited` measure the other figures.
`report` prints the result, next to the rows of the Rust program when `compare` finds it.
"""
