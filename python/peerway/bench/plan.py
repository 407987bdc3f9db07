"""The rows of a run, and the positions of a row's pieces in the two buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from peerway.bench import sizes

#: The same as in the Rust program: the sizes of a quick run and of a full one.
FEW_SIZES = [256, 4 << 10, 64 << 10, 1 << 20, 100 << 20]
SIZES = [256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 10 << 20, 16 << 20, 100 << 20]
FEW_IOVS = [1]
IOVS = [1, 128]
PATHS = ["local-map", "local-cma", "local-ring", "tcp"]
#: The block list of a paged KV cache: 100,000 blocks of 4 KiB.
BLOCK_LIST = (4096, 100_000)

#: Transfers of more pieces use a block list, which is made for that.
MAX_VECTOR = 1024
#: The largest row of several pieces. Larger pieces perform like single ones.
MAX_SCATTERED = 512 << 20
MAX_PIECES = 1 << 22


@dataclass(frozen=True)
class Row:
    """One row to measure."""

    op: str
    size: int
    iovs: int
    #: Determines the order of the pieces and their contents.
    seed: int

    @property
    def total(self) -> int:
        return self.size * self.iovs

    @property
    def name(self) -> str:
        pieces = f"{self.iovs} x " if self.iovs > 1 else ""
        return f"{self.op} {pieces}{sizes.show(self.size)}"

    def order(self, side: str) -> numpy.ndarray:
        """Piece ``i`` of the transfer is block ``order[i]`` of this side's buffer.

        Each side has its own random order, so that no path profits from adjacent pieces. Both
        processes compute it from the seed.
        """
        salt = {"ours": 1, "theirs": 2}[side]
        return numpy.random.default_rng([self.seed, salt]).permutation(self.iovs).astype("uint32")


@dataclass(frozen=True)
class Plan:
    """The rows of every path, and the rows that were left out."""

    rows: list[Row]
    left_out: list[str]

    @property
    def largest(self) -> int:
        return max(row.total for row in self.rows)


def make(ops: Sequence[str], chosen_sizes: Sequence[int], chosen_iovs: Sequence[int], full: bool = False) -> Plan:
    """The rows that the flags select. The defaults are those of the Rust program."""
    rows: list[Row] = []
    left_out: list[str] = []
    all_sizes = chosen_sizes or (SIZES if full else FEW_SIZES)
    all_iovs = chosen_iovs or (IOVS if full else FEW_IOVS)
    shapes = [(size, iovs) for iovs in all_iovs for size in all_sizes]
    if full and not chosen_sizes and not chosen_iovs:
        shapes.append(BLOCK_LIST)
    for op in ops:
        for size, iovs in shapes:
            row = Row(op, size, iovs, seed=len(rows) + 1)
            if iovs > 1 and row.total > MAX_SCATTERED:
                left_out.append(f"{iovs} x {sizes.show(size)}")
            else:
                rows.append(row)
    left_out = list(dict.fromkeys(left_out))
    if not rows:
        raise ValueError(
            f"no row is left to measure: {', '.join(left_out)} exceeds {sizes.show(MAX_SCATTERED)} in total"
        )
    return Plan(rows, left_out)
