"""GPU memory (VRAM) through NIXL, on a GPU or on the fake driver that `PEERWAY_CUDA_SO` names."""

import os
import sys

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../../python/tests"))

pytest.importorskip("peerway", reason="the peerway package, which allocates GPU memory, is not installed")

import gpu_support  # noqa: E402
import nixl_of_tests as of_tests  # noqa: E402
from conftest import pattern  # noqa: E402

SIZE = 3 << 20


@pytest.fixture(autouse=True)
def _gpu():
    gpu_support.need()


class Side:
    """An agent with GPU memory."""

    def __init__(self, seed=None, **settings):
        data = bytes(SIZE) if seed is None else pattern(SIZE, seed).tobytes()
        self.buffer = gpu_support.GpuBuffer(data, before=4096)
        # The agent has host memory too.
        self.side = of_tests.Side(size=SIZE, settings=settings)
        self.agent, self.name = self.side.agent, self.side.name
        self.registered = self.agent.register_memory([(self.buffer.ptr, SIZE, 0, "")], "VRAM")

    def on_gpu(self, *ranges, base=None):
        base = self.buffer.ptr if base is None else base
        return self.agent.get_xfer_descs([(base + offset, length, 0) for offset, length in ranges], "VRAM")

    def run(self, op, ours, theirs, name, message=b""):
        handle = self.agent.initialize_xfer(op, ours, theirs, name, message)
        assert self.side.run(handle) == "DONE"
        self.agent.release_xfer_handle(handle)

    def close(self):
        self.agent.deregister_memory(self.registered)
        self.agent = None
        self.side.close()


@pytest.fixture(params=["auto", "tcp"])
def two(request):
    a, b = Side(1, transport=request.param), Side(transport=request.param)
    a.agent.add_remote_agent(b.agent.get_agent_metadata())
    yield a, b
    a.close()
    b.close()


@pytest.mark.parametrize("length", [1, 4096, SIZE])
def test_written_and_read(two, length):
    a, b = two
    whole = [(0, length)]
    a.run("WRITE", a.on_gpu(*whole), a.on_gpu(*whole, base=b.buffer.ptr), b.name)
    assert bytes(b.buffer)[:length] == bytes(a.buffer)[:length]
    b.buffer.fill(pattern(SIZE, 2).tobytes())
    a.run("READ", a.on_gpu(*whole), a.on_gpu(*whole, base=b.buffer.ptr), b.name)
    assert bytes(a.buffer)[:length] == bytes(b.buffer)[:length]


def test_between_the_gpu_and_the_host(two):
    a, b = two
    whole = [(0, SIZE)]
    # From GPU memory to the other agent's host memory, and back.
    remote = a.side.descriptors(*whole, base=b.side.address)
    a.run("WRITE", a.on_gpu(*whole), remote, b.name)
    assert b.side.memory.tobytes() == bytes(a.buffer)
    b.side.memory[:] = pattern(SIZE, 3)
    a.run("READ", a.on_gpu(*whole), remote, b.name)
    assert bytes(a.buffer) == b.side.memory.tobytes()


def test_many_pieces_and_a_notification(two):
    a, b = two
    pieces = [(i * 3000, 1000 + i) for i in range(500)]
    back = [(SIZE - (i + 1) * 3000, 1000 + i) for i in range(500)]
    a.run("WRITE", a.on_gpu(*pieces), a.on_gpu(*back, base=b.buffer.ptr), b.name, b"there")
    assert b.side.notifications() == [(a.name, b"there")]
    ours, theirs = bytes(a.buffer), bytes(b.buffer)
    for (from_, length), (to, _) in zip(pieces, back, strict=True):
        assert ours[from_ : from_ + length] == theirs[to : to + length]


def test_host_memory_that_is_said_to_be_a_gpus(two):
    a, _ = two
    with pytest.raises(of_tests.REFUSED):
        a.agent.register_memory([(a.side.address, 4096, 0, "")], "VRAM", backends=[of_tests.BACKEND])
