"""Finding an endpoint by its GPU, and the broker's defence against bad clients."""

import contextlib
import gc
import json
import logging
import os
import random
import resource
import signal
import socket
import threading
import time
from typing import Any

import pytest
from peerway.uccl import broker, broker_server, p2p
from uccl_support import NONE_ID, WATCHDOG, Child, listen, shown


def serve_gpu(line: Any, gpu: int) -> None:
    """A process with an endpoint. It sends its metadata and the peers that connect."""
    endpoint = p2p.Endpoint(gpu)
    line.send(endpoint.get_metadata())
    while (said := listen(line)) != "end":
        if said == "accept":
            line.send(endpoint.accept(timeout=WATCHDOG))
        elif said == "serving":
            (agent,) = broker._agents.values()
            line.send(any(map(listens, list(agent._sockets))))
    endpoint.close()


def listens(held: Any) -> bool:
    """Whether this is a listening socket. The agent also holds connections and pidfds."""
    # The agent's thread may close it at any time.
    with contextlib.suppress(OSError):
        return isinstance(held, socket.socket) and bool(held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def whose(metadata: bytes) -> tuple[str, int]:
    ip, port, _bdf = p2p.Endpoint.parse_metadata(metadata)
    return ip, port


def wait_for(what: Any) -> None:
    until = time.monotonic() + WATCHDOG
    while not what():
        assert time.monotonic() < until, "the condition was not met in time"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.connect("127.0.0.1", remote_gpu_idx=3),
        lambda e: e.connect("127.0.0.1", 3),
        lambda e: e.connect("127.0.0.1", shown(3)),
    ],
)
def test_found_in_another_process(private_broker: int, call: Any) -> None:
    with Child(serve_gpu, 3) as child:
        child.receive()
        endpoint = p2p.Endpoint(5)
        child.send("accept")
        assert call(endpoint) == (True, 0), endpoint.last_error()
        success, _ip, gpu, _conn_id = child.receive()
        assert (success, gpu) == (True, 5)
        child.send("end")
        child.end()
        endpoint.close()


def test_found_at_the_address_that_is_advertised(private_broker: int) -> None:
    ip = p2p.get_oob_ip()
    target, endpoint = p2p.Endpoint(4), p2p.Endpoint(5)
    assert broker.find(ip, gpu=4) == whose(target.get_metadata())
    assert broker.find("127.0.0.1", gpu=4) == ("127.0.0.1", whose(target.get_metadata())[1])
    assert endpoint.connect(ip, remote_gpu_idx=4)[0] is True
    target.close()
    endpoint.close()


def test_the_newest_live_endpoint_of_a_process_is_found(private_broker: int) -> None:
    first, second = p2p.Endpoint(1), p2p.Endpoint(1)
    port = {endpoint: whose(endpoint.get_metadata())[1] for endpoint in (first, second)}
    assert broker.find("127.0.0.1", gpu=1)[1] == port[second]
    assert broker.find("127.0.0.1", gpu=1, but=second._id)[1] == port[first]
    second.close()
    wait_for(lambda: broker.find("127.0.0.1", gpu=1)[1] == port[first])
    first.close()


def test_the_first_process_keeps_its_place_while_it_lives(private_broker: int) -> None:
    keeper = p2p.Endpoint(0)
    with Child(serve_gpu, 1) as first:
        of_first = whose(first.receive())[1]
        assert broker.find("127.0.0.1", gpu=1)[1] == of_first
        with Child(serve_gpu, 1) as second:
            of_second = whose(second.receive())[1]
            # The second process appears in the table after its metadata: wait until it is there.
            wait_for(lambda: len(_served(private_broker)) == 3)
            assert broker.find("127.0.0.1", gpu=1)[1] == of_first
            first.stop()
            assert broker.find("127.0.0.1", gpu=1)[1] == of_first, "a stopped process is alive"
            first.kill()
            wait_for(lambda: broker.find("127.0.0.1", gpu=1)[1] == of_second)
            second.send("end")
            second.end()
    keeper.close()


def _served(port: int) -> set[str]:
    """The endpoints that the broker of this process has."""
    return {id for server in _servers(port) for id in server._entries}


def _servers(port: int) -> list[broker_server.Server]:
    things = (thing for thing in gc.get_objects() if isinstance(thing, broker_server.Server))
    return [server for server in things if server._port == port]


