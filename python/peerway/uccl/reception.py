"""Sorts the endpoint's one queue of notifications into arrivals of peers and notes.

There is no separate thread. One waiting caller at a time takes the next notification and puts it
into its queue. The other callers wait for its results.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import peerway

from . import notices
from .log import logger
from .parts import Unfinished, is_part

#: Time limit for the greeting of a peer that connected. A peer without a greeting is not an
#: endpoint of this package, so its GPU is not known.
GRACE = 1.0
#: How often a waiting caller checks for peers without a greeting.
_LOOK = 0.25
#: The most notes, and bytes of notes, that are kept until the application fetches them.
_MAX_NOTES = 65_536
_MAX_NOTE_BYTES = 64 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A peer that connected to this endpoint."""

    peer: "peerway.Peer"
    gpu: int
    bdf: str
    way: str


class Reception:
    """Arrivals and notes, in the order in which they arrived."""

    def __init__(self, native: "peerway.Endpoint") -> None:
        self._native = native
        self._changed = threading.Condition()
        self._sorting = False
        self._closed = False
        self._passive = False
        self._arrivals: deque[Arrival] = deque()
        self._notes: deque[tuple[str, bytes]] = deque()
        self._note_bytes = 0
        self._unfinished = Unfinished()
        # Peers that opened a session but have not sent a greeting yet, with the time of the
        # session.
        self._silent: dict[str, tuple[peerway.Peer, float]] = {}
        # Peers that sent a greeting. The greeting, not the session, announces them.
        self._greeted: set[str] = set()

    def next_arrival(self, way: str, timeout: float | None) -> Arrival | None:
        """The next peer that connected this way; None after the timeout or after ``close``."""

        def take() -> Arrival | None:
            for arrival in self._arrivals:
                if arrival.way in (way, notices.EITHER):
                    self._arrivals.remove(arrival)
                    return arrival
            return None

        return self._wait(take, timeout, lambda: self._passive)

    def next_note(self) -> tuple[str, bytes] | None:
        """The oldest note, or None."""

        def take() -> tuple[str, bytes] | None:
            if not self._notes:
                return None
            note = self._notes.popleft()
            self._note_bytes -= len(note[1])
            return note

        return self._wait(take, 0.0)

    def has_greeted(self, peer: "peerway.Peer") -> bool:
        """Whether this peer has connected to this endpoint, too."""
        # Sort the notifications that have arrived, without taking any.
        self._wait(lambda: None, 0.0)
        return peer.incarnation in self._greeted

    def be_passive(self) -> None:
        """Drops the arrivals, now and in future. Peers can still connect."""
        with self._changed:
            self._passive = True
            self._arrivals.clear()
            self._changed.notify_all()

    @property
    def passive(self) -> bool:
        return self._passive

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait(
        self, take: Callable[[], T | None], timeout: float | None, over: Callable[[], bool] = lambda: False
    ) -> T | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._changed:
                found = take()
                if found is not None or self._closed or over():
                    return found
                left = _LOOK if deadline is None else deadline - time.monotonic()
                if self._sorting:
                    if left <= 0:
                        return None
                    self._changed.wait(min(left, _LOOK))
                    continue
                self._sorting = True
            try:
                more = self._sort(max(0.0, min(left, _LOOK)))
            finally:
                with self._changed:
                    self._sorting = False
                    self._changed.notify_all()
            if left <= 0 and not more:
                with self._changed:
                    return take()

    def _sort(self, timeout: float) -> bool:
        """Sorts one notification; False if none arrived."""
        self._meet()
        message = self._native.notification(timeout)
        if message is None:
            return False
        if notices.is_greeting(message.message):
            self._greeted_by(message.sender, message.message)
        elif is_part(message.message):
            self._part_of_note(message.sender, message.message)
        else:
            self._noted(message.message)
        return True

    def _meet(self) -> None:
        """Finds sessions that peers opened.

        Announces a peer whose time to send a greeting is over.
        """
        now = time.monotonic()
        while (peer := self._accepted()) is not None:
            if peer.incarnation not in self._greeted:
                self._silent[peer.incarnation] = (peer, now)
        for who, (peer, since) in list(self._silent.items()):
            if now - since >= GRACE:
                del self._silent[who]
                if peer.alive:
                    self._announce(Arrival(peer, -1, "", notices.NETWORK))

    def _accepted(self) -> "peerway.Peer | None":
        try:
            return self._native.accept(0.0)
        except peerway.AcceptTimeout:
            return None

    def _greeted_by(self, who: str, message: bytes) -> None:
        greeting = notices.parse_greeting(message)
        if greeting is None:
            logger.warning("dropped a malformed greeting from peer %s", who)
            return
        self._silent.pop(who, None)
        self._remember(who)
        peer = next((peer for peer in self._native.peers() if peer.incarnation == who), None)
        if peer is not None:
            self._announce(Arrival(peer, greeting.gpu, greeting.bdf, greeting.way))

    def _remember(self, who: str) -> None:
        if len(self._greeted) >= 4096:
            # Only peers that are alive can matter again.
            self._greeted &= {peer.incarnation for peer in self._native.peers()}
        self._greeted.add(who)

    def _announce(self, arrival: Arrival) -> None:
        with self._changed:
            if not self._passive:
                self._arrivals.append(arrival)

    def _part_of_note(self, who: str, message: bytes) -> None:
        try:
            note = self._unfinished.take(who, message)
        except ValueError as error:
            logger.error("dropped, from peer %s: %s", who, error)
            return
        if note is not None:
            self._noted(note)

    def _noted(self, message: bytes) -> None:
        note = notices.parse_note(message)
        with self._changed:
            if len(self._notes) >= _MAX_NOTES or self._note_bytes + len(note[1]) > _MAX_NOTE_BYTES:
                logger.error("dropped a notification: %d others wait for get_notifs(); call it", len(self._notes))
                return
            self._notes.append(note)
            self._note_bytes += len(note[1])
