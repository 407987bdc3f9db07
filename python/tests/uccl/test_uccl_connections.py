"""Connecting, accepting, adding and removing."""

import threading
import time
from contextlib import closing

import peerway
import pytest
from peerway.uccl import p2p
from peerway.uccl.notices import Greeting
from uccl_support import NONE_ID, WATCHDOG, Buffer, Pair, pattern, shown


def place(endpoint: p2p.Endpoint) -> tuple[str, int]:
    ip, port, _bdf = endpoint.parse_metadata(endpoint.get_metadata())
    return ip, port


def moves(a: p2p.Endpoint, conn_id: int, b: p2p.Endpoint, seed: int = 1) -> bool:
    """Whether a write over this connection arrives."""
    source, target = Buffer(pattern(1000, seed)), Buffer(1000)
    (_, ours), (_, theirs) = a.reg(source.ptr, 1000), b.reg(target.ptr, 1000)
    _, meta = b.advertise(theirs, target.ptr, 1000)
    done = a.write(conn_id, ours, source.ptr, 1000, meta)
    arrived = bytes(target) == bytes(source)
    assert done == arrived
    return done


def test_connect_and_accept(pair: Pair) -> None:
    assert pair.at_a == pair.at_b == 0, "numbers count from 0"
    assert moves(pair.a, pair.at_a, pair.b)
    assert moves(pair.b, pair.at_b, pair.a, 2), "a connection serves both ways"


def test_every_connect_is_an_accept(pair: Pair) -> None:
    ip, port = place(pair.b)
    for number in (1, 2):
        assert pair.a.connect(ip, "any text", remote_port=port) == (True, number)
        assert pair.b.accept(timeout=WATCHDOG) == (True, ip, 1, number)
    assert moves(pair.a, 2, pair.b)


@pytest.mark.parametrize("spelling", [{"remote_gpu_bdf": "0000:00:00.0"}, {"remote_gpu_idx": 5}, {}])
def test_with_a_port_the_gpu_is_not_looked_at(pair: Pair, spelling: dict) -> None:
    ip, port = place(pair.b)
    assert pair.a.connect(remote_ip_addr=ip, remote_port=port, **spelling) == (True, 1)


def test_connect_without_a_listener_fails(endpoint: p2p.Endpoint) -> None:
    gone = p2p.Endpoint(3)
    ip, port = place(gone)
    gone.close()
    assert endpoint.connect(ip, "", port) == (False, NONE_ID)
    assert str(port) in endpoint.last_error()
    assert endpoint.connect("no.such.host.invalid", "", port) == (False, NONE_ID)


def test_connect_with_nonsense(endpoint: p2p.Endpoint) -> None:
    for arguments, name in [
        ((5, "", 1), "remote_ip_addr"),
        (("::1", b"", 1), "remote_gpu_idx"),
        (("::1", "", "1"), "remote_port"),
    ]:
        with pytest.raises(TypeError, match=name):
            endpoint.connect(*arguments)  # type: ignore[arg-type]
    for port in (-2, 65536, 2**70):
        with pytest.raises(TypeError, match="remote_port"):
            endpoint.connect("127.0.0.1", "", port)
    with pytest.raises(ValueError, match="remote_port"):
        endpoint.connect("127.0.0.1", "", 0)
    with pytest.raises(ValueError, match="remote_port"):
        endpoint.connect("127.0.0.1")
    for gpu in (-1, 2**16, 2**70):
        with pytest.raises(TypeError, match="remote_gpu_idx"):
            endpoint.connect("127.0.0.1", remote_gpu_idx=gpu)
    with pytest.raises(TypeError, match="one argument"):
        endpoint.connect("127.0.0.1", remote_gpu_bdf="x", remote_gpu_idx=1)


def test_accept_without_a_peer_times_out(endpoint: p2p.Endpoint) -> None:
    assert endpoint.accept(timeout=0.05) == (False, "", -1, NONE_ID)
    assert endpoint.accept_local(timeout=0) == (False, "", NONE_ID)
    assert "no peer" in endpoint.last_error()


