"""Registering and advertising."""

import ctypes
import gc
import mmap
import weakref
from contextlib import closing

import numpy
import pytest
from peerway.uccl import p2p
from uccl_support import NONE_ID, Buffer, Pair, Tensor, finish, pattern


def test_numbers_count_from_one_and_are_not_reused(endpoint: p2p.Endpoint) -> None:
    buffer = Buffer(64)
    assert endpoint.reg(buffer.ptr, 64) == (True, 1)
    assert endpoint.reg(ptr=buffer.ptr, size=64, floatType=p2p.FloatType.kFloat16) == (True, 2)
    assert endpoint.dereg(2) is True
    assert endpoint.reg(buffer.ptr, 64, p2p.kBFloat16) == (True, 3)
    assert endpoint._registrations.get(3).float_type is p2p.FloatType.kBFloat16


def test_memory_that_cannot_be_registered(endpoint: p2p.Endpoint) -> None:
    hole = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(hole))
    for ptr, size in [(0, 1), (8, 8), (2**64 - 1, 1), (2**63, 2**63), (start, 2**46)]:
        assert endpoint.reg(ptr, size) == (False, 0), (ptr, size)
        assert "memory" in endpoint.last_error()
    gc.collect()
    for arguments, name in [
        ((-1, 1), "ptr"),
        ((1, 2**64), "size"),
        (("1", 1), "ptr"),
        ((1, 1.5), "size"),
        ((1, 1, 1), "floatType"),
    ]:
        with pytest.raises(TypeError, match=name):
            endpoint.reg(*arguments)  # type: ignore[arg-type]


def test_nothing_can_be_registered(endpoint: p2p.Endpoint) -> None:
    buffer = Buffer(8)
    success, mr_id = endpoint.reg(buffer.ptr, 0)
    assert success and endpoint.advertise(mr_id, buffer.ptr, 0)[0]
    assert endpoint.advertise(mr_id, buffer.ptr, 1) == (False, b"")


def test_regv_is_all_or_nothing(endpoint: p2p.Endpoint) -> None:
    buffers = [Buffer(64) for _ in range(3)]
    success, ids = endpoint.regv([b.ptr for b in buffers], tuple(b.size for b in buffers))
    assert success and ids == [1, 2, 3]
    assert endpoint.regv([], []) == (True, [])
    assert endpoint.regv(ptrs=[buffers[0].ptr, 8], sizes=[64, 8]) == (False, [])
    assert endpoint.dereg(4) is False, "the first registration must not stay"
    with pytest.raises(RuntimeError, match="sizes"):
        endpoint.regv([buffers[0].ptr], [])
    for ptrs, sizes, name in [
        (5, [], "ptrs"),
        ([1], "1", "sizes"),
        (["1"], [1], r"ptrs\[0\]"),
        ([1], [-1], r"sizes\[0\]"),
    ]:
        with pytest.raises(TypeError, match=name):
            endpoint.regv(ptrs, sizes)  # type: ignore[arg-type]


def test_dereg_of_an_unknown_registration_fails(endpoint: p2p.Endpoint) -> None:
    buffer = Buffer(8)
    _, mr_id = endpoint.reg(buffer.ptr, 8)
    assert endpoint.dereg(mr_id=mr_id) is True
    assert endpoint.dereg(mr_id) is False
    assert endpoint.dereg(0) is endpoint.dereg(NONE_ID) is False
    with pytest.raises(TypeError, match="mr_id"):
        endpoint.dereg(-1)


def test_dereg_ends_what_was_advertised(pair: Pair) -> None:
    source, target = Buffer(pattern(64, 1)), Buffer(64)
    (_, ours), (_, theirs) = pair.a.reg(source.ptr, 64), pair.b.reg(target.ptr, 64)
    _, meta = pair.b.advertise(theirs, target.ptr, 64)
    assert pair.a.write(pair.at_a, ours, source.ptr, 64, meta) is True
    assert pair.b.dereg(theirs) is True
    source.fill(pattern(64, 2))
    assert pair.a.write(pair.at_a, ours, source.ptr, 64, meta) is False
    assert bytes(target) == pattern(64, 1)


