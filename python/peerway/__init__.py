"""Peerway moves bytes between the memories of two processes by one-sided reads and writes.

>>> import peerway
>>> a, b = peerway.Endpoint(), peerway.Endpoint()
>>> theirs = b.allocate(1024)
>>> peer = a.connect(b.metadata)
>>> peer.write(b"x" * 1024, peer.remote(theirs.advertise("rw")))
>>> bytes(memoryview(theirs)[:4])
b'xxxx'
"""

from peerway import _errors
from peerway._arrays import GpuArray, empty
from peerway._errors import *  # noqa: F403
from peerway._native import (
    BlockList,
    Endpoint,
    Enqueued,
    Gpu,
    GpuMemory,
    LocalSlice,
    Memory,
    Notification,
    Peer,
    Prepared,
    Region,
    RemoteRegion,
    RemoteSlice,
    Staged,
    Transfer,
    __version__,
    gpus,
)

__all__ = [
    "BlockList",
    "Endpoint",
    "Enqueued",
    "Gpu",
    "GpuArray",
    "GpuMemory",
    "LocalSlice",
    "Memory",
    "Notification",
    "Peer",
    "Prepared",
    "Region",
    "RemoteRegion",
    "RemoteSlice",
    "Staged",
    "Transfer",
    "__version__",
    "empty",
    "gpus",
    *_errors.__all__,
]
