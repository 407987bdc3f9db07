"""The metadata of an endpoint: address, port and GPU.

``ip`` (4 or 16 bytes, network order), ``port`` (2 bytes, big-endian), the length of the GPU's name
(1 byte), the name.
"""

import ipaddress
import re

#: The number of GPU indices that fit into a substitute PCI address.
MAX_GPUS = 1 << 16

_HOST_ONLY = re.compile(r"ffff:([0-9a-f]{2}):([0-9a-f]{2})\.0")


def gpu_name(index: int) -> str:
    """The substitute PCI address of GPU ``index`` without a GPU: ``ffff:00:03.0`` for index 3.

    It has the usual form (12 characters) and is the same in every process and on every host. Real
    GPUs do not use its PCI domain.
    """
    return f"ffff:{index >> 8:02x}:{index & 0xFF:02x}.0"


def gpu_index(name: str) -> int | None:
    """The index that :func:`gpu_name` made this text from; None for any other text."""
    found = _HOST_ONLY.fullmatch(name.lower())
    return int(found[1] + found[2], 16) if found else None


def pack(ip: str, port: int, gpu: str) -> bytes:
    """The metadata of the endpoint at ``ip:port``."""
    name = gpu.encode("ascii")
    address = ipaddress.ip_address(ip.partition("%")[0]).packed
    return address + port.to_bytes(2, "big") + bytes([len(name)]) + name


def parse(metadata: bytes) -> tuple[str, int, str]:
    """``(ip, port, gpu name)``. Raises ``RuntimeError`` for bytes that are not metadata."""
    size = len(metadata)
    if size >= 7 and size == 7 + metadata[6]:
        split = 4
    elif size >= 19 and size == 19 + metadata[18]:
        split = 16
    else:
        raise RuntimeError(f"metadata: these {size} bytes are not the metadata of an endpoint")
    port = int.from_bytes(metadata[split : split + 2], "big")
    try:
        gpu = metadata[split + 3 :].decode("ascii")
    except UnicodeDecodeError:
        raise RuntimeError("metadata: the name of the GPU is not ASCII") from None
    return str(ipaddress.ip_address(metadata[:split])), port, gpu
