"""Byte layouts, compared with literal bytes."""

import random
import struct

import pytest
from peerway.uccl import ipc, metadata, notices, p2p, parts
from peerway.uccl.descriptors import deserialize, serialize
from uccl_support import NONE_ID, Buffer, Tensor, pattern, shown


def test_metadata_ipv4() -> None:
    packed = metadata.pack("192.0.2.7", 0x1234, "0000:4a:00.0")
    assert packed == b"\xc0\x00\x02\x07\x12\x34\x0c0000:4a:00.0"
    assert len(packed) == 19
    assert p2p.Endpoint.parse_metadata(packed) == ("192.0.2.7", 0x1234, "0000:4a:00.0")


def test_metadata_ipv6() -> None:
    packed = metadata.pack("2001:db8::1", 443, "0000:4a:00.0")
    assert packed == bytes.fromhex("20010db8000000000000000000000001") + b"\x01\xbb\x0c0000:4a:00.0"
    assert len(packed) == 31
    assert p2p.Endpoint.parse_metadata(packed) == ("2001:db8::1", 443, "0000:4a:00.0")


def test_metadata_of_an_endpoint(endpoint: p2p.Endpoint) -> None:
    packed = endpoint.get_metadata()
    assert type(packed) is bytes and len(packed) == 19
    ip, port, bdf = endpoint.parse_metadata(packed)
    assert (ip, bdf) == (p2p.get_oob_ip(), shown(0))
    assert packed == metadata.pack(ip, port, bdf)


@pytest.mark.parametrize("index, name", [(0, "ffff:00:00.0"), (9, "ffff:00:09.0"), (300, "ffff:01:2c.0")])
def test_gpu_names(index: int, name: str) -> None:
    assert metadata.gpu_name(index) == name and len(name) == 12
    assert metadata.gpu_index(name) == metadata.gpu_index(name.upper()) == index
    assert metadata.gpu_index("0000:4a:00.0") is None


@pytest.mark.parametrize(
    "blob",
    [b"", b"\0" * 6, b"\0" * 18, b"\0" * 20, b"\0" * 1000, metadata.pack("1.2.3.4", 5, "x" * 12)[:-1]],
)
def test_invalid_metadata_is_refused(blob: bytes) -> None:
    with pytest.raises(RuntimeError, match="metadata"):
        p2p.Endpoint.parse_metadata(blob)


def test_metadata_without_ascii() -> None:
    with pytest.raises(RuntimeError, match="ASCII"):
        p2p.Endpoint.parse_metadata(b"\1\2\3\4\0\5\1\xff")


def test_fifo_item_keeps_address_and_size_in_place(endpoint: p2p.Endpoint) -> None:
    buffer = Buffer(4096)
    _, mr_id = endpoint.reg(buffer.ptr, buffer.size)
    success, item = endpoint.advertise(mr_id, buffer.ptr + 256, 512)
    assert success and type(item) is bytes and len(item) == 64
    assert struct.unpack_from("<QI", item) == (buffer.ptr + 256, 512)


def test_ipc_info_layout(endpoint: p2p.Endpoint) -> None:
    descriptor = bytes(range(64))
    info = ipc.IpcInfo(descriptor, 0x1122, 0x3344).to_bytes()
    expected = (
        descriptor
        + b"\x22\x11\0\0\0\0\0\0"  # offset
        + b"\x44\x33\0\0\0\0\0\0"  # size
        + b"\x01\0\0\0"  # operation
        + b"\x01\0\0\0"  # is_host
        + b"\xff\xff\xff\xff\0\0\0\0"  # gpu_idx -1
        + b"\0" * 8  # direct_addr
    )
    assert info == expected and len(info) == 104
    assert ipc.IpcInfo.from_bytes(info) == ipc.IpcInfo(descriptor, 0x1122, 0x3344)
    buffer = Buffer(64)
    success, real = endpoint.advertise_ipc(0, buffer.ptr, buffer.size)
    assert success and len(real) == 104
    assert struct.unpack_from("<QI", real) == (buffer.ptr, 64)
    assert real[64:] == expected[64:][:0] + b"\0" * 8 + b"\x40" + b"\0" * 7 + expected[80:]


