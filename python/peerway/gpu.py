"""Compile and launch kernels that can issue transfers themselves.

A kernel includes ``peerway_device.cuh`` and takes a :class:`peerway.Proxy` as an argument.
:func:`compile` needs only this package and NVRTC. For another compiler, use :func:`include_dir` or
:func:`device_headers`.

>>> module = peerway.gpu.compile('extern "C" __global__ void twice(int *x) { *x *= 2; }')
>>> module.kernel("twice")(1, 1, tensor)  # on torch's current stream
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peerway._arrays import GpuArray, empty
from peerway._native import (
    Armed,
    Fault,
    Gpu,
    GpuMemory,
    HostProducer,
    Kernel,
    Module,
    Proxy,
    Window,
    compile_kernels,
    device_headers,
    gpus,
    synchronize,
)

Pusher = HostProducer  # the former name

__all__ = [
    "Armed",
    "Fault",
    "Gpu",
    "GpuArray",
    "GpuMemory",
    "HostProducer",
    "Kernel",
    "Module",
    "Proxy",
    "Pusher",
    "Window",
    "compile",
    "device_headers",
    "empty",
    "gpus",
    "include_dir",
    "synchronize",
]


def include_dir() -> Path:
    """The directory of ``peerway_device.cuh`` and ``peerway_abi.h``, for other compilers."""
    return Path(__file__).parent / "include"


def compile(
    source: str,
    name: str = "kernel.cu",
    headers: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    gpu: Any = 0,
) -> Module:
    """Compiles CUDA C++ for a GPU (a number or a ``torch.device``) and loads it there.

    Compiled programs are cached on disk (``PEERWAY_KERNEL_CACHE``). ``headers`` maps the name in an
    ``#include`` to the text; ``peerway_device.cuh`` and ``peerway_abi.h`` are always available.
    ``options`` are options of NVRTC.

    Raises ``CompileError`` with the compiler's messages, and ``NoCompiler`` when there is no
    compiler. The compiler is searched for in ``PEERWAY_NVRTC_SO``, in the ``nvidia`` packages of
    this environment, and in the library path of the system.
    """
    return compile_kernels(source, name, list((headers or {}).items()), options, gpu, _compiler())


#: Directories of ``nvidia`` that contain NVRTC. CUDA 13's packages share one; earlier packages have
#: one each.
_PACKAGES = ("cu13", "cuda_nvrtc")


def _compiler() -> Path | None:
    """The NVRTC of this environment's packages."""
    nvidia = importlib.util.find_spec("nvidia")
    if nvidia is None:
        return None
    places = [Path(place) for place in nvidia.submodule_search_locations or ()]
    found = (
        library
        for package in _PACKAGES
        for place in places
        for library in sorted((place / package / "lib").glob("libnvrtc.so.[0-9]*"))
    )
    return next(found, None)
