"""``uccl.p2p``, by Peerway."""

from peerway.uccl.p2p import *  # noqa: F403
from peerway.uccl.p2p import __all__ as __all__
