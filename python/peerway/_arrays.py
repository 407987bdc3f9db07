"""Shareable memory as arrays, on the host and on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias, TypeVar, overload

from peerway._errors import NoCuda
from peerway._native import GpuMemory, Memory

if TYPE_CHECKING:
    import numpy
    from numpy.typing import DTypeLike, NDArray

    from peerway._types import TorchDtype

    _Scalar = TypeVar("_Scalar", bound=numpy.generic)

Shape: TypeAlias = SupportsIndex | Sequence[SupportsIndex]


@overload
def empty(shape: Shape, dtype: Literal["uint8"] = "uint8", *, gpu: None = None) -> NDArray[numpy.uint8]: ...
@overload
def empty(shape: Shape, dtype: type[_Scalar] | numpy.dtype[_Scalar], *, gpu: None = None) -> NDArray[_Scalar]: ...
@overload
def empty(shape: Shape, dtype: str, *, gpu: None = None) -> NDArray[Any]: ...
@overload
def empty(shape: Shape, dtype: TorchDtype, *, gpu: SupportsIndex | None = None) -> Any: ...
@overload
def empty(shape: Shape, dtype: DTypeLike = "uint8", *, gpu: SupportsIndex) -> GpuArray: ...
@overload
def empty(shape: Shape, dtype: DTypeLike, *, gpu: None = None) -> NDArray[Any]: ...
def empty(shape: Shape, dtype: Any = "uint8", *, gpu: SupportsIndex | None = None) -> Any:
    """Allocates zeroed memory that local peers can map, as an array.

    Such memory allows the fastest path between two processes. A ``torch.dtype`` returns a torch
    tensor. Any NumPy dtype returns a NumPy array, or with ``gpu`` (a number) a :class:`GpuArray`.
    The memory lives as long as the array, or a region registered from the array or a part of it.
    """
    try:
        sizes = (index(shape),) if isinstance(shape, SupportsIndex) else tuple(index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape: {shape} is not a shape; give integers of 0 or more")
    if type(dtype).__module__.partition(".")[0] == "torch":
        return _tensor(sizes, dtype) if gpu is None else _cuda_tensor(sizes, dtype, index(gpu))
    return _array(sizes, dtype, None if gpu is None else index(gpu))


class GpuArray:
    """GPU memory with a shape and a type.

    CuPy, Numba, JAX and torch make arrays of it without a copy, by ``__cuda_array_interface__`` or
    ``__dlpack__``.
    """

    __slots__ = ("__weakref__", "_memory", "dtype", "shape")

    def __init__(self, memory: GpuMemory, shape: tuple[int, ...], dtype: Any) -> None:
        self._memory = memory
        self.shape = shape
        self.dtype = dtype

    @property
    def memory(self) -> GpuMemory:
        """The memory that holds the array."""
        return self._memory

    @property
    def gpu(self) -> int:
        """The GPU's number in this process."""
        return self._memory.gpu

    @property
    def address(self) -> int:
        """Address of the first byte. Only GPUs can use it."""
        return self._memory.address

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._memory.__cuda_array_interface__ | {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._memory.__dlpack_device__()

    def __dlpack__(self, **_options: Any) -> Any:
        code = _DLPACK_CODES.get(self.dtype.kind)
        if code is None or not self.dtype.isnative:
            raise BufferError(f"DLPack has no type code for {self.dtype}; use a native numeric dtype")
        # No stream needs to wait, because no work is pending on the memory.
        return self._memory.dlpack(self.shape, code, 8 * self.dtype.itemsize)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without dimensions has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<peerway.GpuArray {self.shape} of {self.dtype} on GPU {self.gpu}>"


#: DLPack's type codes by NumPy's kind letters.
_DLPACK_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


def _array(shape: tuple[int, ...], dtype: Any, gpu: int | None) -> Any:
    try:
        import numpy
    except ImportError as missing:
        raise ImportError(
            'peerway.empty makes NumPy arrays, and NumPy is not installed: run `pip install "peerway[numpy]"`, '
            "or use Endpoint.allocate(nbytes), whose memory is a buffer"
        ) from missing

    dtype = numpy.dtype(dtype)
    if dtype.hasobject:
        raise ValueError(f"dtype: {dtype} holds Python objects, which cannot be transferred; use a numeric dtype")
    if gpu is not None:
        return GpuArray(GpuMemory(prod(shape) * dtype.itemsize, gpu), shape, dtype)
    return numpy.ndarray(shape, dtype, Memory(prod(shape) * dtype.itemsize))


def _tensor(shape: tuple[int, ...], dtype: Any) -> Any:
    import torch

    if prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    memory = Memory(prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


def _cuda_tensor(shape: tuple[int, ...], dtype: Any, gpu: int) -> Any:
    import torch

    if not torch.cuda.is_available():
        raise NoCuda("dtype: this build of torch has no CUDA; pass a NumPy dtype for a GpuArray")
    device = torch.device("cuda", gpu)
    if prod(shape) == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    # The tensor's storage keeps the memory alive.
    memory = GpuMemory(prod(shape) * dtype.itemsize, gpu)
    return torch.as_tensor(memory, device=device).view(dtype).reshape(shape)
