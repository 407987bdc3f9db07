"""Awaiting transfers."""

from __future__ import annotations

import asyncio
import threading
import time

import far as there
import numpy
import peerway
import pytest
from far import Far


def test_a_thousand_at_once_without_a_thread_each(far: Far) -> None:
    count, size = 1000, 40_000

    async def main() -> None:
        with peerway.Endpoint(slots=2048) as endpoint:
            peer = endpoint.connect(far.metadata)
            remote = peer.remote(far(there.advertise, count * size, 0, "rw", False))
            ours = numpy.random.default_rng(0).integers(0, 256, count * size, dtype="uint8")
            region = endpoint.register(ours)
            threads = threading.active_count(), len(native_threads())

            async def one(i: int) -> None:
                part = slice(i * size, (i + 1) * size)
                await peer.post_write(region[part], remote[part])

            await asyncio.gather(*(one(i) for i in range(count)))
            assert threading.active_count() == threads[0]
            assert len(native_threads()) <= threads[1] + 2
            assert far(there.content) == ours.tobytes()

    asyncio.run(main())


def native_threads() -> list[str]:
    import os

    return os.listdir("/proc/self/task")


def test_ended_already_twice_and_on_two_loops(far: Far, endpoint: peerway.Endpoint) -> None:
    peer = endpoint.connect(far.metadata)
    remote = peer.remote(far(there.advertise, 1000))
    transfer = peer.post_write(bytes(1000), remote)
    transfer.wait()

    async def main() -> None:
        await transfer
        posted = peer.post_write(bytes(1000), remote, notify=b"n")

        async def again() -> None:
            await posted

        await asyncio.gather(again(), again(), again())

    asyncio.run(main())
    asyncio.run(main())


def test_failure_and_cancel() -> None:
    async def main() -> None:
        with Far(transport="tcp") as far, peerway.Endpoint(transport="tcp", detect=30, fence=0.2) as endpoint:
            peer = endpoint.connect(far.metadata)
            size = 32 << 20
            remote = peer.remote(far(there.advertise, size))
            ours = numpy.zeros(size, "uint8")
            far.stop()
            with pytest.raises(peerway.TransferTimeout):
                await peer.post_write(ours, remote, deadline=0.2)
            transfer = peer.post_read(ours, remote)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(wrapped(transfer), 0.1)
            # The cancelled task waited until the transfer no longer changed the buffer.
            assert transfer.done() and transfer.cancelled() and transfer.fenced
            far.resume()

    async def wrapped(transfer: peerway.Transfer) -> None:
        await transfer

    asyncio.run(main())


def test_outside_a_loop() -> None:
    with peerway.Endpoint() as endpoint, peerway.Endpoint() as owner:
        region = owner.allocate(10)
        peer = endpoint.connect(owner.metadata)
        transfer = peer.post_write(bytes(10), region.advertise())
        with pytest.raises(RuntimeError, match="no running event loop"):
            transfer.__await__().send(None)


def test_two_loops_await_one_transfer(far: Far) -> None:
    with peerway.Endpoint(transport="tcp") as endpoint, Far(transport="tcp") as other:
        peer = endpoint.connect(other.metadata)
        remote = peer.remote(other(there.advertise, 100_000))
        ours = numpy.zeros(100_000, "uint8")
        turns = 300
        meet = threading.Barrier(2)
        posted: list[peerway.Transfer] = []

        async def one(transfer: peerway.Transfer) -> None:
            await asyncio.wait_for(asyncio.ensure_future(settle(transfer)), 60)

        async def settle(transfer: peerway.Transfer) -> None:
            await transfer

        def run(first: bool) -> None:
            with asyncio.Runner() as runner:
                for _ in range(turns):
                    if first:
                        posted[:] = [peer.post_write(ours, remote)]
                    meet.wait(90)
                    runner.run(one(posted[0]))
                    meet.wait(90)

        failed: list[BaseException] = []

        def guarded(first: bool) -> None:
            try:
                run(first)
            except BaseException as error:
                failed.append(error)
                meet.abort()

        threads = [threading.Thread(target=guarded, args=(first,)) for first in (True, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed


def test_loops_that_end_leave_no_descriptors(far: Far, endpoint: peerway.Endpoint) -> None:
    import os

    peer = endpoint.connect(far.metadata)
    remote = peer.remote(far(there.advertise, 100_000, 0, "rw", False))

    async def leave() -> None:
        asyncio.ensure_future(waits(peer.post_write(bytes(100_000), remote)))
        await asyncio.sleep(0)

    async def waits(transfer: peerway.Transfer) -> None:
        await transfer

    def rounds(count: int) -> int:
        for _ in range(count):
            loop = asyncio.new_event_loop()
            loop.run_until_complete(leave())
            loop.close()
        return len(os.listdir("/proc/self/fd"))

    before = rounds(3)
    left, until = rounds(20), time.monotonic() + 60
    # The resources of a closed loop are released when its last transfer has ended.
    while left > before + 3:
        assert time.monotonic() < until, f"{left} descriptors, {before} before"
        time.sleep(0.05)
        left = rounds(0)
