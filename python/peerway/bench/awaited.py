"""Many transfers awaited at once on one event loop, and the threads that takes."""

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
#: How often it is done; the median is reported.
REPEATS = 5


@dataclass(frozen=True)
class Awaited:
    """What a path's awaited transfers came to."""

    path: str
    size: int
    transfers: int
    #: From the first post until all were awaited: the median of several times.
    total_ms: float
    #: Of this process, before the first was posted.
    threads_before: int
    #: The same, while they were under way and afterwards: the larger of both.
    threads_during: int


def threads() -> int:
    """Threads of this process, Python's and others'."""
    return len(os.listdir("/proc/self/task"))


def measure(peer: Peer, path: str, local: Sequence[LocalSlice], remote: Sequence[RemoteSlice]) -> Awaited:
    """Writes all pieces, each awaited by a task of its own."""
    before = threads()
    seen = [before]

    async def one(ours: LocalSlice, theirs: RemoteSlice) -> None:
        await peer.post_write(ours, theirs)

    async def look() -> None:
        # Tasks start in the order in which they are made: by now every transfer is posted.
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
