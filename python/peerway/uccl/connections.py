"""Connections by number.

The engine has one session for each pair of endpoints, which carries transfers both ways; connecting again finds
it. Here every connect and every accept gives a number of its own, so several numbers may stand for one session.
"""

import threading
from dataclasses import dataclass
from itertools import count

import peerway

from .engine import ENGINE_ERRORS
from .log import logger, reason
from .notices import Greeting
from .reception import Reception

#: How long the greeting after a connect may take. The session stands by then: only a stopped peer needs longer.
_GREETING_TIME = 5.0


@dataclass(slots=True, eq=False)
class Connection:
    """One number's meaning."""

    id: int
    peer: "peerway.Peer"
    opened: bool
    #: The metadata it was made from, by which it is found again.
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
        #: Whose turn it is to connect to an endpoint.
        self._opening: dict[bytes, threading.Lock] = {}

    def get(self, conn_id: int) -> Connection | None:
        return self._by_id.get(conn_id)

    def known(self, metadata: bytes) -> Connection | None:
        """The connection that was made from this metadata, while its peer lives."""
        with self._lock:
            connection = self._by_metadata.get(metadata)
            return connection if connection is not None and connection.peer.alive else None

    def open_once(self, address: tuple[str, int], way: str, metadata: bytes) -> Connection:
        """Connects by metadata, unless that was done before: also by another thread, at this moment."""
        with self._lock:
            turn = self._opening.setdefault(metadata, threading.Lock())
        with turn:
            return self.known(metadata) or self.open(address, way, metadata)

    def open(self, address: tuple[str, int], way: str, metadata: bytes | None = None) -> Connection:
        """Connects and greets."""
        greeting = Greeting(self._gpu, self._bdf, way).to_bytes()
        peer = self._native.connect(address)
        try:
            peer.notify(greeting).wait(_GREETING_TIME)
        except peerway.PeerGone:
            # The session was the last one's, on its way out: there is another now, or nobody.
            peer = self._native.connect(address)
            peer.notify(greeting).wait(_GREETING_TIME)
        except ENGINE_ERRORS as error:
            # It is connected all the same; only its accept() does not learn our GPU.
            logger.warning("%s was connected to, but not greeted: %s", address, reason(error))
        return self._add(peer, True, metadata)

    def accept(self, peer: "peerway.Peer") -> Connection:
        """A number for a peer that connected to us."""
        return self._add(peer, False, None)

    def remove(self, conn_id: int) -> bool:
        """Forgets a number. With the last of ours, a session that only we use is closed."""
        with self._lock:
            connection = self._by_id.pop(conn_id, None)
            if connection is None:
                return False
            if connection.metadata is not None and self._by_metadata.get(connection.metadata) is connection:
                del self._by_metadata[connection.metadata]
            others = any(c.opened and c.peer.incarnation == connection.peer.incarnation for c in self._by_id.values())
        # A session that the peer connected by too may carry its transfers: it stays until either endpoint goes.
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
