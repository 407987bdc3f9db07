"""A run over all paths."""

from __future__ import annotations

import argparse
import sys

import numpy

from peerway import PeerwayError
from peerway.bench import arguments, awaited, calls, compare, sizes
from peerway.bench.plan import MAX_SCATTERED, Plan
from peerway.bench.report import Report
from peerway.bench.second import Lost, Refused, Second
from peerway.bench.session import Mismatch, Session
from peerway.bench.timing import clock_cost

#: A run needs two buffers of the largest row in this process and one in the second process. A
#: fourth share of the free memory stays for other programs.
SHARE = 4

#: The errors of one row or one path, after which the run continues with the others.
_TROUBLE = (PeerwayError, Mismatch, Refused, MemoryError)


class Failed(Exception):
    """The run could not measure anything. The message is the reason."""


class Run:
    """One run, with its settings and its failures."""

    def __init__(self, args: argparse.Namespace, plan: Plan) -> None:
        self._args = args
        self._plan = plan
        self.progress = Progress(len(args.paths) * (len(plan.rows) + 1))
        #: Rows and paths that failed. The result is printed, but the run counts as failed.
        self.failures: list[str] = []

    def measure(self) -> Report:
        args, plan = self._args, self._plan
        _ensure_room(plan.largest)
        report = Report(args.seconds, clock_cost())
        if plan.left_out:
            limit = sizes.show(MAX_SCATTERED)
            report.notes.append(f"not measured, because larger than {limit} in total: {', '.join(plan.left_out)}")
        scratch = numpy.ones(plan.largest, "uint8")
        try:
            with Second() as other:
                for pin in args.paths:
                    self._path(report, other, pin, scratch)
        except Lost as error:
            raise Failed(str(error)) from error
        if not report.lines:
            raise Failed("; ".join(self.failures or report.notes))
        try:
            report.calls = calls.measure(args.seconds)
        except _TROUBLE as error:
            self.failures.append(f"write inside one process: {error}")
        self._compare(report)
        self.progress.clear()
        return report

    def _path(self, report: Report, other: Second, pin: str, scratch: numpy.ndarray) -> None:
        self.progress.show(f"opening {pin}")
        # The awaited transfers need room, too, even if the rows are smaller.
        nbytes = max(self._plan.largest, awaited.SIZE * awaited.TRANSFERS)
        try:
            session = Session(other, pin, nbytes, report.clock_cost)
        except _TROUBLE as error:
            # A path that this machine does not support is not a failure.
            report.notes.append(f"{pin}: not measured: {error}")
            self.progress.skip(len(self._plan.rows) + 1)
            return
        try:
            for row in self._plan.rows:
                self.progress.step(f"{pin} {row.name}")
                try:
                    report.lines.append(session.measure(row, scratch, self._args.seconds))
                except _TROUBLE as error:
                    self.failures.append(f"{pin} {row.name}: {error}")
            self.progress.step(f"{pin} asyncio and posting")
            try:
                report.awaited.append(session.await_many())
                posting = session.posting()
                if posting is not None:
                    report.postings.append(posting)
            except _TROUBLE as error:
                self.failures.append(f"{pin} asyncio and posting: {error}")
        finally:
            session.close()

    def _compare(self, report: Report) -> None:
        """Adds the Rust program's rows. Without ``--compare``, its failure is only a note."""
        program = self._args.compare or compare.find()
        if self._args.no_compare or program is None:
            return
        self.progress.show(f"{program} bench")
        try:
            report.rust = compare.rows(program, arguments.rust_flags(self._args))
        except compare.NoRows as error:
            if self._args.compare:
                self.failures.append(str(error))
            else:
                report.notes.append(f"not compared: {error}")


class Progress:
    """A progress line on standard error, if that is a terminal."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done = steps, 0
        self._wanted = sys.stderr.isatty()

    def step(self, what: str) -> None:
        self._done += 1
        self.show(what)

    def skip(self, steps: int) -> None:
        self._done += steps

    def show(self, what: str) -> None:
        if self._wanted:
            print(f"\r\x1b[K{self._done}/{self._steps} {what}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._wanted:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _ensure_room(nbytes: int) -> None:
    """Refuses buffers that would make the system swap or kill this process."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return
    if nbytes > free // SHARE:
        what = f"a buffer of {sizes.show(nbytes)} is more than a {SHARE}th of the free memory"
        raise Failed(f"{what}; choose smaller --sizes")