def test_accept_ends_when_the_endpoint_closes() -> None:
    endpoint = p2p.Endpoint(0)
    answers: list = []
    waiters = [
        threading.Thread(target=lambda call=call: answers.append(call()))
        for call in (endpoint.accept, endpoint.accept_local)
    ]
    for waiter in waiters:
        waiter.start()
    time.sleep(0.1)
    endpoint.close()
    for waiter in waiters:
        waiter.join(WATCHDOG)
        assert not waiter.is_alive()
    assert sorted(answers) == [(False, "", -1, NONE_ID), (False, "", NONE_ID)]


def test_a_peer_of_another_kind_is_accepted_without_its_gpu(endpoint: p2p.Endpoint) -> None:
    ip, port = place(endpoint)
    with peerway.Endpoint() as stranger:
        peer = stranger.connect((ip, port))
        success, from_ip, gpu, conn_id = endpoint.accept(timeout=WATCHDOG)
        assert (success, gpu, conn_id) == (True, -1, 0) and from_ip
        assert endpoint.accept(timeout=0.6)[0] is False, "the peer was accepted twice"
        peer.notify(b"\0peerway.uccl\0{broken").wait(WATCHDOG)
        assert endpoint.accept(timeout=0.2)[0] is False, "a malformed greeting announced a peer"
        peer.notify(Greeting(7, "x", "network").to_bytes()).wait(WATCHDOG)
        assert endpoint.accept(timeout=WATCHDOG)[2:] == (7, 1)


def test_one_arrival_goes_to_one_waiting_accept() -> None:
    a, b = p2p.Endpoint(0), p2p.Endpoint(1)
    answers: list = []
    waiters = [threading.Thread(target=lambda: answers.append(b.accept(timeout=WATCHDOG))) for _ in range(8)]
    for waiter in waiters:
        waiter.start()
    ip, port = place(b)
    for number in range(8):
        assert a.connect(ip, "", port) == (True, number)
    for waiter in waiters:
        waiter.join(2 * WATCHDOG)
    assert sorted(answer[3] for answer in answers) == list(range(8)) and all(answer[0] for answer in answers)
    a.close()
    b.close()


def test_both_connect_at_once_and_both_accept() -> None:
    for attempt in range(10):
        ends = [p2p.Endpoint(10), p2p.Endpoint(11)]
        answers: dict = {}

        def meet(me: int, ends: list = ends, answers: dict = answers) -> None:
            ip, port = place(ends[1 - me])
            answers[me] = (ends[me].connect(ip, "", port), ends[me].accept(timeout=WATCHDOG))

        threads = [threading.Thread(target=meet, args=(me,)) for me in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), f"attempt {attempt}"
        for me in (0, 1):
            (connected, conn_id), (accepted, _ip, gpu, _other) = answers[me]
            assert connected and accepted and gpu == 11 - me
            assert moves(ends[me], conn_id, ends[1 - me], attempt)
        for end in ends:
            end.close()


def test_add_remote_endpoint_is_remembered(pair: Pair) -> None:
    metadata = pair.b.get_metadata()
    success, conn_id = pair.a.add_remote_endpoint(metadata)
    assert (success, conn_id) == (True, 1)
    assert pair.a.add_remote_endpoint(metadata_bytes=bytearray(metadata)) == (True, conn_id)
    assert moves(pair.a, conn_id, pair.b)
    assert pair.a.remove_remote_endpoint(conn_id) is True
    assert pair.a.remove_remote_endpoint(conn_id) is False
    assert pair.a.add_remote_endpoint(metadata) == (True, 2), "another number after a removal"
    assert moves(pair.a, 2, pair.b) and moves(pair.a, pair.at_a, pair.b)


def test_both_kinds_of_accept_see_an_added_endpoint(pair: Pair) -> None:
    metadata = pair.b.get_metadata()
    _, first = pair.a.add_remote_endpoint(metadata)
    assert pair.b.accept_local(timeout=WATCHDOG)[:2] == (True, shown(1))
    pair.a.remove_remote_endpoint(first)
    pair.a.add_remote_endpoint(metadata)
    assert pair.b.accept(timeout=WATCHDOG)[2] == 1