def test_the_first_process_keeps_its_place_when_another_serves(
    private_broker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_server, "_SETTLE", 3.0)
    with Child(serve_gpu, 0) as server:
        server.receive()
        wait_for(lambda: asked(server))
        with Child(serve_gpu, 1) as first:
            of_first = whose(first.receive())[1]
            assert broker.find("127.0.0.1", gpu=1)[1] == of_first
            second = p2p.Endpoint(1)
            wait_for(lambda: broker._agents[private_broker]._has_followed)
            # Only this process can serve next. The first owner registers again a little later.
            first.stop()
            server.kill()
            wait_for(lambda: second._id in _served(private_broker))
            threading.Timer(0.2, first.go_on).start()
            assert broker.find("127.0.0.1", gpu=1)[1] == of_first
            second.close()
            first.send("end")
            first.end()


def as_another_user(line: Any, port: int, name: str, entry: dict[str, Any]) -> None:
    """Tries to register at the broker of another user, and to serve in its place."""
    # Python loads a codec for this when it is first used. The other user may not read it.
    socket.getaddrinfo("127.0.0.1", port)
    os.setgid(65534)
    os.setuid(65534)
    outcomes = []
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WATCHDOG)
        try:
            sock.connect(name)
            sock.sendall(json.dumps(entry).encode() + b"\n")
            outcomes.append(sock.recv(4096))
        except ConnectionError:
            outcomes.append(b"")
    with socket.create_connection(("127.0.0.1", port), WATCHDOG) as sock:
        sock.sendall(json.dumps(entry).encode() + b"\n")
        outcomes.append(ends(sock))
    line.send(outcomes)
    assert listen(line) == "squat"
    with socket.socket(socket.AF_UNIX) as sock, socket.create_server(("127.0.0.1", port)) as server:
        sock.bind(name)
        sock.listen(4096)
        line.send("squats")
        assert listen(line) == "end"
        server.close()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@needs_root
def test_another_user_cannot_register(private_broker: int) -> None:
    endpoint = p2p.Endpoint(0)
    port = whose(endpoint.get_metadata())[1]
    assert broker.find("127.0.0.1", gpu=0)[1] == port
    entry = {"op": "register", "id": "x", "gpu": 0, "bdf": "b", "ips": ["127.0.0.1"], "port": 1, "since": 0}
    with Child(as_another_user, private_broker, broker_server.local_name(private_broker), entry) as stranger:
        assert stranger.receive() == [b"", True], "the broker answered another user"
        for _ in range(10):
            assert broker.find("127.0.0.1", gpu=0)[1] == port
        assert "x" not in _served(private_broker)
        thread = broker._agents[private_broker]._thread
        endpoint.close()
        thread.join(WATCHDOG)
        stranger.send("squat")
        assert stranger.receive() == "squats"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PEERWAY_BROKER_WAIT", "0.3")
            for host in ("127.0.0.1", "localhost", p2p.get_oob_ip()):
                with pytest.raises(LookupError, match="belongs to user 65534"):
                    broker.find(host, gpu=0)
        stranger.send("end")
        stranger.end()


