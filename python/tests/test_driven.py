"""Transfers that kernels issue.

Host producers replace the kernels; a GPU or a fake adds GPU proxies.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_support
import numpy
import peerway
import pytest
from far import Far

SIZE = 1 << 16
SOON = 30.0


@dataclass
class Side:
    """An endpoint with a proxy and a window."""

    endpoint: peerway.Endpoint
    proxy: peerway.Proxy
    memory: numpy.ndarray
    region: peerway.Region
    window: peerway.Window


def side(endpoint: peerway.Endpoint, **options: Any) -> Side:
    memory = peerway.empty(SIZE)
    region = endpoint.register(memory)
    proxy = peerway.Proxy(endpoint, threads=1, rings=2, slots=64, **options)
    return Side(endpoint, proxy, memory, region, proxy.window(region))


@pytest.fixture
def two() -> Iterator[tuple[Side, Side]]:
    """Two sides in this process. Each is peer 0 of the other."""
    with peerway.Endpoint() as one, peerway.Endpoint() as other:
        sides = side(one, timeout=1.0), side(other)
        for ours, theirs in [sides, sides[::-1]]:
            peer = ours.endpoint.connect(theirs.endpoint.metadata)
            assert ours.proxy.add_peer(0, peer, theirs.proxy.peer_info()) == [theirs.window]
        yield sides
        for each in sides:
            each.proxy.close()


def pattern(seed: int, nbytes: int = SIZE) -> numpy.ndarray:
    return numpy.frombuffer(numpy.random.default_rng(seed).bytes(nbytes), "uint8")


def test_puts_signals_and_counters(two: tuple[Side, Side]) -> None:
    ours, theirs = two
    assert ours.window == theirs.window and len(ours.window) == ours.window.nbytes == SIZE
    ours.memory[:] = pattern(1)
    producer = ours.proxy.host_producer(1)
    assert (producer.ring, ours.proxy.rings, ours.proxy.gpu) == (1, 2, None)
    dst, src = theirs.window.base, ours.window.base
    with ours.proxy.armed() as armed:
        assert armed.active
        for at in range(0, 4096, 256):
            producer.put(0, dst + at, src + at, 256)
        producer.quiet(0)
        assert (theirs.memory[:4096] == ours.memory[:4096]).all() and not theirs.memory[4096:].any()
        producer.put_with_count(0, dst + 4096, src + 4096, SIZE - 4096, 7)
        assert theirs.proxy.wait_counter(7, 1, SOON) == 1
        assert (theirs.memory == ours.memory).all()
        producer.signal(0, 8)
        assert theirs.proxy.wait_counter(8, 1, SOON) == 1 == theirs.proxy.counter(8)
    assert not armed.active
    stats = ours.proxy.stats
    assert (stats["puts"], stats["bytes"], stats["counts"], stats["faults"]) == (17, SIZE, 2, 0)
    assert ours.proxy.take_fault() is None


def fill(producer: peerway.HostProducer, counter: int) -> None:
    """Pushes until the ring stays full.

    The threads poll for a short time after they are disarmed.
    """
    while True:
        for _ in range(128):
            producer.signal(0, counter)
        time.sleep(0.05)


def test_unarmed_it_sleeps(two: tuple[Side, Side]) -> None:
    ours, theirs = two
    producer = ours.proxy.host_producer()
    # The threads poll for commands for a short time after their start, and then sleep.
    pushed, until = 0, time.monotonic() + SOON
    while theirs.proxy.counter(3) == pushed:
        assert time.monotonic() < until, "the proxy never sleeps"
        time.sleep(0.2)
        producer.signal(0, 3)
        pushed += 1
        with contextlib.suppress(peerway.CounterTimeout):
            theirs.proxy.wait_counter(3, pushed, 0.2)
    with pytest.raises(peerway.CounterTimeout, match=f"counter 3 is at {pushed - 1}, not at {pushed}"):
        theirs.proxy.wait_counter(3, pushed, 0.1)
    with pytest.raises(peerway.CommandTimeout, match="armed"):
        producer.quiet(0, timeout=0.1)
    armed = ours.proxy.arm()
    assert theirs.proxy.wait_counter(3, pushed, SOON) == pushed
    armed.disarm()
    armed.disarm()
    assert not armed.active
    started = time.monotonic()
    with pytest.raises(peerway.RingFull, match="armed"):
        fill(producer, 3)
    assert time.monotonic() - started >= 1.0, "the proxy's time-out"
    # The pushed commands are not lost.
    with armed:
        producer.quiet(0)
    assert theirs.proxy.counter(3) == ours.proxy.stats["counts"] > 64


def test_a_signal_ends_a_wait(two: tuple[Side, Side]) -> None:
    """Interrupts every kind of wait. The first is the wait for room in a ring."""
    patient = peerway.Proxy(two[0].endpoint, threads=1, slots=32, timeout=SOON * 6)
    peer = two[0].endpoint.connect(two[1].endpoint.metadata)
    patient.add_peer(0, peer, two[1].proxy.peer_info())
    producer = patient.host_producer()

    for wait in [
        lambda: fill(producer, 1),
        lambda: producer.wait_counter(1, 1),
        lambda: patient.wait_counter(1, 1),
        lambda: producer.quiet(0),
    ]:
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            wait()
        assert time.monotonic() - started < SOON
    # The interrupted pushes gave their claims back, so the ring still works.
    with patient.armed():
        producer.quiet(0)
    assert two[1].proxy.counter(1) == patient.stats["counts"] >= 32
    patient.close()


def test_forwarding(two: tuple[Side, Side]) -> None:
    ours, theirs = two
    experts = [theirs.endpoint.allocate(4096) for _ in range(3)]
    places = [experts[0], experts[1][0:4096], (experts[2], 0, 4096)]
    theirs.proxy.forward(5, (theirs.region, 256, 4096), to=places, count=[6], answer=[(0, 9)])
    ours.memory[:] = pattern(2)
    producer = ours.proxy.host_producer()
    with ours.proxy.armed(), theirs.proxy.armed():
        producer.put_with_count(0, theirs.window.base + 256, ours.window.base, 4096, 5)
        producer.wait_counter(9, 1, peer=0)
        assert theirs.proxy.counter(6) == 1
        for expert in experts:
            assert bytes(memoryview(expert)) == ours.memory[:4096].tobytes()
        with pytest.raises(peerway.InvalidCommand, match="has a rule already"):
            theirs.proxy.forward(5, theirs.region)
        assert theirs.proxy.stop_forwarding(5) and not theirs.proxy.stop_forwarding(5)
        producer.put_with_count(0, theirs.window.base + 256, ours.window.base, 4096, 5)
        producer.quiet(0)
        with pytest.raises(peerway.CounterTimeout):
            producer.wait_counter(9, 2, timeout=0.1)
    for bad, why in [
        ({"source": (theirs.region, SIZE, 4)}, "outside"),
        ({"to": [theirs.region[0:8]]}, "another length"),
        ({"count": [5]}, "count itself"),
        ({"count": [1024]}, "no such counter"),
    ]:
        with pytest.raises(peerway.InvalidCommand, match=why):
            theirs.proxy.forward(**{"counter": 5, "source": theirs.region[0:16]} | bad)
    with pytest.raises(TypeError, match="source: expected a region"):
        theirs.proxy.forward(5, theirs.memory)
    with pytest.raises(TypeError, match="answer"):
        theirs.proxy.forward(5, theirs.region, answer=[7])


def test_a_fault_is_reported_once_and_starts_a_new_epoch(two: tuple[Side, Side]) -> None:
    ours, theirs = two
    producer = ours.proxy.host_producer(1)
    dst, src = theirs.window.base, ours.window.base
    host, port = ours.endpoint.connect(theirs.endpoint.metadata).address
    address = f"{host}:{port}"
    with ours.proxy.armed():
        for reason, code, peer, command in [
            ("destination", 4, 0, lambda: producer.put(0, dst + SIZE - 4, src, 8)),
            ("source", 3, 0, lambda: producer.put(0, dst, src + SIZE, 4)),
            ("counter", 5, 0, lambda: producer.signal(0, 1024)),
            ("peer", 2, 1, lambda: producer.signal(1, 0)),
        ]:
            command()
            with pytest.raises(peerway.CommandFailed, match="take_fault"):
                producer.quiet(peer)
            fault = ours.proxy.take_fault()
            assert fault is not None and ours.proxy.take_fault() is None
            assert (fault.reason, fault.code, fault.peer, fault.ring) == (reason, code, peer, 1)
            known = peer == 0
            assert fault.address == (address if known else None)
            who = f"peer {peer} at {address}" if known else f"peer {peer}"
            assert str(fault).startswith(f"command {fault.position} of ring 1 (operation {fault.op}, {who}): ")
            assert str(fault) in repr(fault)
        producer.quiet(0)
    # The `quiet` for the unknown peer is the fifth fault.
    assert ours.proxy.stats["faults"] == 5 and not theirs.memory.any()


def test_invalid_commands_are_refused(two: tuple[Side, Side]) -> None:
    ours, _ = two
    producer = ours.proxy.host_producer()
    for call, why in [
        (lambda: producer.put(0, 2, 0, 4), "destination 2 is not a multiple of 4"),
        (lambda: producer.put(0, 0, 0, 6), "length 6 is not a multiple"),
        (lambda: producer.put(0, 0, 0, 1 << 24), "too large"),
        (lambda: producer.put(64, 0, 0, 4), "no peer 64: there are 64"),
        (lambda: producer.wait_counter(1024, 1), "no counter 1024"),
        (lambda: producer.wait_counter(0, 1, peer=64), "no peer 64"),
        (lambda: ours.proxy.counter(1024), "no counter 1024: there are 1024"),
        (lambda: ours.proxy.wait_counter(1024, 1), "no counter 1024"),
        (lambda: ours.proxy.host_producer(2), "no ring 2: there are 2"),
    ]:
        with pytest.raises(peerway.InvalidCommand, match=why):
            call()
    for call, why in [
        (lambda: producer.put(-1, 0, 0, 4), "peer"),
        (lambda: producer.put(0, "0", 0, 4), "dst"),
        (lambda: producer.signal(0, 1 << 16), "counter"),
        (lambda: ours.proxy.window(7), "memory: expected a region"),
        (lambda: peerway.Proxy(None), "endpoint"),
    ]:
        with pytest.raises(TypeError, match=why):
            call()


def test_invalid_settings_and_peer_infos_are_refused(two: tuple[Side, Side], endpoint: peerway.Endpoint) -> None:
    with pytest.raises(ValueError, match="pigeon.*launched, resident or engines"):
        peerway.Proxy(endpoint, copier="pigeon")
    for options, what in [
        ({"threads": 0}, "threads"),
        ({"threads": 4, "rings": 3}, "rings"),
        ({"slots": 16}, "slots"),
        ({"peers": 1 << 20}, "peers"),
        ({"counters": 0}, "counters"),
    ]:
        with pytest.raises(peerway.InvalidSetting, match=what):
            peerway.Proxy(endpoint, **options)
    with pytest.raises(ValueError, match="timeout: -1 is not a time"):
        peerway.Proxy(endpoint, timeout=-1)
    ours, theirs = two
    peer, info = ours.endpoint.connect(theirs.endpoint.metadata), theirs.proxy.peer_info()
    with pytest.raises(peerway.InvalidCommand, match="peer 0 is there already"):
        ours.proxy.add_peer(0, peer, info)
    with pytest.raises(peerway.InvalidCommand, match="a peer's number must be between 0 and 63"):
        ours.proxy.add_peer(64, peer, info)
    for wrong in [b"", info[1:], info + b"x", os.urandom(100)]:
        with pytest.raises(peerway.InvalidPeerInfo):
            ours.proxy.add_peer(1, peer, wrong)
    with pytest.raises(TypeError, match="info: expected bytes"):
        ours.proxy.add_peer(1, peer, "info")
    readonly = numpy.zeros(16, "uint8")
    readonly.flags.writeable = False
    with pytest.raises(BufferError, match="memory: the memory is read-only"):
        ours.proxy.window(readonly)


def test_windows_of_plain_memory(two: tuple[Side, Side]) -> None:
    ours, theirs = two
    memory = bytearray(b"x" * 64)
    window = ours.proxy.window(memory)
    del memory
    gc.collect()
    with ours.proxy.armed():
        producer = ours.proxy.host_producer()
        producer.put(0, theirs.window.base, window.base, 64)
        producer.quiet(0)
    assert theirs.memory[:64].tobytes() == b"x" * 64


def test_closed(two: tuple[Side, Side]) -> None:
    ours, _ = two
    proxy, producer = ours.proxy, ours.proxy.host_producer()
    heard: list[BaseException] = []

    def wait() -> None:
        try:
            proxy.wait_counter(0, 1)
        except peerway.ProxyClosed as error:
            heard.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with proxy, proxy.armed():
        assert "2 rings" in repr(proxy) and not proxy.closed
    waiting.join(SOON)
    assert len(heard) == 1 and proxy.closed and "closed" in repr(proxy)
    for call in [
        lambda: proxy.handle,
        lambda: proxy.rings,
        lambda: proxy.peer_info(),
        lambda: proxy.counter(0),
        lambda: proxy.window(ours.region),
        lambda: proxy.arm(),
        lambda: proxy.armed().__enter__(),
        lambda: proxy.take_fault(),
        lambda: proxy.stats,
        lambda: proxy.host_producer(0),
        lambda: producer.signal(0, 0),
        lambda: producer.quiet(0),
    ]:
        with pytest.raises(peerway.ProxyClosed):
            call()
    proxy.close()
    ours.endpoint.close()
    with pytest.raises(peerway.EndpointClosed):
        peerway.Proxy(ours.endpoint)


def serve(here: dict[str, Any]) -> tuple[bytes, bytes]:
    here["side"] = side(here["endpoint"])
    return here["endpoint"].metadata, here["side"].proxy.peer_info()


def meet(here: dict[str, Any], metadata: bytes, info: bytes) -> None:
    theirs = here["side"]
    (here["window"],) = theirs.proxy.add_peer(3, theirs.endpoint.connect(metadata), info)


def echo(here: dict[str, Any], rounds: int) -> bytes:
    """Adds one to every byte that arrives, and sends it back."""
    mine = here["side"]
    producer = mine.proxy.host_producer()
    with mine.proxy.armed():
        for number in range(1, rounds + 1):
            producer.wait_counter(0, number, peer=3)
            mine.memory[:1024] += 1
            producer.put_with_count(3, here["window"].base, mine.window.base, 1024, 1)
        producer.quiet(3)
    return mine.memory[:1024].tobytes()


def start_echo(here: dict[str, Any], rounds: int) -> None:
    here["thread"] = threading.Thread(target=echo, args=(here, rounds), daemon=True)
    here["thread"].start()


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_between_processes(transport: str) -> None:
    with peerway.Endpoint(transport=transport) as endpoint, Far(transport=transport) as far:
        mine = side(endpoint)
        metadata, info = far(serve)
        (window,) = mine.proxy.add_peer(0, endpoint.connect(metadata), info)
        far(meet, endpoint.metadata, mine.proxy.peer_info())
        far(start_echo, 20)
        mine.memory[:1024] = pattern(3, 1024)
        producer = mine.proxy.host_producer(1)
        with mine.proxy.armed():
            for number in range(1, 21):
                producer.put_with_count(0, window.base, mine.window.base, 1024, 0)
                producer.wait_counter(1, number, peer=0)
        assert (mine.memory[:1024] == pattern(3, 1024) + 20).all()
        mine.proxy.close()


def test_a_peer_that_dies() -> None:
    with peerway.Endpoint() as endpoint, Far() as far:
        mine = side(endpoint, timeout=120)
        metadata, info = far(serve)
        mine.proxy.add_peer(0, endpoint.connect(metadata), info)
        producer = mine.proxy.host_producer()
        with mine.proxy.armed():
            producer.signal(0, 0)
            producer.quiet(0)
            far.kill_in(0.2)
            with pytest.raises(peerway.CommandFailed):
                while True:
                    producer.wait_counter(0, 1, peer=0, timeout=SOON)
        # The proxy refuses later commands, and the fault names them.
        with mine.proxy.armed():
            producer.signal(0, 0)
            with pytest.raises(peerway.CommandFailed):
                producer.quiet(0)
        fault = mine.proxy.take_fault()
        assert fault is not None and fault.reason == "peer-gone"
        mine.proxy.close()


PROGRAM = """
#include "peerway_device.cuh"
extern "C" int run(const peerway_proxy *proxy, peerway_u64 dst, peerway_u64 src) {
    if (proxy->magic != PEERWAY_MAGIC) return 100;
    int status = peerway_put_with_count(proxy, 0, 0, dst, src, 4096, 2);
    return status != PEERWAY_OK ? status : peerway_quiet(proxy, 0, 0);
}
"""


def test_the_package_has_the_headers(two: tuple[Side, Side], tmp_path: Path) -> None:
    """The headers exist as files and as texts.

    A program that uses them works with a proxy's handle.
    """
    texts = peerway.gpu.device_headers()
    assert set(texts) == {"peerway_device.cuh", "peerway_abi.h"}
    for name, text in texts.items():
        assert (peerway.gpu.include_dir() / name).read_text() == text
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    (tmp_path / "program.cpp").write_text(PROGRAM)
    made = tmp_path / "program.so"
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-I", str(peerway.gpu.include_dir())]
    subprocess.run(["g++", *flags, "-o", made, tmp_path / "program.cpp"], check=True, timeout=120)
    run = ctypes.CDLL(str(made)).run
    ours, theirs = two
    ours.memory[:] = pattern(4)
    with ours.proxy.armed():
        arguments = [ours.proxy.handle, theirs.window.base, ours.window.base]
        assert run(*map(ctypes.c_uint64, arguments)) == 0
    assert theirs.proxy.counter(2) == 1 and (theirs.memory[:4096] == ours.memory[:4096]).all()


@pytest.fixture
def gpu() -> int:
    gpu_support.need()
    return 0


class Device:
    """An object like a ``torch.device``."""

    def __init__(self, type: str, index: int | None) -> None:
        self.type, self.index = type, index


def test_a_proxy_of_a_gpu(endpoint: peerway.Endpoint, gpu: int) -> None:
    with peerway.Proxy(endpoint, gpu, threads=1, rings=4) as proxy, peerway.Proxy(endpoint, Device("cuda", 0)) as other:
        assert proxy.gpu == other.gpu == 0 and "GPU 0" in repr(proxy)
        assert proxy.handle != other.handle
        # The driver copies the words that a kernel finds at the handle.
        words = numpy.frombuffer(gpu_support.driver().get(proxy.handle, 24), "uint32")
        assert words.tolist() == [0x50574456, 1, 4, 64, 1024, 0]
        window = proxy.window(endpoint.allocate(4096, gpu=gpu))
        assert (window.base, window.nbytes) == (0, 4096)
        with pytest.raises(peerway.InvalidCommand, match="for kernels"):
            proxy.host_producer(0)
        with proxy.armed():
            assert proxy.wait_counter(0, 0, 0) == 0
    with pytest.raises(peerway.NoSuchGpu):
        peerway.Proxy(endpoint, 1000)
    with pytest.raises(TypeError, match="not a CUDA device"):
        peerway.Proxy(endpoint, Device("cpu", None))
    with pytest.raises(TypeError, match="gpu"):
        peerway.Proxy(endpoint, "cuda:0")


#: Kernels that the fake can run, with the declarations of the engine's kernels.
KERNELS = """
#include "peerway_device.cuh"
struct Run { peerway_u64 src, dst, len; };
extern "C" __global__ void peerway_copy_runs(const Run *runs, peerway_u32 count) {
    for (peerway_u32 i = 0; i < count; i++)
        for (peerway_u64 at = threadIdx.x; at < runs[i].len; at += blockDim.x)
            ((char *)runs[i].dst)[at] = ((const char *)runs[i].src)[at];
}
struct Few { peerway_u32 count, reserved; Run runs[64]; };
extern "C" __global__ void peerway_copy_few(Few few, peerway_u32 *flag, peerway_u32 value) {
    for (peerway_u32 i = 0; i < few.count; i++)
        for (peerway_u64 at = threadIdx.x; at < few.runs[i].len; at += blockDim.x)
            ((char *)few.runs[i].dst)[at] = ((const char *)few.runs[i].src)[at];
    __syncthreads();
    if (threadIdx.x == 0) *flag = value;
}
extern "C" __global__ void take(const peerway_proxy *proxy, Run run) {
    peerway_put(proxy, peerway_ring_for_warp(proxy), 0, run.dst, run.src, run.len);
}
"""


@pytest.fixture
def compiled(gpu: int) -> peerway.gpu.Module:
    try:
        return peerway.gpu.compile(KERNELS, options=["--std=c++17"], gpu=gpu)
    except peerway.NoCompiler as error:
        pytest.skip(str(error))


def test_a_kernel_is_compiled_and_launched(compiled: peerway.gpu.Module) -> None:
    assert compiled.gpu == 0 and compiled.architecture.startswith(("sm_", "compute_"))
    assert compiled.compiler.startswith("NVRTC ") and "kernel.cu" in repr(compiled)
    kernel = compiled.kernel("peerway_copy_runs")
    assert (kernel.name, kernel.gpu, kernel.parameters) in [("peerway_copy_runs", 0, s) for s in ([8, 4], None)]
    assert kernel.handle
    data = pattern(5, 5000).tobytes()
    source = gpu_support.GpuBuffer(data)
    stream = gpu_support.driver().stream()
    ways = [
        (gpu_support.ByInterface, 1, {}),
        (gpu_support.ByPointer, numpy.uint32(1), {"stream": stream}),
        (lambda runs: runs.ptr, ctypes.c_uint32(1), {"stream": 0}),
        (lambda runs: gpu_support.ByInterface(runs, stream=stream), True + 0, {"shared": 0}),
    ]
    for runs_as, count, options in ways:
        target = gpu_support.GpuBuffer(5000)
        runs = gpu_support.GpuBuffer(numpy.array([source.ptr, target.ptr, 5000], "uint64").tobytes())
        kernel((1, 1), [256], runs_as(runs), count, **options)
        gpu_support.driver()("cuCtxSynchronize")
        assert bytes(target) == data
    # The second compilation finds the program on disk. A kernel keeps its module alive.
    again = peerway.gpu.compile(KERNELS, options=("--std=c++17",), gpu=Device("cuda", 0))
    assert again.cached or os.environ.get("PEERWAY_KERNEL_CACHE") == "off"
    kernel = again.kernel("peerway_copy_runs")
    del again, compiled
    gc.collect()
    kernel(1, 32, None, 0)
    gpu_support.driver()("cuCtxSynchronize")


class Run(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("src", "dst", "len")]


class Few(ctypes.Structure):
    _fields_ = [("count", ctypes.c_uint32), ("reserved", ctypes.c_uint32), ("runs", Run * 64)]


def test_structures_are_given_by_value(compiled: peerway.gpu.Module) -> None:
    kernel = compiled.kernel("peerway_copy_few")
    source, flag = gpu_support.GpuBuffer(pattern(6, 999).tobytes()), gpu_support.GpuBuffer(4)
    for value, of_numpy in [(7, False), (numpy.int32(-2), True)]:
        target = gpu_support.GpuBuffer(999)
        few = Few(1)
        few.runs[0] = Run(source.ptr, target.ptr, 999)
        given = numpy.frombuffer(few, f"V{ctypes.sizeof(few)}")[0] if of_numpy else few
        kernel(1, 32, given, gpu_support.ByPointer(flag), value)
        peerway.gpu.synchronize()
        assert bytes(target) == bytes(source)
        assert int.from_bytes(bytes(flag), "little", signed=True) == value


def test_tensors_on_the_host_are_refused(compiled: peerway.gpu.Module) -> None:
    torch = pytest.importorskip("torch")
    kernel = compiled.kernel("peerway_copy_runs")
    with pytest.raises(ValueError, match="argument 0: the tensor is in host memory"):
        kernel(1, 1, torch.zeros(8), 0)
    kernel(1, 1, None, numpy.uint32(0))
    assert peerway.gpu.compile(KERNELS, options=["--std=c++17"], gpu=torch.device("cuda", 0)).gpu == 0


def test_arguments_of_wrong_kinds(compiled: peerway.gpu.Module, endpoint: peerway.Endpoint) -> None:
    with pytest.raises(peerway.NoKernel, match="no_such_kernel"):
        compiled.kernel("no_such_kernel")
    kernel = compiled.kernel("peerway_copy_runs")
    for arguments, why in [
        ((None, "1"), "argument 1: a kernel cannot be given <class 'str'>"),
        ((numpy.zeros(4), 0), "argument 0: a kernel cannot be given"),
        ((endpoint, 0), "argument 0"),
        ((1 << 64, 0), "argument 0: .* does not fit into 8 bytes"),
        ((-(1 << 63) - 1, 0), "does not fit"),
    ]:
        with pytest.raises(TypeError, match=why):
            kernel(1, 1, *arguments)
    for grid, block in [(0, 1), (1, 0), (1, (1, 1, 1, 1)), ((), 1), ("1", 1), (1, -1)]:
        with pytest.raises(TypeError, match="grid|block"):
            kernel(grid, block, None, 0)
    with pytest.raises(TypeError, match="stream must be a CUDA stream"):
        kernel(1, 1, None, 0, stream="default")
    proxy = peerway.Proxy(endpoint, threads=1)
    with pytest.raises(peerway.InvalidCommand, match="argument 0: the proxy is for host threads"):
        kernel(1, 1, proxy, 0)
    proxy.close()
    with pytest.raises(peerway.ProxyClosed):
        kernel(1, 1, proxy, 0)
    # This tensor declares that it is on the host.
    with pytest.raises(ValueError, match="argument 0: the tensor is in host memory"):
        kernel(1, 1, gpu_support.ByPointer(gpu_support.GpuBuffer(8), is_cuda=False), 0)


def test_arguments_of_wrong_numbers_and_sizes(compiled: peerway.gpu.Module) -> None:
    kernel = compiled.kernel("peerway_copy_runs")
    if kernel.parameters is None:
        pytest.skip("the driver does not report the parameters of kernels")
    for arguments, why in [
        ((), "takes 2 arguments and was given 0"),
        ((None,), "takes 2 arguments and was given 1"),
        ((None, 0, 0), "takes 2 arguments and was given 3"),
        ((None, 0.0), "argument 1: <class 'float'> is 8 bytes and the kernel takes 4"),
        ((None, None), "argument 1: <class 'NoneType'> is 8 bytes"),
        ((None, True), "argument 1: <class 'bool'> is 1 bytes"),
        ((numpy.uint32(1), 0), "argument 0: <class 'numpy.uint32'> is 4 bytes and the kernel takes 8"),
        ((None, ctypes.c_uint64(1)), "is 8 bytes and the kernel takes 4"),
        ((None, 1 << 32), "argument 1: 4294967296 does not fit into 4 bytes"),
    ]:
        with pytest.raises(TypeError, match=why):
            kernel(1, 1, *arguments)


def test_programs_that_do_not_compile_are_refused(compiled: peerway.gpu.Module) -> None:
    with pytest.raises(peerway.CompileError, match=r"(?s)wrong\.cu does not compile for .*no_such_thing"):
        peerway.gpu.compile("__global__ void f() { no_such_thing(); }", "wrong.cu")
    program = '#include "mine.h"\n#include "peerway_device.cuh"\nextern "C" __global__ void f() { int x = MINE; }'
    with pytest.raises(peerway.CompileError, match=r"mine\.h"):
        peerway.gpu.compile(program)
    peerway.gpu.compile(program, headers={"mine.h": "#define MINE 1\n"})
    with pytest.raises(peerway.InvalidSource, match="-arch=sm_90 says what to compile for"):
        peerway.gpu.compile("", options=["-arch=sm_90"])
    with pytest.raises(peerway.InvalidSource, match="NUL"):
        peerway.gpu.compile("\0")
    with pytest.raises(TypeError, match="options"):
        peerway.gpu.compile("", options="--std=c++17")
    with pytest.raises(peerway.NoSuchGpu):
        peerway.gpu.compile("", gpu=1000)


def test_the_example_compiles(compiled: peerway.gpu.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of the example and of the documentation compile.

    A fake GPU loads but cannot run them.
    """
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    import driven_puts

    peerway.gpu.compile(driven_puts.KERNELS)
    found = re.search(r'KERNEL = """(.*?)"""', documented(), re.DOTALL)
    assert found is not None
    peerway.gpu.compile(found[1])


