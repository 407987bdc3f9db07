"""The result: a JSON object for programs, and a table with definitions for people."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from peerway import __version__
from peerway.bench import sizes
from peerway.bench.awaited import Awaited
from peerway.bench.calls import Calls
from peerway.bench.compare import Key
from peerway.bench.session import Baseline, Line, Posting

#: The columns of a window.
WIDTH = 80


@dataclass
class Report:
    """The result of a run."""

    seconds: float
    clock_cost: int
    lines: list[Line] = field(default_factory=list)
    postings: list[Posting] = field(default_factory=list)
    awaited: list[Awaited] = field(default_factory=list)
    calls: Calls | None = None
    #: Rows of the Rust program; None when it was not run.
    rust: dict[Key, dict[str, Any]] | None = None
    #: Paths that were not measured, or only in part, with the reason; other remarks.
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        rows = []
        for line in self.lines:
            row = asdict(line)
            if self.rust is not None:
                rust = self._rust(line)
                row["rust_gbps"] = rust and rust["gbps"]
                row["rust_p50_us"] = rust and rust["p50_us"]
            rows.append(row)
        return {
            "version": __version__,
            "seconds": self.seconds,
            "clock_cost_ns": self.clock_cost,
            "rows": rows,
            "call": self.calls and asdict(self.calls) | {"overhead_ns": self.calls.overhead_ns},
            "posting": [asdict(posting) for posting in self.postings],
            "asyncio": [asdict(one) for one in self.awaited],
            "notes": self.notes,
        }

    def as_text(self) -> str:
        parts = [self._head(), *_table(*self._rows(), words=2), "", *self._legend()]
        if self.calls:
            parts += ["", *self._call(self.calls)]
        if self.postings:
            parts += ["", *self._postings()]
        if self.awaited:
            parts += ["", *self._awaited()]
        if self.notes:
            parts += ["", *(line for note in self.notes for line in _wrap(note))]
        return "\n".join(parts) + "\n"

    def _head(self) -> str:
        text = (
            f"peerway {__version__} bench from Python: one transfer outstanding, {self.seconds:g} s a row, "
            "in alternation with its baseline; GB/s = bytes / p50 time of the call; GB = 10^9 bytes, K = 1024"
        )
        return "\n".join([*_wrap(text), ""])

    def _rust(self, line: Line) -> dict[str, Any] | None:
        return (self.rust or {}).get((line.path, line.op, line.size, line.iovs))

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        header = ["path", "op", "size", "GB/s", "p50 µs", "p99 µs", "prep µs"]
        header += ["ratio (low-high)"]
        if self.rust is not None:
            header += ["Rust µs"]
        rows: list[list[str]] = []
        group: tuple[str, str] | None = None
        for line in self.lines:
            if group not in (None, (line.path, line.op)):
                rows.append([""] * len(header))
            group = line.path, line.op
            shape = sizes.show(line.size) if line.iovs == 1 else f"{line.iovs}x{sizes.show(line.size)}"
            cells = [line.path, line.op, shape]
            cells += [figure(value) for value in (line.gbps, line.p50_us, line.p99_us, line.prepared_p50_us)]
            cells.append("-" if line.baseline is None else _ratio(line.baseline))
            if self.rust is not None:
                rust = self._rust(line)
                cells.append(figure(rust["p50_us"]) if rust else "-")
            rows.append(cells)
        return header, rows

    def _legend(self) -> list[str]:
        lines = [
            *_explain(
                "call",
                "peer.write(local, remote) or peer.read, of two slices or two lists of slices; for more "
                "than 1024 pieces, of two block lists",
            ),
            *_explain("prep", "median of prepared.run() of the same transfer"),
            *_explain(
                "ratio",
                "GB/s of the row divided by those of numpy.copyto of as many bytes by one thread inside "
                "this process: the median of five rounds, the lowest and the highest; for small sizes "
                "numpy.copyto takes as long as a NumPy call; none for tcp",
            ),
            *_explain(
                "memory", "local: a NumPy array; remote: peerway.empty for local-map, a NumPy array for other paths"
            ),
            *_explain(
                "verified",
                f"the bytes of every row; times exclude the cost of reading the clock ({self.clock_cost} ns)",
            ),
        ]
        if self.rust is not None:
            lines += _explain(
                "Rust", "median time of peerway bench with the same flags, run afterwards; its transfers are prepared"
            )
        return lines

    def _call(self, calls: Calls) -> list[str]:
        return [
            *_wrap(
                f"a write of {calls.size} bytes inside this process: {calls.write_ns:.0f} ns a call, "
                f"prepared {calls.prepared_ns:.0f} ns; an empty Python call {calls.empty_ns:.0f} ns"
            ),
            *_wrap(f"a write costs {calls.overhead_ns:.0f} ns more than an empty call, including the copy"),
        ]

    def _postings(self) -> list[str]:
        first = self.postings[0]
        header = ["path", "blocks µs", "prepare µs", "post µs"]
        rows = [[p.path, *(figure(value) for value in (p.blocks_us, p.prepare_us, p.post_us))] for p in self.postings]
        return [
            *_table(header, rows, words=1),
            *_wrap(
                f"medians for {first.iovs} x {sizes.show(first.size)}: making block lists of two NumPy index arrays, "
                "checking them, and the time inside the posting call"
            ),
        ]

    def _awaited(self) -> list[str]:
        first = self.awaited[0]
        header = ["path", "asyncio ms", "threads before", "during"]
        rows = [[c.path, figure(c.total_ms), str(c.threads_before), str(c.threads_during)] for c in self.awaited]
        return [
            *_table(header, rows, words=1),
            *_wrap(
                f"{first.transfers} writes of {sizes.show(first.size)}, all awaited at once on one event loop: "
                "the total time, and the threads of this process"
            ),
        ]


def _ratio(baseline: Baseline) -> str:
    """The ratio with its spread. A ratio below 0.01 has no digits to show a spread in."""
    if baseline.high < 0.01:
        return "<0.01"
    ratio, low, high = (f"{value:.2f}"[:4].rstrip(".") for value in (baseline.ratio, baseline.low, baseline.high))
    return f"{ratio} ({low}-{high})"


def _wrap(text: str) -> list[str]:
    # A path or a size is not broken at its hyphen.
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False)


def _explain(term: str, text: str) -> list[str]:
    indent = " " * 10
    head = f"{term + ':':<10}"
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)


def figure(value: float) -> str:
    """A number with about three significant digits."""
    for least, digits in ((99.95, 0), (9.995, 1), (0.995, 2), (0.00995, 3)):
        if value >= least:
            return f"{value:.{digits}f}"
    return f"{value:.4f}" if value else "0"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """The lines of a table. All columns after the first ``words`` are numbers."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[:words] = [cell.ljust(width) for cell, width in zip(row[:words], widths, strict=False)]
        return " ".join(cells).rstrip()

    return [line(row) for row in [header, *rows]]
