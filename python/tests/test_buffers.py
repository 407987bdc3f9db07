"""Every kind of Python memory is used without a copy and kept alive while it is in use."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import sys
import warnings
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
    def __dlpack__(self, **options: object) -> object:
        return self.array.__dlpack__()

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


def test_memory_that_cannot_be_transferred_is_refused(near) -> None:
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
        with pytest.raises(peerway.GpuError, match="local: .*GPU"):
            peer.write(memory, remote)


def test_objects_and_bits_are_no_bytes(endpoint: peerway.Endpoint) -> None:
    objects = numpy.array(["a", "b"], dtype=object)
    bits = ByInterface(numpy.zeros(8, "uint8"))
    bits.__array_interface__ = dict(bits.__array_interface__, typestr="|t1")
    short = ByInterface(numpy.zeros((2, 4), "uint8"))
    short.__array_interface__ = dict(short.__array_interface__, strides=(4,))
    for memory in [objects, ByInterface(objects), bits, short]:
        with pytest.raises(BufferError, match="buffer: "):
            endpoint.register(memory)
    endpoint.register(numpy.zeros(4, "datetime64[s]"))


def test_a_tensor_that_is_given_other_storage_keeps_what_was_registered(near) -> None:
    peer, remote, theirs = near
    tensor = torch().zeros(1 << 22, dtype=torch().uint8)
    with peerway.Endpoint() as other, peerway.Endpoint() as reader:
        region = other.register(tensor)
        link = reader.connect(other.metadata)
        far_away = link.remote(region.advertise())
        tensor.data = torch().zeros(4, dtype=torch().uint8)
        link.write(b"x" * 100, far_away[:100])
    with peerway.Endpoint() as other:
        kept = torch().zeros(100, dtype=torch().uint8)
        region = other.register(kept)
        with pytest.raises(RuntimeError, match="resiz"):
            kept.resize_(1 << 20)
    conjugated = torch().ones(4, dtype=torch().complex64).conj()
    with pytest.raises(TypeError, match="local: .*does not expose its bytes"):
        peer.write(conjugated, remote)


def test_memory_that_only_claims_to_be_writable(endpoint: peerway.Endpoint, tmp_path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(8192))
    mapped = numpy.memmap(path, "uint8", mode="r")
    with warnings.catch_warnings(action="ignore"):
        tensor = torch().from_numpy(mapped)
    with pytest.raises(BufferError, match="buffer: .*cannot be written"):
        endpoint.register(tensor)
    region = endpoint.register_address(mapped.ctypes.data, mapped.nbytes, mapped)
    assert not region.writable
    with pytest.raises(BufferError, match="access: .*read-only"):
        region.advertise("rw")
    assert len(region.advertise("r")) == 64
    with peerway.Endpoint() as owner:
        theirs = owner.allocate(8192)
        peer = endpoint.connect(owner.metadata)
        peer.write(region, theirs.advertise())
        for local in [region, region[:8192], [region]]:
            with pytest.raises(BufferError, match="local: .*read-only"):
                peer.read(local, [theirs.advertise()] if isinstance(local, list) else theirs.advertise())
        with pytest.raises(BufferError):
            peer.read(region.blocks([0], 8192), peer.remote(theirs.advertise()).blocks([0], 8192))


def test_a_signal_in_an_object_is_not_swallowed(endpoint: peerway.Endpoint) -> None:
    class Interrupted:
        def data_ptr(self) -> int:
            return 1

        def is_contiguous(self) -> bool:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        endpoint.register(Interrupted())


def test_a_meta_tensor_has_no_memory(endpoint: peerway.Endpoint) -> None:
    with pytest.raises(TypeError, match="buffer: .*device 'meta'"):
        endpoint.register(torch().empty(4, device="meta"))
