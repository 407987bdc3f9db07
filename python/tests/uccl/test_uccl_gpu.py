"""GPU memory in the calls of ``uccl.p2p``. One GPU, real or fake, is enough."""

import itertools
from typing import Any

import gpu_support
import peerway
import pytest
from gpu_support import ByPointer, GpuBuffer, PinnedBuffer
from peerway.uccl import ipc, p2p
from uccl_support import NONE_ID, WATCHDOG, Buffer, Child, Pair, finish, listen, pattern

SIZE = 40_000


@pytest.fixture(autouse=True)
def _gpu() -> None:
    gpu_support.need()


def bdf(endpoint: p2p.Endpoint) -> str:
    return endpoint.parse_metadata(endpoint.get_metadata())[2]


# Which GPU


def test_the_address_of_a_gpu_is_its_own() -> None:
    endpoint, nameless = p2p.Endpoint(0), p2p.Endpoint()
    assert bdf(endpoint) == bdf(nameless) == peerway.gpus()[0].bus_id
    none = p2p.Endpoint(len(peerway.gpus()))
    assert bdf(none).startswith("ffff:"), "an index without a GPU has no substitute address"
    for one in (endpoint, nameless, none):
        one.close()


def test_several_indices_of_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = peerway.gpus()[0]
    for names in ("0,0", " 0 , 0 ", f"{gpu.uuid},{gpu.bus_id.upper()}"):
        monkeypatch.setenv("PEERWAY_GPU_MAP", names)
        endpoints = [p2p.Endpoint(local_gpu_idx=0), p2p.Endpoint(local_gpu_idx=1)]
        assert [bdf(endpoint) for endpoint in endpoints] == [gpu.bus_id] * 2
        for endpoint in endpoints:
            endpoint.close()


