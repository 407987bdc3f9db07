"""Registered memory by number."""

import ctypes
import mmap
import threading
from dataclasses import dataclass, field
from itertools import count

import peerway
from peerway import _native

from .cache import Entry, KeyCache
from .engine import ENGINE_ERRORS
from .floats import FloatType
from .log import logger, reason

_libc = ctypes.CDLL(None, use_errno=True)
_MS_ASYNC = 1


@dataclass(slots=True, eq=False)
class Registration:
    """One registration."""

    id: int
    region: "peerway.Region"
    addr: int
    size: int
    keys: Entry
    float_type: FloatType
    #: The driver's id of the GPU allocation that contains the memory; None for host memory.
    buffer: int | None = None
    #: Advertisements by (start, stop), so that the same range is advertised once.
    adverts: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def advertise(self, addr: int, size: int) -> bytes:
        """The descriptor of a part. Raises ``ValueError`` for a range outside the registration."""
        start, stop = addr - self.addr, addr - self.addr + size
        if start < 0 or stop > self.size:
            raise ValueError(
                f"{size} bytes from {addr:#x} are not inside registration {self.id} "
                f"({self.size} bytes from {self.addr:#x})"
            )
        found = self.adverts.get((start, stop))
        if found is None:
            access = "rw" if self.region.writable else "r"
            found = self.adverts[start, stop] = self.region.advertise(access, start=start, stop=stop)
        return found


class Registrations:
    """The registrations of an endpoint. Numbers start at 1; 0 means no registration."""

    def __init__(self, native: "peerway.Endpoint") -> None:
        self._native = native
        self._lock = threading.Lock()
        self._ids = count(1)
        self._by_id: dict[int, Registration] = {}
        self._keys = KeyCache()
        # Memory that was offered without a registration by the caller.
        self._offered: dict[tuple[int, int], Registration] = {}

    def get(self, mr_id: int) -> Registration | None:
        return self._by_id.get(mr_id)

    def add(self, addr: int, size: int, float_type: FloatType, owner: object = None) -> Registration:
        """Registers memory. Raises one of ``ENGINE_ERRORS`` on failure."""
        region = self._region(addr, size, owner)
        buffer = None if region.gpu is None else _native.gpu_buffer_at(addr)
        with self._lock:
            keys = self._keys.acquire(addr, size)
            registration = Registration(next(self._ids), region, addr, size, keys, float_type, buffer)
            self._by_id[registration.id] = registration
            return registration

    def remove(self, mr_id: int) -> bool:
        """Ends a registration. The engine refuses its advertisements from now on."""
        with self._lock:
            registration = self._by_id.pop(mr_id, None)
            if registration is None:
                return False
            self._keys.release(registration.keys)
        try:
            if not registration.region.revoke():
                logger.warning("registration %d ended, but a peer may still access its memory", mr_id)
        except ENGINE_ERRORS as error:
            logger.warning("registration %d ended without a fence: %s", mr_id, reason(error))
        return True

    def covering(self, addr: int, size: int) -> Registration:
        """A registration that contains the range; a new one if there is none.

        Memory can be offered to local processes without a registration by the caller. No call ends
        such an offer, so it lives until the endpoint closes. The same range is registered once,
        unless GPU memory was freed and other memory has its address now.
        """
        buffer = _native.gpu_buffer_at(addr)
        with self._lock:
            found = self._offered.get((addr, size))
            if found is not None and found.buffer != buffer:
                del self._offered[addr, size]
                found = None
            if found is None:
                inside = (
                    r
                    for r in self._by_id.values()
                    if r.addr <= addr and addr + size <= r.addr + r.size and r.buffer == buffer
                )
                found = min(inside, key=lambda r: r.size, default=None)
        if found is None:
            found = self.add(addr, size, FloatType.kUndefined)
            with self._lock:
                del self._by_id[found.id]
                # Another thread may have registered the range first.
                found = self._offered.setdefault((addr, size), found)
        return found

    def borrow(self, addr: int, size: int) -> "peerway.Region":
        """A region for the local side of one transfer, which keeps it alive.

        No peer can access it.
        """
        return self._region(addr, size)

    def clear(self) -> None:
        with self._lock:
            self._by_id.clear()
            self._offered.clear()

    def _region(self, addr: int, size: int, owner: object = None) -> "peerway.Region":
        region = self._native.register_address(addr, size, owner)
        if getattr(owner, "is_cuda", False) and region.gpu is None and size:
            peerway.gpus()  # raises NoCuda if the process has no GPU
            raise ValueError(f"{size} bytes from {addr:#x} are not GPU memory, although the tensor is on a GPU")
        # The kernel does not know GPU memory, so check only host memory.
        if region.gpu is None and not is_mapped(addr, size):
            raise ValueError(f"{size} bytes from {addr:#x} are neither host memory of this process nor GPU memory")
        return region


def is_mapped(addr: int, size: int) -> bool:
    """Whether the whole range is mapped host memory of this process.

    Memory that the allocator has freed may still be mapped.
    """
    if size == 0:
        return True
    if addr + size > 2**64:
        return False
    start = addr - addr % mmap.PAGESIZE
    # With MS_ASYNC, msync starts no I/O. It only checks that every page belongs to a mapping.
    return bool(_libc.msync(ctypes.c_void_p(start), ctypes.c_size_t(addr + size - start), _MS_ASYNC) == 0)