def inherits(line: Any, port: int) -> None:
    """Registers an endpoint, and ends while a child holds its connection."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(broker_server.local_name(port))
    entry = {"op": "register", "id": "x", "gpu": 3, "bdf": "b", "ips": ["127.0.0.1"], "port": 7, "since": 1}
    sock.sendall(json.dumps(entry).encode() + b"\n")
    child = os.fork()
    if child == 0:
        signal.alarm(int(WATCHDOG))
        while True:
            signal.pause()
    line.send(child)
    assert listen(line) == "end"
    os._exit(0)


def test_a_dead_process_has_no_place_even_if_a_child_holds_its_connection(private_broker: int) -> None:
    endpoint = p2p.Endpoint(0)
    assert broker.find("127.0.0.1", gpu=0)
    with Child(inherits, private_broker) as owner:
        heir = owner.receive()
        try:
            assert broker.find("127.0.0.1", gpu=3) == ("127.0.0.1", 7)
            owner.send("end")
            wait_for(lambda: "x" not in _served(private_broker))
            later = p2p.Endpoint(3)
            assert broker.find("127.0.0.1", gpu=3)[1] == whose(later.get_metadata())[1]
            later.close()
        finally:
            os.kill(heir, signal.SIGKILL)
    endpoint.close()


def test_an_endpoint_that_is_collected_is_not_found(private_broker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = p2p.Endpoint(0)
    p2p.Endpoint(1)
    monkeypatch.setenv("PEERWAY_BROKER_WAIT", "0.3")
    with pytest.raises(LookupError, match="GPU 1"):
        broker.find("127.0.0.1", gpu=1)
    keeper.close()


def test_an_endpoint_that_appears_later_is_waited_for(private_broker: int) -> None:
    endpoint = p2p.Endpoint(0)
    with Child(serve_gpu, 9) as child:
        assert endpoint.connect("127.0.0.1", remote_gpu_idx=9)[0] is True, endpoint.last_error()
        child.receive()
        child.send("end")
        child.end()
    endpoint.close()


def test_a_broker_that_appears_later_is_waited_for(private_broker: int) -> None:
    with Child(serve_gpu, 9):
        assert broker.find("127.0.0.1", gpu=9)[1] > 0


def test_a_search_without_an_endpoint_times_out(private_broker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERWAY_BROKER_WAIT", "0.2")
    endpoint = p2p.Endpoint(0)
    started = time.monotonic()
    assert endpoint.connect("127.0.0.1", remote_gpu_idx=8) == (False, NONE_ID)
    assert "GPU 8" in endpoint.last_error() and time.monotonic() - started < WATCHDOG / 2
    endpoint.close()


def test_without_a_broker_no_endpoint_is_found(private_broker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERWAY_BROKER_WAIT", "0.1")
    with pytest.raises(LookupError, match=f"127.0.0.1:{private_broker}"):
        broker.find("127.0.0.1", gpu=0)


def test_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERWAY_BROKER_PORT", "0")
    agents = dict(broker._agents)
    a, b = p2p.Endpoint(0), p2p.Endpoint(1)
    assert broker._agents == agents
    started = time.monotonic()
    assert a.connect("127.0.0.1", remote_gpu_idx=1) == (False, NONE_ID)
    assert "PEERWAY_BROKER_PORT" in a.last_error() and time.monotonic() - started < 20
    assert a.connect_local(1) == (False, NONE_ID)
    assert a.add_remote_endpoint(b.get_metadata()) == (True, 0)
    a.close()
    b.close()


@pytest.mark.parametrize("name", ["PEERWAY_BROKER_PORT", "PEERWAY_BROKER_WAIT"])
@pytest.mark.parametrize("value", ["x", "-1", "70000", "1e9", "nan", "9" * 5000])
def test_settings_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        (p2p.Endpoint if name == "PEERWAY_BROKER_PORT" else broker.patience)()


def test_when_the_serving_process_dies_another_takes_over(private_broker: int) -> None:
    with Child(serve_gpu, 1) as first:
        first.receive()
        wait_for(lambda: asked(first))
        with Child(serve_gpu, 2) as second, Child(serve_gpu, 3) as third:
            places = {2: whose(second.receive()), 3: whose(third.receive())}
            for gpu, place in places.items():
                assert broker.find(place[0], gpu=gpu) == place
            assert not asked(second) and not asked(third)
            os.kill(first.process.pid, signal.SIGKILL)
            wait_for(lambda: asked(second) + asked(third) == 1)
            for gpu, place in places.items():
                assert broker.find(place[0], gpu=gpu) == place, "the other process did not register again"
            assert_gone(1)
            with Child(serve_gpu, 4) as fourth:
                place = whose(fourth.receive())
                assert broker.find(place[0], gpu=4) == place
                fourth.send("end")
                fourth.end()
            for child in (second, third):
                child.send("end")
                child.end()


def asked(child: Child) -> bool:
    child.send("serving")
    return child.receive()


def assert_gone(gpu: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEERWAY_BROKER_WAIT", "0.2")
        with pytest.raises(LookupError):
            broker.find("127.0.0.1", gpu=gpu)


def test_a_broker_whose_last_endpoint_goes_gives_up_the_port(private_broker: int) -> None:
    endpoint = p2p.Endpoint(0)
    assert broker.find("127.0.0.1", gpu=0)
    thread = broker._agents[private_broker]._thread
    endpoint.close()
    thread.join(WATCHDOG)
    assert not thread.is_alive() and broker._agents[private_broker]._thread is None
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", private_broker))
    again = p2p.Endpoint(0)
    assert broker.find("127.0.0.1", gpu=0)
    again.close()


def test_garbage_and_slow_clients_are_dropped_and_others_served(
    private_broker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_server, "SILENCE", 0.5)
    endpoint = p2p.Endpoint(0)
    assert broker.find("127.0.0.1", gpu=0)
    source = random.Random(1)
    entry = {"op": "register", "id": "x", "gpu": 0, "bdf": "b", "ips": ["127.0.0.1"], "port": 1, "since": 1}
    garbage = [
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 10_000,
        b"{}\n",
        b"[]\n",
        b"[" * 2000 + b"\n",
        b'"text"\n',
        b'{"op":"find"}\n',
        b'{"op":"find","gpu":-1,"wait":1}\n',
        b'{"op":"find","gpu":0,"wait":NaN}\n',
        b'{"op":"find","gpu":0,"wait":"1"}\n',
        b'{"op":"unregister","id":"' + endpoint._id.encode() + b'"}\n',
        json.dumps({**entry, "id": endpoint._id}).encode() + b"\n",
        *(json.dumps({**entry, name: None}).encode() + b"\n" for name in entry),
        json.dumps({**entry, "since": -1}).encode() + b"\n",
        json.dumps({**entry, "ips": ["no address"]}).encode() + b"\n",
        json.dumps({**entry, "ips": []}).encode() + b"\n",
        json.dumps({**entry, "port": 0}).encode() + b"\n",
        json.dumps({**entry, "port": 2**70}).encode() + b"\n",
        *(source.randbytes(200) + b"\n" for _ in range(20)),
    ]
    silent = socket.create_connection(("127.0.0.1", private_broker), 5)
    partial = socket.create_connection(("127.0.0.1", private_broker), 5)
    partial.sendall(b'{"op":')
    for said in garbage:
        for connect in (tcp, unix):
            with connect(private_broker) as sock:
                # The broker may close the connection before it has read everything.
                with contextlib.suppress(ConnectionError):
                    sock.sendall(said)
                assert ends(sock), f"the broker accepted {said[:60]!r}"
    for sock in (silent, partial):
        assert ends(sock), "the broker kept a silent client"
        sock.close()
    assert broker.find("127.0.0.1", gpu=0) == ("127.0.0.1", whose(endpoint.get_metadata())[1])
    endpoint.close()


def tcp(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 5)


def unix(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(broker_server.local_name(port))
    return sock


def ends(sock: socket.socket) -> bool:
    """Whether the other side closes the connection after its banner."""
    sock.settimeout(WATCHDOG)
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_no_process_can_register_over_tcp(private_broker: int) -> None:
    endpoint = p2p.Endpoint(0)
    for ip in {"127.0.0.1", p2p.get_oob_ip()}:
        assert broker.find(ip, gpu=0)
        with socket.create_connection((ip, private_broker), 5) as sock:
            entry = {"op": "register", "id": "x", "gpu": 7, "bdf": "b", "ips": [ip], "port": 1, "since": 1}
            sock.sendall(json.dumps(entry).encode() + b"\n")
            assert ends(sock)
    assert_gone(7)
    endpoint.close()


def test_a_search_from_another_host_goes_over_tcp(private_broker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = p2p.Endpoint(4)
    monkeypatch.setattr(broker, "_as_own", lambda _host, _at: None)
    for ip in {"127.0.0.1", p2p.get_oob_ip()}:
        assert broker.find(ip, gpu=4) == (ip, whose(endpoint.get_metadata())[1])
    endpoint.close()


def test_many_strangers_do_not_keep_endpoints_out(private_broker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_server, "_MAX_STRANGERS", 4)
    monkeypatch.setattr(broker_server, "SILENCE", 0.5)
    endpoint = p2p.Endpoint(0)
    assert broker.find("127.0.0.1", gpu=0)
    socks = [socket.create_connection(("127.0.0.1", private_broker), 5) for _ in range(10)]
    assert broker.find("127.0.0.1", gpu=0), "the endpoint is not found after the silent clients are dropped"
    for sock in socks:
        sock.close()
    endpoint.close()


def starve(line: Any) -> None:
    """Serves the broker without free file descriptors and sends the processor time that it used."""
    warnings = []
    broker_server.logger.addHandler(handler := logging.Handler(logging.INFO))
    broker_server.logger.setLevel(logging.INFO)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    endpoint = p2p.Endpoint(6)
    assert broker.find("127.0.0.1", gpu=6)
    # The server closes the connection of that search a little later, which frees a descriptor.
    wait_for(lambda: not any(server._clients for server in _servers(broker.port())))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit cannot be zero, because poll(2) refuses more descriptors than the limit. Use up the
    # free descriptors instead.
    most = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, allowed[1]))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))
    line.send("starved")
    assert listen(line) == "measure"
    used, start = time.process_time(), time.monotonic()
    time.sleep(2.0)
    used, window = time.process_time() - used, time.monotonic() - start
    resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    line.send((used, window))
    for descriptor in taken:
        os.close(descriptor)
    assert listen(line) == "end"
    line.send([said for said in warnings if "accept" in said])
    endpoint.close()


def test_the_broker_rests_without_descriptors(private_broker: int) -> None:
    with Child(starve) as child:
        assert child.receive() == "starved"
        with socket.create_connection(("127.0.0.1", private_broker), WATCHDOG) as waiting:
            child.send("measure")
            used, window = child.receive()
            assert used < window / 3, f"{used} s of {window} s were spent"
            assert waiting.recv(4096).startswith(b'{"broker"'), "the waiting client is not served"
        assert broker.find("127.0.0.1", gpu=6)
        child.send("end")
        said = child.receive()
        assert len(said) == 2, said
        assert "cannot accept" in said[0] and "again" in said[1], said
        child.end()


def test_a_new_client_is_served_beside_silent_ones(private_broker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_server, "_MAX_STRANGERS", 4)
    monkeypatch.setattr(broker_server, "SILENCE", 10 * WATCHDOG)
    endpoint = p2p.Endpoint(0)
    assert broker.find("127.0.0.1", gpu=0)
    socks = [socket.create_connection(("127.0.0.1", private_broker), WATCHDOG) for _ in range(10)]
    assert broker.find("127.0.0.1", gpu=0), "the oldest silent clients are not dropped"
    for sock in socks:
        sock.close()
    endpoint.close()


def test_a_port_that_is_not_a_brokers(private_broker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERWAY_BROKER_WAIT", "0.5")
    with socket.create_server(("127.0.0.1", private_broker)):
        endpoint = p2p.Endpoint(0)
        with pytest.raises(LookupError):
            broker.find("127.0.0.1", gpu=0)
    monkeypatch.setenv("PEERWAY_BROKER_WAIT", "60")
    assert broker.find("127.0.0.1", gpu=0), "the broker does not take the port when it is free"
    endpoint.close()


def test_invalid_answers_of_a_broker_are_refused(private_broker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERWAY_BROKER_WAIT", "0.5")
    monkeypatch.setattr(broker, "_as_own", lambda _host, _at: None)
    for said in (
        b"\xff\xff\n",
        b"{}\n",
        b"x" * 5000,
        json.dumps(broker_server.BANNER).encode() + b'\n{"ip":"x","port":1}\n',
    ):
        with socket.create_server(("127.0.0.1", private_broker)) as server:
            server.settimeout(0.2)
            over = threading.Event()

            def answer(server: socket.socket = server, said: bytes = said, over: threading.Event = over) -> None:
                while not over.is_set():
                    try:
                        sock, _ = server.accept()
                    except TimeoutError:
                        continue
                    with sock:
                        sock.sendall(said)

            thread = threading.Thread(target=answer)
            thread.start()
            with pytest.raises(LookupError):
                broker.find("127.0.0.1", gpu=0)
            over.set()
            thread.join(WATCHDOG)


def forker(line: Any) -> None:
    """Forks while it serves. The test kills the parent; the child keeps running."""
    endpoint = p2p.Endpoint(6)
    broker.find("127.0.0.1", gpu=6)
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(WATCHDOG))
        try:
            ok = not broker._agents and endpoint.accept(timeout=0.2)[0] is False
            endpoint.close()
            mine = p2p.Endpoint(7)
            line.send(ok and broker.find("127.0.0.1", gpu=7)[1] > 0)
            listen(line)
            mine.close()
        finally:
            os._exit(0)
    time.sleep(WATCHDOG)


def test_a_forked_child_does_not_hold_the_port(private_broker: int) -> None:
    with Child(forker) as child:
        assert child.receive() is True
        # Do not join: the forked child keeps the pipe open that signals the end of the process.
        os.kill(child.process.pid, signal.SIGKILL)
        wait_for(lambda: broker.find("127.0.0.1", gpu=7)[1] > 0)
        assert_gone(6)
        child.send("child goes")
