"""Release of requests whose bytes may still land: the backend refuses it until they cannot."""

import pytest
from nixl_of_tests import Side, bindings, release, until

SIZE = 64 << 20
WHOLE = [(0, SIZE)]
MAY_LAND = "its bytes may still land"


def posted_to_a_stopped_peer(side, peer):
    side.agent.add_remote_agent(peer.metadata)
    side.memory[:] = 0xAA
    request = side.request("WRITE", WHOLE, WHOLE, peer.name, peer.address)
    peer.stop()
    side.agent.transfer(request)
    return request


def check_refusals(side, request, log):
    """Waits until the transfer has ended in the engine with an open fence; checks the refusals."""

    def has_ended():
        assert side.agent.check_xfer_state(request) == "PROC"
        return log.lines(MAY_LAND)

    until(has_ended, "the transfer has ended with an open fence")
    # If the backend answered the first release with a status, NIXL would free the request at the
    # second.
    for _ in range(5):
        with pytest.raises(bindings.nixlRepostActiveError):
            side.agent.release_xfer_handle(request)
        assert side.agent.check_xfer_state(request) == "PROC"
        with pytest.raises(bindings.nixlRepostActiveError):
            side.agent.transfer(request)
    assert len(log.lines(MAY_LAND)) == 1


@pytest.mark.parametrize("transport", ["local-cma", "local-ring"])
@pytest.mark.parametrize("proof", ["goes on", "dies"])
def test_release_is_refused_until_the_stopped_peer(peer_process, log, transport, proof):
    settings = {"transport": transport}
    peer = peer_process(size=SIZE, **settings)
    side = Side(size=SIZE, settings=settings)
    request = posted_to_a_stopped_peer(side, peer)
    check_refusals(side, request, log)
    if proof == "dies":
        peer.kill()
        release(side, request)
    else:
        peer.go_on()
        release(side, request)
        # The memory can be reused: no byte of the released request changes it any more.
        peer.ask("fill", value=0x11)
        assert peer.ask("notifications") == {}
        assert peer.ask("only", value=0x11)
    side.close()


def test_an_end_is_told_once_its_fence_holds(peer_process, log):
    settings = {"transport": "local-cma"}
    peer = peer_process(size=SIZE, **settings)
    side = Side(size=SIZE, settings=settings)
    request = posted_to_a_stopped_peer(side, peer)
    check_refusals(side, request, log)
    peer.go_on()
    with pytest.raises(bindings.nixlRemoteDisconnectError):
        side.ended(request)
    side.agent.release_xfer_handle(request)
    side.close()


def test_a_stopped_peer_refuses_the_release_of_a_request_under_way(peer_process, log):
    # The peer is not silent long enough to count as dead, so the release itself finds the fence
    # open.
    settings = {"transport": "local-cma", "detect": "120s", "deadline": "120s", "fence": "200ms"}
    peer = peer_process(size=SIZE, **settings)
    side = Side(size=SIZE, settings=settings)
    request = posted_to_a_stopped_peer(side, peer)

    def is_refused():
        nonlocal request
        assert side.agent.check_xfer_state(request) == "PROC"
        try:
            side.agent.release_xfer_handle(request)
        except bindings.nixlRepostActiveError:
            return True
        # The transfer had sent no byte yet, so no byte can land. Try again.
        request = side.request("WRITE", WHOLE, WHOLE, peer.name, peer.address)
        side.agent.transfer(request)
        return False

    until(is_refused, "a request is released while its bytes are in flight")
    check_refusals(side, request, log)
    peer.go_on()
    release(side, request)
    side.close()


def test_a_read_whose_notification_does_not_arrive_is_released_at_once(peer_process, log):
    # The bytes of a read have arrived, and a silent peer cannot change them. Only the message is
    # lost.
    settings = {"transport": "local-cma"}
    peer = peer_process(size=SIZE, **settings)
    side = Side(size=SIZE, settings=settings)
    side.agent.add_remote_agent(peer.metadata)
    request = side.request("READ", WHOLE, WHOLE, peer.name, peer.address)
    peer.stop()
    side.agent.transfer(request, b"was read")
    with pytest.raises(bindings.nixlRemoteDisconnectError):
        side.ended(request)
    side.agent.release_xfer_handle(request)
    assert log.lines(MAY_LAND) == []
    side.close()


def test_an_agent_ends_with_a_request_that_is_not_released(peer_process, log):
    settings = {"transport": "local-cma"}
    peer = peer_process(size=SIZE, **settings)
    side = Side(size=SIZE, settings=settings)
    request = posted_to_a_stopped_peer(side, peer)
    check_refusals(side, request, log)
    # The memory must outlive the agent, as the guide requires.
    kept = side.memory
    del request
    side.close()
    peer.go_on()
    peer.ask("notifications")
    assert (kept == 0xAA).all()
