"""Makes this package importable as ``uccl`` without an installation under that name."""

import os
import sys
from pathlib import Path

#: A folder with a package ``uccl`` that is an alias of this one.
FOLDER = str(Path(__file__).parent / "_alias")


def install() -> None:
    """Makes ``uccl``, ``uccl.p2p`` and ``uccl.utils`` aliases of this package in this process."""
    import peerway.uccl as package

    sys.modules["uccl"] = package
    sys.modules["uccl.p2p"] = package.p2p
    sys.modules["uccl.utils"] = package.utils


def install_for_children() -> None:
    """Does the same in child processes, for example of a launcher or of ``multiprocessing``."""
    before = os.environ.get("PYTHONPATH")
    if before is None or FOLDER not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = FOLDER if not before else FOLDER + os.pathsep + before
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
