"""``uccl.utils``, by Peerway."""

from peerway.uccl.utils import *  # noqa: F403
from peerway.uccl.utils import __all__ as __all__
from peerway.uccl.utils import _recv_exact as _recv_exact
