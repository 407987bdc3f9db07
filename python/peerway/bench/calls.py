"""The cost of a call: a write of 256 bytes inside this process, against an empty Python call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from statistics import median
from time import perf_counter_ns

import numpy

import peerway
from peerway.bench.second import HERE
from peerway.bench.session import Mismatch

SIZE = 256
#: Loops of each kind, in alternation. The median of the times per call is reported.
ROUNDS = 15


@dataclass(frozen=True)
class Calls:
    """Nanoseconds per call, including the loop."""

    size: int
    #: ``def nothing(local, remote): pass``
    empty_ns: float
    #: ``peer.write(local, remote)``
    write_ns: float
    #: ``prepared.run()``
    prepared_ns: float

    @property
    def overhead_ns(self) -> float:
        """The cost of a write beyond an empty call. It includes the copy of the bytes."""
        return self.write_ns - self.empty_ns


def measure(seconds: float) -> Calls:
    """Measures the calls for about ``seconds``."""
    with peerway.Endpoint(bind=HERE) as here, peerway.Endpoint(bind=HERE) as there:
        theirs = peerway.empty(SIZE)
        owner = there.register(theirs)
        ours = numpy.arange(SIZE, dtype="uint8")
        local = here.register(ours)
        peer = here.connect(there.metadata)
        remote = peer.remote(owner.advertise("w"))
        prepared = peer.prepare_write(local, remote)
        kinds: list[Callable[[int], None]] = [
            lambda count: _loop(_nothing, local, remote, count),
            lambda count: _loop(peer.write, local, remote, count),
            lambda count: _loop_bare(prepared.run, count),
        ]
        # A call takes much less than a microsecond. The estimate only makes the run shorter.
        count = max(100, int(seconds * 1e6 / ROUNDS / len(kinds)))
        spent: list[list[float]] = [[] for _ in kinds]
        for _ in range(ROUNDS):
            for kind, times in zip(kinds, spent, strict=True):
                start = perf_counter_ns()
                kind(count)
                times.append((perf_counter_ns() - start) / count)
        if not numpy.array_equal(ours, theirs):
            raise Mismatch("the received bytes differ from the sent bytes")
        return Calls(SIZE, *(median(times) for times in spent))


def _nothing(local: object, remote: object) -> None:
    pass


def _loop(call: Callable[..., None], local: object, remote: object, count: int) -> None:
    for _ in repeat(None, count):
        call(local, remote)


def _loop_bare(call: Callable[[], None], count: int) -> None:
    for _ in repeat(None, count):
        call()
