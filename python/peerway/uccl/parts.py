"""Splits messages that exceed the size of a notification into parts, and reassembles them.

A part is a reserved prefix, the sender's number of the message and the length of the whole message
(``u64`` each, little-endian), and bytes. The sender sends a part after the previous one has
arrived, so the parts of one message arrive in order. Parts of several messages may be interleaved.
``libuccl_p2p`` (compat/uccl/cpp) uses the same format.
"""

import struct
from collections.abc import Iterator
from itertools import count

#: The longest message that is sent or reassembled.
LONGEST = 64 << 20
_LONGEST_WHOLE = 1 << 20
_PREFIX = b"\0peerway.uccl.part\0"
_HEAD = struct.Struct("<QQ")
_PART = 512 << 10
#: The most messages that can be incomplete at the same time.
_MOST = 1024
_numbers = count(1)


def in_parts(note: bytes) -> Iterator[bytes]:
    """The notifications that carry a message. A short message is one notification.

    Raises ``ValueError`` for a message that is too long.
    """
    if len(note) > LONGEST:
        raise ValueError(f"a notification of {len(note)} bytes is too long; the limit is {LONGEST}")
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
    """Messages that are not complete yet."""

    def __init__(self) -> None:
        self._notes: dict[tuple[str, int], bytearray] = {}
        self._bytes = 0

    def take(self, who: str, message: bytes) -> bytes | None:
        """Adds a part. Returns the message after its last part, otherwise None.

        Raises ``ValueError`` when it drops a part or a message.
        """
        start = len(_PREFIX) + _HEAD.size
        number, whole = _HEAD.unpack_from(message, len(_PREFIX)) if len(message) > start else (0, 0)
        if not 0 < whole <= LONGEST:
            raise ValueError("a malformed part of a notification")
        added = len(message) - start
        new = (who, number) not in self._notes
        if self._bytes + added > LONGEST or (new and len(self._notes) >= _MOST):
            # Senders that are gone never complete their messages.
            lost, self._bytes = len(self._notes), 0
            self._notes.clear()
            raise ValueError(f"{lost} unfinished notifications and this part, because the limit is reached")
        note = self._notes.setdefault((who, number), bytearray())
        note += message[start:]
        self._bytes += added
        if len(note) < whole:
            return None
        del self._notes[who, number]
        self._bytes -= len(note)
        if len(note) > whole:
            raise ValueError("a notification with more bytes than its header announced")
        return bytes(note)
