"""Every kind of memory that Python has, without a copy, kept alive while it is used."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import sys
import weakref

import numpy
import peerway
import pytest


@pytest.fixture
def near(endpoint: peerway.Endpoint):
    """A peer in this process and 64 bytes of its memory."""
    with peerway.Endpoint() as owner:
        region = owner.allocate(64)
        peer = endpoint.connect(owner.metadata)
        yield peer, peer.remote(region.advertise()), memoryview(region)


class ByDlpack:
    def __init__(self, array: numpy.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: object) -> object:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class ByInterface:
    def __init__(self, array: numpy.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


class OnGpu:
    __cuda_array_interface__ = {"shape": (64,), "typestr": "|u1", "data": (1 << 40, False), "version": 3}


class ByDlpackOnGpu(ByDlpack):
    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def torch():
    return pytest.importorskip("torch")


KINDS = {
    "bytearray": lambda: bytearray(range(64)),
    "array": lambda: array.array("I", range(16)),
    "ctypes": lambda: (ctypes.c_uint8 * 64)(*range(64)),
    "mmap": lambda: mmap.mmap(-1, 64),
    "memoryview": lambda: memoryview(bytearray(range(64))),
    "numpy": lambda: numpy.arange(16, dtype="float32"),
    "numpy 2d": lambda: numpy.arange(16, dtype="float32").reshape(4, 4),
    "numpy fortran": lambda: numpy.asfortranarray(numpy.arange(16, dtype="float32").reshape(4, 4)),
    "numpy part": lambda: numpy.arange(100, dtype="uint8")[10:74],
    "dlpack": lambda: ByDlpack(numpy.arange(64, dtype="uint8")),
    "array interface": lambda: ByInterface(numpy.arange(64, dtype="uint8")),
    "torch": lambda: torch().arange(16, dtype=torch().float32),
    "torch bfloat16": lambda: torch().arange(32).to(torch().bfloat16),
    "torch part": lambda: torch().arange(100, dtype=torch().uint8)[7:71],
    "shared": lambda: peerway.empty(64),
    "shared part": lambda: peerway.empty((4, 64), "uint8")[2],
    "shared torch": lambda: peerway.empty((4, 8), torch().int16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(near, kind: str) -> None:
    peer, remote, theirs = near
    ours = KINDS[kind]()
    for i in range(64):
        theirs[i] = 255 - i
    peer.read(ours, remote)
    theirs[:] = bytes(64)
    peer.write(ours, remote)
    assert bytes(theirs) == bytes(255 - i for i in range(64))


def test_shareable_memory_is_recognised_in_parts(endpoint: peerway.Endpoint) -> None:
    whole = peerway.empty((8, 1024), "float32")
    assert whole.shape == (8, 1024) and whole.dtype == "float32" and not whole.any()
    part = endpoint.register(whole[3])
    assert part.shareable and part.address == whole[3].ctypes.data and part.nbytes == 4096
    assert endpoint.register_address(whole.ctypes.data, whole.nbytes).shareable
    assert not endpoint.register(numpy.zeros(10)).shareable
    memoryview(endpoint.allocate(10))[:] = bytes(10)
    with pytest.raises(BufferError, match="the object it was registered from"):
        memoryview(endpoint.register(bytearray(10)))
    assert peerway.empty(0).size == 0 and peerway.empty((3, 0), torch().float32).numel() == 0
    for bad in [(-1,), ("x",), (1.5,)]:
        with pytest.raises(ValueError, match="shape"):
            peerway.empty(bad)
    with pytest.raises(ValueError, match="dtype"):
        peerway.empty(3, object)


def test_memory_is_kept_while_it_is_registered_and_no_longer(endpoint: peerway.Endpoint) -> None:
    class Owner(numpy.ndarray):
        pass

    ours = numpy.zeros(1000, "uint8").view(Owner)
    gone = weakref.ref(ours)
    region = endpoint.register(ours)
    count = sys.getrefcount(ours)
    del ours
    gc.collect()
    assert gone() is not None and count > 2
    del region
    gc.collect()
    assert gone() is None

    resizable = bytearray(100)
    region = endpoint.register(resizable)
    with pytest.raises(BufferError):
        resizable.extend(b"x")
    del region
    gc.collect()
    resizable.extend(b"x")


def test_what_cannot_be_moved_is_refused(near) -> None:
    peer, remote, _ = near
    not_contiguous = [
        numpy.zeros((64, 2), "uint8")[:, 0],
        memoryview(bytearray(128))[::2],
        ByInterface(numpy.zeros((64, 2), "uint8")[:, 0]),
        ByDlpack(numpy.zeros((64, 2), "uint8")[:, 0]),
        torch().zeros((64, 2), dtype=torch().uint8)[:, 0],
    ]
    for memory in not_contiguous:
        with pytest.raises(BufferError, match="local: .*not contiguous"):
            peer.read(memory, remote)
    fixed = numpy.zeros(64, "uint8")
    fixed.flags.writeable = False
    for memory in [fixed, b"x" * 64, memoryview(bytes(64)), ByInterface(fixed)]:
        with pytest.raises(BufferError, match="local: .*read-only"):
            peer.read(memory, remote)
        peer.write(memory, remote)
    for memory in [OnGpu(), ByDlpackOnGpu(numpy.zeros(64, "uint8"))]:
        with pytest.raises(peerway.NoCuda, match="local: .*GPU"):
            peer.write(memory, remote)


def test_a_meta_tensor_has_no_memory(endpoint: peerway.Endpoint) -> None:
    with pytest.raises(TypeError, match="buffer: .*device 'meta'"):
        endpoint.register(torch().empty(4, device="meta"))
