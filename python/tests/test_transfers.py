"""Reads and writes between two processes, by every path, in every shape."""

from __future__ import annotations

import far as there
import numpy
import peerway
import pytest
from far import Far

SIZE = 300_000


@pytest.fixture
def linked(pinned: str):
    with Far(transport=pinned) as far, peerway.Endpoint(transport=pinned) as endpoint:
        yield far, endpoint, endpoint.connect(far.metadata)


def pattern(seed: int, nbytes: int = SIZE) -> numpy.ndarray:
    return numpy.random.default_rng(seed).integers(0, 256, nbytes, dtype="uint8")


def test_write_and_read(linked, pinned: str) -> None:
    far, endpoint, peer = linked
    shared = pinned == "local-map"
    remote = peer.remote(far(there.advertise, SIZE, 1, "rw", shared))
    assert remote.nbytes == SIZE and remote.access == "rw"
    ours = pattern(1)
    peer.write(ours, remote)
    assert far(there.content) == ours.tobytes()
    back = numpy.zeros(SIZE, "uint8")
    peer.read(back, remote)
    assert (back == ours).all()
    assert peer.path == pinned and peer.why and peer.alive
    assert peer.trusted == (pinned in ("local-map", "local-cma"))


def test_posted_prepared_and_vectors(linked, pinned: str) -> None:
    far, endpoint, peer = linked
    remote = peer.remote(far(there.advertise, SIZE, 0, "rw", pinned == "local-map"))
    ours = pattern(2)
    region = endpoint.register(ours)
    transfer = peer.post_write(region, remote)
    transfer.wait(10)
    assert transfer.done() and transfer.exception() is None and transfer.fenced and not transfer.cancelled()
    assert transfer.stats["bytes_total"] == SIZE and transfer.path in (pinned, "local-ring")
    assert far(there.content) == ours.tobytes()

    ours[:] = pattern(3)
    prepared = peer.prepare_write(region, remote)
    assert prepared.nbytes == SIZE
    prepared.run()
    assert far(there.content) == ours.tobytes()
    ours[:] = pattern(4)
    prepared.post().wait()
    assert far(there.content) == ours.tobytes()

    before = bytearray(far(there.content))
    cuts = [(0, 10), (1000, 5000), (SIZE - 1, SIZE)]
    ours[:] = pattern(5)
    peer.write([region[a:b] for a, b in cuts], [remote[a:b] for a, b in cuts])
    for a, b in cuts:
        before[a:b] = ours[a:b].tobytes()
    assert far(there.content) == bytes(before)


@pytest.mark.parametrize("dtype", ["uint32", "int32", "int64", "uint64", "list"])
def test_blocks(linked, pinned: str, dtype: str) -> None:
    far, endpoint, peer = linked
    block, count = 512, 100
    remote = peer.remote(far(there.advertise, block * count, 0, "rw", pinned == "local-map"))
    ours = pattern(6, block * count)
    region = endpoint.register(ours)
    mine, theirs = [7, 0, 99, 50], [1, 98, 3, 40]
    as_indices = (lambda x: x) if dtype == "list" else (lambda x: numpy.array(x, dtype))
    blocks = remote.blocks(as_indices(theirs), block)
    assert len(blocks) == 4 and blocks.nbytes == 4 * block
    peer.write(peerway.BlockList(region, as_indices(mine), block), blocks)
    found = numpy.frombuffer(far(there.content), "uint8").reshape(count, block)
    for a, b in zip(mine, theirs, strict=True):
        assert (found[b] == ours.reshape(count, block)[a]).all()
    assert (numpy.delete(found, theirs, 0) == 0).all()


def test_notes_and_counters_follow_the_bytes(linked, pinned: str) -> None:
    far, endpoint, peer = linked
    remote = peer.remote(far(there.advertise, SIZE, 0, "rw", pinned == "local-map"))
    ours = pattern(7)
    peer.write(ours, remote, notify=b"here", count=9)
    assert far(there.notification) == b"here" and far(there.counter, 9, 1) == 1
    peer.notify(b"alone").wait()
    peer.count(9).wait()
    assert far(there.notification) == b"alone" and far(there.counter, 9, 2) == 2
    assert far(there.notification, 0) is None


