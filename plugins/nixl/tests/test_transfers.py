"""Transfers, with every kind of request that NIXL has."""

import mmap
import socket

import numpy as np
import pytest
from conftest import pattern
from nixl_of_tests import Side, pair


@pytest.mark.parametrize("length", [1, 7, 256, 4096, 65_537, 1 << 20])
@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_a_range_between_processes(one, peer_process, op, length):
    peer = peer_process()
    one.agent.add_remote_agent(peer.metadata)
    one.memory[:length] = pattern(length)
    whole = [(0, length)]
    if op == "WRITE":
        assert one.run(one.request("WRITE", whole, whole, peer.name, peer.address)) == "DONE"
        assert peer.bytes(0, length) == one.memory[:length].tobytes()
    else:
        peer.ask("fill", value=0x5A)
        assert one.run(one.request("READ", whole, whole, peer.name, peer.address)) == "DONE"
        assert (one.memory[:length] == 0x5A).all()
    # The transfer changed no other byte.
    assert one.memory[length] == 0


@pytest.mark.parametrize("transport", ["tcp", "local-cma", "local-ring"])
def test_every_transport(peer_process, transport):
    peer = peer_process(transport=transport)
    side = Side(settings={"transport": transport})
    side.agent.add_remote_agent(peer.metadata)
    side.memory[:] = pattern(side.memory.nbytes)
    whole = [(0, side.memory.nbytes)]
    assert side.run(side.request("WRITE", whole, whole, peer.name, peer.address)) == "DONE"
    assert peer.bytes(0, 4096) == side.memory[:4096].tobytes()
    sent = side.memory.copy()
    side.memory[:] = 0
    assert side.run(side.request("READ", whole, whole, peer.name, peer.address)) == "DONE"
    assert (side.memory == sent).all()
    side.close()


def test_two_agents_in_one_process_write_to_each_other(two):
    a, b = two
    a.memory[:] = 1
    assert a.run(a.request("WRITE", [(0, 4096)], [(8192, 4096)], b.name, b.address)) == "DONE"
    assert (b.memory[8192:12288] == 1).all() and b.memory[8191] == 0 and b.memory[12288] == 0
    b.memory[:4096] = 2
    assert b.run(b.request("WRITE", [(0, 4096)], [(0, 4096)], a.name, a.address)) == "DONE"
    assert (a.memory[:4096] == 2).all() and a.memory[4096] == 1


def test_an_agent_writes_to_itself(two):
    a, _ = two
    a.memory[:4096] = pattern(4096)
    request = a.request("WRITE", [(0, 4096)], [(65536, 4096)], a.name, a.address)
    assert a.run(request) == "DONE"
    assert (a.memory[65536 : 65536 + 4096] == a.memory[:4096]).all()


def test_a_hundred_thousand_descriptors(peer_process):
    count, length = 100_000, 512
    peer = peer_process(size=2 * count * length)
    side = Side(size=2 * count * length)
    side.agent.add_remote_agent(peer.metadata)
    side.memory[:] = pattern(side.memory.nbytes)
    # Every second local block, in another order at the peer.
    order = np.random.default_rng(1).permutation(count).astype(np.uint64)
    rows = lambda base, index: np.stack(  # noqa: E731
        [
            np.uint64(base) + index * np.uint64(2 * length),
            np.full(count, length, np.uint64),
            np.zeros(count, np.uint64),
        ],
        axis=1,
    )
    local = side.agent.get_xfer_descs(rows(side.address, np.arange(count, dtype=np.uint64)), "DRAM")
    remote = side.agent.get_xfer_descs(rows(peer.address, order), "DRAM")
    for _ in range(2):
        handle = side.agent.initialize_xfer("WRITE", local, remote, peer.name)
        assert side.run(handle) == "DONE"
        side.agent.release_xfer_handle(handle)
    for i in (0, 1, 77_777, count - 1):
        at = int(order[i]) * 2 * length
        ours = side.memory[i * 2 * length : i * 2 * length + length].tobytes()
        assert peer.bytes(at, length) == ours
        # The bytes between the blocks are unchanged.
        assert peer.bytes(at + length, length) == bytes(length)
    side.close()