def test_adding_forgets_a_peer_that_is_gone(endpoint: p2p.Endpoint) -> None:
    other = p2p.Endpoint(1)
    metadata = other.get_metadata()
    assert endpoint.add_remote_endpoint(metadata) == (True, 0)
    other.close()
    until = time.monotonic() + WATCHDOG
    while endpoint._connections.known(metadata) is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert endpoint.add_remote_endpoint(metadata) == (False, NONE_ID)


@pytest.mark.parametrize("metadata", [b"", b"x" * 19, bytes(64)])
def test_adding_invalid_metadata_is_refused(endpoint: p2p.Endpoint, metadata: bytes) -> None:
    with pytest.raises(RuntimeError, match="metadata"):
        endpoint.add_remote_endpoint(metadata)
    with pytest.raises(TypeError, match="metadata_bytes"):
        endpoint.add_remote_endpoint(metadata.decode())  # type: ignore[arg-type]


def test_removing_an_unknown_connection_fails(endpoint: p2p.Endpoint) -> None:
    for conn_id in (0, 999999, NONE_ID):
        assert endpoint.remove_remote_endpoint(conn_id) is False
    assert "connection" in endpoint.last_error()
    for conn_id in (-1, 2**64, "0", None):
        with pytest.raises(TypeError, match="conn_id"):
            endpoint.remove_remote_endpoint(conn_id)  # type: ignore[arg-type]


def test_removing_closes_a_session_that_only_we_use(pair: Pair) -> None:
    metadata = pair.b.get_metadata()
    _, conn_id = pair.a.add_remote_endpoint(metadata)
    pair.a.remove_remote_endpoint(conn_id)
    assert len(pair.a._native.peers()) == 1, "the first connection still uses it"
    pair.a.remove_remote_endpoint(pair.at_a)
    until = time.monotonic() + WATCHDOG
    while pair.a._native.peers() and time.monotonic() < until:
        time.sleep(0.01)
    assert pair.a._native.peers() == []
    _, again = pair.a.add_remote_endpoint(metadata)
    assert moves(pair.a, again, pair.b)


def test_removing_leaves_the_other_sides_connection_alone(pair: Pair) -> None:
    success, back = pair.b.add_remote_endpoint(pair.a.get_metadata())
    assert success
    assert pair.a.remove_remote_endpoint(pair.at_a) is True
    assert moves(pair.b, back, pair.a)


def test_passive_accept(endpoint: p2p.Endpoint) -> None:
    assert endpoint.start_passive_accept() is True
    assert endpoint.start_passive_accept() is True
    before = threading.active_count()
    other = p2p.Endpoint(1)
    success, conn_id = other.add_remote_endpoint(endpoint.get_metadata())
    assert success and moves(other, conn_id, endpoint)
    assert threading.active_count() <= before, "threads of earlier tests may have ended"
    started = time.monotonic()
    assert endpoint.accept() == (False, "", -1, NONE_ID), "accept must not wait, because peers are not announced"
    assert endpoint.accept_local() == (False, "", NONE_ID)
    assert time.monotonic() - started < WATCHDOG / 2
    other.close()


def test_passive_accept_ends_a_wait(endpoint: p2p.Endpoint) -> None:
    answers: list = []
    waiter = threading.Thread(target=lambda: answers.append(endpoint.accept()))
    waiter.start()
    time.sleep(0.1)
    endpoint.start_passive_accept()
    waiter.join(WATCHDOG)
    assert answers == [(False, "", -1, NONE_ID)]


def test_passive_accept_takes_no_arguments(endpoint: p2p.Endpoint) -> None:
    with pytest.raises(TypeError):
        endpoint.start_passive_accept(1)  # type: ignore[call-arg]


def test_an_endpoint_can_connect_to_itself(endpoint: p2p.Endpoint) -> None:
    ip, port = place(endpoint)
    success, conn_id = endpoint.connect(ip, "", port)
    assert success
    assert endpoint.accept(timeout=WATCHDOG)[2] == 0
    assert moves(endpoint, conn_id, endpoint)


def test_connections_are_not_known_by_rank(endpoint: p2p.Endpoint) -> None:
    assert endpoint.conn_id_of_rank(0) == endpoint.conn_id_of_rank(rank=7) == NONE_ID
    with pytest.raises(TypeError, match="rank"):
        endpoint.conn_id_of_rank("0")  # type: ignore[arg-type]


