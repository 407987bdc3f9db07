"""``uccl.utils``."""

import random
import resource
import socket
import threading

import pytest
from peerway.uccl import utils
from peerway.uccl.utils import ClosedIntervalTree


def test_objects_go_over_sockets() -> None:
    left, right = socket.socketpair()
    with left, right:
        sent = {"a": [1, 2, 3], "b": b"\0" * 3_000_000}
        sender = threading.Thread(target=utils.send_obj, args=(left, sent))
        sender.start()
        assert utils.recv_obj(right) == sent
        sender.join(60)
        left.sendall(b"\0" * 8)
        assert utils.recv_obj(right) is None
        left.sendall(b"\0\0\0\0\0\0\0\x09only")
        left.close()
        with pytest.raises(ConnectionError, match="5 bytes early"):
            utils.recv_obj(right)


def test_connecting_waits_for_a_listener(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match="tried 3 times"):
            utils.create_socket_and_connect("127.0.0.1", port, max_retries=2, initial_delay=0.01)
        later = threading.Timer(0.1, listener.listen)
        later.start()
        with utils.create_socket_and_connect("127.0.0.1", port, initial_delay=0.02, timeout=5) as sock:
            assert sock.gettimeout() == 5
        later.join()
    assert "retry in" in capsys.readouterr().err


def test_files_limit_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        utils.set_files_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
        utils.set_files_limit()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    said = capsys.readouterr().err
    assert "raised" in said and "cannot be raised" in said


def test_files_limit_that_stays_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError("not allowed")

    monkeypatch.setattr(resource, "getrlimit", refuse)
    utils.set_files_limit()
    assert "not allowed" in capsys.readouterr().err


def test_intervals() -> None:
    tree = ClosedIntervalTree()
    tree.add(1, 10, "a")
    tree.add(5, 5, "point")
    tree.add(1, 10, "b")
    tree.add(1, 10, "a")
    assert list(tree) == [(1, 10, "a"), (1, 10, "b"), (5, 5, "point")] and len(tree) == 3
    assert str(tree) == "[1, 10] -> a\n[1, 10] -> b\n[5, 5] -> point"
    assert tree.query_exact_match(1, 10, "b") == [(1, 10, "b")]
    assert tree.query_exact_match(1, 11) == []
    assert tree.remove(1, 10, "zz") == 0 and tree.remove(2, 10) == 0
    assert tree.remove(1, 10) == 2 and list(tree) == [(5, 5, "point")]
    tree.clear()
    assert list(tree) == [] and tree.query_overlap(0, 100) == []
    with pytest.raises(ValueError, match="end"):
        tree.add(2, 1, "x")


@pytest.mark.parametrize("seed", range(5))
def test_intervals_against_looking_at_all(seed: int) -> None:
    source, tree = random.Random(seed), ClosedIntervalTree()
    known: list[tuple[int, int, int]] = []
    for data in range(300):
        start = source.randrange(100)
        interval = (start, start + source.choice([0, 1, 5, 60]), data)
        tree.add(*interval)
        known.append(interval)
        if source.random() < 0.3:
            gone = known.pop(source.randrange(len(known)))
            assert tree.remove(*gone) == 1
        low = source.randrange(110)
        high = low + source.randrange(20)
        assert sorted(tree.query_overlap(low, high)) == sorted(i for i in known if i[0] <= high and low <= i[1])
        assert sorted(tree.query_containing(low, high)) == sorted(i for i in known if i[0] <= low and high <= i[1])
    assert [i[:2] for i in tree] == sorted(i[:2] for i in known)