def test_registered_tensors_stay_alive(endpoint: p2p.Endpoint) -> None:
    tensor = Tensor(64)
    alive = weakref.ref(tensor)
    descs = endpoint.register_memory([tensor])
    del tensor
    gc.collect()
    assert alive() is not None
    endpoint.deregister_memory(descs)
    gc.collect()
    assert alive() is None


def test_register_memory(endpoint: p2p.Endpoint) -> None:
    assert endpoint.register_memory([]) == []
    tensor = Tensor(256, element=2)
    (desc,) = endpoint.register_memory(tensor_list=[tensor])
    assert (desc.addr, desc.size, desc.mr_id) == (tensor.data_ptr(), 256, 1)
    assert endpoint.deregister_memory(desc_list=[desc]) is None
    assert endpoint.dereg(desc.mr_id) is False
    endpoint.deregister_memory([desc, p2p.XferDesc()])


class Scattered(Tensor):
    def is_contiguous(self) -> bool:
        return False


class OnGpu(Tensor):
    is_cuda = True


class Wild(Tensor):
    def data_ptr(self) -> int:
        return 8


@pytest.mark.parametrize(
    "tensor, error",
    [
        (5, RuntimeError),
        ("text", RuntimeError),
        (b"bytes", RuntimeError),
        (Scattered(8), ValueError),
        (OnGpu(8), RuntimeError),
        (Wild(8), RuntimeError),
    ],
)
def test_invalid_tensors_are_refused(endpoint: p2p.Endpoint, tensor: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"tensor_list\[1\]"):
        endpoint.register_memory([Tensor(8), tensor])
    assert all(endpoint.dereg(mr_id) is False for mr_id in range(4)), "the valid registration must not stay"


