"""Between processes: both directions, at once, and with peers that die."""

import os
import signal
import threading
import time
from typing import Any

import pytest
from peerway.uccl import p2p
from uccl_support import NONE_ID, WATCHDOG, Buffer, Child, Tensor, finish, listen, pattern, shown

SIZE = 300_000


def peer(line: Any, environment: dict[str, str]) -> None:
    """Accepts, exchanges, writes back and reads back."""
    os.environ.update(environment)
    endpoint = p2p.Endpoint(0)
    line.send(endpoint.get_metadata())
    accepted, _ip, gpu, conn_id = endpoint.accept(timeout=WATCHDOG)
    assert accepted and gpu == 0
    landing, source = Buffer(SIZE), Buffer(pattern(SIZE, 2))
    success, ids = endpoint.regv([landing.ptr, source.ptr], [SIZE, SIZE])
    assert success
    success, metas = endpoint.advertisev(ids, [landing.ptr, source.ptr], [SIZE, SIZE], 2)
    assert success
    line.send(metas)
    theirs = listen(line)
    assert bytes(landing) == pattern(SIZE, 1), "the bytes that the peer wrote"
    back = Buffer(pattern(SIZE, 3))
    _, mr_id = endpoint.reg(back.ptr, SIZE)
    assert endpoint.write(conn_id, mr_id, back.ptr, SIZE, theirs) is True, endpoint.last_error()
    line.send("written back")
    assert listen(line) == "end"
    endpoint.close()


