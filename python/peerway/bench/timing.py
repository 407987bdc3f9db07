"""Timing in alternating rounds, so that a disturbance of the machine affects all measurements."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns

import numpy

#: Few enough that cold caches at the start of a round do not matter. Enough that a disturbance
#: affects all measurements.
ROUNDS = 5
#: The share of a round that warms up the caches and the peer.
WARM_UP = 1 / 20


class Times:
    """The recorded times of one call, in nanoseconds.

    Results exclude the cost of reading the clock.
    """

    def __init__(self, clock_cost: int) -> None:
        self._times = array("q")
        self._clock_cost = clock_cost

    def quantile_us(self, part: float) -> float:
        """The quantile ``part`` of the times, in microseconds."""
        nanos = float(numpy.quantile(numpy.frombuffer(self._times, "int64"), part))
        return max(nanos - self._clock_cost, 1.0) / 1e3

    @property
    def p50_us(self) -> float:
        return self.quantile_us(0.5)

    @property
    def p99_us(self) -> float:
        return self.quantile_us(0.99)

    def run(self, seconds: float, call: Callable[..., object], *args: object) -> float:
        """Calls for about ``seconds``, at least twice, and records all times after the warm-up.

        Returns the median of these times, in microseconds.
        """
        first = len(self._times)
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
                return max(median(self._times[first:]) - self._clock_cost, 1.0) / 1e3


def clock_cost() -> int:
    """The difference of two consecutive readings of the clock, in nanoseconds.

    It is the minimum of several medians. A value that is too small only makes times longer, but a
    value from a slow moment would make every transfer look fast.
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