def test_parse_metadata_on_class_and_instance(endpoint: p2p.Endpoint) -> None:
    metadata = endpoint.get_metadata()
    assert p2p.Endpoint.parse_metadata(metadata) == endpoint.parse_metadata(metadata=metadata)
    with pytest.raises(TypeError, match="metadata"):
        p2p.Endpoint.parse_metadata("text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        endpoint.get_metadata(1)  # type: ignore[call-arg]


@pytest.mark.parametrize("index", [-1, 2**16, 2**80, "0", 1.0])
def test_endpoints_of_impossible_gpus(index: object) -> None:
    with pytest.raises(TypeError, match="local_gpu_idx"):
        p2p.Endpoint(index)  # type: ignore[arg-type]


def test_endpoints_without_an_index_are_of_gpu_0() -> None:
    endpoint = p2p.Endpoint()
    assert endpoint.parse_metadata(endpoint.get_metadata())[2] == shown(None)
    assert repr(endpoint) == "<UCCL P2P Endpoint>"
    endpoint.close()
    named = p2p.Endpoint(local_gpu_idx=3)
    assert named.parse_metadata(named.get_metadata())[2] == shown(3)
    named.close()


def test_a_closed_endpoint_says_so(pair: Pair) -> None:
    buffer = Buffer(8)
    pair.a.close()
    pair.a.close()
    assert pair.a.reg(buffer.ptr, 8) == (False, 0)
    assert pair.a.connect(*place(pair.b)[:1], "", place(pair.b)[1]) == (False, NONE_ID)
    assert pair.a.accept() == (False, "", -1, NONE_ID)
    assert pair.a.get_notifs() == []
    assert "closed" in pair.a.last_error()


def test_notifications(pair: Pair) -> None:
    assert pair.a.send_notif(pair.at_a, "agent", b"one") is True
    assert pair.a.send_notif(conn_id=pair.at_a, name="", message=b"x" * 300_000) is True
    ip, port = place(pair.b)
    pair.a.connect(ip, "", port)
    pair.a._connections.get(pair.at_a).peer.notify(b"plain").wait(WATCHDOG)
    assert pair.b.get_notifs() == [("agent", b"one"), ("", b"x" * 300_000), ("", b"plain")], "greetings are not shown"
    assert pair.b.get_notifs() == []
    # This message is longer than a notification of the engine, so it is sent in parts.
    long = bytes(range(256)) * 10_000
    assert pair.a.send_notif(pair.at_a, "long", long) and pair.b.get_notifs() == [("long", long)]
    assert pair.a.send_notif(pair.at_a, "too long", bytes(64 << 20)) is False and pair.b.get_notifs() == []
    assert pair.b.accept(timeout=WATCHDOG)[0] is True, "the greeting between the messages was lost"
    assert pair.b.send_notif(pair.at_b, "back", b"two") and pair.a.get_notifs() == [("back", b"two")]
    assert pair.a.send_notif(99, "agent", b"one") is False
    with pytest.raises(TypeError, match="message"):
        pair.a.send_notif(pair.at_a, "agent", "one")  # type: ignore[arg-type]
    pair.b.close()
    until = time.monotonic() + WATCHDOG
    while pair.a.send_notif(pair.at_a, "agent", b"three"):
        assert time.monotonic() < until


def test_one_number_for_one_metadata_from_many_threads() -> None:
    with closing(p2p.Endpoint(0)) as a, closing(p2p.Endpoint(1)) as b:
        metadata, found = b.get_metadata(), []
        threads = [threading.Thread(target=lambda: found.append(a.add_remote_endpoint(metadata))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8 and set(found) == {found[0]} and found[0][0] is True


@pytest.mark.parametrize("bad", [-1, float("nan"), "x", True])
def test_accept_takes_a_time(bad: object) -> None:
    with closing(p2p.Endpoint(0)) as endpoint:
        for accept in (endpoint.accept, endpoint.accept_local):
            with pytest.raises((TypeError, ValueError), match="timeout"):
                accept(bad)
