"""Peers that die, stop, return or deregister their memory, and requests released early."""

import time

import pytest
from nixl_of_tests import Side, release, until

TCP = {"transport": "tcp"}


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_a_killed_peer_is_a_disconnect(peer_process, op):
    peer = peer_process(size=64 << 20, **TCP)
    side = Side(size=64 << 20, settings=TCP)
    side.agent.add_remote_agent(peer.metadata)
    whole = [(0, 64 << 20)]
    request = side.request(op, whole, whole, peer.name, peer.address)
    side.agent.transfer(request)
    peer.kill()
    try:
        ended = side.ended(request)
        # The transfer finished before the kill. Post again until one fails.
        while ended == "DONE":
            ended = side.run(request)
    except Exception as error:
        ended = error
    assert "DISCONNECT" in str(ended).upper(), ended
    # NIXL has forgotten the dead agent. This agent still works with others.
    other = peer_process()
    side.agent.add_remote_agent(other.metadata)
    assert side.run(side.request("WRITE", [(0, 64)], [(0, 64)], other.name, other.address)) == "DONE"
    side.close()


def test_a_stopped_peer_ends_a_transfer(peer_process):
    # Over TCP, no proof can come from a silent peer. The end is reported when the peer's lease
    # expires.
    peer = peer_process(size=256 << 20, **TCP)
    side = Side(size=256 << 20, settings=TCP)
    side.agent.add_remote_agent(peer.metadata)
    whole = [(0, 256 << 20)]
    request = side.request("WRITE", whole, whole, peer.name, peer.address)
    peer.stop()
    with pytest.raises(Exception, match="(?i)disconnect"):
        side.run(request)
    side.agent.release_xfer_handle(request)
    peer.go_on()
    side.close()


def test_a_deadline_ends_a_transfer_that_stands_still(peer_process, log):
    # The peer is stopped, but not silent long enough to count as dead.
    settings = {"deadline": "300ms", "detect": "120s", "transport": "tcp"}
    peer = peer_process(size=256 << 20, **settings)
    side = Side(size=256 << 20, settings=settings)
    side.agent.add_remote_agent(peer.metadata)
    whole = [(0, 256 << 20)]
    request = side.request("WRITE", whole, whole, peer.name, peer.address)
    peer.stop()
    assert side.agent.transfer(request) == "PROC"

    def has_ended():
        assert side.agent.check_xfer_state(request) == "PROC"
        return log.lines("the deadline passed")

    until(has_ended, "the deadline ends the transfer")
    # The sent bytes may still land, so NIXL learns of the end only after the peer has confirmed.
    peer.go_on()
    with pytest.raises(Exception, match="(?i)cancel"):
        side.ended(request)
    side.agent.release_xfer_handle(request)
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
            release(side, request)
        # The memory can be reused: no byte of the released request changes it any more.
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
        release(side, request)
    side.memory[:] = 0x11
    time.sleep(0.05)
    assert (side.memory == 0x11).all()
    side.close()


def test_a_peer_that_comes_back_is_another_and_can_be_loaded_anew(peer_process):
    first = peer_process(**TCP)
    side = Side(settings=TCP)
    side.agent.add_remote_agent(first.metadata)
    request = side.request("WRITE", [(0, 64)], [(0, 64)], first.name, first.address)
    assert side.run(request) == "DONE"
    first.kill()
    with pytest.raises(Exception, match="(?i)disconnect"):
        # Until the peer's death is detected, a small write may still succeed.
        until(lambda: side.run(request) != "DONE", "the peer's death is detected")
    second = peer_process(**TCP)
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
