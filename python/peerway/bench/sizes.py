"""Sizes with units: ``256``, ``4K``, ``100M``, with K = 1024."""

from __future__ import annotations

import re

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def parse(text: str) -> int:
    """Parses a size. Zero is not valid."""
    found = re.fullmatch(r"([0-9]{1,12})([KMGT]?)", text.strip(), re.IGNORECASE)
    size = int(found[1]) << _UNITS[found[2].upper()] if found else 0
    if not 0 < size < 1 << 50:
        raise ValueError(f"'{text}': expected a size such as 256, 4K or 100M")
    return size


def show(size: int) -> str:
    """A size in the largest unit that divides it, in the form that ``parse`` accepts."""
    for unit, shift in reversed(_UNITS.items()):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return str(size)
