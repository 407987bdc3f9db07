"""Measures many transfers awaited at once on one event loop, and the number of threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from peerway import LocalSlice, Peer, RemoteSlice

TRANSFERS = 1000
SIZE = 4096
#: Number of repetitions. The median is reported.
REPEATS = 5


@dataclass(frozen=True)
class Awaited:
    """The result for the awaited transfers of a path."""

    path: str
    size: int
    transfers: int
    #: Time from the first post to the end of the last await: the median of the repetitions.
    total_ms: float
    #: Threads of this process before the first post.
    threads_before: int
    #: The most threads of this process before, during and after the transfers.
    threads_during: int


def threads() -> int:
    """The number of threads of this process, including threads unknown to Python."""
    return len(os.listdir("/proc/self/task"))


def measure(peer: Peer, path: str, local: Sequence[LocalSlice], remote: Sequence[RemoteSlice]) -> Awaited:
    """Writes all pieces. A separate task awaits each transfer."""
    before = threads()
    seen = [before]

    async def one(ours: LocalSlice, theirs: RemoteSlice) -> None:
        await peer.post_write(ours, theirs)

    async def look() -> None:
        # Tasks start in the order of their creation, so every transfer is posted by now.
        seen.append(threads())

    async def all_at_once() -> float:
        start = perf_counter()
        tasks = [one(ours, theirs) for ours, theirs in zip(local, remote, strict=True)]
        await asyncio.gather(*tasks, look())
        spent = perf_counter() - start
        seen.append(threads())
        return spent

    async def main() -> list[float]:
        return [await all_at_once() for _ in range(REPEATS)]

    spent = asyncio.run(main())
    return Awaited(path, local[0].nbytes, len(local), median(spent) * 1e3, before, max(seen))
