"""Reading, writing and polling."""

import time
from collections.abc import Callable
from contextlib import closing

import numpy
import pytest
from peerway.uccl import p2p
from uccl_support import NONE_ID, WATCHDOG, Buffer, Pair, Tensor, finish, pattern


class Sides:
    """Registered memory on both sides, with different contents."""

    def __init__(self, pair: Pair, size: int = 4096, pieces: int = 3) -> None:
        self.pair, self.size, self.pieces = pair, size, pieces
        self.ours = [Buffer(pattern(size, 100 + at)) for at in range(pieces)]
        self.theirs = [Buffer(pattern(size, 200 + at)) for at in range(pieces)]
        _, self.ids = pair.a.regv([b.ptr for b in self.ours], [size] * pieces)
        _, ids = pair.b.regv([b.ptr for b in self.theirs], [size] * pieces)
        success, self.metas = pair.b.advertisev(ids, [b.ptr for b in self.theirs], [size] * pieces, pieces)
        assert success

    def check(self, op: str, moved: int) -> None:
        """Checks that the first ``moved`` pieces were moved and that no other byte changed."""
        for at, (mine, other) in enumerate(zip(self.ours, self.theirs, strict=True)):
            ours, theirs = pattern(self.size, 100 + at), pattern(self.size, 200 + at)
            if at < moved:
                ours, theirs = (theirs, theirs) if op == "read" else (ours, ours)
            assert (bytes(mine), bytes(other)) == (ours, theirs), f"piece {at}"

    @property
    def one(self) -> tuple:
        return self.pair.at_a, self.ids[0], self.ours[0].ptr, self.size, self.metas[0]

    @property
    def all(self) -> tuple:
        pointers = [buffer.ptr for buffer in self.ours]
        return self.pair.at_a, self.ids, pointers, [self.size] * self.pieces, self.metas, self.pieces


@pytest.fixture
def sides(pair: Pair) -> Sides:
    return Sides(pair)


def ended(endpoint: p2p.Endpoint, answer: bool | tuple[bool, int]) -> bool:
    """The result of a call, or of the transfer that it started."""
    if isinstance(answer, bool):
        return answer
    success, number = answer
    if not success:
        assert number == 0
        return False
    return finish(endpoint, number)


@pytest.mark.parametrize("suffix", ["", "_async"])
@pytest.mark.parametrize("op", ["read", "write"])
def test_one_piece(sides: Sides, op: str, suffix: str) -> None:
    assert ended(sides.pair.a, getattr(sides.pair.a, op + suffix)(*sides.one)) is True
    sides.check(op, 1)


@pytest.mark.parametrize("suffix", ["", "_async"])
@pytest.mark.parametrize("op", ["read", "write"])
def test_several_pieces(sides: Sides, op: str, suffix: str) -> None:
    assert ended(sides.pair.a, getattr(sides.pair.a, f"{op}v{suffix}")(*sides.all)) is True
    sides.check(op, 3)


@pytest.mark.parametrize("suffix", ["", "_async"])
@pytest.mark.parametrize("op, local", [("read", "dst"), ("write", "src")])
def test_keywords_in_both_spellings(sides: Sides, op: str, local: str, suffix: str) -> None:
    a, (conn_id, mr_id, ptr, size, meta) = sides.pair.a, sides.one
    call = getattr(a, op + suffix)
    assert ended(a, call(conn_id=conn_id, mr_id=mr_id, ptr=ptr, size=size, meta=meta)) is True
    assert ended(a, call(conn_id=conn_id, mr_id=mr_id, **{local: ptr}, size=size, slot_item=meta)) is True
    assert ended(a, call(conn_id, mr_id, **{local: ptr}, size=size, meta=bytearray(meta))) is True
    with pytest.raises(TypeError, match="one argument"):
        call(conn_id, mr_id, ptr=ptr, size=size, meta=meta, slot_item=meta)
    with pytest.raises(TypeError):
        call(conn_id, mr_id, ptr, size, meta, **{local: ptr})
    with pytest.raises(TypeError):
        call(conn_id, mr_id, ptr, size)
    call = getattr(a, f"{op}v{suffix}")
    conn_id, ids, pointers, sizes, metas, count = sides.all
    assert (
        ended(
            a,
            call(conn_id=conn_id, mr_id_v=ids, ptr_v=pointers, size_v=sizes, meta_blob_v=metas, num_iovs=count),
        )
        is True
    )
    second = {
        "mr_id_list": ids,
        f"{local}_list": pointers,
        "size_list": tuple(sizes),
        "slot_item_list": metas,
    }
    assert ended(a, call(conn_id, num_iovs=count, **second)) is True
    sides.check(op, 3)


