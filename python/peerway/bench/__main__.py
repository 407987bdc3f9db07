"""The run, from the flags to the last line."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from typing import IO


def main() -> int:
    """Runs the benchmark. Returns 1 when a measurement failed, 2 for invalid flags, otherwise 0."""
    try:
        import numpy  # noqa: F401
    except ImportError:
        return _fail("NumPy is not installed: pip install numpy")
    from peerway.bench import arguments, plan
    from peerway.bench.run import Failed, Run

    parser = arguments.parser()
    args = parser.parse_args()
    try:
        rows = plan.make(arguments.ops(args.op), args.sizes, args.iovs, args.full)
    except ValueError as error:
        parser.error(str(error))
    with ExitStack() as stack:
        try:
            file = _open(args, stack)
        except OSError as error:
            return _fail(f"cannot write {args.json}: {error.strerror}")
        run = Run(args, rows)
        try:
            report = run.measure()
        except KeyboardInterrupt:
            run.progress.clear()
            _fail("interrupted")
            return 130
        except Failed as error:
            run.progress.clear()
            return _fail(str(error))
        try:
            print(report.as_text(), end="", file=sys.stderr if file is sys.stdout else sys.stdout)
            if file is not None:
                print(json.dumps(report.as_json(), indent=2), file=file, flush=True)
        except OSError as error:
            return _fail(f"cannot write the result: {error.strerror}")
        return _fail("; ".join(run.failures)) if run.failures else 0


def _open(args: argparse.Namespace, stack: ExitStack) -> IO[str] | None:
    """The file for the JSON.

    It is opened at the start, so that a wrong name does not cost a run.
    """
    if args.json is None:
        return None
    return sys.stdout if args.json == "-" else stack.enter_context(open(args.json, "w", encoding="utf-8"))


def _fail(why: str) -> int:
    print(f"python -m peerway.bench: {' '.join(why.split())}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
