"""Messages between endpoints: the greeting after a connect, and the messages of applications.

Both are notifications of the engine. A greeting starts with a reserved prefix, and the application
never sees it. An application's message is ``u32 0xDEADDEAD | u32 type | u32 name length | u32
message length | name | message``, little-endian.
"""

import json
import struct
from dataclasses import dataclass

from .metadata import MAX_GPUS

_PREFIX = b"\0peerway.uccl\0"
_HEAD = struct.Struct("<IIII")
_MAGIC = 0xDEAD_DEAD
#: The longest greeting. Greetings have a short, fixed form.
_MAX_GREETING = 512

#: How a peer connected. It selects the call that returns the peer: ``accept()``,
#: ``accept_local()``, or the first of both.
NETWORK, LOCAL, EITHER = "network", "local", "either"


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first message of an endpoint to the endpoint that it connected to."""

    gpu: int
    bdf: str
    way: str

    def to_bytes(self) -> bytes:
        return _PREFIX + json.dumps({"gpu": self.gpu, "bdf": self.bdf, "way": self.way}).encode()


def is_greeting(message: bytes) -> bool:
    """Whether a notification is a greeting, well-formed or not."""
    return message.startswith(_PREFIX)


def parse_greeting(message: bytes) -> Greeting | None:
    """The greeting in a notification; None when it is malformed."""
    if len(message) > _MAX_GREETING:
        return None
    try:
        said = json.loads(message[len(_PREFIX) :])
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    gpu, bdf, way = said.get("gpu"), said.get("bdf"), said.get("way")
    if type(gpu) is int and 0 <= gpu < MAX_GPUS and isinstance(bdf, str) and way in (NETWORK, LOCAL, EITHER):
        return Greeting(gpu, bdf, way)
    return None


def pack_note(name: str, message: bytes) -> bytes:
    """An application's message."""
    head = name.encode()
    return _HEAD.pack(_MAGIC, 0, len(head), len(message)) + head + message


def parse_note(message: bytes) -> tuple[str, bytes]:
    """``(name, message)``.

    A notification in another form has an empty name and is returned whole.
    """
    if len(message) >= _HEAD.size:
        magic, _type, head, body = _HEAD.unpack_from(message)
        if magic == _MAGIC and len(message) == _HEAD.size + head + body:
            end = _HEAD.size + head
            return message[_HEAD.size : end].decode(errors="replace"), message[end:]
    return "", message
