"""``uccl`` is ``peerway.uccl``: on the path of processes that were started under ``python -m peerway.uccl``."""

from peerway.uccl.alias import install

install()