def test_ipc_info_points_only_at_what_is_offered() -> None:
    info = ipc.IpcInfo(struct.pack("<QI", 1000, 100) + bytes(52), 8, 92)
    assert struct.unpack_from("<QI", info.start(92)) == (1008, 92)
    with pytest.raises(ValueError, match="93 bytes"):
        info.start(93)
    on_gpu = ipc.IpcInfo(struct.pack("<QI", 1000, 100) + bytes(52), 0, 8, 3)
    assert struct.unpack_from("<QI", on_gpu.start(8)) == (1000, 8)
    assert on_gpu.to_bytes()[84:96] == b"\0\0\0\0" + b"\x03\0\0\0" + b"\0\0\0\0"
    assert ipc.IpcInfo.from_bytes(on_gpu.to_bytes()) == on_gpu and not on_gpu.is_host
    with pytest.raises(ValueError, match="address space"):
        ipc.IpcInfo(b"\xff" * 64, 8, 2**63).start(1)


def test_more_than_four_gib_is_said_as_all_ones() -> None:
    assert ipc.retarget(bytes(64), 5, 5 << 30)[8:12] == b"\xff\xff\xff\xff"
    assert ipc.retarget(bytes(64), 5, 77)[8:12] == struct.pack("<I", 77)


def test_serialized_descriptors() -> None:
    desc = p2p.XferDesc()
    desc.addr, desc.size, desc.lkeys, desc.rkeys, desc.mr_id = 0x1000, 0x20, [1, 2], [3, 4], 77
    desc._ipc_info = b"abc"
    blob = serialize([desc])
    assert blob == (
        b"\x01\0\0\0\0\0\0\0"
        b"\x00\x10\0\0\0\0\0\0"
        b"\x20\0\0\0\0\0\0\0"
        b"\x02\0\0\0\0\0\0\0"
        b"\x01\0\0\0\x02\0\0\0"
        b"\x03\0\0\0\x04\0\0\0"
        b"\x03\0\0\0\0\0\0\0"
        b"abc"
    )
    (back,) = deserialize(blob)
    assert back.mr_id == NONE_ID, "mr_id must not be serialized"
    back.mr_id = 77
    assert back == desc
    (short,) = deserialize(blob[: -len(b"abc") - 8])
    assert short._ipc_info == b"", "the last length may be missing"


def test_registered_descriptors_take_168_bytes_each(endpoint: p2p.Endpoint) -> None:
    tensors = [Tensor(pattern(256, seed)) for seed in range(3)]
    descs = endpoint.register_memory(tensors)
    assert len(endpoint.get_serialized_descs(descs)) == 8 + 3 * 168
    assert endpoint.get_serialized_descs([]) == bytes(8)
    assert endpoint.deserialize_descs(b"") == endpoint.deserialize_descs(bytes(8)) == []


def test_every_cut_of_a_list_is_refused(endpoint: p2p.Endpoint) -> None:
    blob = endpoint.get_serialized_descs(endpoint.register_memory([Tensor(64), Tensor(64)]))
    without_last_ipc = len(blob) - 112
    for end in range(1, len(blob)):
        if end != without_last_ipc:
            with pytest.raises(RuntimeError, match="Invalid serialized XferDesc data"):
                endpoint.deserialize_descs(blob[:end])
    with pytest.raises(RuntimeError, match="1 bytes too many"):
        endpoint.deserialize_descs(blob + b"\0")


@pytest.mark.parametrize("at", [0, 24, 64])
def test_huge_counts_are_refused_at_once(endpoint: p2p.Endpoint, at: int) -> None:
    blob = bytearray(endpoint.get_serialized_descs(endpoint.register_memory([Tensor(64)])))
    blob[at : at + 8] = b"\xff" * 8
    with pytest.raises(RuntimeError, match="Invalid serialized XferDesc data"):
        endpoint.deserialize_descs(bytes(blob))


def test_random_bytes_are_refused_or_a_list(endpoint: p2p.Endpoint) -> None:
    source = random.Random(7)
    for _ in range(500):
        blob = source.randbytes(source.randrange(1, 200))
        with pytest.raises(RuntimeError, match="Invalid serialized"):
            endpoint.deserialize_descs(blob)


def test_unequal_keys_are_no_list(endpoint: p2p.Endpoint) -> None:
    desc = p2p.XferDesc()
    desc.lkeys = [1]
    with pytest.raises(ValueError, match=r"desc_list\[0\]"):
        endpoint.get_serialized_descs([desc])


def test_notes() -> None:
    packed = notices.pack_note("ab", b"xyz")
    assert packed == b"\xad\xde\xad\xde\0\0\0\0\x02\0\0\0\x03\0\0\0abxyz"
    assert notices.parse_note(packed) == ("ab", b"xyz")
    assert notices.parse_note(packed + b"!") == ("", packed + b"!")
    assert notices.parse_note(b"plain") == ("", b"plain")


