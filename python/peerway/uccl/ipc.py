"""The 104 bytes that offer memory to a process on the same host.

``handle[64] | offset u64 | size u64 | operation u32 | is_host u8, 3 unused | gpu_idx i32, 4 unused
| direct_addr u64``, little-endian. The handle is the engine's descriptor, which also has 64 bytes.
The owner checks the descriptor.
"""

import struct
from dataclasses import dataclass

#: Bytes of a descriptor, which UCCL calls a "FIFO item".
DESCRIPTOR_SIZE = 64
#: Bytes of an offer.
IPC_INFO_SIZE = 104

_INFO = struct.Struct("<64sQQIB3xi4xQ")
_WINDOW = struct.Struct("<QI")
_LONG = 0xFFFF_FFFF
_OFFER = 1


@dataclass(frozen=True, slots=True)
class IpcInfo:
    """Memory that a process on this host offers."""

    descriptor: bytes
    offset: int
    size: int
    #: The number of the GPU that holds the memory; None for host memory. The owner sets it, and it
    #: is only a hint.
    gpu: int | None = None

    @property
    def is_host(self) -> bool:
        return self.gpu is None

    def to_bytes(self) -> bytes:
        # -1 means no GPU. The last field is 0, so that no address of this process is disclosed.
        gpu = -1 if self.gpu is None else self.gpu
        return _INFO.pack(self.descriptor, self.offset, self.size, _OFFER, self.is_host, gpu, 0)

    @classmethod
    def from_bytes(cls, info: bytes) -> "IpcInfo":
        descriptor, offset, size, _operation, is_host, gpu, _address = _INFO.unpack(info)
        return cls(descriptor, offset, size, None if is_host else gpu)

    def start(self, size: int) -> bytes:
        """The descriptor of ``size`` bytes at the offset.

        Raises ``ValueError`` if fewer are offered.
        """
        if size > self.size:
            raise ValueError(f"the transfer has {size} bytes, but info offers only {self.size}")
        address, _ = _WINDOW.unpack_from(self.descriptor)
        return retarget(self.descriptor, address + self.offset, size)


def retarget(descriptor: bytes, address: int, size: int) -> bytes:
    """The same grant for ``size`` bytes from ``address``.

    The owner checks that it advertised them.
    """
    if address + size > 2**64:
        raise ValueError(f"{size} bytes from {address:#x} exceed the address space")
    return _WINDOW.pack(address, min(size, _LONG)) + descriptor[_WINDOW.size :]
