"""The keys of registrations, by the rules of a cache of memory registrations.

A request inside a live entry shares the keys of the smallest such entry. Any other request gets new
keys. An entry lives while a registration uses it. The keys are only names: each registration is a
separate region in the engine, so ending one never leaves the memory of another accessible.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from itertools import count

#: Keys per entry: the most network cards that could be used at once.
SLOTS = 4


@dataclass(slots=True)
class Entry:
    """One range with its keys."""

    addr: int
    size: int
    serial: int
    users: int = 0
    lkeys: list[int] = field(init=False)
    rkeys: list[int] = field(init=False)

    def __post_init__(self) -> None:
        # Each entry has sixteen numbers, never zero. No key is both an lkey and an rkey.
        base = (0x1000 + 16 * self.serial) & 0xFFFF_FFF0
        self.lkeys = [base + slot for slot in range(SLOTS)]
        self.rkeys = [base + 8 + slot for slot in range(SLOTS)]


class KeyCache:
    """Entries by range. The caller holds a lock."""

    def __init__(self) -> None:
        self._serials = count()
        self._exact: dict[tuple[int, int], Entry] = {}
        # By the bit length of the size, sorted by address. A range of n bytes can only lie in
        # entries of its own class or a larger one. In each class, only entries that start close
        # enough before the range can contain it.
        self._classes: dict[int, list[tuple[int, int]]] = {}

    def acquire(self, addr: int, size: int) -> Entry:
        """The smallest entry that contains the range; a new one if there is none."""
        entry = self._exact.get((addr, size)) or self._containing(addr, size)
        if entry is None:
            entry = Entry(addr, size, next(self._serials))
            self._exact[addr, size] = entry
            insort(self._classes.setdefault(size.bit_length(), []), (addr, size))
        entry.users += 1
        return entry

    def release(self, entry: Entry) -> None:
        """Removes one user. The last user removes the entry."""
        entry.users -= 1
        if entry.users:
            return
        del self._exact[entry.addr, entry.size]
        ranges = self._classes[entry.size.bit_length()]
        del ranges[bisect_left(ranges, (entry.addr, entry.size))]
        if not ranges:
            del self._classes[entry.size.bit_length()]

    def __len__(self) -> int:
        return len(self._exact)

    def _containing(self, addr: int, size: int) -> Entry | None:
        for bits in sorted(self._classes):
            if bits < size.bit_length():
                continue
            ranges = self._classes[bits]
            first = bisect_left(ranges, (addr + size - (1 << bits), 0))
            last = bisect_right(ranges, (addr, 1 << bits))
            fits = [(n, at) for at, n in ranges[first:last] if at + n >= addr + size]
            if fits:
                n, at = min(fits)
                return self._exact[at, n]
        return None
