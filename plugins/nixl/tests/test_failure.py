"""Peers that die, stop, come back, or take their memory away; requests that are given up."""

import os
import signal
import time

import pytest
from nixl_of_tests import Side, released_within

# Silence after which a peer is held dead; the tests have it shorter than programs would.
DETECT = {"detect": "500ms", "transport": "tcp"}


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_a_killed_peer_is_a_disconnect(peer_process, op):
    peer = peer_process(size=64 << 20, **DETECT)
    side = Side(size=64 << 20, settings=DETECT)
    side.agent.add_remote_agent(peer.metadata)
    whole = [(0, 64 << 20)]
    request = side.request(op, whole, whole, peer.name, peer.address)
    side.agent.transfer(request)
    peer.kill()
    try:
        ended = side.ended(request, timeout=5)
        # It was sooner done than killed; the next one is not.
        while ended == "DONE":
            ended = side.run(request, timeout=5)
    except Exception as error:
        ended = error
    assert "DISCONNECT" in str(ended).upper(), ended
    # NIXL has forgotten the agent, and this one serves others.
    other = peer_process()
    side.agent.add_remote_agent(other.metadata)
    assert side.run(side.request("WRITE", [(0, 64)], [(0, 64)], other.name, other.address)) == "DONE"
    side.close()


def test_a_stopped_peer_ends_a_transfer_in_time(peer_process):
    peer = peer_process(size=256 << 20, **DETECT)
    side = Side(size=256 << 20, settings=DETECT)
    side.agent.add_remote_agent(peer.metadata)
    whole = [(0, 256 << 20)]
    request = side.request("WRITE", whole, whole, peer.name, peer.address)
    os.kill(peer.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        with pytest.raises(Exception, match="(?i)disconnect"):
            side.run(request, timeout=20)
        assert time.monotonic() - begun < 5
    finally:
        os.kill(peer.pid, signal.SIGCONT)
    side.close()


def test_a_deadline_ends_a_transfer_that_stands_still(peer_process):
    # The peer lives, and says so, for longer than the deadline.
    settings = {"deadline": "300ms", "detect": "30s", "transport": "tcp"}
    peer = peer_process(size=256 << 20, **settings)
    side = Side(size=256 << 20, settings=settings)
    side.agent.add_remote_agent(peer.metadata)
    whole = [(0, 256 << 20)]
    request = side.request("WRITE", whole, whole, peer.name, peer.address)
    os.kill(peer.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        with pytest.raises(Exception, match="(?i)cancel"):
            side.run(request, timeout=20)
        assert time.monotonic() - begun < 5
    finally:
        os.kill(peer.pid, signal.SIGCONT)
    side.close()


@pytest.mark.parametrize("transport", ["tcp", "local-cma", "local-ring"])
def test_what_was_released_writes_nothing_any_more(peer_process, transport):
    settings = {"transport": transport}
    size = 256 << 20
    peer = peer_process(size=size, **settings)
    side = Side(size=size, settings=settings)
    side.agent.add_remote_agent(peer.metadata)
    side.memory[:] = 0xAA
    whole = [(0, size)]
    for turn in range(3):
        request = side.request("WRITE", whole, whole, peer.name, peer.address)
        if side.agent.transfer(request) == "PROC":
            released_within(side, request, 5)
        # Whoever has the memory now finds his bytes in it, and no others.
        peer.ask("fill", value=turn)
        time.sleep(0.05)
        assert peer.ask("only", value=turn)
    side.close()


@pytest.mark.parametrize("transport", ["tcp", "local-cma"])
def test_a_read_that_was_released_leaves_its_buffer_alone(peer_process, transport):
    settings = {"transport": transport}
    size = 256 << 20
    peer = peer_process(size=size, **settings)
    side = Side(size=size, settings=settings)
    side.agent.add_remote_agent(peer.metadata)
    whole = [(0, size)]
    request = side.request("READ", whole, whole, peer.name, peer.address)
    if side.agent.transfer(request) == "PROC":
        released_within(side, request, 5)
    side.memory[:] = 0x11
    time.sleep(0.05)
    assert (side.memory == 0x11).all()
    side.close()


def test_a_peer_that_comes_back_is_another_and_can_be_loaded_anew(peer_process):
    first = peer_process(**DETECT)
    side = Side(settings=DETECT)
    side.agent.add_remote_agent(first.metadata)
    request = side.request("WRITE", [(0, 64)], [(0, 64)], first.name, first.address)
    assert side.run(request) == "DONE"
    first.kill()
    with pytest.raises(Exception, match="(?i)disconnect"):
        for _ in range(100):
            side.run(request, timeout=5)
            time.sleep(0.02)
    second = peer_process(**DETECT)
    side.agent.add_remote_agent(second.metadata)
    request = side.request("WRITE", [(0, 64)], [(0, 64)], second.name, second.address)
    assert side.run(request) == "DONE"
    side.close()


def test_memory_that_was_taken_back_is_refused(one, peer_process):
    peer = peer_process()
    one.agent.add_remote_agent(peer.metadata)
    request = one.request("WRITE", [(0, 64)], [(0, 64)], peer.name, peer.address)
    assert one.run(request) == "DONE"
    peer.ask("forget")
    with pytest.raises(Exception, match="(?i)not.?allowed"):
        one.run(request)
    assert peer.ask("notifications") == {}


@pytest.mark.parametrize("transport", ["tcp", "local-cma"])
def test_a_peer_that_takes_its_memory_back_and_leaves_is_a_disconnect(transport):
    side = Side(settings={"transport": transport})
    for turn in range(100):
        other = Side(settings={"transport": transport})
        side.agent.add_remote_agent(other.agent.get_agent_metadata())
        request = side.request("WRITE", [(0, 64)], [(0, 64)], other.name, other.address)
        if turn % 2:
            assert side.run(request) == "DONE"
        other.close()
        with pytest.raises(Exception, match="(?i)disconnect"):
            side.run(request)
    side.close()


def test_a_peer_writes_to_us_while_we_do_nothing(peer_process):
    side = Side()
    peer = peer_process()
    metadata = side.agent.get_agent_metadata().hex()
    assert peer.ask("write", metadata=metadata, address=side.address, length=4096) == "DONE"
    assert (side.memory[:4096] == 0x77).all()
    side.close()
