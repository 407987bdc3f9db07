"""The serving side of the broker: it returns the endpoints on this host.

The protocol is lines of JSON, over TCP for other hosts and over a Unix socket for processes of this
host. The server sends ``{"broker": "peerway-uccl", "version": 1}`` first. Then a client may send

* ``{"op": "register", "id": ..., "gpu": 0, "bdf": ..., "ips": [...], "port": ..., "since": ...}``,
  over the Unix socket only. The registration ends with the connection or with the process that
  opened it,
* ``{"op": "unregister", "id": ...}``,
* ``{"op": "find", "gpu": 0 or null, "bdf": ... or null, "not": id or null, "wait": seconds, "at":
  address}``, answered by ``{"ip": ..., "port": ...}`` or, after that time, by ``{"error": ...}``.
  ``at`` is the address that the client asks for; only clients of the Unix socket send it.

The kernel tells the user of a process at the other end of the Unix socket. The server closes the
connection of any other user before it takes a place.

The process that registers a GPU first keeps its place: while it lives, the server returns its
endpoint, the newest one if it has several. A process that is dead has no place.

One thread serves all clients and never waits for a single one. The server closes a connection when
a line is too long, is not JSON or is not one of these requests, and when the client is silent for
too long.
"""

import contextlib
import errno
import io
import ipaddress
import json
import os
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from .log import logger
from .metadata import MAX_GPUS