CALLS = ["read", "write", "read_async", "write_async"]
VECTORS = ["readv", "writev", "readv_async", "writev_async"]


@pytest.mark.parametrize("name", CALLS)
def test_one_piece_that_cannot_be(sides: Sides, name: str) -> None:
    a, (conn_id, mr_id, ptr, size, meta) = sides.pair.a, sides.one
    call = getattr(a, name)
    zeros, other = bytes(64), bytearray(meta)
    other[40] ^= 1
    wrong: list[tuple] = [
        (99, mr_id, ptr, size, meta),
        (conn_id, 99, ptr, size, meta),
        (conn_id, 0, ptr, size, meta),
        (conn_id, mr_id, ptr + 1, size, meta),
        (conn_id, mr_id, ptr - 1, size, meta),
        (conn_id, mr_id, ptr, size + 1, meta),
        (conn_id, mr_id, ptr, 2**63, meta),
        (conn_id, mr_id, 2**64 - 1, 1, meta),
        (conn_id, mr_id, ptr, size, zeros),
        (conn_id, mr_id, ptr, size, bytes(other)),
    ]
    for arguments in wrong:
        before = a.last_error()
        a._last_error = ""
        assert ended(a, call(*arguments)) is False, arguments
        assert a.last_error() and before is not None
    sides.check("read", 0)


@pytest.mark.parametrize("name", CALLS)
def test_one_piece_of_nonsense(sides: Sides, name: str) -> None:
    conn_id, mr_id, ptr, size, meta = sides.one
    call = getattr(sides.pair.a, name)
    for bad in (-1, 2**64, "1", None, 1.0):
        for at, argument in enumerate(["conn_id", "mr_id", "ptr", "size"]):
            arguments = [conn_id, mr_id, ptr, size, meta]
            arguments[at] = bad
            with pytest.raises(TypeError, match=argument):
                call(*arguments)
    for blob in (b"", meta[:63], meta + b"\0"):
        with pytest.raises(RuntimeError, match="meta must be exactly 64 bytes"):
            call(conn_id, mr_id, ptr, size, blob)
    for blob in ("x" * 64, None, 5, [meta]):
        with pytest.raises(TypeError, match="meta"):
            call(conn_id, mr_id, ptr, size, blob)
    sides.check("read", 0)


@pytest.mark.parametrize("name", VECTORS)
def test_several_pieces_that_cannot_be(sides: Sides, name: str) -> None:
    a, (conn_id, ids, pointers, sizes, metas, count) = sides.pair.a, sides.all
    call = getattr(a, name)
    wrong: list[tuple] = [
        (99, ids, pointers, sizes, metas, count),
        (conn_id, [*ids[:2], 99], pointers, sizes, metas, count),
        (conn_id, ids, [*pointers[:2], 8], sizes, metas, count),
        (conn_id, ids, pointers, [*sizes[:2], sizes[2] + 1], metas, count),
        (conn_id, ids, pointers, sizes, [*metas[:2], bytes(64)], count),
    ]
    for arguments in wrong:
        assert ended(a, call(*arguments)) is False, arguments
    sides.check("read", 0)
    assert ended(a, call(conn_id, [], [], [], [], 0)) is True, "no pieces are done"
    assert ended(a, call(99, [], [], [], [], 0)) is False


@pytest.mark.parametrize("name", VECTORS)
def test_several_pieces_of_nonsense(sides: Sides, name: str) -> None:
    conn_id, ids, pointers, sizes, metas, count = sides.all
    call = getattr(sides.pair.a, name)
    for at, argument in enumerate(["mr_id_v", "ptr_v", "size_v", "meta_blob_v"]):
        lists: list = [ids, pointers, sizes, metas]
        lists[at] = lists[at][:2]
        with pytest.raises(RuntimeError, match=argument):
            call(conn_id, *lists, count)
        for bad in (5, "abc", b"abc", None, {1: 2}):
            lists[at] = bad
            with pytest.raises(TypeError, match=argument):
                call(conn_id, *lists, count)
        lists[at] = [None] * 3
        with pytest.raises(TypeError, match=rf"{argument}\[0\]"):
            call(conn_id, *lists, count)
    with pytest.raises(RuntimeError, match="num_iovs"):
        call(conn_id, ids, pointers, sizes, metas, 4)
    with pytest.raises(TypeError, match="num_iovs"):
        call(conn_id, ids, pointers, sizes, metas, -1)
    with pytest.raises(RuntimeError, match=r"meta_blob_v\[2\] must be exactly 64 bytes"):
        call(conn_id, ids, pointers, sizes, [*metas[:2], b"short"], count)
    sides.check("read", 0)


