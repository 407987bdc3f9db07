"""Shareable memory as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from peerway._native import Memory


def empty(shape: int | Sequence[int], dtype: Any = "uint8") -> Any:
    """Zeroed memory that local peers can map, as an array: the fastest path between two processes.

    A ``torch.dtype`` gives a torch tensor, anything else that NumPy takes for a dtype a NumPy array. The memory
    lives as long as the array or a region registered from it (or from a part of it).
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(f"shape: {shape} is not a shape; give integers, 0 or more")
    if type(dtype).__module__.partition(".")[0] == "torch":
        return _tensor(shape, dtype)
    return _array(shape, dtype)


def _array(shape: tuple[int, ...], dtype: Any) -> Any:
    import numpy

    dtype = numpy.dtype(dtype)
    if dtype.hasobject:
        raise ValueError(f"dtype: {dtype} holds Python objects, which are no bytes to move")
    return numpy.ndarray(shape, dtype, Memory(prod(shape) * dtype.itemsize))


def _tensor(shape: tuple[int, ...], dtype: Any) -> Any:
    import torch

    if prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    memory = Memory(prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)
