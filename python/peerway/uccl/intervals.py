"""Closed intervals with data, and queries by containment or overlap."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

Interval = tuple[Any, Any, Any]


class ClosedIntervalTree:
    """A set of intervals ``[start, end]``, both ends included, each with some data.

    The intervals are sorted by start, and each position has the largest end so far. A query starts
    at the last interval that starts early enough, and goes back until no earlier interval can reach
    it.
    """

    def __init__(self) -> None:
        self._intervals: list[Interval] = []
        self._ends: list[Any] | None = []

    def add(self, start: Any, end: Any, data: Any) -> None:
        """Adds an interval, unless the same interval with the same data exists."""
        if end < start:
            raise ValueError(f"start is {start} and end is {end}; end must not be less than start")
        if not any(known == data for _, _, known in self.query_exact_match(start, end)):
            at = bisect_right(self._intervals, (start, end), key=lambda interval: interval[:2])
            self._intervals.insert(at, (start, end, data))
            self._ends = None

    def remove(self, start: Any, end: Any, data: Any = None) -> int:
        """Removes intervals with these ends (and this data, unless it is None).

        Returns their number.
        """
        matches = self._positions(start, end, lambda a, b, d: a == start and b == end and (data is None or d == data))
        for at in reversed(matches):
            del self._intervals[at]
        if matches:
            self._ends = None
        return len(matches)

    def query_containing(self, query_start: Any, query_end: Any) -> list[Interval]:
        """Intervals that contain ``[query_start, query_end]``."""
        return self._select(query_start, query_end, lambda a, b, _: a <= query_start and query_end <= b)

    def query_overlap(self, query_start: Any, query_end: Any) -> list[Interval]:
        """Intervals that share a point with ``[query_start, query_end]``."""
        return self._select(query_start, query_end, lambda a, b, d: True)

    def query_exact_match(self, query_start: Any, query_end: Any, data: Any = None) -> list[Interval]:
        """Intervals with these ends (and this data, unless it is None)."""
        return self._select(
            query_start,
            query_end,
            lambda a, b, d: a == query_start and b == query_end and (data is None or d == data),
        )

    def clear(self) -> None:
        """Removes all intervals."""
        self._intervals.clear()
        self._ends = []

    def __iter__(self) -> Iterator[Interval]:
        return iter(list(self._intervals))

    def __len__(self) -> int:
        return len(self._intervals)

    def __str__(self) -> str:
        return "\n".join(f"[{start}, {end}] -> {data}" for start, end, data in self._intervals)

    def _select(self, start: Any, end: Any, fits: Any) -> list[Interval]:
        return [self._intervals[at] for at in self._positions(start, end, fits)]

    def _positions(self, start: Any, end: Any, fits: Any) -> list[int]:
        """The positions of intervals that overlap ``[start, end]`` and fit, in order."""
        if self._ends is None:
            self._ends = list(accumulate((interval[1] for interval in self._intervals), max))
        found: list[int] = []
        at = bisect_right(self._intervals, end, key=lambda interval: interval[0]) - 1
        while at >= 0 and self._ends[at] >= start:
            interval = self._intervals[at]
            if interval[1] >= start and fits(*interval):
                found.append(at)
            at -= 1
        return found[::-1]