def test_polling(sides: Sides) -> None:
    a = sides.pair.a
    numbers = []
    for _ in range(5):
        success, number = a.write_async(*sides.one)
        assert success
        numbers.append(number)
    assert numbers == [1, 2, 3, 4, 5], "numbers count from 1"
    for number in reversed(numbers):
        assert finish(a, number) is True
        assert a.poll_async(number) == (False, True), "an end is reported once"
    for unknown in (0, 6, NONE_ID):
        assert a.poll_async(transfer_id=unknown) == (False, True)
        assert "no transfer" in a.last_error()
    assert len(a._transfers) == 0
    for bad in (-1, 2**64, "1", None):
        with pytest.raises(TypeError, match="transfer_id"):
            a.poll_async(bad)  # type: ignore[arg-type]


def test_transfers_that_are_not_polled_stay(sides: Sides) -> None:
    a = sides.pair.a
    numbers = [a.read_async(*sides.one)[1] for _ in range(100)]
    time.sleep(0.05)
    assert len(a._transfers) == 100
    assert all(finish(a, number) for number in numbers) and len(a._transfers) == 0


def test_check_xfer_state(sides: Sides) -> None:
    a = sides.pair.a
    _, number = a.write_async(*sides.one)
    until = time.monotonic() + WATCHDOG
    while not a.check_xfer_state(number):
        assert time.monotonic() < until
    assert a.check_xfer_state(number) is True and a.check_xfer_state(transfer_id=77) is True
    with pytest.raises(TypeError, match="transfer_id"):
        a.check_xfer_state("1")  # type: ignore[arg-type]


def described(pair: Pair, count: int = 2) -> tuple[list[Tensor], list[Tensor], list[p2p.XferDesc], list[p2p.XferDesc]]:
    ours = [Tensor(pattern(1024, at)) for at in range(count)]
    theirs = [Tensor(pattern(1024, 50 + at)) for at in range(count)]
    remote = pair.a.deserialize_descs(pair.b.get_serialized_descs(pair.b.register_memory(theirs)))
    return ours, theirs, pair.a.register_memory(ours), remote


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("op", ["read", "write", "READ", "Write"])
def test_transfer(pair: Pair, op: str, count: int) -> None:
    ours, theirs, local, remote = described(pair, count)
    success, number = pair.a.transfer(conn_id=pair.at_a, op_name=op, local_desc_list=local, remote_desc_list=remote)
    assert success and finish(pair.a, number) is True
    for at in range(count):
        moved = pattern(1024, at if op.lower() == "write" else 50 + at)
        assert bytes(ours[at].buffer) == bytes(theirs[at].buffer) == moved


def test_transfer_of_a_part(pair: Pair) -> None:
    _, theirs, local, remote = described(pair, 1)
    local[0].addr += 100
    local[0].size = 50
    remote[0]["addr"] += 200
    remote[0].size -= 200
    success, number = pair.a.transfer(pair.at_a, "write", local, remote)
    assert success and finish(pair.a, number)
    mine, other = pattern(1024, 0), pattern(1024, 50)
    assert bytes(theirs[0].buffer) == other[:200] + mine[100:150] + other[250:]


def test_transfer_over_the_acceptors_number(pair: Pair) -> None:
    ours, theirs, local, _ = described(pair, 1)
    remote = pair.b.deserialize_descs(pair.a.get_serialized_descs(local))
    success, number = pair.b.transfer(pair.at_b, "read", pair.b.register_memory(theirs), remote)
    assert success and finish(pair.b, number)
    assert bytes(theirs[0].buffer) == bytes(ours[0].buffer) == pattern(1024, 0)


def test_transfer_of_nothing(pair: Pair) -> None:
    success, number = pair.a.transfer(pair.at_a, "read", [], [])
    assert success and pair.a.poll_async(number) == (True, True) and pair.a.poll_async(number) == (False, True)


