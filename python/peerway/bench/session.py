"""One path: an endpoint and a buffer in each process, and the measurement of rows between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import Any, TypeVar

import numpy

import peerway
from peerway.bench import awaited, pattern, second
from peerway.bench.plan import BLOCK_LIST, MAX_VECTOR, Row
from peerway.bench.second import Second
from peerway.bench.timing import ROUNDS, Times

T = TypeVar("T")

#: Shares of a row's time: the call, the same transfer prepared, and the baseline.
CALLS, PREPARED, BASELINE = 0.4, 0.3, 0.3
#: Number of posts to time: enough for a median, although each moves hundreds of megabytes.
POSTS = 9


class Mismatch(Exception):
    """The received bytes differ from the sent bytes, or the transfer took another path."""


@dataclass(frozen=True)
class Baseline:
    """What the row is compared with, and the ratio to it. The Rust program has the same fields."""

    name: str
    gbps: float
    #: The row's GB/s divided by those of the baseline: the median of the rounds.
    ratio: float
    #: The lowest and the highest ratio of a round.
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """One measured row. Fields that the Rust program also has use its names."""

    path: str
    op: str
    size: int
    iovs: int
    p50_us: float
    p99_us: float
    gbps: float
    prepared_p50_us: float
    #: None for a path without a baseline.
    baseline: Baseline | None


@dataclass(frozen=True)
class Posting:
    """The cost of a block list of NumPy index arrays before its bytes move. Values are medians."""

    path: str
    size: int
    iovs: int
    #: Making block lists of two index arrays.
    blocks_us: float
    #: Checking the block lists.
    prepare_us: float
    #: The posting call of the prepared transfer.
    post_us: float


class Session:
    """An open path between the two processes."""

    def __init__(self, other: Second, pin: str, nbytes: int, clock_cost: int) -> None:
        self._other = other
        self._clock_cost = clock_cost
        # Only local-map needs shareable memory. The other paths use ordinary application memory.
        metadata, descriptor = other.ask(second.open_path, pin, nbytes, pin == "local-map")
        self._endpoint = peerway.Endpoint(bind=second.HERE, transport=pin)
        try:
            self._peer = self._endpoint.connect(metadata)
            self._remote = self._peer.remote(descriptor)
            self._buffer = numpy.empty(nbytes, "uint8")
            self._buffer[:] = 1
            self._local = self._endpoint.register(self._buffer)
        except BaseException:
            self._endpoint.close()
            raise
        self.name = self._peer.path

    def close(self) -> None:
        self._endpoint.close()
        self._other.ask(second.close_path)

    def measure(self, row: Row, scratch: numpy.ndarray, seconds: float) -> Line:
        """Measures one row in alternation with its baseline, and compares the bytes."""
        local, remote = self._pieces(row)
        self._check_path(row, local, remote)
        writes = row.op == "write"
        call = self._peer.write if writes else self._peer.read
        prepared = (self._peer.prepare_write if writes else self._peer.prepare_read)(local, remote)
        # Verify each call separately first. After the rounds, the bytes do not show which call
        # moved them.
        self._verified(row, lambda: call(local, remote))
        self._verified(row, prepared.run)
        source, target = self._buffer[: row.total], scratch[: row.total]

        calls, runs, copies = (Times(self._clock_cost) for _ in range(3))
        turns: list[tuple[Times, float, Callable[..., object], tuple[object, ...]]] = [
            (calls, CALLS, call, (local, remote)),
            (runs, PREPARED, prepared.run, ()),
        ]
        if self.name != "tcp":
            turns.append((copies, BASELINE, numpy.copyto, (target, source)))
        ratios: list[float] = []

        def rounds() -> None:
            for _ in range(ROUNDS):
                medians = [times.run(seconds * part / ROUNDS, once, *args) for times, part, once, args in turns]
                # Of the call and, last, of the baseline. A shorter time is a higher rate.
                ratios.append(medians[-1] / medians[0])

        self._verified(row, rounds)
        baseline = None
        if self.name != "tcp":
            gbps = row.total / copies.p50_us / 1e3
            baseline = Baseline("numpy.copyto", gbps, median(ratios), min(ratios), max(ratios))
        return Line(
            path=self.name,
            op=row.op,
            size=row.size,
            iovs=row.iovs,
            p50_us=calls.p50_us,
            p99_us=calls.p99_us,
            gbps=row.total / calls.p50_us / 1e3,
            prepared_p50_us=runs.p50_us,
            baseline=baseline,
        )

    def posting(self) -> Posting | None:
        """Measures the calls for a block list. Returns None if the buffers are too small for it."""
        row = Row("write", *BLOCK_LIST, seed=0)
        if row.total > self._buffer.nbytes:
            return None
        ours, theirs = row.order("ours"), row.order("theirs")
        times = numpy.zeros((POSTS, 3))
        for i in range(POSTS):
            start = perf_counter_ns()
            local, remote = self._local.blocks(ours, row.size), self._remote.blocks(theirs, row.size)
            made = perf_counter_ns()
            prepared = self._peer.prepare_write(local, remote)
            checked = perf_counter_ns()
            transfer = prepared.post()
            posted = perf_counter_ns()
            transfer.wait()
            times[i] = made - start, checked - made, posted - checked
        return Posting(self.name, row.size, row.iovs, *(numpy.median(times, axis=0) / 1e3).tolist())

    def await_many(self) -> awaited.Awaited:
        """Measures transfers that are awaited at once on one event loop."""
        row = Row("write", awaited.SIZE, awaited.TRANSFERS, seed=0)
        local, remote = self._pieces(row, as_slices=True)
        return self._verified(row, lambda: awaited.measure(self._peer, self.name, local, remote))

    def _verified(self, row: Row, transfer: Callable[[], T]) -> T:
        """Runs ``transfer`` between buffers that differ, and checks the received bytes."""
        if row.op == "write":
            pattern.fill(self._buffer, row)
            self._other.ask(second.blank, row)
        else:
            pattern.blank(self._buffer, row)
            self._other.ask(second.fill, row)
        result = transfer()
        if row.op == "write":
            arrived = self._other.ask(second.arrived, row)
        else:
            arrived = pattern.arrived(self._buffer, row, "ours")
        if not arrived:
            raise Mismatch("the received bytes differ from the sent bytes")
        return result

    def _pieces(self, row: Row, as_slices: bool = False) -> tuple[Any, Any]:
        """Both sides of a row: two slices, two lists of slices, or two block lists."""
        if row.iovs == 1:
            return self._local[: row.size], self._remote[: row.size]
        ours, theirs = row.order("ours"), row.order("theirs")
        if row.iovs > MAX_VECTOR and not as_slices:
            return self._local.blocks(ours, row.size), self._remote.blocks(theirs, row.size)
        return (
            [self._local[i * row.size : (i + 1) * row.size] for i in ours.tolist()],
            [self._remote[i * row.size : (i + 1) * row.size] for i in theirs.tolist()],
        )

    def _check_path(self, row: Row, local: Any, remote: Any) -> None:
        """Runs the row once and checks that the transfer takes the path of this session."""
        post = self._peer.post_write if row.op == "write" else self._peer.post_read
        transfer = post(local, remote)
        transfer.wait()
        if transfer.path != self.name:
            raise Mismatch(f"the transfer took the path {transfer.path}, not {self.name}")