def documented() -> str:
    """The program in the documentation."""
    text = (Path(__file__).parents[2] / "docs/book/src/guide/kernels.md").read_text()
    section = text.partition("## From Python\n")[2].partition("\n## ")[0]
    return section.partition("```python\n")[2].partition("```")[0]


def test_the_documentation_is_right() -> None:
    """Runs the documented program as a user would, with or without a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "PEERWAY_CUDA_SO"}
    command = [sys.executable, "-c", documented()]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "all 4096 bytes are there\n"), ran.stderr


def test_a_stream_is_waited_for(gpu: int) -> None:
    peerway.gpu.synchronize()
    peerway.gpu.synchronize(gpu_support.driver().stream(), gpu)
    with pytest.raises(peerway.NoSuchGpu):
        peerway.gpu.synchronize(gpu=1000)
    with pytest.raises(TypeError, match="stream must be a CUDA stream"):
        peerway.gpu.synchronize("default")


def test_without_a_compiler(gpu: int, tmp_path: Path) -> None:
    """The error names the searched paths.

    It needs a new process, because a process keeps its compiler.
    """
    (tmp_path / "nvidia" / "cuda_nvrtc" / "lib").mkdir(parents=True)
    fake = tmp_path / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"
    fake.write_text("no library")
    code = """