@pytest.mark.parametrize("names", ["0,", ",", "99", "0,GPU-nonsense", "x"])
def test_a_map_that_makes_no_sense(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    monkeypatch.setenv("PEERWAY_GPU_MAP", names)
    with pytest.raises(ValueError, match="PEERWAY_GPU_MAP"):
        p2p.Endpoint(names.count(","))


# In one process

MEMORIES = {"gpu": lambda data: GpuBuffer(data, before=256), "host": Buffer, "pinned": PinnedBuffer}


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("ours, theirs", [("gpu", "gpu"), ("gpu", "host"), ("host", "gpu"), ("pinned", "gpu")])
def test_registered(pair: Pair, op: str, ours: str, theirs: str) -> None:
    mine, other = MEMORIES[ours](pattern(SIZE, 1)), MEMORIES[theirs](pattern(SIZE, 2))
    registered, mr_id = pair.a.reg(mine.ptr, SIZE)
    assert registered, pair.a.last_error()
    registered, their_id = pair.b.reg(other.ptr, SIZE)
    assert registered, pair.b.last_error()
    advertised, meta = pair.b.advertise(their_id, other.ptr + 100, 1000)
    assert advertised and len(meta) == 64
    assert getattr(pair.a, op)(pair.at_a, mr_id, mine.ptr + 50, 1000, meta), pair.a.last_error()
    expected = bytearray(pattern(SIZE, 2 if op == "write" else 1))
    if op == "write":
        expected[100:1100] = pattern(SIZE, 1)[50:1050]
        assert bytes(other) == bytes(expected)
    else:
        expected[50:1050] = pattern(SIZE, 2)[100:1100]
        assert bytes(mine) == bytes(expected)
    started, number = getattr(pair.a, f"{op}_async")(pair.at_a, mr_id, mine.ptr, 1000, meta)
    assert started and finish(pair.a, number)
    assert pair.a.dereg(mr_id) and pair.b.dereg(their_id)


@pytest.mark.parametrize("suffix", ["", "_async"])
def test_vectors(pair: Pair, suffix: str) -> None:
    mine = [GpuBuffer(pattern(700, at)) if at % 2 else Buffer(pattern(700, at)) for at in range(4)]
    other = [GpuBuffer(700, before=at) for at in range(4)]
    made, ids = pair.a.regv([b.ptr for b in mine], [700] * 4)
    assert made, pair.a.last_error()
    made, their_ids = pair.b.regv([b.ptr for b in other], [700] * 4)
    assert made, pair.b.last_error()
    made, metas = pair.b.advertisev(their_ids, [b.ptr for b in other], [700] * 4, 4)
    assert made
    answer = getattr(pair.a, f"writev{suffix}")(pair.at_a, ids, [b.ptr for b in mine], [700] * 4, metas, 4)
    assert answer is True or (answer[0] and finish(pair.a, answer[1])), pair.a.last_error()
    assert [bytes(b) for b in other] == [pattern(700, at) for at in range(4)]


def test_descriptors(pair: Pair) -> None:
    mine = [GpuBuffer(pattern(4000, 3)), Buffer(pattern(4000, 4))]
    other = [GpuBuffer(4000, before=64), GpuBuffer(4000)]
    ours = pair.a.register_memory([ByPointer(mine[0], is_cuda=True), ByPointer(mine[1])])
    theirs = pair.b.register_memory([ByPointer(buffer, is_cuda=True) for buffer in other])
    assert [ipc.IpcInfo.from_bytes(desc._ipc_info).gpu for desc in ours] == [0, None]
    remote = pair.a.deserialize_descs(pair.b.get_serialized_descs(theirs))
    for op, expected in (("write", [3, 4]), ("read", [5, 6])):
        if op == "read":
            for buffer, seed in zip(other, expected, strict=True):
                buffer.fill(pattern(4000, seed))
        started, number = pair.a.transfer(pair.at_a, op, ours, remote)
        assert started and finish(pair.a, number), pair.a.last_error()
        assert [bytes(b) for b in mine] == [bytes(b) for b in other] == [pattern(4000, seed) for seed in expected]
    pair.a.deregister_memory(ours)
    pair.b.deregister_memory(theirs)


def test_host_memory_declared_as_gpu_memory_is_refused(endpoint: p2p.Endpoint) -> None:
    with pytest.raises(RuntimeError, match=r"tensor_list\[0\].*not GPU memory"):
        endpoint.register_memory([ByPointer(Buffer(64), is_cuda=True)])


def test_memory_that_was_freed(pair: Pair) -> None:
    mine, other = GpuBuffer(1 << 22), GpuBuffer(1 << 22)
    address, info = mine.ptr, pair.b.advertise_ipc(pair.at_b, other.ptr, 1 << 22)[1]
    mine.free()
    assert pair.a.reg(address, 4096) == (False, 0)
    assert "freed" in pair.a.last_error() or "neither" in pair.a.last_error()
    assert pair.a.advertise_ipc(pair.at_a, address, 4096) == (False, b"")
    assert pair.a.write_ipc(pair.at_a, address, 4096, info) is False
    assert pair.a.reg(other.ptr, 1 << 40) == (False, 0) and "leaves the allocation" in pair.a.last_error()
    assert pair.a.reg(other.ptr, 1 << 22)[0] is True


def test_memory_that_is_allocated_anew_is_offered_anew(pair: Pair) -> None:
    first = GpuBuffer(1 << 22)
    address, (_, info) = first.ptr, pair.b.advertise_ipc(0, first.ptr, 1 << 22)
    assert pair.b.advertise_ipc(0, address, 1 << 22) == (True, info)
    first.free()
    others = []
    for _ in range(8):
        others.append(GpuBuffer(1 << 22))
        if others[-1].ptr == address:
            break
    else:
        pytest.skip("the driver did not give the same address again")
    success, again = pair.b.advertise_ipc(0, address, 1 << 22)
    assert success and again != info
    ours = Buffer(pattern(SIZE, 8))
    assert pair.a.write_ipc(pair.at_a, ours.ptr, SIZE, again), pair.a.last_error()
    assert bytes(others[-1])[:SIZE] == pattern(SIZE, 8)


# Between processes

CALLS = [("", False), ("", True), ("_async", False), ("_async", True)]


def serve(line: Any, index: int) -> None:
    """Offers parts of allocations, and sends their contents on request."""
    endpoint = p2p.Endpoint(local_gpu_idx=index)
    line.send(endpoint.get_metadata())
    accepted, gpu, conn_id = endpoint.accept_local(timeout=WATCHDOG)
    assert accepted and gpu == peerway.gpus()[0].bus_id
    buffers = [GpuBuffer(pattern(SIZE, 20 + at), before=1000 * at) for at in range(3)]
    success, infos = endpoint.advertisev_ipc(conn_id, [b.ptr for b in buffers], [SIZE] * 3)
    assert success, endpoint.last_error()
    assert endpoint.advertise_ipc(77, buffers[0].ptr, SIZE) == (True, infos[0])
    line.send(infos)
    while listen(line) == "show":
        line.send([bytes(b) for b in buffers])
    endpoint.close()


@pytest.mark.parametrize("kind", ["gpu", "host", "pinned"])
def test_ipc_between_processes(private_broker: int, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("PEERWAY_GPU_MAP", "0,0")
    with Child(serve, 0) as child:
        _ip, _port, gpu = p2p.Endpoint.parse_metadata(child.receive())
        endpoint = p2p.Endpoint(local_gpu_idx=1)
        connected, conn_id = endpoint.connect_local(remote_gpu_bdf=gpu)
        assert connected, endpoint.last_error()
        infos = child.receive()
        assert [ipc.IpcInfo.from_bytes(info).gpu for info in infos] == [0] * 3
        ours = [MEMORIES[kind](pattern(SIZE, 30 + at)) for at in range(3)]
        pointers = [b.ptr for b in ours]

        def run(name: str, *arguments: Any) -> None:
            answer = getattr(endpoint, name)(conn_id, *arguments)
            assert answer is True or (answer[0] and finish(endpoint, answer[1])), endpoint.last_error()

        def fill(buffers: list[Any], seed: int) -> None:
            for at, buffer in enumerate(buffers):
                buffer.fill(pattern(SIZE, seed + at))

        seeds = itertools.count(100, 10)
        for suffix, several in CALLS:
            seed = next(seeds)
            fill(ours, seed)
            if several:
                run(f"writev_ipc{suffix}", pointers, [SIZE] * 3, infos)
            else:
                for pointer, info in zip(pointers, infos, strict=True):
                    run(f"write_ipc{suffix}", pointer, SIZE, info)
            child.send("show")
            theirs = [pattern(SIZE, seed + at) for at in range(3)]
            assert child.receive() == theirs
            fill(ours, next(seeds))
            if several:
                run(f"readv_ipc{suffix}", pointers, [SIZE] * 3, infos)
            else:
                for pointer, info in zip(pointers, infos, strict=True):
                    run(f"read_ipc{suffix}", pointer, SIZE, info)
            assert [bytes(b) for b in ours] == theirs

        # The GPU copies the bytes, from an offset of the local memory into the remote memory.
        transfer = endpoint._post_ipc("write", conn_id, [pointers[0] + 1000], [500], [infos[1]])
        transfer.wait(WATCHDOG)
        assert transfer.path == "gpu-ipc"  # type: ignore[attr-defined]
        child.send("show")
        assert child.receive()[1][:500] == bytes(ours[0])[1000:1500]

        assert endpoint.write_ipc(conn_id, pointers[0], SIZE + 1, infos[0]) is False
        assert endpoint.write_ipc(99, pointers[0], SIZE, infos[0]) is False
        assert endpoint.read_ipc_async(conn_id, 8, SIZE, infos[0]) == (False, 0)
        child.send("end")
        child.end()
        endpoint.close()


def test_network_calls_between_processes(private_broker: int) -> None:
    with Child(serve_network) as child:
        ip, port, gpu = p2p.Endpoint.parse_metadata(child.receive())
        endpoint = p2p.Endpoint(local_gpu_idx=0)
        connected, conn_id = endpoint.connect(ip, gpu, remote_port=port)
        assert connected, endpoint.last_error()
        ours = GpuBuffer(SIZE)
        registered, mr_id = endpoint.reg(ours.ptr, SIZE, p2p.FloatType.kFloat16)
        assert registered
        meta = child.receive()
        assert endpoint.read(conn_id, mr_id, ours.ptr, SIZE, meta), endpoint.last_error()
        assert bytes(ours) == pattern(SIZE, 40)
        ours.fill(pattern(SIZE, 41))
        assert endpoint.writev(conn_id, [mr_id], [ours.ptr], [SIZE], [meta], 1), endpoint.last_error()
        child.send("show")
        assert child.receive() == pattern(SIZE, 41)
        child.end()
        endpoint.close()


def serve_network(line: Any) -> None:
    endpoint = p2p.Endpoint(local_gpu_idx=0)
    line.send(bytes(endpoint.get_metadata()))
    accepted, _ip, gpu, conn_id = endpoint.accept(timeout=WATCHDOG)
    assert accepted and gpu == 0 and conn_id != NONE_ID
    buffer = GpuBuffer(pattern(SIZE, 40), before=12)
    _, mr_id = endpoint.reg(buffer.ptr, SIZE)
    advertised, meta = endpoint.advertise(mr_id, buffer.ptr, SIZE)
    assert advertised
    line.send(meta)
    assert listen(line) == "show"
    line.send(bytes(buffer))
    endpoint.close()
