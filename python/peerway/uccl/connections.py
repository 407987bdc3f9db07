"""Connections by number.

The engine has one session for each pair of endpoints. It carries transfers both ways, and a second
connect returns it. Here every connect and every accept returns a new number, so several numbers may
mean one session.
"""

import threading
from dataclasses import dataclass
from itertools import count

import peerway

from .engine import ENGINE_ERRORS
from .log import logger, reason
from .notices import Greeting
from .reception import Reception

#: Time limit for the greeting after a connect. The session is established by then, so only a
#: stopped peer needs longer.
_GREETING_TIME = 5.0


@dataclass(slots=True, eq=False)
class Connection:
    """The connection of one number."""

    id: int
    peer: "peerway.Peer"
    opened: bool
    #: The metadata it was made from, if any. A later connect by the same metadata finds it.
    metadata: bytes | None = None


class Connections:
    """The connections of an endpoint."""

    def __init__(self, native: "peerway.Endpoint", reception: Reception, gpu: int, bdf: str) -> None:
        self._native = native
        self._reception = reception
        self._gpu = gpu
        self._bdf = bdf
        self._lock = threading.Lock()
        self._ids = count()
        self._by_id: dict[int, Connection] = {}
        self._by_metadata: dict[bytes, Connection] = {}
        #: One lock per endpoint, so that only one thread connects to it at a time.
        self._opening: dict[bytes, threading.Lock] = {}

    def get(self, conn_id: int) -> Connection | None:
        return self._by_id.get(conn_id)

    def known(self, metadata: bytes) -> Connection | None:
        """The connection that was made from this metadata, while its peer is alive."""
        with self._lock:
            connection = self._by_metadata.get(metadata)
            return connection if connection is not None and connection.peer.alive else None

    def open_once(self, address: tuple[str, int], way: str, metadata: bytes) -> Connection:
        """Connects by metadata, or returns the connection that a thread already made."""
        with self._lock:
            turn = self._opening.setdefault(metadata, threading.Lock())
        with turn:
            return self.known(metadata) or self.open(address, way, metadata)

    def open(self, address: tuple[str, int], way: str, metadata: bytes | None = None) -> Connection:
        """Connects and sends the greeting."""
        greeting = Greeting(self._gpu, self._bdf, way).to_bytes()
        peer = self._native.connect(address)
        try:
            peer.notify(greeting).wait(_GREETING_TIME)
        except peerway.PeerGone:
            # The session belonged to an endpoint that was closing. Connect to its successor, if
            # any.
            peer = self._native.connect(address)
            peer.notify(greeting).wait(_GREETING_TIME)
        except ENGINE_ERRORS as error:
            # The connection works; only the peer's accept() does not learn the GPU of this
            # endpoint.
            logger.warning("connected to %s, but the greeting failed: %s", address, reason(error))
        return self._add(peer, True, metadata)

    def accept(self, peer: "peerway.Peer") -> Connection:
        """Adds a number for a peer that connected to this endpoint."""
        return self._add(peer, False, None)

    def remove(self, conn_id: int) -> bool:
        """Removes a number.

        The last number of a session closes it, unless the peer uses it, too.
        """
        with self._lock:
            connection = self._by_id.pop(conn_id, None)
            if connection is None:
                return False
            if connection.metadata is not None and self._by_metadata.get(connection.metadata) is connection:
                del self._by_metadata[connection.metadata]
            others = any(c.opened and c.peer.incarnation == connection.peer.incarnation for c in self._by_id.values())
        # If the peer also connected, the session may carry its transfers. It then stays open until
        # one of the endpoints closes.
        if connection.opened and not others and not self._reception.has_greeted(connection.peer):
            connection.peer.remove()
        return True

    def clear(self) -> None:
        with self._lock:
            self._by_id.clear()
            self._by_metadata.clear()

    def _add(self, peer: "peerway.Peer", opened: bool, metadata: bytes | None) -> Connection:
        with self._lock:
            connection = Connection(next(self._ids), peer, opened, metadata)
            self._by_id[connection.id] = connection
            if metadata is not None:
                self._by_metadata[metadata] = connection
            return connection