BANNER = {"broker": "peerway-uccl", "version": 1}
#: The longest line: a registration with sixteen IPv6 addresses fits.
MAX_LINE = 2048
#: Seconds for which a client may be connected without a request.
SILENCE = 5.0
#: Seconds for which a query may wait for its answer.
MAX_WAIT = 60.0
#: The most clients without a registration. It bounds the resources that unknown clients can use.
_MAX_STRANGERS = 512
#: The most endpoints that one connection, and so one process, can register.
_MAX_ENTRIES = 1024
#: Seconds for which a listener is not polled when accept fails, for example for lack of file
#: descriptors.
_REST = 0.1
#: Seconds for which a server that follows another one collects registrations before it answers.
#: Otherwise the first owner of a GPU could lose its place to a process that registers again sooner.
_SETTLE = 0.25
#: Seconds between two warnings that no connection can be accepted.
_WARN_EVERY = 10.0
#: Errors of accept(2) that concern only the connection, not the listener.
_OF_CONNECTION = frozenset(
    {
        errno.EAGAIN,
        errno.EINTR,
        errno.ECONNABORTED,
        errno.EPROTO,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENONET,
        errno.ENOPROTOOPT,
    }
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One endpoint."""

    id: str
    gpu: int
    bdf: str
    ips: tuple[str, ...]
    port: int
    #: When the endpoint was made, in nanoseconds of the clock that all processes of a host share.
    #: It decides which owner of a GPU was first, also after another process has become the server.
    since: int = field(default_factory=time.monotonic_ns)

    def to_line(self) -> bytes:
        said = {
            "op": "register",
            "id": self.id,
            "gpu": self.gpu,
            "bdf": self.bdf,
            "ips": self.ips,
            "port": self.port,
            "since": self.since,
        }
        return to_line(said)

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> "Entry":
        """Parses a registration. Raises ``ValueError`` if it is not valid."""
        ips = said.get("ips")
        if not isinstance(ips, list) or not 1 <= len(ips) <= 16 or not all(isinstance(ip, str) for ip in ips):
            raise ValueError("ips must be a list of 1 to 16 addresses")
        return cls(
            short_text(said, "id"),
            number(said, "gpu", 0, MAX_GPUS - 1),
            short_text(said, "bdf"),
            tuple(str(ipaddress.ip_address(ip)) for ip in ips),
            number(said, "port", 1, 65535),
            number(said, "since", 0, 2**63 - 1),
        )


@dataclass(slots=True)
class Query:
    """A client's search for an endpoint."""

    gpu: int | None
    bdf: str | None
    but: str | None
    until: float

    def fits(self, entry: Entry) -> bool:
        gpu_fits = self.gpu is None or self.gpu == entry.gpu
        return gpu_fits and (self.bdf is None or self.bdf == entry.bdf) and self.but != entry.id


@dataclass(slots=True, eq=False)
class Client:
    """One connection."""

    sock: socket.socket
    address: str
    since: float
    #: The address by which the client reached this host.
    here: str
    #: The process of a client on the Unix socket, which belongs to our user. 0 if it is not visible
    #: here, None for a client over TCP.
    pid: int | None
    deadline: float
    #: Becomes readable when the process of a registered client ends.
    process: io.FileIO | None = None
    got: bytearray = field(default_factory=bytearray)
    entries: set[str] = field(default_factory=set)
    query: Query | None = None


class Server:
    """Serves until this process has no endpoint."""

    def __init__(
        self,
        listener: socket.socket,
        local: socket.socket,
        wake: socket.socket,
        ours: Callable[[], Iterable[Entry]],
        track: Callable[[Any], Any],
        drop: Callable[[Any], None],
        settle: bool = False,
    ) -> None:
        self._port: int = listener.getsockname()[1]
        self._local = local
        #: Until then, queries wait for the registrations of processes that had another server.
        self._settles_at = time.monotonic() + _SETTLE if settle else None
        self._wake = wake
        self._ours = ours
        self._track = track
        self._drop = drop
        self._order = count()
        # By id: the order of registration, the endpoint, and its client (None for this process).
        self._entries: dict[str, tuple[int, Entry, Client | None]] = {}
        self._clients: set[Client] = set()
        self._listeners: dict[str, socket.socket] = {"127.0.0.1": listener}
        # Listeners that are not polled for a while, with the time until then.
        self._resting: dict[socket.socket, float] = {}
        # A warning that accept fails was logged, and no accept has succeeded since.
        self._is_short = False
        self._warned_at = float("-inf")
        # When the last warning about another user was logged.
        self._refused_at = float("-inf")
        # poll(2) instead of epoll(7), so that a forked child shares no kernel object with this
        # process.
        self._selector = selectors.PollSelector()

    def run(self) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listeners["127.0.0.1"], selectors.EVENT_READ)
        self._selector.register(self._local, selectors.EVENT_READ)
        try:
            while self._take_ours():
                for key, _events in self._selector.select(self._patience()):
                    if key.data is not None:
                        if key.fileobj is key.data.process:
                            self._dismiss(key.data)
                        else:
                            self._hear(key.data)
                    elif key.fileobj is self._wake:
                        with contextlib.suppress(BlockingIOError):
                            self._wake.recv(4096)
                    else:
                        self._admit(key.fileobj)  # type: ignore[arg-type]
                self._expire()
        finally:
            for client in list(self._clients):
                self._dismiss(client)
            for listener in self._listeners.values():
                self._drop(listener)
            self._drop(self._local)
            self._selector.close()

    def _take_ours(self) -> bool:
        """Updates the endpoints of this process. False if there are none."""
        ours = {entry.id: entry for entry in self._ours()}
        for id, (_order, _entry, owner) in list(self._entries.items()):
            if owner is None and id not in ours:
                del self._entries[id]
        for entry in ours.values():
            if entry.id not in self._entries:
                self._enter(entry, None)
        return bool(ours)

    def _enter(self, entry: Entry, owner: Client | None) -> None:
        self._entries[entry.id] = (next(self._order), entry, owner)
        for ip in entry.ips:
            self._listen(ip)
        for client in list(self._clients):
            self._try_to_answer(client)

    def _listen(self, ip: str) -> None:
        """Listens on an endpoint's address, so that peers can reach the broker there, too."""
        if ip in self._listeners or ipaddress.ip_address(ip).is_loopback:
            return
        try:
            listener = self._track(listen(ip, self._port))
        except OSError as error:
            # The advertised address is not one of this host. Another host may forward it to this
            # one.
            logger.debug("the broker does not listen on %s: %s", ip, error)
            return
        self._listeners[ip] = listener
        self._selector.register(listener, selectors.EVENT_READ)

    def _admit(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except OSError as error:
            if error.errno not in _OF_CONNECTION:
                self._rest(listener, error)
            return
        if self._is_short:
            self._is_short = False
            logger.info("the broker on port %d accepts connections again", self._port)
        here, pid = "", None
        if listener is self._local:
            pid, uid = credentials(sock)
            if uid != os.geteuid():
                self._refuse_user(sock, uid)
                return
            name = f"process {pid}"
        else:
            name, here = address[0], sock.getsockname()[0].partition("%")[0]
        self._make_room()
        self._track(sock)
        sock.setblocking(False)
        now = time.monotonic()
        client = Client(sock, name, now, here, pid, now + SILENCE)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, client)
        self._say(client, BANNER)

    def _refuse_user(self, sock: socket.socket, uid: int) -> None:
        sock.close()
        now = time.monotonic()
        if now >= self._refused_at + _WARN_EVERY:
            self._refused_at = now
            logger.warning("the broker on port %d refused a process of user %d", self._port, uid)

    def _rest(self, listener: socket.socket, error: OSError) -> None:
        """Stops polling a listener for a while.

        The pending connection would wake the thread at once.
        """
        now = time.monotonic()
        self._selector.unregister(listener)
        self._resting[listener] = now + _REST
        if not self._is_short and now >= self._warned_at + _WARN_EVERY:
            self._is_short = True
            self._warned_at = now
            logger.warning("the broker on port %d cannot accept connections and retries: %s", self._port, error)

    def _make_room(self) -> None:
        """If too many clients are unregistered, closes the oldest one of the busiest address."""
        strangers = [client for client in self._clients if not client.entries]
        if len(strangers) < _MAX_STRANGERS:
            return
        # Close a client with a pending query only if all of them have one.
        candidates = [client for client in strangers if client.query is None] or strangers
        held = Counter(client.address for client in candidates)
        self._dismiss(max(candidates, key=lambda client: (held[client.address], -client.since)))

    def _hear(self, client: Client) -> None:
        if client not in self._clients:
            return
        try:
            data = client.sock.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._dismiss(client)
            return
        client.got += data
        while client in self._clients and (end := client.got.find(b"\n")) >= 0:
            line = bytes(client.got[:end])
            del client.got[: end + 1]
            try:
                self._do(client, from_line(line))
            except Exception as error:  # an invalid request must not affect other clients
                logger.debug("the broker closed the connection of %s: %s", client.address, error)
                self._dismiss(client)
        if len(client.got) > MAX_LINE:
            self._dismiss(client)

    def _do(self, client: Client, said: dict[str, Any]) -> None:
        op = said.get("op")
        if op == "register" and client.pid is not None:
            entry = Entry.from_json(said)
            taken = self._entries.get(entry.id)
            if len(client.entries) >= _MAX_ENTRIES or (taken is not None and taken[2] is not client):
                raise ValueError(f"id {entry.id} belongs to another client, or the client has too many endpoints")
            self._watch(client)
            client.entries.add(entry.id)
            self._enter(entry, client)
        elif op == "unregister" and (id := short_text(said, "id")) in client.entries:
            client.entries.discard(id)
            del self._entries[id]
            client.deadline = time.monotonic() + SILENCE
        elif op == "find":
            self._find(client, said)
        else:
            raise ValueError(f"operation {op!r} is not allowed for this client")

    def _watch(self, client: Client) -> None:
        """Watches the process of a client.

        The connection alone does not prove that the process lives: a child may have inherited it.
        """
        if client.process is None and client.pid:
            # The kernel refuses if the process has ended. Then the connection ends, too, or a child
            # of that process holds it.
            try:
                client.process = self._track(io.FileIO(os.pidfd_open(client.pid)))
            except ProcessLookupError:
                raise ValueError(f"process {client.pid} has ended") from None
            except OSError as error:
                logger.debug("cannot watch process %d: %s", client.pid, error)
                return
            self._selector.register(client.process, selectors.EVENT_READ, client)

    def _find(self, client: Client, said: dict[str, Any]) -> None:
        wait = said.get("wait")
        if not isinstance(wait, (int, float)) or not wait >= 0:  # also refuses NaN
            raise ValueError("wait must be a number of seconds")
        query = Query(
            None if said.get("gpu") is None else number(said, "gpu", 0, MAX_GPUS - 1),
            None if said.get("bdf") is None else short_text(said, "bdf"),
            None if said.get("not") is None else short_text(said, "not"),
            time.monotonic() + min(wait, MAX_WAIT),
        )
        if client.pid is not None:
            client.here = short_text(said, "at")
        client.query = query
        self._try_to_answer(client)

    def _try_to_answer(self, client: Client) -> None:
        """Answers the query of a client, if it has one and an endpoint fits.

        The process that was first keeps its place, so the newest endpoint of that process is found.
        """
        query = client.query
        if query is None or self._settles_at is not None:
            return
        fits = [(order, entry, owner) for order, entry, owner in self._entries.values() if query.fits(entry)]
        if fits:
            _order, _entry, first = min(fits, key=lambda fit: (fit[1].since, fit[0]))
            newest = max((fit for fit in fits if fit[2] is first), key=lambda fit: (fit[1].since, fit[0]))
            self._answer(client, newest[1])

    def _answer(self, client: Client, entry: Entry) -> None:
        """Sends the endpoint's address.

        If possible, it is the address by which the client connected.
        """
        ip = client.here if client.here in entry.ips else entry.ips[0]
        self._end_query(client, {"ip": ip, "port": entry.port})

    def _end_query(self, client: Client, answer: dict[str, Any]) -> None:
        client.query = None
        client.deadline = time.monotonic() + SILENCE
        self._say(client, answer)

    def _say(self, client: Client, said: dict[str, Any]) -> None:
        line = to_line(said)
        try:
            # A short line does not fit into the socket buffer, so this client does not read.
            if client.sock.send(line) != len(line):
                self._dismiss(client)
        except OSError:
            self._dismiss(client)

    def _dismiss(self, client: Client) -> None:
        if client not in self._clients:
            return
        self._clients.discard(client)
        for id in client.entries:
            self._entries.pop(id, None)
        self._selector.unregister(client.sock)
        self._drop(client.sock)
        if client.process is not None:
            self._selector.unregister(client.process)
            self._drop(client.process)

    def _patience(self) -> float | None:
        """The time until the next deadline; None if there is none."""
        ends = [c.query.until if c.query else c.deadline for c in self._clients if c.query or not c.entries]
        ends += self._resting.values()
        if self._settles_at is not None:
            ends.append(self._settles_at)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _expire(self) -> None:
        now = time.monotonic()
        if self._settles_at is not None and self._settles_at <= now:
            self._settles_at = None
            for client in list(self._clients):
                self._try_to_answer(client)
        for listener in [listener for listener, until in self._resting.items() if until <= now]:
            del self._resting[listener]
            self._selector.register(listener, selectors.EVENT_READ)
        for client in list(self._clients):
            if client.query is not None:
                if client.query.until <= now:
                    self._end_query(client, {"error": "no matching endpoint"})
            elif not client.entries and client.deadline <= now:
                self._dismiss(client)


