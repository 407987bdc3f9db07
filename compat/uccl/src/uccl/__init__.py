"""Drop-in for the ``uccl`` package: ``uccl.p2p`` and ``uccl.utils`` over Peerway."""

from ._upstream import refuse_beside_upstream

refuse_beside_upstream()

from peerway.uccl import (  # noqa: E402
    __version__,
    efa_nccl_path,
    efa_plugin_path,
    has_efa,
    is_efa,
    nccl_plugin_path,
    rccl_plugin_path,
)

from . import p2p, utils  # noqa: E402

__all__ = [
    "__version__",
    "efa_nccl_path",
    "efa_plugin_path",
    "has_efa",
    "is_efa",
    "nccl_plugin_path",
    "p2p",
    "rccl_plugin_path",
    "utils",
]