def test_greetings() -> None:
    greeting = notices.Greeting(3, "ffff:00:03.0", notices.LOCAL)
    blob = greeting.to_bytes()
    assert notices.is_greeting(blob) and notices.parse_greeting(blob) == greeting
    prefix = blob[: blob.index(b"{")]
    bad = [
        b"",
        b"[]",
        b"{}",
        b"[" * 400,
        b'{"gpu":-1,"bdf":"","way":"local"}',
        b'{"gpu":true,"bdf":"","way":"local"}',
    ]
    bad += [
        b'{"gpu":1,"bdf":2,"way":"local"}',
        b'{"gpu":1,"bdf":"","way":"up"}',
        b"\xff",
        b'{"x":"' + b"y" * 600 + b'"}',
    ]
    for said in bad:
        assert notices.is_greeting(prefix + said) and notices.parse_greeting(prefix + said) is None
    assert not notices.is_greeting(b"peerway.uccl")


def test_descriptor_attributes() -> None:
    desc = p2p.XferDesc()
    assert (desc.addr, desc.size, desc.mr_id, desc.lkeys, desc.rkeys) == (0, 0, NONE_ID, [], [])
    desc["addr"], desc["rkeys"] = 5, [7]
    assert desc.addr == desc["addr"] == 5 and desc["rkeys"] == [7]
    desc.size, desc.mr_id = 6, 9
    assert repr(desc) == "<XferDesc addr=5 size=6 mr_id=9>"
    desc.rkeys.append(1)
    assert desc.rkeys == [7], "the property must return a copy"
    other = p2p.XferDesc()
    assert desc != other and other == p2p.XferDesc() and desc != 5
    with pytest.raises(KeyError):
        desc["_ipc_info"]
    with pytest.raises(KeyError):
        desc["nothing"] = 1
    with pytest.raises(AttributeError):
        desc.nothing = 1  # type: ignore[attr-defined]
    for name, value in [("addr", -1), ("size", 2**64), ("mr_id", "1"), ("lkeys", 3), ("rkeys", [2**32])]:
        with pytest.raises(TypeError, match=name):
            setattr(desc, name, value)


def test_transfer_handles_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="XferHandle"):
        p2p.XferHandle()
    assert all(isinstance(getattr(p2p.XferHandle, name), property) for name in ("conn_id", "op_name", "transfer_id"))


def test_parts() -> None:
    assert list(parts.in_parts(b"short")) == [b"short"] and not parts.is_part(b"short")
    one, two = (bytes([fill]) * ((1 << 20) + 1) for fill in (1, 2))
    of_one, of_two = list(parts.in_parts(one)), list(parts.in_parts(two))
    assert len(of_one) == 3 and all(map(parts.is_part, of_one))
    assert of_one[2][:19] == b"\0peerway.uccl.part\0" and of_one[2][27:] == struct.pack("<Q", len(one)) + b"\1"
    # Interleave parts of two senders and of two messages.
    unfinished = parts.Unfinished()
    mixed = [("a", of_one[0]), ("a", of_two[0]), ("b", of_one[0]), ("a", of_one[1]), ("a", of_two[1])]
    assert [unfinished.take(*part) for part in mixed] == [None] * 5
    assert unfinished.take("a", of_two[2]) == two and unfinished.take("a", of_one[2]) == one
    with pytest.raises(ValueError, match="64"):
        next(parts.in_parts(bytes(parts.LONGEST + 1)))


def test_parts_that_are_wrong() -> None:
    unfinished = parts.Unfinished()
    head = b"\0peerway.uccl.part\0"
    for bad in (
        b"",
        b"x" * 15,
        struct.pack("<QQ", 1, 4),
        struct.pack("<QQ", 1, 0) + b"x",
        struct.pack("<QQ", 1, 1 << 40) + b"x",
    ):
        with pytest.raises(ValueError, match="malformed"):
            unfinished.take("a", head + bad)
    with pytest.raises(ValueError, match="more bytes"):
        unfinished.take("a", head + struct.pack("<QQ", 1, 4) + b"12345")
    # A sender that never completes its messages does not fill the memory.
    for number in range(1024):
        assert unfinished.take("a", head + struct.pack("<QQ", number, 4) + b"1") is None
    with pytest.raises(ValueError, match="1024 unfinished"):
        unfinished.take("b", head + struct.pack("<QQ", 0, 4) + b"1")
    assert unfinished.take("b", head + struct.pack("<QQ", 0, 1) + b"1") == b"1"
