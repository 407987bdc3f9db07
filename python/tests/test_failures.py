"""Every failure raises its own exception, in bounded time, and the endpoint keeps working."""

from __future__ import annotations

import os
import signal
import threading
import time

import far as there
import numpy
import peerway
import pytest
from far import Far

BIG = 256 << 20


def test_killed_peer(far: Far, endpoint: peerway.Endpoint) -> None:
    peer = endpoint.connect(far.metadata)
    remote = peer.remote(far(there.advertise, 1 << 20, 0, "rw", False))
    far.kill()
    with pytest.raises(peerway.PeerGone) as raised:
        for _ in range(1000):
            peer.write(bytes(1 << 20), remote)
            time.sleep(0.01)
    assert isinstance(raised.value, ConnectionError)
    with pytest.raises(peerway.ConnectError):
        endpoint.connect(("127.0.0.1", 1))


def test_stopped_peer_times_out_and_says_that_its_fence_is_open() -> None:
    with Far(transport="tcp") as far, peerway.Endpoint(transport="tcp", detect=120, fence=0.2) as endpoint:
        peer = endpoint.connect(far.metadata)
        remote = peer.remote(far(there.advertise, BIG // 8))
        far.stop()
        started = time.monotonic()
        with pytest.raises(peerway.TransferTimeout) as raised:
            peer.write(numpy.zeros(BIG // 8, "uint8"), remote, deadline=0.3)
        assert 0.25 < time.monotonic() - started < 60, "the detection of a silent peer would take two minutes"
        assert isinstance(raised.value, peerway.Unfenced) and isinstance(raised.value, TimeoutError)
        far.resume()


def check(error: BaseException, peer: peerway.Peer, op: str, nbytes: int) -> None:
    """The exception says what every failed transfer says, and its text says the same."""
    assert isinstance(error, peerway.TransferError)
    host, port = peer.address
    assert error.peer == f"{host}:{port}" and error.incarnation == peer.incarnation
    assert (error.op, error.bytes_total) == (op, nbytes) and 0 <= error.bytes_done <= nbytes
    assert error.fence == ("open" if isinstance(error, peerway.Unfenced) else "held")
    for part in [error.peer, error.incarnation, f"by {error.path}", f"the fence is {error.fence}", error.last_event]:
        assert part is None or part in str(error), (part, str(error))


def test_failed_transfers_say_what_is_known() -> None:
    with Far(transport="tcp") as far, peerway.Endpoint(transport="tcp", detect=120, fence=0.2) as endpoint:
        nbytes = BIG // 8
        peer = endpoint.connect(far.metadata)
        small = peer.remote(far(there.advertise, 100))
        assert far(there.revoke) is True
        with pytest.raises(peerway.Revoked, match="the peer revoked the region") as revoked:
            peer.read(bytearray(100), small)
        check(revoked.value, peer, "read", 100)
        assert (revoked.value.path, revoked.value.bytes_done, revoked.value.last_event) == ("tcp", 0, None)

        ours = numpy.zeros(nbytes, "uint8")
        remote = peer.remote(far(there.advertise, nbytes))
        far.stop()
        with pytest.raises(peerway.TransferTimeout, match="the deadline passed") as late:
            peer.write(ours, remote, deadline=0.3)
        check(late.value, peer, "write", nbytes)
        assert late.value.fence == "open" and late.value.bytes_done < nbytes
        cancelled = peer.post_write(ours, remote)
        cancelled.cancel()
        error = cancelled.exception(60)
        assert isinstance(error, peerway.TransferCancelled) and error.last_event is None
        check(error, peer, "write", nbytes)

        writes, notifies = peer.post_write(ours, remote), peer.notify(b"nobody hears")
        far.kill()
        for transfer, op, total in [(writes, "write", nbytes), (notifies, "notify", 0)]:
            error = transfer.exception(60)
            assert isinstance(error, peerway.PeerGone)
            check(error, peer, op, total)
            assert error.last_event
        with pytest.raises(peerway.PeerGone) as gone:
            peer.notify(b"x")
        host, port = peer.address
        assert (gone.value.peer, gone.value.incarnation) == (f"{host}:{port}", peer.incarnation)
        assert f"the peer is gone: {host}:{port} (incarnation {peer.incarnation})" in str(gone.value)
        assert gone.value.op is None, "nothing was posted"


def test_rights_are_kept(far: Far, endpoint: peerway.Endpoint) -> None:
    peer = endpoint.connect(far.metadata)
    readable = peer.remote(far(there.advertise, 100, 7, "r"))
    assert readable.access == "r"
    with pytest.raises(peerway.AccessDenied):
        peer.write(bytes(100), readable)
    writable = peer.remote(far(there.advertise, 100, 7, "w"))
    with pytest.raises(PermissionError):
        peer.read(bytearray(100), writable)
    assert far(there.revoke) is True
    with pytest.raises(peerway.Revoked):
        peer.write(bytes(100), writable)
    assert far(there.content) == b"\x07" * 100


def test_a_descriptor_is_bound_to_its_peer(far: Far) -> None:
    with peerway.Endpoint() as owner, peerway.Endpoint() as friend, peerway.Endpoint() as other:
        region = owner.allocate(64)
        friend.connect(owner.metadata)
        bound = region.advertise("rw", to=owner.accept(5))
        friend.connect(owner.metadata).write(b"f" * 64, bound)
        with pytest.raises(peerway.AccessDenied):
            other.connect(owner.metadata).write(b"o" * 64, bound)
        assert bytes(memoryview(region)) == b"f" * 64


def test_nonsense_is_refused_by_name(far: Far, endpoint: peerway.Endpoint) -> None:
    peer = endpoint.connect(far.metadata)
    remote = peer.remote(far(there.advertise, 100))
    region = endpoint.allocate(100)
    cases = [
        (peerway.InvalidDescriptor, "", lambda: peer.remote(b"short")),
        (TypeError, "descriptor", lambda: peer.remote("text")),
        (TypeError, "remote", lambda: peer.write(region, 5)),
        (TypeError, "local", lambda: peer.write(5, remote)),
        (TypeError, "local", lambda: peer.write("text", remote)),
        (TypeError, "local and remote", lambda: peer.write([region], remote)),
        (ValueError, "1 pieces against 2", lambda: peer.write([region], [remote, remote])),
        (peerway.InvalidWork, "99 local bytes do not match 100", lambda: peer.write(region[:99], remote)),
        (ValueError, "step", lambda: region[::2]),
        (BufferError, "local", lambda: peer.write(numpy.zeros((100, 2), "uint8")[:, 0], remote)),
        (BufferError, "read-only", lambda: peer.read(b"x" * 100, remote)),
        (BufferError, "buffer: .*read-only", lambda: endpoint.register(b"x" * 100)),
        (TypeError, "buffer", lambda: endpoint.register(object())),
        (TypeError, "remote", lambda: peer.write(region.blocks([0], 10), remote)),
        (TypeError, "local", lambda: peer.write(remote.blocks([0], 10), remote.blocks([0], 10))),
        (TypeError, "remote", lambda: peer.write(region.blocks([0], 10), region.blocks([0], 10))),
        (
            peerway.InvalidWork,
            "index 10",
            lambda: peer.write(region.blocks([10], 10), remote.blocks([0], 10)),
        ),
        (
            peerway.InvalidWork,
            "2 local pieces",
            lambda: peer.write(region.blocks([0, 1], 10), remote.blocks([0], 10)),
        ),
        (ValueError, "indices: number -1 at 1", lambda: region.blocks([0, -1], 10)),
        (ValueError, "indices: number 4294967296", lambda: region.blocks(numpy.array([1 << 32]), 10)),
        (TypeError, "indices", lambda: region.blocks(["a"], 10)),
        (TypeError, "region", lambda: peerway.BlockList("x", [0], 10)),
        (TypeError, "-1 is out of range(.|\n)*'nbytes'", lambda: region.blocks([0], -1)),
        (TypeError, "-1 is out of range(.|\n)*'id'", lambda: peer.count(-1)),
        (TypeError, "4294967296 is out of range(.|\n)*'id'", lambda: peer.count(1 << 32)),
        (TypeError, "'count'", lambda: peer.write(region, remote, count=-1)),
        (TypeError, "'start'", lambda: region.advertise(start=-1)),
        (TypeError, "'slots'", lambda: peerway.Endpoint(slots=1 << 40)),
        (TypeError, "notify", lambda: peer.write(region, remote, notify="text")),
        (peerway.InvalidWork, "over the cap", lambda: peer.notify(bytes(1 << 24))),
        (ValueError, "kind: 'fast'", lambda: peer.write(region, remote, kind="fast")),
        (ValueError, "deadline: -1", lambda: peer.write(region, remote, deadline=-1)),
        (ValueError, "timeout: NaN", lambda: endpoint.accept(float("nan"))),
        (ValueError, "access: 'x'", lambda: region.advertise("x")),
        (peerway.InvalidWork, "leaves the region", lambda: region.advertise(start=10, stop=101)),
        (peerway.InvalidMetadata, "", lambda: endpoint.connect(b"nonsense")),
        (TypeError, "to: ", lambda: endpoint.connect(5)),
        (ValueError, "to: 'nowhere'", lambda: endpoint.connect("nowhere")),
        (peerway.ConnectError, "cannot find the host", lambda: endpoint.connect("no.such.host.invalid:1")),
        (TypeError, "'nbytes'", lambda: endpoint.allocate(-1)),
        (peerway.RegisterError, "cannot allocate", lambda: endpoint.allocate(1 << 60)),
        (peerway.InvalidWork, "not a range", lambda: endpoint.register_address(0, 10)),
        (ValueError, "op: 'move'", lambda: peer.post_addresses("move", [], [], [], [])),
        (ValueError, "1 regions, 0 addresses", lambda: peer.post_addresses("read", [region], [], [], [])),
        (peerway.AcceptTimeout, "in time", lambda: endpoint.accept(0.01)),
        (peerway.CounterTimeout, "counter 5 is at 0", lambda: endpoint.wait_counter(5, 1, 0.01)),
        (peerway.InvalidSetting, "PEERWAY|transport", lambda: peerway.Endpoint(transport="carrier-pigeon")),
        (ValueError, "bind: 'x'", lambda: peerway.Endpoint(bind="x")),
        (ValueError, "advertise: 'x'", lambda: peerway.Endpoint(advertise="x")),
        (ValueError, "spin: -1", lambda: peerway.Endpoint(spin=-1)),
    ]
    for number, (kind, text, call) in enumerate(cases):
        with pytest.raises(kind, match=text or None):
            call()
            pytest.fail(f"case {number} ({text}) was accepted")
    peer.write(region, remote)  # valid transfers still work


def test_other_protocols_are_told_apart(endpoint: peerway.Endpoint) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(200))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(peerway.ConnectError):
            endpoint.connect(server.getsockname())
        thread.join(10)


def test_a_connect_that_times_out_says_where_and_when(endpoint: peerway.Endpoint) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        with pytest.raises(peerway.ConnectTimeout, match=f"{host}:{port} timed out after .*ms while"):
            endpoint.connect((host, port), timeout=0.5)


def test_cancel(pinned: str) -> None:
    with Far(transport=pinned) as far, peerway.Endpoint(transport=pinned) as endpoint:
        peer = endpoint.connect(far.metadata)
        remote = peer.remote(far(there.advertise, BIG, 0, "rw", pinned == "local-map"))
        ours = peerway.empty(BIG)
        transfer = peer.post_write(ours, remote)
        transfer.cancel()
        error = transfer.exception(60)
        # The transfer may have ended before the cancel.
        assert error is None or isinstance(error, peerway.TransferCancelled)
        assert transfer.cancelled() == (error is not None) and transfer.fenced
        with pytest.raises(peerway.WaitTimeout):
            peer.post_write(ours, remote).wait(0)


def test_closed_endpoint(far: Far) -> None:
    endpoint = peerway.Endpoint()
    peer = endpoint.connect(far.metadata)
    region = endpoint.allocate(10)
    endpoint.close()
    endpoint.close()
    assert endpoint.closed
    calls = [
        lambda: peer.notify(b"x"),
        lambda: endpoint.connect(far.metadata),
        lambda: endpoint.accept(1),
        lambda: endpoint.allocate(1),
        lambda: endpoint.wait_counter(1, 1),
        lambda: endpoint.register(bytearray(1)),
    ]
    for call in calls:
        with pytest.raises(peerway.EndpointClosed):
            call()
    assert endpoint.notification(5) is None
    region.revoke()


def test_busy() -> None:
    with Far(transport="tcp") as far, peerway.Endpoint(transport="tcp", slots=2) as endpoint:
        peer = endpoint.connect(far.metadata)
        remote = peer.remote(far(there.advertise, BIG // 8))
        ours = numpy.zeros(BIG // 8, "uint8")
        held = [peer.post_write(ours, remote) for _ in range(2)]
        with pytest.raises(peerway.Busy, match="all 2 transfer slots"):
            peer.post_write(ours, remote)
        for transfer in held:
            transfer.wait()


@pytest.mark.parametrize("what", ["wait", "accept", "counter", "notification", "write"])
def test_ctrl_c_is_heard_at_once(what: str) -> None:
    with Far(transport="tcp") as far, peerway.Endpoint(transport="tcp", detect=120, fence=0.3) as endpoint:
        peer = endpoint.connect(far.metadata)
        remote = peer.remote(far(there.advertise, BIG // 8))
        ours = numpy.zeros(BIG // 8, "uint8")
        far.stop()
        transfer = peer.post_write(ours, remote)
        calls = {
            "wait": lambda: transfer.wait(),
            "accept": lambda: endpoint.accept(),
            "counter": lambda: endpoint.wait_counter(1, 1),
            "notification": lambda: endpoint.notification(None),
            "write": lambda: peer.write(ours, remote),
        }
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            calls[what]()
        # The write is cancelled and fenced first, which takes the fence deadline with a stopped
        # peer. Without the signal, it would end only after the peer has been silent for two
        # minutes.
        assert time.monotonic() - started < 60
        timer.join()
        far.resume()


def test_fork_after_import_and_after_an_endpoint(endpoint: peerway.Endpoint) -> None:
    region = endpoint.allocate(10)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            try:
                endpoint.allocate(1)
            except peerway.EndpointClosed:
                with peerway.Endpoint() as a, peerway.Endpoint() as b:
                    theirs = b.allocate(10)
                    a.connect(b.metadata).write(b"z" * 10, theirs.advertise())
                    code = 0 if bytes(memoryview(theirs)) == b"z" * 10 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not endpoint.closed and region.nbytes == 10


def test_ended_transfers_that_are_kept_take_no_slots() -> None:
    with peerway.Endpoint(slots=4) as endpoint, peerway.Endpoint() as owner:
        region = owner.allocate(1 << 20)
        peer = endpoint.connect(owner.metadata)
        kept = []
        for _ in range(50):
            kept.append(peer.post_write(bytes(1 << 20), region.advertise()))
            kept[-1].wait(60)
        assert all(transfer.done() and transfer.stats["bytes_done"] == 1 << 20 for transfer in kept)


def test_a_forked_child_cannot_wait_for_a_transfer_of_its_parent(far: Far) -> None:
    with peerway.Endpoint(transport="tcp", detect=30) as endpoint, Far(transport="tcp") as far:
        peer = endpoint.connect(far.metadata)
        remote = peer.remote(far(there.advertise, BIG // 8))
        far.stop()
        transfer = peer.post_write(numpy.zeros(BIG // 8, "uint8"), remote)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                transfer.wait()
            except peerway.EndpointClosed:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        far.resume()
        transfer.wait(60)


def test_a_closed_endpoint_says_so_and_not_that_its_peer_is_gone() -> None:
    endpoint, owner = peerway.Endpoint(), peerway.Endpoint()
    region = owner.allocate(BIG)
    transfer = endpoint.connect(owner.metadata).post_write(peerway.empty(BIG), region.advertise())
    endpoint.close()
    error = transfer.exception(60)
    assert error is None or isinstance(error, peerway.EndpointClosed), error
    owner.close()
    with pytest.raises(peerway.EndpointClosed):
        region.advertise()


def test_advertising_and_importing_many_parts_is_quick(far: Far, endpoint: peerway.Endpoint) -> None:
    # Quadratic costs would take minutes here. The test sets no tighter limit.
    peer = endpoint.connect(far.metadata)
    descriptors = far(_advertise_parts, 20_000)
    ours = endpoint.allocate(20_000)
    peer.post_addresses(
        "write", [ours] * 20_000, [ours.address + i for i in range(20_000)], [1] * 20_000, descriptors
    ).wait()


def _advertise_parts(here, count: int) -> list[bytes]:
    import peerway

    array = peerway.empty(count)
    region = here["endpoint"].register(array)
    here["kept"] = array, region
    return [region.advertise("w", start=i, stop=i + 1) for i in range(count)]


def test_memory_that_a_stopped_writer_may_write_outlives_region_and_endpoint() -> None:
    # With this length, a writer that is stopped at a random time is usually inside a copy.
    nbytes = 64 << 20
    with Far() as far:
        for _ in range(50):
            endpoint = peerway.Endpoint(fence=0.2)
            array = peerway.empty(nbytes)
            array[:] = 0
            region = endpoint.register(array)
            far(there.write_over_and_over, endpoint.metadata, region.advertise("rw"), nbytes)
            deadline = time.monotonic() + 30
            while not array[0] and time.monotonic() < deadline:
                time.sleep(0.001)
            far.stop()
            if not region.revoke():
                break
            far.resume()
        else:
            pytest.fail("the writer was never stopped inside a copy")
        assert region.revoke() is False
        endpoint.close()
        assert region.revoke() is False, "the fence was reported as held without proof"
        del array, region, endpoint
        kept = peerway.quarantine()
        assert (kept["regions"], kept["bytes"]) == (1, nbytes)
        far.resume()
        deadline = time.monotonic() + 60
        while peerway.quarantine()["regions"]:
            assert time.monotonic() < deadline, peerway.quarantine()
            time.sleep(0.01)


def test_refusals_are_counted_by_reason() -> None:
    one, other = peerway.Endpoint(transport="tcp"), peerway.Endpoint(transport="tcp")
    peer = one.connect(other.metadata)
    assert set(other.stats["refusals"].values()) == {0}
    with pytest.raises(peerway.AccessDenied, match="a count before any import"):
        peer.count(7).wait()
    assert other.stats["refusals"]["counts_without_right"] == 1
    assert other.counter(7) == 0
    one.close()
    other.close()
