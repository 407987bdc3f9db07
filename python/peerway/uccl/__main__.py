"""Runs a program that was written for ``uccl.p2p``.

    python -m peerway.uccl script.py [arguments]
    python -m peerway.uccl -m module [arguments]

The program and its child processes import this package as ``uccl``. No package with that name needs
to be installed.
"""

import os
import runpy
import sys

from .alias import install, install_for_children

_USAGE = "usage: python -m peerway.uccl (script.py | -m module) [argument ...]"


def main(arguments: list[str]) -> None:
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        sys.exit(_USAGE)
    if arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return
    install()
    install_for_children()
    if arguments[0] == "-m":
        # Like the interpreter, search for modules in the current directory.
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = arguments[0]
    if not os.path.exists(script):
        sys.exit(f"python -m peerway.uccl: file {script} does not exist")
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