def test_prepared_once_and_posted_a_thousand_times(one, peer_process):
    peer = peer_process()
    one.agent.add_remote_agent(peer.metadata)
    ours = one.agent.prep_xfer_dlist("", one.descriptors(*[(i * 256, 256) for i in range(64)]))
    there = [(i * 512, 256) for i in range(64)]
    theirs = one.agent.prep_xfer_dlist(peer.name, one.descriptors(*there, base=peer.address))
    picked = list(range(0, 64, 2))
    handle = one.agent.make_prepped_xfer("WRITE", ours, picked, theirs, picked[::-1])
    for turn in range(1000):
        one.memory[: 64 * 256] = turn % 251
        assert one.run(handle) == "DONE"
        if turn % 250 == 0:
            assert peer.bytes(picked[0] * 512, 256) == bytes([turn % 251]) * 256
    assert peer.bytes(512, 256) == bytes(256), "a block that was not picked has changed"
    one.agent.release_xfer_handle(handle)


@pytest.mark.slow
def test_more_than_four_gib_in_one_descriptor():
    length = (4 << 30) + 12_345
    # The source is never written, so the kernel backs it with the zero page. Only the destination
    # takes memory.
    source, target = (np.frombuffer(mmap.mmap(-1, length), np.uint8) for _ in range(2))
    # The default deadline is too short for this transfer on a busy machine.
    settings = {"deadline": "10m"}
    a, b = Side(memory=source, settings=settings), Side(memory=target, settings=settings)
    target[-1] = target[0] = 9
    a.agent.add_remote_agent(b.agent.get_agent_metadata())
    request = a.request("WRITE", [(0, length)], [(0, length)], b.name, b.address)
    assert a.run(request) == "DONE"
    assert target[0] == 0 and target[-1] == 0
    a.agent.release_xfer_handle(request)
    a.close()
    b.close()


def test_over_ipv6(peer_process):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 on the loopback interface: {error}")
    peer = peer_process(bind="[::1]:0", transport="tcp")
    side = Side(settings={"bind": "[::1]:0", "transport": "tcp"})
    side.agent.add_remote_agent(peer.metadata)
    side.memory[:64] = 5
    assert side.run(side.request("WRITE", [(0, 64)], [(0, 64)], peer.name, peer.address)) == "DONE"
    assert peer.bytes(0, 64) == bytes([5]) * 64
    side.close()


def test_loading_an_agent_does_not_connect(peer_process):
    peer = peer_process()
    side = Side()
    peer.kill()
    # The peer is gone, but loading its metadata does not connect.
    side.agent.add_remote_agent(peer.metadata)
    with pytest.raises(Exception, match="(?i)disconnect"):
        side.request("WRITE", [(0, 64)], [(0, 64)], peer.name, peer.address)
    side.close()


def test_both_sides_use_a_connection_and_forgetting_an_agent_leaves_it_to_the_other(two):
    a, b = two
    assert a.run(a.request("WRITE", [(0, 64)], [(0, 64)], b.name, b.address)) == "DONE"
    handle = b.request("WRITE", [(0, 64)], [(0, 64)], a.name, a.address)
    assert b.run(handle) == "DONE"
    a.agent.remove_remote_agent(b.name)
    assert b.run(handle) == "DONE"


def test_threads_share_an_agent(peer_process):
    from concurrent.futures import ThreadPoolExecutor

    peer = peer_process(size=8 << 20)
    side = Side(size=8 << 20, threads=True)
    side.agent.add_remote_agent(peer.metadata)
    side.memory[:] = pattern(8 << 20)

    def write(i):
        at = [(i << 20, 1 << 20)]
        request = side.request("WRITE", at, at, peer.name, peer.address)
        for _ in range(20):
            assert side.run(request) == "DONE"
        side.agent.release_xfer_handle(request)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(8)))
    for i in range(8):
        assert peer.bytes(i << 20, 4096) == side.memory[i << 20 : (i << 20) + 4096].tobytes()
    side.close()


def test_transfers_of_a_pair_pinned_to_tcp():
    a, b = pair(transport="tcp")
    a.memory[:] = 3
    whole = [(0, a.memory.nbytes)]
    assert a.run(a.request("WRITE", whole, whole, b.name, b.address)) == "DONE"
    assert (b.memory == 3).all()
    a.close()
    b.close()
