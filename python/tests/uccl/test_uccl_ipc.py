"""Host memory between processes of one host."""

import pytest
from peerway.uccl import p2p
from uccl_support import NONE_ID, WATCHDOG, Buffer, Pair, finish, pattern, shown


def ended(endpoint: p2p.Endpoint, answer: bool | tuple[bool, int]) -> bool:
    return answer if isinstance(answer, bool) else answer[0] and finish(endpoint, answer[1])


@pytest.mark.parametrize("spelling", ["bdf", "idx", "positional"])
def test_connect_local(private_broker: int, spelling: str) -> None:
    a, b = p2p.Endpoint(0), p2p.Endpoint(1)
    answer = {
        "bdf": lambda: a.connect_local(remote_gpu_bdf=b.parse_metadata(b.get_metadata())[2].upper()),
        "idx": lambda: a.connect_local(remote_gpu_idx=1),
        "positional": lambda: a.connect_local(1),
    }[spelling]()
    assert answer == (True, 0), a.last_error()
    assert b.accept(timeout=0.1)[0] is False, "accept() returned a peer of connect_local()"
    assert b.accept_local(timeout=WATCHDOG) == (True, shown(0), 0)
    a.close()
    b.close()


def test_two_endpoints_of_one_gpu_find_each_other(private_broker: int) -> None:
    a, b = p2p.Endpoint(0), p2p.Endpoint(0)
    for one, other in ((a, b), (b, a)):
        assert one.connect_local(shown(0))[0] is True, "the endpoint found itself"
        assert other.accept_local(timeout=WATCHDOG)[:2] == (True, shown(0))
    a.close()
    b.close()