@pytest.mark.parametrize(
    "environment",
    [{}, {"UCCL_P2P_TRANSPORT": "tcp"}, {"UCCL_P2P_DISABLE_IPC": "1"}, {"PEERWAY_TRANSPORT": "local-ring"}],
    ids=["auto", "tcp", "no-ipc", "ring"],
)
def test_both_ways(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with Child(peer, environment) as child:
        endpoint = p2p.Endpoint(0)
        success, conn_id = endpoint.add_remote_endpoint(child.receive())
        assert success, endpoint.last_error()
        path = endpoint._connections.get(conn_id).peer.path
        assert (path == "tcp") == ("UCCL_P2P_TRANSPORT" in environment or "UCCL_P2P_DISABLE_IPC" in environment)
        landing, source = child.receive()
        ours, got = Buffer(pattern(SIZE, 1)), Buffer(SIZE)
        _, ids = endpoint.regv([ours.ptr, got.ptr], [SIZE, SIZE])
        success, number = endpoint.write_async(conn_id, ids[0], ours.ptr, SIZE, landing)
        assert success and finish(endpoint, number)
        assert endpoint.read(conn_id, ids[1], got.ptr, SIZE, source) is True
        assert bytes(got) == pattern(SIZE, 2), "the bytes that this side read"
        success, meta = endpoint.advertise(ids[1], got.ptr, SIZE)
        child.send(meta)
        assert child.receive() == "written back" and bytes(got) == pattern(SIZE, 3)
        child.send("end")
        child.end()
        endpoint.close()


def mutual(line: Any, rounds: int) -> None:
    """Adds the peer, is added by it, transfers both ways, removes the peer, and adds it again."""
    endpoint = p2p.Endpoint(0)
    endpoint.start_passive_accept()
    line.send(endpoint.get_metadata())
    metadata = listen(line)
    numbers = []
    mine = Tensor(pattern(4096, os.getpid()))
    descs = endpoint.register_memory([mine])
    line.send((endpoint.get_serialized_descs(descs), bytes(mine.buffer)))
    serialized, contents = listen(line)
    remote = endpoint.deserialize_descs(serialized)
    into = Tensor(4096)
    local = endpoint.register_memory([into])
    for _ in range(rounds):
        line.send("round")
        assert listen(line) == "go"
        success, conn_id = endpoint.add_remote_endpoint(metadata)
        assert success, endpoint.last_error()
        numbers.append(conn_id)
        into.buffer.fill(bytes(4096))
        success, number = endpoint.transfer(conn_id, "read", local, remote)
        assert success and finish(endpoint, number), endpoint.last_error()
        assert bytes(into.buffer) == contents
        line.send("moved")
        assert listen(line) == "remove"
        assert endpoint.remove_remote_endpoint(conn_id) is True
        with pytest.raises(RuntimeError, match="Invalid conn_id"):
            endpoint.transfer(conn_id, "read", local, remote)
    assert len(set(numbers)) == rounds
    line.send("end")
    assert listen(line) == "end"


def test_two_processes_of_one_gpu_add_each_other_at_once() -> None:
    rounds = 8
    with Child(mutual, rounds) as one, Child(mutual, rounds) as two:
        both = (one, two)
        for _exchange in range(2):
            said = [child.receive() for child in both]
            one.send(said[1])
            two.send(said[0])
        for _ in range(rounds):
            for expected, answer in (("round", "go"), ("moved", "remove")):
                assert [child.receive() for child in both] == [expected] * 2
                for child in both:
                    child.send(answer)
        assert [child.receive() for child in both] == ["end"] * 2
        for child in both:
            child.send("end")
        for child in both:
            child.end()


def opposite(line: Any) -> None:
    """Connects to the peer and accepts it at the same time."""
    for _ in range(6):
        endpoint = p2p.Endpoint(3)
        line.send(endpoint.get_metadata())
        ip, port, _bdf = endpoint.parse_metadata(listen(line))
        connected, conn_id = endpoint.connect(ip, 3, port)
        assert connected, endpoint.last_error()
        accepted, _ip, gpu, other = endpoint.accept(timeout=WATCHDOG)
        assert accepted and gpu == 3 and {conn_id, other} == {0, 1}
        assert endpoint.send_notif(conn_id, "from", str(os.getpid()).encode())
        assert endpoint.send_notif(other, "from", str(os.getpid()).encode())
        line.send("met")
        assert listen(line) == "next"
        assert len(endpoint.get_notifs()) == 2
        line.send("heard")
        assert listen(line) == "close"
        endpoint.close()


def test_two_processes_connect_to_each_other_and_both_accept() -> None:
    with Child(opposite) as one, Child(opposite) as two:
        both = (one, two)
        for _ in range(6):
            metadata = [child.receive() for child in both]
            one.send(metadata[1])
            two.send(metadata[0])
            for expected, answer in (("met", "next"), ("heard", "close")):
                assert [child.receive() for child in both] == [expected] * 2
                for child in both:
                    child.send(answer)
        for child in both:
            child.end()


def owner(line: Any) -> None:
    """Advertises memory and waits until the test ends the process."""
    endpoint = p2p.Endpoint(1)
    buffer = Buffer(SIZE)
    _, mr_id = endpoint.reg(buffer.ptr, SIZE)
    line.send((endpoint.get_metadata(), endpoint.advertise(mr_id, buffer.ptr, SIZE)[1]))
    listen(line)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_peer_that_dies_is_a_failure(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERWAY_TRANSPORT", transport)
    monkeypatch.setenv("PEERWAY_DETECT", "500ms")
    with Child(owner) as child:
        metadata, meta = child.receive()
        endpoint = p2p.Endpoint(0)
        _, conn_id = endpoint.add_remote_endpoint(metadata)
        ours = Buffer(pattern(SIZE, 1))
        _, mr_id = endpoint.reg(ours.ptr, SIZE)
        assert endpoint.write(conn_id, mr_id, ours.ptr, SIZE, meta) is True
        child.kill()
        until = time.monotonic() + WATCHDOG
        while endpoint.write(conn_id, mr_id, ours.ptr, SIZE, meta):
            assert time.monotonic() < until
        assert endpoint.last_error()
        success, number = endpoint.read_async(conn_id, mr_id, ours.ptr, SIZE, meta)
        assert success is False or finish(endpoint, number) is False
        assert endpoint.add_remote_endpoint(metadata) == (False, NONE_ID)
        assert endpoint.remove_remote_endpoint(conn_id) is True
        endpoint.close()


def test_a_transfer_that_fails_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped peer accepts no bytes over TCP, so the pending transfer fails with the peer."""
    monkeypatch.setenv("PEERWAY_TRANSPORT", "tcp")
    monkeypatch.setenv("PEERWAY_DETECT", "500ms")
    monkeypatch.setenv("PEERWAY_FENCE", "200ms")
    with Child(owner) as child:
        metadata, meta = child.receive()
        endpoint = p2p.Endpoint(0)
        _, conn_id = endpoint.add_remote_endpoint(metadata)
        ours = Buffer(SIZE)
        _, mr_id = endpoint.reg(ours.ptr, SIZE)
        assert endpoint.read(conn_id, mr_id, ours.ptr, SIZE, meta) is True
        child.stop()
        success, number = endpoint.read_async(conn_id, mr_id, ours.ptr, SIZE, meta)
        assert success and endpoint.poll_async(number) == (True, False)
        assert finish(endpoint, number) is False
        assert f"transfer {number}" in endpoint.last_error() and f"transfer {number}" in caplog.text
        assert endpoint.poll_async(number) == (False, True)
        child.go_on()
        endpoint.close()


def interrupted(line: Any) -> None:
    """Gets interrupted in accept(), and then in a read from a peer that does not answer."""
    os.environ["PEERWAY_TRANSPORT"] = "tcp"
    endpoint = p2p.Endpoint(0)
    # On a busy machine, the interrupt may arrive before the call.
    try:
        line.send(endpoint.get_metadata())
        endpoint.accept()
    except KeyboardInterrupt:
        line.send("accept")
    conn_id = endpoint.add_remote_endpoint(listen(line))[1]
    meta = listen(line)
    ours = Buffer(SIZE)
    _, mr_id = endpoint.reg(ours.ptr, SIZE)
    assert endpoint.read(conn_id, mr_id, ours.ptr, SIZE, meta) is True
    line.send("ready")
    assert listen(line) == "stopped"
    try:
        line.send("reading")
        endpoint.read(conn_id, mr_id, ours.ptr, SIZE, meta)
    except KeyboardInterrupt:
        line.send("read")


def test_ctrl_c_is_an_interrupt() -> None:
    with Child(interrupted) as child, Child(owner) as slow:
        child.receive()
        time.sleep(0.3)
        os.kill(child.process.pid, signal.SIGINT)
        assert child.receive() == "accept"
        metadata, meta = slow.receive()
        child.send(metadata)
        child.send(meta)
        assert child.receive() == "ready"
        slow.stop()
        child.send("stopped")
        assert child.receive() == "reading"
        time.sleep(0.3)
        os.kill(child.process.pid, signal.SIGINT)
        assert child.receive() == "read"
        slow.go_on()
        child.end()


def local(line: Any) -> None:
    """The serving side of the IPC calls."""
    endpoint = p2p.Endpoint(0)
    line.send(endpoint.parse_metadata(endpoint.get_metadata())[2])
    accepted, bdf, conn_id = endpoint.accept_local(timeout=WATCHDOG)
    assert accepted and bdf == shown(1)
    first, second = Buffer(pattern(SIZE, 5)), Buffer(pattern(SIZE, 6))
    line.send(endpoint.advertisev_ipc(conn_id, [first.ptr, second.ptr], [SIZE] * 2)[1])
    assert listen(line) == "written"
    assert bytes(first) == pattern(SIZE, 7) and bytes(second) == pattern(SIZE, 6)
    line.send("right")


def test_ipc_between_processes(private_broker: int) -> None:
    with Child(local) as child:
        bdf = child.receive()
        endpoint = p2p.Endpoint(1)
        success, conn_id = endpoint.connect_local(remote_gpu_bdf=bdf)
        assert success, endpoint.last_error()
        first, second = child.receive()
        ours, got = Buffer(pattern(SIZE, 7)), Buffer(2 * SIZE)
        assert endpoint.readv_ipc(conn_id, [got.ptr, got.ptr + SIZE], [SIZE] * 2, [second, first]) is True
        assert bytes(got) == pattern(SIZE, 6) + pattern(SIZE, 5)
        assert endpoint.write_ipc(conn_id, ours.ptr, SIZE, first) is True
        child.send("written")
        assert child.receive() == "right"
        child.end()
        endpoint.close()


def test_threads_share_an_endpoint() -> None:
    with Child(owner) as child:
        metadata, meta = child.receive()
        endpoint = p2p.Endpoint(0)
        _, conn_id = endpoint.add_remote_endpoint(metadata)
        failures: list = []

        def work(seed: int) -> None:
            buffer = Buffer(SIZE)
            for _ in range(20):
                _, mr_id = endpoint.reg(buffer.ptr, SIZE)
                success, number = endpoint.read_async(conn_id, mr_id, buffer.ptr, SIZE, meta)
                if not (success and finish(endpoint, number) and endpoint.dereg(mr_id)):
                    failures.append((seed, endpoint.last_error()))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WATCHDOG)
            assert not thread.is_alive()
        assert failures == []
        child.send("end")
        child.end()
        endpoint.close()
