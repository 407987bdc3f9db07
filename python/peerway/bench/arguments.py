"""The command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from peerway.bench import plan, sizes

T = TypeVar("T")

_EXAMPLES = """\
examples:
  python -m peerway.bench                               a first look at all paths
  python -m peerway.bench --full                        every size
  python -m peerway.bench --paths tcp --sizes 256,1M    one path, two sizes
  python -m peerway.bench --sizes 4K --iovs 100000      a block list, scattered
  python -m peerway.bench --compare target/release/peerway
                                                        beside the Rust program

Each row is measured in alternation with its baseline, and its bytes are
compared at the end. The text under the table defines the columns.
"""


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def parser() -> argparse.ArgumentParser:
    result = _Parser(
        prog="python -m peerway.bench",
        description="Measure transfers from Python over every path that works here, against a plain copy.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, options in _FLAGS.items():
        result.add_argument(name, **options)
    compare = result.add_mutually_exclusive_group()
    for name, options in _COMPARE.items():
        compare.add_argument(name, **options)
    return result


def ops(op: str) -> list[str]:
    return ["write", "read"] if op == "both" else [op]


def rust_flags(args: argparse.Namespace) -> list[str]:
    """The flags that make the Rust program do the same run."""
    flags = ["--paths", ",".join(args.paths), "--op", args.op, "--seconds", f"{args.seconds:f}"]
    if args.sizes:
        flags += ["--sizes", ",".join(str(size) for size in args.sizes)]
    if args.iovs:
        flags += ["--iovs", ",".join(str(iovs) for iovs in args.iovs)]
    if args.full:
        flags.append("--full")
    return flags


def _list(one: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Parses values that are separated by commas, and drops duplicates."""

    def read(text: str) -> list[T]:
        try:
            return list(dict.fromkeys(one(part) for part in text.split(",")))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _path(text: str) -> str:
    if text not in plan.PATHS:
        raise ValueError(f"'{text}': expected {', '.join(plan.PATHS)}")
    return text


def _pieces(text: str) -> int:
    # int() also accepts "1_0" and blanks.
    count = int(text) if text.isdecimal() and len(text) < 10 else 0
    if not 1 <= count <= plan.MAX_PIECES:
        raise ValueError(f"'{text}': expected a number from 1 to {plan.MAX_PIECES}")
    return count


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    # More than an hour for one row is a mistake.
    if not 0.001 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"'{text}': expected seconds from 0.001 to 3600")
    return seconds


def _shown(chosen: Sequence[int]) -> str:
    return ",".join(sizes.show(size) for size in chosen)


_FLAGS: dict[str, dict[str, Any]] = {
    "--full": {"action": "store_true", "help": "measure every size, scattered pieces and a block list"},
    "--paths": {
        "type": _list(_path),
        "metavar": "PATH,...",
        "default": plan.PATHS,
        "help": f"paths to measure [{','.join(plan.PATHS)}]",
    },
    "--sizes": {
        "type": _list(sizes.parse),
        "metavar": "SIZE,...",
        "default": [],
        "help": f"sizes of one piece, such as 4K [{_shown(plan.FEW_SIZES)}; with --full {_shown(plan.SIZES)}]",
    },
    "--iovs": {
        "type": _list(_pieces),
        "metavar": "N,...",
        "default": [],
        "help": "pieces of a transfer [1; with --full 1,128, and 100000 of 4K]; more than 1024 go as a block list",
    },
    "--op": {"choices": ["write", "read", "both"], "default": "both", "help": "operations to measure [both]"},
    "--seconds": {
        "type": _seconds,
        "default": 0.5,
        "help": "seconds for each row [0.5]: 40 %% for the call, 30 %% for it prepared, 30 %% for the baseline",
    },
    "--json": {
        "metavar": "FILE",
        "help": "write the result to FILE as JSON; with -, to standard output, and the table to standard error",
    },
}

_COMPARE: dict[str, dict[str, Any]] = {
    "--compare": {
        "metavar": "PEERWAY",
        "help": "the Rust program whose rows to print for comparison [peerway on PATH, if any]",
    },
    "--no-compare": {"action": "store_true", "help": "do not run the Rust program"},
}