def test_connect_local_without_an_endpoint_fails(private_broker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERWAY_BROKER_WAIT", "0.2")
    endpoint = p2p.Endpoint(0)
    assert endpoint.connect_local("0000:4a:00.0") == (False, NONE_ID)
    assert "0000:4a:00.0" in endpoint.last_error()
    assert endpoint.connect_local(0) == (False, NONE_ID)
    for bad in (-1, 2**16, None, 1.5, b"x"):
        with pytest.raises(TypeError, match="remote_gpu_bdf"):
            endpoint.connect_local(bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        endpoint.connect_local()  # type: ignore[call-arg]
    endpoint.close()


@pytest.mark.parametrize("suffix", ["", "_async"])
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("op", ["read", "write"])
def test_one_piece(pair: Pair, op: str, suffix: str, registered: bool) -> None:
    ours, theirs = Buffer(pattern(5000, 1)), Buffer(pattern(5000, 2))
    if registered:
        assert pair.a.reg(ours.ptr, 5000)[0] and pair.b.reg(theirs.ptr, 5000)[0]
    success, info = pair.b.advertise_ipc(pair.at_b, theirs.ptr + 1000, 3000)
    assert success and type(info) is bytes
    call = getattr(pair.a, f"{op}_ipc{suffix}")
    assert ended(pair.a, call(pair.at_a, ours.ptr + 500, 2000, info)) is True
    mine, other = pattern(5000, 1), pattern(5000, 2)
    if op == "read":
        assert bytes(ours) == mine[:500] + other[1000:3000] + mine[2500:] and bytes(theirs) == other
    else:
        assert bytes(theirs) == other[:1000] + mine[500:2500] + other[3000:] and bytes(ours) == mine
    assert ended(pair.a, call(conn_id=pair.at_a, ptr=ours.ptr, size=3000, info=bytearray(info))) is True


@pytest.mark.parametrize("suffix", ["", "_async"])
@pytest.mark.parametrize("op", ["read", "write"])
def test_several_pieces(pair: Pair, op: str, suffix: str) -> None:
    ours = [Buffer(pattern(700, at)) for at in range(3)]
    theirs = [Buffer(pattern(700, 10 + at)) for at in range(3)]
    success, infos = pair.b.advertisev_ipc(pair.at_b, [b.ptr for b in theirs], [700] * 3)
    assert success and [len(info) for info in infos] == [104] * 3
    call = getattr(pair.a, f"{op}v_ipc{suffix}")
    assert ended(pair.a, call(conn_id=pair.at_a, ptr_v=[b.ptr for b in ours], size_v=[700] * 3, info_v=infos)) is True
    for at in range(3):
        assert bytes(ours[at]) == bytes(theirs[at]) == pattern(700, at if op == "write" else 10 + at)


def test_offers_do_not_look_at_the_connection(endpoint: p2p.Endpoint) -> None:
    buffer = Buffer(64)
    one = endpoint.advertise_ipc(conn_id=12345, ptr=buffer.ptr, size=64)
    assert one[0] and one == endpoint.advertise_ipc(0, buffer.ptr, 64), "the same range is offered once"
    assert endpoint.advertisev_ipc(conn_id=0, ptr_v=[buffer.ptr], size_v=[64]) == (True, [one[1]])
    assert endpoint.advertisev_ipc(0, [], []) == (True, [])


def test_memory_that_cannot_be_offered(endpoint: p2p.Endpoint) -> None:
    buffer = Buffer(64)
    assert endpoint.advertise_ipc(0, 8, 8) == (False, b"")
    assert endpoint.advertisev_ipc(0, [buffer.ptr, 8], [64, 8]) == (False, [bytes(104)] * 2)
    with pytest.raises(RuntimeError, match="size_v"):
        endpoint.advertisev_ipc(0, [buffer.ptr], [])
    for arguments, name in [((-1, 1, 1), "conn_id"), ((0, "1", 1), "ptr"), ((0, 1, 2**64), "size")]:
        with pytest.raises(TypeError, match=name):
            endpoint.advertise_ipc(*arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ptr_v"):
        endpoint.advertisev_ipc(0, 5, [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="conn_id"):
        endpoint.advertisev_ipc(None, [], [])  # type: ignore[arg-type]


NAMES = ["read_ipc", "write_ipc", "read_ipc_async", "write_ipc_async"]
VECTORS = ["readv_ipc", "writev_ipc", "readv_ipc_async", "writev_ipc_async"]


@pytest.mark.parametrize("name", NAMES)
def test_one_piece_that_cannot_be(pair: Pair, name: str) -> None:
    ours, theirs = Buffer(pattern(128, 1)), Buffer(pattern(64, 2))
    _, info = pair.b.advertise_ipc(pair.at_b, theirs.ptr, 64)
    call = getattr(pair.a, name)
    far = bytearray(info)
    far[64:72] = (1).to_bytes(8, "little")
    wild = bytearray(info)
    wild[64:80] = b"\xff" * 16
    wrong: list[tuple] = [
        (99, ours.ptr, 64, info),
        (pair.at_a, ours.ptr, 65, info),
        (pair.at_a, 8, 64, info),
        (pair.at_a, ours.ptr, 64, bytes(104)),
        (pair.at_a, ours.ptr, 64, bytes(far)),
        (pair.at_a, ours.ptr, 64, bytes(wild)),
    ]
    for arguments in wrong:
        pair.a._last_error = ""
        assert ended(pair.a, call(*arguments)) is False, arguments
        assert pair.a.last_error()
    assert bytes(ours) == pattern(128, 1) and bytes(theirs) == pattern(64, 2)
    for blob in (b"", info[:103], info + b"\0"):
        with pytest.raises(RuntimeError, match="info must be exactly 104 bytes"):
            call(pair.at_a, ours.ptr, 64, blob)
    for arguments, what in [
        (("0", 1, 1, info), "conn_id"),
        ((0, -1, 1, info), "ptr"),
        ((0, 1, None, info), "size"),
        ((0, 1, 1, "x"), "info"),
    ]:
        with pytest.raises(TypeError, match=what):
            call(*arguments)


@pytest.mark.parametrize("name", VECTORS)
def test_several_pieces_that_cannot_be(pair: Pair, name: str) -> None:
    ours, theirs = Buffer(pattern(128, 1)), Buffer(pattern(128, 2))
    _, infos = pair.b.advertisev_ipc(pair.at_b, [theirs.ptr, theirs.ptr + 64], [64, 64])
    call, pointers = getattr(pair.a, name), [ours.ptr, ours.ptr + 64]
    assert ended(pair.a, call(99, pointers, [64, 64], infos)) is False
    assert ended(pair.a, call(pair.at_a, pointers, [64, 65], infos)) is False
    assert ended(pair.a, call(pair.at_a, pointers, [64, 64], [infos[0], bytes(104)])) is False
    assert bytes(ours) == pattern(128, 1) and bytes(theirs) == pattern(128, 2)
    assert ended(pair.a, call(pair.at_a, [], [], [])) is True
    with pytest.raises(RuntimeError, match="info_v"):
        call(pair.at_a, pointers, [64, 64], infos[:1])
    with pytest.raises(RuntimeError, match="size_v"):
        call(pair.at_a, pointers, [64], infos)
    with pytest.raises(RuntimeError, match=r"info_v\[1\] must be exactly 104 bytes"):
        call(pair.at_a, pointers, [64, 64], [infos[0], b""])
    for at, what in enumerate(["ptr_v", "size_v", "info_v"]):
        lists: list = [pointers, [64, 64], infos]
        lists[at] = "no list"
        with pytest.raises(TypeError, match=what):
            call(pair.at_a, *lists)