import peerway, peerway.gpu
peerway.gpu._PACKAGES = ("cuda_nvrtc",)
try:
    module = peerway.gpu.compile('extern "C" __global__ void f() {}')
    print("compiled by", module.compiler)
except peerway.NoCompiler as error:
    print(error)
"""
    path = os.pathsep.join([str(tmp_path), str(Path(peerway.__file__).parents[1])])
    variables = {"PEERWAY_KERNEL_CACHE": "off", "PYTHONPATH": path}
    environment = {name: value for name, value in os.environ.items() if name != "PEERWAY_NVRTC_SO"} | variables
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    # A machine with a CUDA toolkit finds another compiler.
    assert ("there is no compiler" in ran.stdout and str(fake) in ran.stdout) or "compiled by" in ran.stdout, ran.stdout


def test_former_names_still_work(two: tuple[Side, Side]) -> None:
    ours, _ = two
    assert peerway.Pusher is peerway.gpu.Pusher is peerway.HostProducer
    assert peerway.InvalidCard is peerway.InvalidPeerInfo
    assert ours.proxy.card() == ours.proxy.peer_info()
    assert ours.proxy.pusher(0).ring == ours.proxy.host_producer(0).ring == 0
    assert ours.proxy.stats["flights"] == ours.proxy.stats["requests"]
