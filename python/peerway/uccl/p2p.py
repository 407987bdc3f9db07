"""Drop-in for ``uccl.p2p``: one-sided reads and writes of registered memory, over Peerway."""

from .descriptors import XferDesc, XferHandle
from .endpoint import Endpoint, get_oob_ip
from .floats import (
    FloatType,
    kBFloat16,
    kFloat8E4M3FN,
    kFloat8E5M2,
    kFloat16,
    kFloat32,
    kUndefined,
)

__all__ = [
    "Endpoint",
    "FloatType",
    "XferDesc",
    "XferHandle",
    "get_oob_ip",
    "kBFloat16",
    "kFloat8E4M3FN",
    "kFloat8E5M2",
    "kFloat16",
    "kFloat32",
    "kUndefined",
]
