"""GPU memory: every interface, every path, and the errors. A fake driver is enough."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Iterator
from typing import Any

import far as far_away
import gpu_support
import numpy
import peerway
import pytest
from far import Far
from gpu_support import ByDlpack, ByInterface, ByPointer, GpuBuffer, PinnedBuffer, driver
from peerway import _native

SIZE = 100_000


def pattern(seed: int, size: int = SIZE) -> bytes:
    return numpy.random.default_rng(seed).bytes(size)


@pytest.fixture(autouse=True)
def _gpu() -> None:
    gpu_support.need()


@pytest.fixture
def near(endpoint: peerway.Endpoint) -> Iterator[tuple[peerway.Peer, peerway.Endpoint]]:
    """A peer in this process."""
    with peerway.Endpoint() as owner:
        yield endpoint.connect(owner.metadata), owner


def test_facts() -> None:
    found = peerway.gpus()
    assert [gpu.index for gpu in found] == list(range(len(found)))
    gpu = found[0]
    assert gpu.name and gpu.memory > 1 << 20 and gpu.capability >= (1, 0)
    assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", gpu.uuid)
    assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", gpu.bus_id)
    assert gpu.bus_id in repr(gpu)


KINDS = {
    "cuda array interface": ByInterface,
    "cuda array interface with a stream": lambda buffer: ByInterface(buffer, stream=1),
    "cuda array interface with strides": lambda buffer: ByInterface(
        buffer, shape=(SIZE // 8, 2), typestr="<f4", strides=(8, 4)
    ),
    "dlpack": ByDlpack,
    "data_ptr": ByPointer,
    "data_ptr with is_cuda": lambda buffer: ByPointer(buffer, is_cuda=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(near, kind: str) -> None:
    peer, owner = near
    buffer = GpuBuffer(pattern(1), before=256)
    ours, theirs = KINDS[kind](buffer), numpy.zeros(SIZE, "uint8")
    region = owner.register(theirs)
    remote = peer.remote(region.advertise())
    peer.write(ours, remote)
    assert theirs.tobytes() == pattern(1)
    theirs[:] = numpy.frombuffer(pattern(2), "uint8")
    peer.read(ours, remote)
    assert bytes(buffer) == pattern(2)
    if kind == "dlpack":
        assert ours.asked == {"stream": 1}
    registered = owner.register(ours)
    assert registered.gpu == 0 and registered.address == buffer.ptr and registered.nbytes == SIZE


def test_between_gpu_memories_of_one_process(near) -> None:
    peer, owner = near
    source, target = GpuBuffer(pattern(3), before=512), GpuBuffer(SIZE)
    theirs = owner.register_address(target.ptr, SIZE)
    assert theirs.gpu == 0 and theirs.writable
    remote = peer.remote(theirs.advertise())
    peer.post_write(ByInterface(source), remote).wait(10)
    assert bytes(target) == pattern(3)
    ours = owner.register(ByInterface(source))
    peer.write(ours.blocks([0, 2], 1000), remote.blocks([5, 7], 1000))
    expected = bytearray(pattern(3))
    expected[5000:6000], expected[7000:8000] = pattern(3)[:1000], pattern(3)[2000:3000]
    assert bytes(target) == bytes(expected)


def test_memory_pinned_for_gpus_is_host_memory(near) -> None:
    peer, owner = near
    pinned, target = PinnedBuffer(pattern(4)), GpuBuffer(SIZE)
    region = owner.register_address(target.ptr, SIZE)
    ours = ByDlpack(pinned, device=3)
    peer.write(ours, region.advertise())
    assert bytes(target) == pattern(4) and ours.asked == {}
    target.fill(pattern(5))
    peer.read(ours, region.advertise())
    assert bytes(pinned) == pattern(5)
    registered = owner.register_address(pinned.ptr, SIZE)
    assert registered.gpu is None and registered.writable


def test_read_only_memory_is_only_read(near) -> None:
    peer, owner = near
    buffer = GpuBuffer(pattern(6))
    fixed, theirs = ByInterface(buffer, data=(buffer.ptr, True)), owner.allocate(SIZE)
    peer.write(fixed, theirs.advertise())
    assert bytes(memoryview(theirs)) == pattern(6)
    with pytest.raises(BufferError, match="local: .*read-only"):
        peer.read(fixed, theirs.advertise())
    with pytest.raises(BufferError, match="buffer: .*read-only"):
        owner.register(fixed)


def test_objects_without_plain_memory_are_refused(endpoint: peerway.Endpoint) -> None:
    buffer = GpuBuffer(64)
    for array in [
        ByInterface(buffer, shape=(32,), strides=(2,)),
        ByInterface(buffer, shape=(4, 4), typestr="<f4", strides=(4, 16)),
        ByDlpack(buffer, strides=[2]),
        ByPointer(buffer, is_contiguous=lambda: False),
    ]:
        with pytest.raises(BufferError, match="buffer: .*not contiguous"):
            endpoint.register(array)
    for items in [
        {"mask": buffer},
        {"stream": 0},
        {"typestr": "|O8"},
        {"data": None},
        {"shape": (8, 8), "strides": (8,)},
    ]:
        with pytest.raises(BufferError, match="buffer: "):
            endpoint.register(ByInterface(buffer, **items))
    for items in [{"stream": "x"}, {"data": 5}, {"shape": "x"}]:
        with pytest.raises((TypeError, ValueError)):
            endpoint.register(ByInterface(buffer, **items))
    with pytest.raises(TypeError, match="buffer: .*kind 10"):
        endpoint.register(ByDlpack(buffer, device=10))
    with pytest.raises(ValueError, match="overflows"):
        endpoint.register(ByInterface(buffer, shape=(2**40, 2**40)))


class Host:
    def __init__(self) -> None:
        self._memory = numpy.zeros(4096, "uint8")
        self.ptr, self.size = self._memory.ctypes.data, 4096


def test_memory_that_is_not_on_a_gpu_is_refused(endpoint: peerway.Endpoint) -> None:
    for wrong in [ByInterface(Host()), ByDlpack(Host()), ByPointer(Host(), is_cuda=True)]:
        with pytest.raises(peerway.GpuError, match="buffer: .*not memory of a GPU.*host memory"):
            endpoint.register(wrong)
    with pytest.raises(peerway.GpuError, match="pinned"):
        endpoint.register(ByInterface(PinnedBuffer(bytes(64))))
    small = GpuBuffer(4096)
    for far_too_long in [ByInterface(small, shape=(1 << 40,)), ByInterface(small, data=(small.ptr + 4000, False))]:
        with pytest.raises(peerway.GpuError, match="leaves the allocation"):
            endpoint.register(far_too_long)
    with pytest.raises(peerway.GpuError, match="leaves the allocation"):
        endpoint.register_address(small.ptr, 1 << 40)


def test_a_freed_pointer(endpoint: peerway.Endpoint) -> None:
    buffer = GpuBuffer(1 << 22)
    address = buffer.ptr
    assert _native.gpu_buffer_at(address) is not None
    array = ByInterface(buffer)
    buffer.free()
    assert _native.gpu_buffer_at(address) is None
    with pytest.raises(peerway.GpuError, match="freed"):
        endpoint.register(array)
    with pytest.raises(peerway.PeerwayError):
        endpoint.register_address(address, 4096)


def test_nothing_needs_no_memory(endpoint: peerway.Endpoint) -> None:
    nothing = Host()
    nothing.ptr = nothing.size = 0
    assert len(endpoint.register(ByInterface(nothing))) == 0
    assert len(endpoint.allocate(0, gpu=0)) == 0
    assert peerway.empty((3, 0), "float32", gpu=0).nbytes == 0


def test_gpus_that_are_not_there(endpoint: peerway.Endpoint) -> None:
    for call in [
        lambda: endpoint.allocate(64, gpu=99),
        lambda: peerway.empty(64, gpu=99),
        lambda: peerway.GpuMemory(64, 99),
        lambda: _native.open_gpu(99),
    ]:
        with pytest.raises(peerway.NoSuchGpu, match="no GPU 99"):
            call()
    assert issubclass(peerway.NoSuchGpu, ValueError) and issubclass(peerway.NoCuda, peerway.GpuError)
    for wrong in (-1, 2**40, "0", 1.5):
        with pytest.raises(TypeError):
            endpoint.allocate(64, gpu=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            peerway.empty(64, gpu=wrong)  # type: ignore[arg-type]
    with pytest.raises(peerway.GpuError, match="cannot allocate"):
        endpoint.allocate(1 << 50, gpu=0)
    assert len(endpoint.allocate(64, gpu=0)) == 64, "the endpoint still works"


def test_allocated(near) -> None:
    peer, owner = near
    region = owner.allocate(SIZE, gpu=0)
    assert region.gpu == 0 and region.nbytes == SIZE and "of GPU 0" in repr(region) and not region.shareable
    assert driver().get(region.address, SIZE) == bytes(SIZE), "the memory is not zeroed"
    with pytest.raises(BufferError, match="GPU 0.*__cuda_array_interface__"):
        memoryview(region)
    interface = region.__cuda_array_interface__
    assert interface["data"] == (region.address, False) and interface["shape"] == (SIZE,)
    peer.write(pattern(7), region.advertise())
    assert driver().get(region.address, SIZE) == pattern(7)
    assert owner.register(region).address == region.address
    on_host = owner.allocate(16)
    assert on_host.gpu is None and not hasattr(on_host, "__cuda_array_interface__")


def test_arrays(near) -> None:
    peer, owner = near
    array = peerway.empty((4, 250), "<f4", gpu=0)
    assert (array.shape, array.size, array.nbytes, len(array), array.gpu) == ((4, 250), 1000, 4000, 4, 0)
    assert array.memory.kind in ("fabric", "posix-fd", "plain") and "float32" in repr(array)
    assert array.memory.kind == "fabric" or array.memory.why_not_better
    interface = array.__cuda_array_interface__
    assert interface["typestr"] == "<f4" and interface["data"] == (array.address, False)
    region = owner.register(array)
    assert region.gpu == 0 and region.nbytes == 4000
    peer.write(pattern(8, 4000), region.advertise())
    back = numpy.zeros(1000, "<f4")
    peer.read(back, region.advertise())
    assert back.tobytes() == pattern(8, 4000)
    with pytest.raises(ValueError, match="Python objects"):
        peerway.empty(3, object, gpu=0)
    with pytest.raises(BufferError, match="no type code"):
        peerway.empty(3, "M8[s]", gpu=0).__dlpack__()
    with pytest.raises(TypeError, match="no length"):
        len(peerway.empty((), gpu=0))
    with pytest.raises(ValueError, match="does not fit"):
        array.memory.dlpack([4, 251], 2, 32)
    with pytest.raises(ValueError, match="does not fit"):
        array.memory.dlpack([-1], 2, 32)


def test_arrays_are_freed_with_the_last_that_holds_them(endpoint: peerway.Endpoint) -> None:
    array = peerway.empty(1 << 21, gpu=0)
    address, capsule = array.address, array.__dlpack__(stream=1, max_version=(1, 0))
    assert array.__dlpack_device__() == (2, 0) and "dltensor" in repr(capsule)
    del array
    assert _native.gpu_buffer_at(address) is not None, "the capsule holds it"
    del capsule
    gc.collect()
    assert _native.gpu_buffer_at(address) is None
    array = peerway.empty(1 << 21, gpu=0)
    address, region = array.address, endpoint.register(array)
    del array
    gc.collect()
    assert _native.gpu_buffer_at(address) is not None, "the region holds it"
    del region
    endpoint.counter(0)
    gc.collect()
    assert _native.gpu_buffer_at(address) is None


def test_a_capsule_that_was_taken_over_is_freed_by_its_taker() -> None:
    array = peerway.empty((3, 5), "int16", gpu=0)
    address, capsule = array.address, array.__dlpack__()
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
    tensor = gpu_support._DlTensor.from_address(api.PyCapsule_GetPointer(capsule, b"dltensor"))
    taken = b"used_dltensor"
    api.PyCapsule_SetName(capsule, taken)
    assert (tensor.data, tensor.device_type, tensor.code, tensor.bits) == (address, 2, 0, 16)
    assert (tensor.ndim, tensor.shape[0], tensor.shape[1]) == (2, 3, 5) and not tensor.strides
    del array, capsule
    gc.collect()
    assert _native.gpu_buffer_at(address) is not None
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(tensor.deleter)(ctypes.addressof(tensor))
    assert _native.gpu_buffer_at(address) is None


def test_registration_waits_for_pending_work_of_the_producer(endpoint: peerway.Endpoint) -> None:
    buffer, stream = GpuBuffer(4096), driver().stream()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def slow(_: Any) -> None:
        time.sleep(0.3)

    queue, start, count = ctypes.c_void_p(stream), ctypes.c_uint64(buffer.ptr), ctypes.c_size_t(4096)
    driver()("cuLaunchHostFunc", queue, slow, None)
    driver()("cuMemsetD8Async", start, ctypes.c_ubyte(7), count, queue)
    region = endpoint.register(ByInterface(buffer, stream=stream))
    assert region.gpu == 0
    driver()("cuStreamQuery", queue)
    assert bytes(buffer) == b"\x07" * 4096


def test_memory_is_freed_while_a_stream_waits_for_python(endpoint: peerway.Endpoint) -> None:
    stream = driver().stream()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def slow(_: Any) -> None:
        time.sleep(0.1)

    for free in [lambda: peerway.empty(64, gpu=0), lambda: endpoint.allocate(64, gpu=0)]:
        memory = free()
        driver()("cuLaunchHostFunc", ctypes.c_void_p(stream), slow, None)
        del memory
        driver()("cuStreamSynchronize", ctypes.c_void_p(stream))


def test_torch_tensors(endpoint: peerway.Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        ours = torch.arange(1000, dtype=torch.int32, device="cuda:0")
        region = endpoint.register(ours)
        made = peerway.empty((10, 100), torch.int32, gpu=0)
        assert made.device.type == "cuda" and made.shape == (10, 100) and not made.any()
        target = endpoint.register(made)
        with peerway.Endpoint() as other:
            peer = other.connect(endpoint.metadata)
            peer.write(ours, target.advertise())
        assert (made.reshape(-1) == ours).all() and region.gpu == target.gpu == 0
        return
    with pytest.raises(peerway.NoCuda, match="torch"):
        peerway.empty(3, torch.float32, gpu=0)

    # This tensor declares that it is on a GPU.
    buffer = GpuBuffer(pattern(9, 4000))
    waited = []

    class Stream:
        def synchronize(self) -> None:
            waited.append(True)

    class OnGpu(torch.Tensor):
        device = type("device", (), {"type": "cuda", "index": 0})()
        is_cuda = True

        def data_ptr(self) -> int:
            return buffer.ptr

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    tensor = torch.zeros(1000, dtype=torch.float32).as_subclass(OnGpu)
    region = endpoint.register(tensor)
    assert region.gpu == 0 and region.nbytes == 4000 and region.address == buffer.ptr and waited == [True]
    with pytest.raises(BufferError, match="not contiguous"):
        endpoint.register(tensor.reshape(10, 100).t())


def allocate(here: dict[str, Any], seed: int, before: int, interface: bool) -> bytes:
    """Allocates GPU memory and advertises it."""
    buffer = GpuBuffer(pattern(seed), before)
    region = here["endpoint"].register(ByInterface(buffer) if interface else ByPointer(buffer))
    here["buffer"], here["region"] = buffer, region
    return region.advertise()


def content(here: dict[str, Any]) -> bytes:
    return bytes(here["buffer"])


@pytest.mark.parametrize("interface", [False, True])
def test_between_processes(endpoint: peerway.Endpoint, far: Far, interface: bool) -> None:
    peer = endpoint.connect(far.metadata)
    remote = peer.remote(far(allocate, 10, 4096, interface))
    ours = GpuBuffer(SIZE, before=300)
    region = endpoint.register(ByInterface(ours))
    transfer = peer.post_read(region, remote)
    transfer.wait(20)
    assert transfer.path == "gpu-ipc" and bytes(ours) == pattern(10)
    ours.fill(pattern(11))
    transfer = peer.post_write(region[1000:2000], remote[50:1050])
    transfer.wait(20)
    expected = bytearray(pattern(10))
    expected[50:1050] = pattern(11)[1000:2000]
    assert transfer.path == "gpu-ipc" and far(content) == bytes(expected)
    peer.write(region.blocks([9, 0], 512), remote.blocks([1, 4], 512))
    expected[512:1024], expected[2048:2560] = pattern(11)[9 * 512 : 10 * 512], pattern(11)[:512]
    assert far(content) == bytes(expected)


@pytest.mark.parametrize("make", [PinnedBuffer, lambda data: None], ids=["pinned", "pageable"])
def test_between_a_host_and_the_gpu_of_another_process(endpoint: peerway.Endpoint, far: Far, make: Any) -> None:
    _native.open_gpu(0)
    peer = endpoint.connect(far.metadata)
    remote = peer.remote(far(allocate, 12, 0, True))
    pageable = numpy.zeros(SIZE, "uint8")
    pinned = make(bytes(SIZE))
    region = endpoint.register(pageable) if pinned is None else endpoint.register_address(pinned.ptr, SIZE)
    transfer = peer.post_read(region, remote)
    transfer.wait(20)
    assert transfer.path == "gpu-ipc"
    assert (pageable.tobytes() if pinned is None else bytes(pinned)) == pattern(12)
    peer.write(pattern(13), remote)
    assert far(content) == pattern(13)


def test_from_a_process_that_uses_no_gpu(endpoint: peerway.Endpoint) -> None:
    """The bytes go over a lane, and the owner of the GPU memory moves them."""
    with Far() as far:
        mine = GpuBuffer(SIZE)
        region = endpoint.register(ByInterface(mine))
        far(write_from_host, endpoint.metadata, region.advertise())
        assert bytes(mine) == pattern(14)
        assert far(in_use) is False


def write_from_host(here: dict[str, Any], metadata: bytes, descriptor: bytes) -> None:
    peer = here["endpoint"].connect(metadata)
    peer.write(pattern(14), descriptor)
    back = bytearray(SIZE)
    peer.read(back, descriptor)
    assert back == pattern(14)


def in_use(here: dict[str, Any]) -> bool:
    return _native.gpu_in_use()


def test_over_every_path(pinned: str) -> None:
    """Paths that cannot access a GPU use a staging buffer."""
    with Far(transport=pinned) as far, peerway.Endpoint(transport=pinned) as endpoint:
        peer = endpoint.connect(far.metadata)
        remote = peer.remote(far(allocate, 15, 100, True))
        ours = GpuBuffer(SIZE)
        peer.read(ByInterface(ours), remote)
        assert bytes(ours) == pattern(15)
        ours.fill(pattern(16))
        peer.write(ByInterface(ours), remote)
        assert far(content) == pattern(16)
        on_host = peer.remote(far(far_away.advertise, SIZE, 3, "rw", pinned == "local-map"))
        peer.read(ByInterface(ours), on_host)
        assert bytes(ours) == b"\x03" * SIZE


class Stream:
    """A stream with the interface of the frameworks."""

    def __init__(self) -> None:
        self.cuda_stream = driver().stream()

    def fill(self, address: int, value: int, size: int) -> None:
        """Enqueues a memset in the stream."""
        stream = ctypes.c_void_p(self.cuda_stream)
        driver()("cuMemsetD8Async", ctypes.c_uint64(address), value, ctypes.c_size_t(size), stream)

    def synchronize(self) -> None:
        driver()("cuStreamSynchronize", ctypes.c_void_p(self.cuda_stream))


@pytest.mark.parametrize("pinned", ["auto", "tcp"])
def test_in_a_stream(pinned: str) -> None:
    with peerway.Endpoint(transport=pinned) as ours, peerway.Endpoint(transport=pinned) as theirs:
        peer = ours.connect(theirs.metadata)
        here, there = ours.allocate(SIZE, gpu=0), theirs.allocate(SIZE, gpu=0)
        remote = peer.remote(there.advertise())
        prepared = peer.prepare_write(here, remote)
        stream = Stream()
        stream.fill(here.address, 7, SIZE)
        enqueued = prepared.enqueue(stream)
        stream.fill(here.address, 0, SIZE)
        stream.synchronize()
        enqueued.wait(10)
        assert enqueued.runs == 1
        assert driver().get(there.address, SIZE) == b"\7" * SIZE
        staged = peer.stage([prepared])
        stream.fill(here.address, 9, SIZE)
        staged.release(0, stream=stream.cuda_stream)
        staged.wait(10)
        assert driver().get(there.address, SIZE) == b"\x09" * SIZE
        with pytest.raises(TypeError, match="stream must be a CUDA stream"):
            prepared.enqueue("a stream")
        host = ours.register(bytearray(SIZE))
        if pinned == "tcp":
            with pytest.raises(peerway.GpuError, match="post it without a stream"):
                peer.prepare_write(host, remote).enqueue(stream)
