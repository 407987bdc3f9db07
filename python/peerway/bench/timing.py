"""Timing: rounds of one thing in turns with rounds of others, so that what disturbs the machine disturbs all."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns

import numpy

#: Few enough that the caches a round starts with do not matter, enough that a disturbance hits all alike.
ROUNDS = 5
#: The part of a round that warms up caches and the other side.
WARM_UP = 1 / 20


class Times:
    """Times of one thing, in nanoseconds, with the cost of reading the clock taken off."""

    def __init__(self, clock_cost: int) -> None:
        self._times = array("q")
        self._clock_cost = clock_cost

    def quantile_us(self, part: float) -> float:
        """What that part of the times stay under, in microseconds."""
        nanos = float(numpy.quantile(numpy.frombuffer(self._times, "int64"), part))
        return max(nanos - self._clock_cost, 1.0) / 1e3

    @property
    def p50_us(self) -> float:
        return self.quantile_us(0.5)

    @property
    def p99_us(self) -> float:
        return self.quantile_us(0.99)

    def run(self, seconds: float, call: Callable[..., object], *args: object) -> None:
        """Calls for about so long, at least twice, and records all but the first times."""
        start = perf_counter_ns()
        warm, end = start + int(seconds * WARM_UP * 1e9), start + int(seconds * 1e9)
        record = self._times.append
        call(*args)
        while perf_counter_ns() < warm:
            call(*args)
        while True:
            before = perf_counter_ns()
            call(*args)
            after = perf_counter_ns()
            record(after - before)
            if after >= end:
                return


def clock_cost() -> int:
    """What two readings of the clock with nothing between them differ by, in nanoseconds.

    The least of several medians: taking off too little only makes times longer, and a moment in which the machine
    was slow must not make every transfer look fast.
    """
    medians = []
    for _ in range(50):
        differences = []
        for _ in range(500):
            before = perf_counter_ns()
            after = perf_counter_ns()
            differences.append(after - before)
        medians.append(median(differences))
    return round(min(medians))
