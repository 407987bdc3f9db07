"""Peerway moves bytes between the memory of two processes by one-sided reads and writes.

>>> import peerway
>>> a, b = peerway.Endpoint(), peerway.Endpoint()
>>> theirs = b.allocate(1024)
>>> peer = a.connect(b.metadata)
>>> peer.write(b"x" * 1024, peer.remote(theirs.advertise("rw")))
>>> bytes(memoryview(theirs)[:4])
b'xxxx'
"""

from peerway import _errors, gpu
from peerway._arrays import GpuArray, empty
from peerway._errors import *  # noqa: F403
from peerway._native import (
    Armed,
    BlockList,
    Endpoint,
    Enqueued,
    Fault,
    Gpu,
    GpuMemory,
    HostProducer,
    LocalSlice,
    Memory,
    Notification,
    Peer,
    Prepared,
    Proxy,
    Region,
    RemoteRegion,
    RemoteSlice,
    Staged,
    Transfer,
    Window,
    __version__,
    gpus,
    quarantine,
)

Pusher = HostProducer  # the former name

__all__ = [
    "Armed",
    "BlockList",
    "Endpoint",
    "Enqueued",
    "Fault",
    "Gpu",
    "GpuArray",
    "GpuMemory",
    "HostProducer",
    "LocalSlice",
    "Memory",
    "Notification",
    "Peer",
    "Prepared",
    "Proxy",
    "Pusher",
    "Region",
    "RemoteRegion",
    "RemoteSlice",
    "Staged",
    "Transfer",
    "Window",
    "__version__",
    "empty",
    "gpu",
    "gpus",
    "quarantine",
    *_errors.__all__,
]
