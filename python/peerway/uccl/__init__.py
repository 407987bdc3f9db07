"""Drop-in for the ``uccl`` package: ``p2p`` and ``utils``.

``python -m peerway.uccl script.py`` runs a script with ``from uccl import p2p`` on this package.
The distribution ``peerway-uccl`` installs it under the name ``uccl``.
"""

from pathlib import Path
from typing import NoReturn

from . import p2p, utils

__all__ = [
    "efa_nccl_path",
    "efa_plugin_path",
    "has_efa",
    "is_efa",
    "nccl_plugin_path",
    "p2p",
    "rccl_plugin_path",
    "utils",
]

#: The release of UCCL whose interface this package implements.
__version__ = "0.1.1"

_DEVICES = Path("/sys/class/infiniband")


def has_efa() -> bool:
    """Whether this host has an EFA network card. ``p2p`` does not depend on it."""
    try:
        return any("rdmap" in device.name for device in _DEVICES.iterdir())
    except OSError:
        return False


is_efa = has_efa()


def nccl_plugin_path() -> NoReturn:
    """Raises ``FileNotFoundError``: UCCL's collectives are not part of Peerway."""
    _not_here("libnccl-net-uccl.so")


def rccl_plugin_path() -> NoReturn:
    """Raises ``FileNotFoundError``: UCCL's collectives are not part of Peerway."""
    _not_here("librccl-net-uccl.so")


def efa_plugin_path() -> NoReturn:
    """Raises ``FileNotFoundError``: UCCL's collectives are not part of Peerway."""
    _not_here("libnccl-net-efa.so")


def efa_nccl_path() -> NoReturn:
    """Raises ``FileNotFoundError``: UCCL's collectives are not part of Peerway."""
    _not_here("libnccl-efa.so")


def _not_here(name: str) -> NoReturn:
    raise FileNotFoundError(
        f"{name} belongs to UCCL's collectives, which Peerway does not provide; install UCCL itself"
    )
