"""``python -m peerway.bench``: the table of ``peerway bench`` from Python calls, so that the binding's cost shows.

This process asks; a second one, started by `second`, owns the memory that is read and written. `plan` says
which rows there are, `session` opens a path and measures them beside their limit with `timing`, `calls` and
`awaited` measure what is no row, and `report` prints it all, beside the rows of the Rust program when
`compare` finds it.
"""
