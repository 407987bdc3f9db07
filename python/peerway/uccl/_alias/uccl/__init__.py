"""Makes ``uccl`` an alias of ``peerway.uccl`` in child processes of ``python -m peerway.uccl``."""

from peerway.uccl.alias import install

install()
