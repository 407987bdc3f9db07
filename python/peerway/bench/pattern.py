"""The contents of the buffers.

The row's seed and the position determine each word, so the receiver can check every piece alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy

from peerway.bench.plan import Row

#: The value of every byte of a destination before a row.
BLANK = 0xEE
#: Bytes handled at a time. A chunk stays in a core's cache, so temporary arrays need no new pages.
CHUNK = 256 << 10
_ODD = numpy.uint64(0x9E37_79B9_7F4A_7C15)


def fill(buffer: numpy.ndarray, row: Row) -> None:
    """Makes the buffer the source of a row."""
    blocks = buffer[: row.total].reshape(row.iovs, row.size)
    order = numpy.arange(row.iovs)
    for pieces, part in _chunks(row):
        blocks[pieces, part] = _content(row, order[pieces], part)


def blank(buffer: numpy.ndarray, row: Row) -> None:
    """Makes the buffer the destination of a row."""
    buffer[: row.total] = BLANK


def arrived(buffer: numpy.ndarray, row: Row, side: str) -> bool:
    """Whether this side's buffer contains every piece of the row that the other side sent."""
    blocks = buffer[: row.total].reshape(row.iovs, row.size)
    source, target = (row.order("ours"), row.order("theirs"))
    if side == "ours":
        source, target = target, source
    return all(
        numpy.array_equal(blocks[target[pieces], part], _content(row, source[pieces], part))
        for pieces, part in _chunks(row)
    )


def _chunks(row: Row) -> Iterator[tuple[slice, slice]]:
    """All of a row, in steps of several pieces or of a part of one piece."""
    at_once = max(1, CHUNK // row.size)
    for piece in range(0, row.iovs, at_once):
        for start in range(0, row.size, CHUNK):
            yield slice(piece, piece + at_once), slice(start, min(start + CHUNK, row.size))


def _content(row: Row, blocks: numpy.ndarray, part: slice) -> numpy.ndarray:
    """The contents of this part of these source blocks. A part starts at a word boundary."""
    words = numpy.arange(part.start // 8, -(-part.stop // 8), dtype="uint64")
    words = blocks.astype("uint64")[:, None] * numpy.uint64(-(-row.size // 8)) + words
    words += numpy.uint64(row.seed << 40)
    words *= _ODD
    # The low bytes of a product repeat early; the high ones do not.
    words ^= words >> numpy.uint64(29)
    return words.view("uint8")[:, : part.stop - part.start]