def listen(ip: str, port: int) -> socket.socket:
    """A non-blocking listener."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of the previous server in TIME_WAIT must not prevent this bind.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((ip, port))
        sock.listen(128)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def local_name(port: int) -> str:
    """The abstract name of the Unix socket of this user's broker.

    It belongs to the network namespace, as the port does, and leaves no file behind.
    """
    return f"\0peerway-uccl-{os.geteuid()}-{port}"


def listen_local(port: int) -> socket.socket:
    """A non-blocking listener on the Unix socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(local_name(port))
        sock.listen(128)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def credentials(sock: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a Unix socket, as the kernel reports them.

    The process is 0 if it is not visible here.
    """
    # struct ucred: pid, uid, gid.
    size = struct.calcsize("iII")
    pid, uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


def to_line(said: dict[str, Any]) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


def from_line(line: bytes) -> dict[str, Any]:
    """Parses a line. Raises ``ValueError`` if it is not a JSON object."""
    if len(line) > MAX_LINE:
        raise ValueError("the line is too long")
    try:
        said = json.loads(line)
    except RecursionError:
        raise ValueError("the line is nested too deeply") from None
    if not isinstance(said, dict):
        raise ValueError("the line is not a JSON object")
    return said


def short_text(said: dict[str, Any], name: str) -> str:
    value = said.get(name)
    if not isinstance(value, str) or len(value) > 64:
        raise ValueError(f"{name} must be a string of at most 64 characters")
    return value


def number(said: dict[str, Any], name: str, low: int, high: int) -> int:
    value = said.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}")
    return value
