"""GPU memory for tests, from the real driver or from the fake that ``PEERWAY_CUDA_SO`` names.

The tests need no framework. They use hand-made objects with the same interfaces.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import peerway
import pytest


def need() -> None:
    """Skips the test if there is neither a GPU nor a fake driver."""
    try:
        peerway.gpus()
    except peerway.NoCuda as error:
        pytest.skip(f"{error} (PEERWAY_CUDA_SO can name a fake)")


@cache
def driver() -> Driver:
    return Driver()


class Driver:
    """The driver's calls, in the context of GPU 0."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ.get("PEERWAY_CUDA_SO") or "libcuda.so.1")
        self._call("cuInit", 0)
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        assert result == 0, f"{name}: {result}"

    def __call__(self, name: str, *arguments: Any) -> None:
        self._call("cuCtxSetCurrent", self._context)
        self._call(name, *arguments)

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def pinned(self, nbytes: int) -> int:
        address = ctypes.c_void_p()
        self("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(nbytes), 0)
        return address.value or 0

    def free(self, address: int) -> None:
        self("cuMemFree_v2", ctypes.c_uint64(address))

    def put(self, address: int, data: bytes) -> None:
        self("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def get(self, address: int, nbytes: int) -> bytes:
        into = ctypes.create_string_buffer(nbytes)
        self("cuMemcpyDtoH_v2", into, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        return into.raw

    def stream(self) -> int:
        made = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(made), 1)
        return made.value or 0


class GpuBuffer:
    """Bytes on GPU 0, inside an allocation, with ``before`` bytes in front of them."""

    def __init__(self, data: bytes | int, before: int = 0) -> None:
        data = bytes(data) if isinstance(data, int) else data
        self.size = len(data)
        self._base = driver().allocate(max(1, before + self.size))
        self.ptr = self._base + before
        self.fill(data)

    def __bytes__(self) -> bytes:
        return driver().get(self.ptr, self.size)

    def fill(self, data: bytes) -> None:
        driver().put(self.ptr, data)

    def free(self) -> None:
        if self._base:
            driver().free(self._base)
            self._base = 0

    def __del__(self) -> None:
        self.free()


class PinnedBuffer:
    """Pinned host memory. It is never freed, because the tests use little of it."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self.ptr = driver().pinned(self.size)
        self.fill(data)

    def __bytes__(self) -> bytes:
        return ctypes.string_at(self.ptr, self.size)

    def fill(self, data: bytes) -> None:
        ctypes.memmove(self.ptr, data, len(data))


class ByInterface:
    """An object like an array of CuPy or Numba."""

    def __init__(self, buffer: Any, **items: Any) -> None:
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": (buffer.size,),
            "typestr": "|u1",
            "data": (buffer.ptr, False),
            "version": 3,
        } | items


class ByPointer:
    """A tensor of a framework other than torch."""

    def __init__(self, buffer: Any, **attributes: Any) -> None:
        self.buffer = buffer
        for name, value in attributes.items():
            setattr(self, name, value)

    def data_ptr(self) -> int:
        return self.buffer.ptr

    def numel(self) -> int:
        return self.buffer.size

    def element_size(self) -> int:
        return 1


class _DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class ByDlpack:
    """An object like an array of JAX, whose first byte has an offset."""

    def __init__(self, buffer: Any, device: int = 2, strides: list[int] | None = None) -> None:
        self.buffer, self._device = buffer, device
        self.asked: dict[str, Any] = {}
        self._shape = (ctypes.c_int64 * 1)(buffer.size)
        steps = (ctypes.c_int64 * 1)(*strides) if strides else None
        self._tensor = _DlTensor(buffer.ptr - 8, device, 0, 1, 1, 8, 1, self._shape, steps, 8, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self._device, 0)

    def __dlpack__(self, **options: Any) -> Any:
        self.asked = options
        return _new_capsule(ctypes.addressof(self._tensor), b"dltensor", None)