def test_staged(linked, pinned: str) -> None:
    far, endpoint, peer = linked
    remote = peer.remote(far(there.advertise, 4096, 0, "rw", pinned == "local-map"))
    region = endpoint.register(pattern(8, 4096))
    staged = peer.stage(
        [peer.prepare_write(region[i : i + 1024], remote[i : i + 1024], count=20) for i in range(0, 4096, 1024)]
    )
    assert len(staged) == 4 and not staged.done(0)
    staged.release(2)
    assert far(there.counter, 20, 1) == 1
    assert far(there.content)[:2048] == bytes(2048)
    for i in (0, 1, 3):
        staged.release(i)
    staged.wait()
    assert all(staged.done(i) for i in range(4))
    with pytest.raises(peerway.InvalidWork, match="released already"):
        staged.release(0)
    with pytest.raises(peerway.InvalidWork, match="no stage 4"):
        staged.release(4)


def test_many_blocks_without_a_loop(far: Far, endpoint: peerway.Endpoint) -> None:
    count, block = 100_000, 64
    peer = endpoint.connect(far.metadata)
    remote = peer.remote(far(there.advertise, count * block))
    ours = peerway.empty((count, block))
    ours[:] = pattern(9, count * block).reshape(count, block)
    order = numpy.random.default_rng(1).permutation(count).astype("uint32")
    region = endpoint.register(ours)
    prepared = peer.prepare_write(
        region.blocks(order, block), remote.blocks(numpy.arange(count, dtype="uint32"), block)
    )
    prepared.run()
    assert far(there.content) == ours[order].tobytes()


def test_peers(far: Far, endpoint: peerway.Endpoint) -> None:
    peer = endpoint.connect(far.metadata)
    assert endpoint.connect(far.metadata) == peer and hash(endpoint.connect(far.metadata)) == hash(peer)
    assert endpoint.peers() == [peer] and peer.initiator
    host, port = peer.address
    assert endpoint.connect((host, port)) == peer and endpoint.connect(f"{host}:{port}") == peer
    theirs = far(_accepted)
    assert theirs == endpoint.incarnation and peer.incarnation != theirs
    assert peer.stats["transfers"] == 0
    peer.remove()
    with pytest.raises(peerway.PeerGone):
        peer.notify(b"x")
    again = endpoint.connect(far.metadata)
    assert again != peer and again.alive and not peer.alive


def _accepted(here) -> str:
    return here["endpoint"].accept(10).incarnation


def test_descriptors_may_be_given_as_bytes(far: Far, endpoint: peerway.Endpoint) -> None:
    peer = endpoint.connect(far.metadata)
    descriptor = far(there.advertise, 100)
    assert len(descriptor) == 64
    peer.write(b"y" * 100, descriptor)
    assert far(there.content) == b"y" * 100
    for i in range(600):  # more than are kept imported
        descriptor = far(there.advertise, 10)
        peer.write(bytes([i % 256]) * 10, descriptor)
        assert far(there.content) == bytes([i % 256]) * 10


@pytest.mark.parametrize("transport", [None, "tcp"])
def test_both_sides_count_the_bytes_of_every_path(transport: str | None) -> None:
    one, other = peerway.Endpoint(transport=transport), peerway.Endpoint(transport=transport)
    region = other.allocate(1 << 20)
    peer = one.connect(other.metadata)
    remote = peer.remote(region.advertise())
    local = one.allocate(1 << 20)
    peer.write(local, remote)
    peer.read(local[:4096], remote[:4096])
    peer.write(local[:256], remote[:256], notify=b"there")
    assert (peer.stats["bytes_written"], peer.stats["bytes_read"]) == ((1 << 20) + 256, 4096)
    assert other.notification(timeout=60) is not None
    stats = other.stats
    assert (stats["bytes_landed"], stats["bytes_served"]) == ((1 << 20) + 256, 4096)
    assert stats["peers"] == 1
    (near,) = other.peers()
    assert {key: stats[key] for key in near.stats} == near.stats
    one.close()
    other.close()