def test_invalid_lists_are_refused(endpoint: p2p.Endpoint) -> None:
    with pytest.raises(TypeError, match="tensor_list"):
        endpoint.register_memory(Tensor(8))  # type: ignore[arg-type]
    for call in (endpoint.deregister_memory, endpoint.get_serialized_descs):
        with pytest.raises(TypeError, match="desc_list"):
            call(p2p.XferDesc())  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"desc_list\[0\]"):
            call([b"desc"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="serialized_bytes"):
        endpoint.deserialize_descs("text")  # type: ignore[arg-type]


def test_advertise_in_both_spellings(endpoint: p2p.Endpoint) -> None:
    buffer = Buffer(256)
    _, mr_id = endpoint.reg(buffer.ptr, 256)
    one = endpoint.advertise(mr_id, buffer.ptr, 256)
    assert one[0] and len(one[1]) == 64
    assert endpoint.advertise(mr_id=mr_id, ptr=buffer.ptr, size=256) == one, "the same range is advertised once"
    assert endpoint.advertise(mr_id=mr_id, addr=buffer.ptr, len=256) == one
    many = endpoint.advertisev([mr_id] * 2, [buffer.ptr, buffer.ptr + 8], [256, 8], 2)
    assert many[0] and many[1][0] == one[1] and len(many[1][1]) == 64
    assert endpoint.advertisev(mr_id_list=[mr_id], addr_list=[buffer.ptr], len_list=[256], num_iovs=1) == (
        True,
        [one[1]],
    )
    assert endpoint.advertisev(mr_id_v=[mr_id], ptr_v=[buffer.ptr], size_v=[256], num_iovs=1) == (
        True,
        [one[1]],
    )
    assert endpoint.advertisev([], [], [], 0) == (True, [])


def test_advertise_outside_the_registration(endpoint: p2p.Endpoint) -> None:
    buffer = Buffer(256)
    _, mr_id = endpoint.reg(buffer.ptr, 256)
    for ptr, size in [
        (buffer.ptr - 1, 8),
        (buffer.ptr + 249, 8),
        (buffer.ptr, 257),
        (0, 1),
        (2**64 - 1, 2**64 - 1),
    ]:
        assert endpoint.advertise(mr_id, ptr, size) == (False, b"")
        assert "registration" in endpoint.last_error()
    assert endpoint.advertise(99, buffer.ptr, 8) == (False, b"")
    success, blobs = endpoint.advertisev([mr_id, 99], [buffer.ptr] * 2, [8, 8], 2)
    assert success is False and blobs == [bytes(64)] * 2
    with pytest.raises(RuntimeError, match="size_v"):
        endpoint.advertisev([mr_id], [buffer.ptr], [], 1)
    with pytest.raises(RuntimeError, match="num_iovs"):
        endpoint.advertisev([mr_id], [buffer.ptr], [8], 2)
    for arguments, name in [((-1, 1, 1), "mr_id"), ((1, None, 1), "ptr"), ((1, 1, 2**64), "size")]:
        with pytest.raises(TypeError, match=name):
            endpoint.advertise(*arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one argument"):
        endpoint.advertise(mr_id, ptr=buffer.ptr, addr=buffer.ptr, size=8)
    with pytest.raises(TypeError):
        endpoint.advertise(mr_id, buffer.ptr)


def test_a_peer_reaches_only_what_was_advertised(pair: Pair) -> None:
    ours, theirs = Buffer(pattern(256, 1)), Buffer(pattern(256, 2))
    (_, mine), (_, other) = pair.a.reg(ours.ptr, 256), pair.b.reg(theirs.ptr, 256)
    _, meta = pair.b.advertise(other, theirs.ptr + 64, 64)
    assert pair.a.read(pair.at_a, mine, ours.ptr, 65, meta) is False
    beyond = (theirs.ptr).to_bytes(8, "little") + meta[8:]
    assert pair.a.read(pair.at_a, mine, ours.ptr, 64, beyond) is False
    assert bytes(ours) == pattern(256, 1)
    assert pair.a.read(pair.at_a, mine, ours.ptr, 64, meta) is True
    assert bytes(ours) == pattern(256, 2)[64:128] + pattern(256, 1)[64:]


def test_compress_only_registers_and_warns(endpoint: p2p.Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    buffer = Buffer(64)
    assert endpoint.reg_compress_only(buffer.ptr, 64, p2p.kFloat32) == (True, 1)
    assert "compress" in caplog.text
    assert endpoint.reg_compress_only(0, 64) == (False, 0)


def test_torch_tensors(pair: Pair) -> None:
    torch = pytest.importorskip("torch")
    source = torch.arange(1024, dtype=torch.float32)
    target = torch.zeros(2048, dtype=torch.float32)
    ours = pair.a.register_memory([source])
    theirs = pair.b.register_memory([target[512:1536]])
    remote = pair.a.deserialize_descs(pair.b.get_serialized_descs(theirs))
    success, number = pair.a.transfer(pair.at_a, "write", ours, remote)
    assert success and finish(pair.a, number)
    assert torch.equal(target[512:1536], source) and target[:512].sum() == target[1536:].sum() == 0
    with pytest.raises(ValueError, match=r"tensor_list\[0\]"):
        pair.a.register_memory([torch.zeros(4, 4).t()[1:]])


def test_read_only_memory_can_be_read_and_not_written(tmp_path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"w" * 8192)
    mapped = numpy.memmap(path, "uint8", mode="r")
    ours = numpy.zeros(8192, "uint8")
    with closing(p2p.Endpoint(0)) as owner, closing(p2p.Endpoint(1)) as reader:
        ok, mr = owner.reg(mapped.ctypes.data, mapped.nbytes)
        assert ok
        ok, meta = owner.advertise(mr, mapped.ctypes.data, mapped.nbytes)
        assert ok
        ok, conn = reader.add_remote_endpoint(owner.get_metadata())
        ok, own = reader.reg(ours.ctypes.data, ours.nbytes)
        assert reader.read(conn, own, ours.ctypes.data, 8192, meta) is True
        assert ours.tobytes() == b"w" * 8192
        assert reader.write(conn, own, ours.ctypes.data, 8192, meta) is False
        assert "advertised" in reader.last_error()
        ok, back = owner.add_remote_endpoint(reader.get_metadata())
        ok, theirs = reader.advertise(own, ours.ctypes.data, 8192)
        assert owner.read(back, mr, mapped.ctypes.data, 8192, theirs) is False
        assert "read-only" in owner.last_error()
