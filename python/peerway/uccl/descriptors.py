"""Transfer descriptors, and the serialized form of a list of them.

A serialized list is ``u64 n`` and n times ``u64 addr | u64 size | u64 k | u32 lkeys[k] | u32
rkeys[k] | u64 length | ipc bytes``, little-endian. It does not contain ``mr_id``, which is valid
only at the endpoint that registered the memory.
"""

import struct
from typing import Any

from .arguments import NONE_ID, items, u32, u64

_HEAD = struct.Struct("<QQQ")
_U64 = struct.Struct("<Q")
_FIELDS = ("addr", "size", "mr_id", "lkeys", "rkeys")


class XferDesc:
    """A piece of registered memory, local or at a peer.

    ``desc["addr"]`` is ``desc.addr``. Two descriptors are equal when all their fields are equal.
    The keys are names from the registration cache, not keys of a network card. The ``ipc bytes``
    carry the grant for the memory.
    """

    __slots__ = ("_addr", "_ipc_info", "_lkeys", "_mr_id", "_rkeys", "_size")
    __hash__ = None  # type: ignore[assignment]  # fields can be changed

    def __init__(self) -> None:
        self._addr = 0
        self._size = 0
        self._mr_id = NONE_ID
        self._lkeys: list[int] = []
        self._rkeys: list[int] = []
        self._ipc_info = b""

    @classmethod
    def of(cls, addr: int, size: int, mr_id: int, lkeys: list[int], rkeys: list[int], ipc_info: bytes) -> "XferDesc":
        """A descriptor with all its fields."""
        desc = cls()
        desc._addr, desc._size, desc._mr_id = addr, size, mr_id
        desc._lkeys, desc._rkeys, desc._ipc_info = lkeys, rkeys, ipc_info
        return desc

    @property
    def addr(self) -> int:
        return self._addr

    @addr.setter
    def addr(self, value: int) -> None:
        self._addr = u64(value, "addr")

    @property
    def size(self) -> int:
        return self._size

    @size.setter
    def size(self, value: int) -> None:
        self._size = u64(value, "size")

    @property
    def mr_id(self) -> int:
        return self._mr_id

    @mr_id.setter
    def mr_id(self, value: int) -> None:
        self._mr_id = u64(value, "mr_id")

    @property
    def lkeys(self) -> list[int]:
        return list(self._lkeys)

    @lkeys.setter
    def lkeys(self, value: list[int]) -> None:
        self._lkeys = [u32(key, f"lkeys[{at}]") for at, key in enumerate(items(value, "lkeys"))]

    @property
    def rkeys(self) -> list[int]:
        return list(self._rkeys)

    @rkeys.setter
    def rkeys(self, value: list[int]) -> None:
        self._rkeys = [u32(key, f"rkeys[{at}]") for at, key in enumerate(items(value, "rkeys"))]

    def __getitem__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise KeyError(name)
        return getattr(self, name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in _FIELDS:
            raise KeyError(name)
        setattr(self, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, XferDesc):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in XferDesc.__slots__)

    def __repr__(self) -> str:
        return f"<XferDesc addr={self._addr} size={self._size} mr_id={self._mr_id}>"


class XferHandle:
    """A part of ``uccl.p2p``'s interface. No call returns one, because ids name transfers."""

    __slots__ = ("_conn_id", "_op_name", "_transfer_id")
    _conn_id: int
    _op_name: str
    _transfer_id: int

    def __new__(cls) -> "XferHandle":
        raise TypeError("XferHandle cannot be instantiated; use the transfer id that transfer() returns")

    @property
    def conn_id(self) -> int:
        return self._conn_id

    @property
    def op_name(self) -> str:
        return self._op_name

    @property
    def transfer_id(self) -> int:
        return self._transfer_id


def descs(value: object, name: str) -> list[XferDesc]:
    """A sequence of descriptors."""
    found = items(value, name)
    for at, desc in enumerate(found):
        if not isinstance(desc, XferDesc):
            raise TypeError(f"{name}[{at}] must be an XferDesc, not {type(desc).__name__}")
    return found


def serialize(desc_list: list[XferDesc]) -> bytes:
    """The bytes of a list of descriptors."""
    parts = [_U64.pack(len(desc_list))]
    for at, desc in enumerate(desc_list):
        count = len(desc._lkeys)
        if len(desc._rkeys) != count:
            raise ValueError(f"desc_list[{at}] has {count} lkeys and {len(desc._rkeys)} rkeys; the counts must match")
        parts.append(_HEAD.pack(desc._addr, desc._size, count))
        parts.append(struct.pack(f"<{2 * count}I", *desc._lkeys, *desc._rkeys))
        parts.append(_U64.pack(len(desc._ipc_info)))
        parts.append(desc._ipc_info)
    return b"".join(parts)


def deserialize(data: bytes) -> list[XferDesc]:
    """The descriptors in ``data``. Raises ``RuntimeError`` for bytes that are not such a list."""
    if not data:
        return []
    rest = _Rest(data)
    (n,) = rest.take(_U64)
    found: list[XferDesc] = []
    # Every descriptor takes bytes, so a count that is too large fails at the end of the data.
    for _ in range(n):
        addr, size, count = rest.take(_HEAD)
        keys = rest.keys(2 * count)
        # Lists of older versions end without the last length.
        ipc_info = rest.cut(rest.take(_U64)[0]) if rest.left else b""
        found.append(XferDesc.of(addr, size, NONE_ID, list(keys[:count]), list(keys[count:]), ipc_info))
    if rest.left:
        raise RuntimeError(f"Invalid serialized XferDesc data: {rest.left} bytes too many at the end")
    return found


class _Rest:
    """The unparsed rest of the data. Every length is checked against the rest before use."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def cut(self, size: int) -> bytes:
        if size > self.left:
            raise RuntimeError(f"Invalid serialized XferDesc data: {size} bytes expected, {self.left} left")
        start, self._at = self._at, self._at + size
        return self._data[start : self._at]

    def take(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.cut(layout.size))

    def keys(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}I", self.cut(4 * count))
