"""What the buffers hold. Words follow from the row's seed and their place, so that whoever received them can
tell by itself whether every piece is where it belongs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy

from peerway.bench.plan import Row

#: What a destination is set to before a row.
BLANK = 0xEE
#: Bytes handled at a time: what stays in a core's cache needs no pages that the kernel must find first.
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
    """Whether this side's buffer holds every piece of the row that the other side sent."""
    blocks = buffer[: row.total].reshape(row.iovs, row.size)
    source, target = (row.order("ours"), row.order("theirs"))
    if side == "ours":
        source, target = target, source
    return all(
        numpy.array_equal(blocks[target[pieces], part], _content(row, source[pieces], part))
        for pieces, part in _chunks(row)
    )


def _chunks(row: Row) -> Iterator[tuple[slice, slice]]:
    """All of a row, as some pieces or a part of one at a time."""
    at_once = max(1, CHUNK // row.size)
    for piece in range(0, row.iovs, at_once):
        for start in range(0, row.size, CHUNK):
            yield slice(piece, piece + at_once), slice(start, min(start + CHUNK, row.size))


def _content(row: Row, blocks: numpy.ndarray, part: slice) -> numpy.ndarray:
    """What that part of these blocks of the source holds. A part starts with a whole word."""
    words = numpy.arange(part.start // 8, -(-part.stop // 8), dtype="uint64")
    words = blocks.astype("uint64")[:, None] * numpy.uint64(-(-row.size // 8)) + words
    words += numpy.uint64(row.seed << 40)
    words *= _ODD
    # The low bytes of a product repeat early; the high ones do not.
    words ^= words >> numpy.uint64(29)
    return words.view("uint8")[:, : part.stop - part.start]
