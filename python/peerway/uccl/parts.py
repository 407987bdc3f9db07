"""Messages that are longer than the engine's notifications: sent as several, and put together again.

A part is a reserved prefix, the message's number at its sender and its whole length (``u64`` each, little-endian), and
bytes. The next part is sent when the last has arrived, so parts of one message come in order; those of several may be
mixed. ``libuccl_p2p`` (compat/uccl/cpp) does the same.
"""

import struct
from collections.abc import Iterator
from itertools import count

#: The longest message that is sent or put together.
LONGEST = 64 << 20
_LONGEST_WHOLE = 1 << 20
_PREFIX = b"\0peerway.uccl.part\0"
_HEAD = struct.Struct("<QQ")
_PART = 512 << 10
#: Messages that can be unfinished at once.
_MOST = 1024
_numbers = count(1)


def in_parts(note: bytes) -> Iterator[bytes]:
    """The notifications that carry a message: itself where it is short. Raises ``ValueError`` for one too long."""
    if len(note) > LONGEST:
        raise ValueError(f"a notification of {len(note)} bytes: the longest is {LONGEST}")
    if len(note) <= _LONGEST_WHOLE:
        yield note
        return
    head = _PREFIX + _HEAD.pack(next(_numbers), len(note))
    for at in range(0, len(note), _PART):
        yield head + note[at : at + _PART]


def is_part(message: bytes) -> bool:
    """Whether a notification is a part, well-formed or not."""
    return message.startswith(_PREFIX)


class Unfinished:
    """Messages of which parts are missing."""

    def __init__(self) -> None:
        self._notes: dict[tuple[str, int], bytearray] = {}
        self._bytes = 0

    def take(self, who: str, message: bytes) -> bytes | None:
        """Takes a part; the message, where it was the last one. Raises ``ValueError`` for what had to be dropped."""
        start = len(_PREFIX) + _HEAD.size
        number, whole = _HEAD.unpack_from(message, len(_PREFIX)) if len(message) > start else (0, 0)
        if not 0 < whole <= LONGEST:
            raise ValueError("a malformed part of a notification")
        added = len(message) - start
        new = (who, number) not in self._notes
        if self._bytes + added > LONGEST or (new and len(self._notes) >= _MOST):
            # Senders that were lost never finish theirs.
            lost, self._bytes = len(self._notes), 0
            self._notes.clear()
            raise ValueError(f"{lost} unfinished notifications and a part of one")
        note = self._notes.setdefault((who, number), bytearray())
        note += message[start:]
        self._bytes += added
        if len(note) < whole:
            return None
        del self._notes[who, number]
        self._bytes -= len(note)
        if len(note) > whole:
            raise ValueError("a notification with more bytes than it was said to have")
        return bytes(note)