def test_transfers_that_make_no_sense(pair: Pair) -> None:
    _, _, local, remote = described(pair, 2)
    a, conn_id = pair.a, pair.at_a
    own = a.deserialize_descs(a.get_serialized_descs(local))
    bare = p2p.XferDesc()
    bare.size = 1024
    short = a.deserialize_descs(a.get_serialized_descs(remote))
    short[1].size = 1023
    beyond = a.deserialize_descs(a.get_serialized_descs(remote))
    beyond[0].addr = 2**64 - 8
    raises: list[tuple[tuple, type[Exception], str]] = [
        ((99, "read", local, remote), RuntimeError, "Invalid conn_id"),
        ((conn_id, "copy", local, remote), RuntimeError, "Invalid op_name: copy"),
        ((conn_id, "read", local, remote[:1]), RuntimeError, "remote_desc_list"),
        ((conn_id, "read", own, remote), RuntimeError, r"local_desc_list\[0\]"),
        ((conn_id, "read", local, [remote[0], bare]), RuntimeError, r"remote_desc_list\[1\]"),
        ((conn_id, "read", local, short), RuntimeError, r"remote_desc_list\[1\]"),
        ((conn_id, "read", local, beyond), RuntimeError, r"remote_desc_list\[0\]"),
        ((conn_id, 5, local, remote), TypeError, "op_name"),
        ((-1, "read", local, remote), TypeError, "conn_id"),
        ((conn_id, "read", local[0], remote), TypeError, "local_desc_list"),
        ((conn_id, "read", local, [1, 2]), TypeError, r"remote_desc_list\[0\]"),
    ]
    for arguments, error, what in raises:
        with pytest.raises(error, match=what):
            a.transfer(*arguments)


def test_transfers_that_are_refused(pair: Pair) -> None:
    ours, theirs, local, remote = described(pair, 1)
    foreign = pair.a.deserialize_descs(pair.a.get_serialized_descs(local))
    assert pair.a.transfer(pair.at_a, "write", local, foreign) == (False, 0), "not the peer's memory"
    moved = pair.a.deserialize_descs(pair.a.get_serialized_descs(remote))
    moved[0].addr += 1
    assert pair.a.transfer(pair.at_a, "write", local, moved) == (False, 0), "beyond the advertised range"
    pair.a.deregister_memory(local)
    assert pair.a.transfer(pair.at_a, "write", local, remote) == (False, 0), "not registered any more"
    assert bytes(theirs[0].buffer) == pattern(1024, 50) and bytes(ours[0].buffer) == pattern(1024, 0)


@pytest.mark.parametrize("start", ["write", "write_async", "writev_async"])
def test_a_removed_connection_is_of_no_use(sides: Sides, start: Callable) -> None:
    a = sides.pair.a
    assert a.remove_remote_endpoint(sides.pair.at_a) is True
    arguments = sides.all if "v" in str(start) else sides.one
    assert ended(a, getattr(a, str(start))(*arguments)) is False
    sides.check("write", 0)


def test_large_transfers(pair: Pair) -> None:
    sides = Sides(pair, size=8 << 20, pieces=2)
    assert pair.a.writev(*sides.all) is True
    sides.check("write", 2)
    success, number = pair.a.readv_async(*sides.all)
    assert success and finish(pair.a, number)


def test_many_pieces(pair: Pair) -> None:
    count = 500
    source, target = Buffer(pattern(count * 64, 1)), Buffer(count * 64)
    (_, ours), (_, theirs) = pair.a.reg(source.ptr, source.size), pair.b.reg(target.ptr, target.size)
    order = list(range(0, count, 2)) + list(range(1, count, 2))
    _, metas = pair.b.advertisev([theirs] * count, [target.ptr + 64 * at for at in order], [64] * count, count)
    pointers = [source.ptr + 64 * at for at in order]
    assert pair.a.writev(pair.at_a, [ours] * count, pointers, [64] * count, metas, count) is True
    assert bytes(target) == bytes(source)


def test_transfers_that_are_never_polled_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERWAY_SLOTS", "8")
    size = 100_000
    ours, theirs = numpy.ones(size, "uint8"), numpy.zeros(size, "uint8")
    with closing(p2p.Endpoint(0)) as a, closing(p2p.Endpoint(1)) as b:
        ok, conn = a.add_remote_endpoint(b.get_metadata())
        ok, mr = a.reg(ours.ctypes.data, size)
        ok, other = b.reg(theirs.ctypes.data, size)
        ok, meta = b.advertise(other, theirs.ctypes.data, size)
        for _ in range(40):
            ok, number = a.write_async(conn, mr, ours.ctypes.data, size, meta)
            while not ok:  # earlier transfers may still hold the slots
                ok, number = a.write_async(conn, mr, ours.ctypes.data, size, meta)
        assert a.write(conn, mr, ours.ctypes.data, size, meta) is True
        while not a.poll_async(number)[1]:
            pass
