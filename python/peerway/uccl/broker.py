"""Finds the endpoint of a GPU on a host when the port is not known.

Every process with an endpoint participates, with one thread that is usually blocked. The first
process on a host that binds the broker's port serves it (:mod:`.broker_server`): over TCP on the
loopback interface and on the addresses of its endpoints, and on a Unix socket for processes of the
same user. These register over a connection to that socket. When the connection drops, another
process binds the port and serves, and the rest register there.

``PEERWAY_BROKER_PORT`` is the port (default 51780, the same on all hosts); 0 turns the broker off.
``PEERWAY_BROKER_WAIT`` is the time in seconds that a connect waits for an endpoint (default 10).

Only processes of the user that serves can register: the kernel tells the user at the other end of a
Unix socket. The first process that registers a GPU keeps its place while it lives. A search on this
host goes over the Unix socket and refuses a broker of another user. A search on another host cannot
know who answers there: it trusts the network and that host's port, as the address alone does. Two
users of a host need two ports, or one of them connects by metadata.
"""

import contextlib
import ipaddress
import os
import random
import select
import socket
import threading
import time
import weakref
from typing import Any

from .broker_server import (
    BANNER,
    MAX_LINE,
    Entry,
    Server,
    credentials,
    from_line,
    listen,
    listen_local,
    local_name,
    number,
    short_text,
    to_line,
)
from .log import logger

_DEFAULT_PORT = 51780
_DEFAULT_WAIT = 10.0
_LOOPBACK = "127.0.0.1"
#: After this many failed attempts, about two seconds, the port is not just changing hands.
_FAILURES_TO_WARN = 8
#: Seconds for one request to a broker that is running.
_ANSWER_TIME = 2.0


def port() -> int:
    """The broker's port; 0 turns the broker off."""
    asked = os.environ.get("PEERWAY_BROKER_PORT", "").strip()
    if not asked:
        return _DEFAULT_PORT
    if not asked.isascii() or not asked.isdigit() or len(asked) > 5 or int(asked) > 65535:
        raise ValueError(f"PEERWAY_BROKER_PORT must be a port, or 0 for no broker, not {asked[:64]!r}")
    return int(asked)


def patience() -> float:
    """How long to wait for an endpoint to appear, in seconds."""
    asked = os.environ.get("PEERWAY_BROKER_WAIT", "").strip()
    try:
        seconds = float(asked) if asked else _DEFAULT_WAIT
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise ValueError(f"PEERWAY_BROKER_WAIT must be a number of seconds up to 3600, not {asked[:64]!r}")
    return seconds


def register(entry: Entry, owner: object) -> None:
    """Registers an endpoint on this host for the lifetime of ``owner``."""
    at = port()
    if at == 0:
        return
    with _agents_lock:
        agent = _agents.get(at)
        if agent is None:
            agent = _agents[at] = Agent(at)
    agent.add(entry)
    weakref.finalize(owner, agent.remove, entry.id)


def unregister(id: str) -> None:
    """Removes the registration of an endpoint."""
    with _agents_lock:
        agents = list(_agents.values())
    for agent in agents:
        agent.remove(id)


def find(host: str, *, gpu: int | None = None, bdf: str | None = None, but: str | None = None) -> tuple[str, int]:
    """The address of the endpoint of this GPU on ``host``, without the id ``but``.

    If several processes have one, it is that of the first process; if that process has several, it
    is the newest. Waits for one to appear. Raises ``LookupError`` with the reason if none does.
    """
    at, seconds = port(), patience()
    wanted = f"GPU {gpu}" if bdf is None else f"GPU {bdf}"
    if at == 0:
        off = "PEERWAY_BROKER_PORT=0 turns the broker off"
        raise LookupError(f"cannot look for {wanted} on {host}: {off}; pass the port")
    deadline = time.monotonic() + seconds
    while True:
        left = max(0.0, deadline - time.monotonic())
        query: dict[str, object] = {"op": "find", "gpu": gpu, "bdf": bdf, "not": but, "wait": left}
        try:
            here = _as_own(host, at)
            if here is not None:
                query["at"] = here
            with _Line(host if here is None else None, at, min(_ANSWER_TIME, max(left, 0.1))) as line:
                line.send(query)
                answer = line.receive(left + _ANSWER_TIME)
            if "error" not in answer:
                return str(ipaddress.ip_address(short_text(answer, "ip"))), number(answer, "port", 1, 65535)
            why = f"no endpoint of {wanted} appeared on {host} within {seconds:g} s"
        except (OSError, ValueError) as error:
            tried = f"the broker at {host}:{at} was not reached within {seconds:g} s"
            why = f"{tried} while looking for {wanted}: {error}"
        if time.monotonic() >= deadline:
            raise LookupError(why)
        time.sleep(random.uniform(0.01, 0.05))


def _as_own(host: str, at: int) -> str | None:
    """The address of ``host`` if it is one of this host.

    The kernel reaches an address of this host from the same address, or from another loopback one.
    No packet is sent.
    """
    for family, kind, _protocol, _name, address in socket.getaddrinfo(host, at, type=socket.SOCK_DGRAM):
        ip = str(address[0]).partition("%")[0]
        if ipaddress.ip_address(ip).is_loopback:
            return ip
        with socket.socket(family, kind) as sock, contextlib.suppress(OSError):
            sock.connect(address)
            if sock.getsockname()[0].partition("%")[0] == ip:
                return ip
    return None


class Agent:
    """The participation of this process in the broker on one port."""

    def __init__(self, at: int) -> None:
        self._port = at
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._thread: threading.Thread | None = None
        # Another process has served this one, so it may have served others.
        self._has_followed = False
        #: Consecutive times that this process could neither serve nor register.
        self._failures = 0
        # Sockets, and descriptors of processes that the server watches.
        self._sockets: set[Any] = set()
        # `_ring` writes to this pair when the endpoints of this process change, to wake the thread.
        self._bell, self._wake = (self._track(sock) for sock in socket.socketpair())
        self._bell.setblocking(False)
        self._wake.setblocking(False)

    def add(self, entry: Entry) -> None:
        with self._lock:
            self._entries[entry.id] = entry
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="peerway-broker", daemon=True)
                self._thread.start()
        self._ring()

    def remove(self, id: str) -> None:
        # In a forked child, the lock may have been copied in the locked state, and the endpoints
        # belong to the parent.
        if os.getpid() != self._pid:
            return
        with self._lock:
            known = self._entries.pop(id, None) is not None
        if known:
            self._ring()

    def abandon(self) -> None:
        """Closes the parent's sockets in a forked child.

        Otherwise they stay open after the parent ends.
        """
        for sock in self._sockets:
            sock.close()

    def _ring(self) -> None:
        # A full socket buffer already wakes the thread.
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def _ours(self) -> list[Entry]:
        with self._lock:
            return list(self._entries.values())

    def _track(self, sock: Any) -> Any:
        self._sockets.add(sock)
        return sock

    def _drop(self, sock: Any) -> None:
        self._sockets.discard(sock)
        sock.close()

    def _run(self) -> None:
        pause = 0.05
        while True:
            with self._lock:
                if not self._entries:
                    self._thread = None
                    return
            try:
                took_part = self._serve() or self._follow()
            except Exception:
                # Endpoints can be found by their metadata even without the broker.
                logger.exception("the broker thread on port %d continues after an error", self._port)
                took_part = False
            # Wait a random time, so that one of many processes that lost their broker comes first.
            # Wait longer if another program has the port.
            pause = 0.05 if took_part else min(1.0, pause * 2)
            if took_part:
                self._failures = 0
            select.select([self._wake], [], [], random.uniform(pause / 10, pause))
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(4096)

    def _serve(self) -> bool:
        """Serves until this process has no endpoint. False if the port is not available."""
        try:
            listener = self._track(listen(_LOOPBACK, self._port))
        except OSError as error:
            logger.debug("cannot bind the broker's port %d: %s", self._port, error)
            return False
        try:
            local = self._track(listen_local(self._port))
        except OSError as error:
            # A server of this user is about to end, or another user has taken the name.
            self._drop(listener)
            logger.debug("cannot bind the broker's Unix socket for port %d: %s", self._port, error)
            return False
        settle, self._has_followed = self._has_followed, False
        Server(listener, local, self._wake, self._ours, self._track, self._drop, settle).run()
        return True

    def _follow(self) -> bool:
        """Registers with the serving process until it ends. False if no process serves."""
        try:
            with _Line(None, self._port, 1.0) as line:
                self._track(line.sock)
                self._has_followed = True
                try:
                    self._stay(line)
                finally:
                    self._sockets.discard(line.sock)
        except (OSError, ValueError) as error:
            logger.debug("cannot register with a broker on port %d: %s", self._port, error)
            self._warn_of_port(error)
            return False
        return True

    def _warn_of_port(self, error: Exception) -> None:
        """Warns once if the port stays taken by a program that is not a broker of this user."""
        self._failures += 1
        if self._failures == _FAILURES_TO_WARN:
            logger.warning(
                "another program or another user has port %d, so endpoints of this process are found only by "
                "their metadata (%s); set PEERWAY_BROKER_PORT to a port for this user",
                self._port,
                error,
            )

    def _stay(self, line: "_Line") -> None:
        told: set[str] = set()
        while True:
            ours = {entry.id: entry for entry in self._ours()}
            if not ours:
                return
            for id in told - ours.keys():
                line.send({"op": "unregister", "id": id})
            for id in ours.keys() - told:
                line.sock.sendall(ours[id].to_line())
            told = set(ours)
            ready, _, _ = select.select([line.sock, self._wake], [], [])
            if line.sock in ready and not line.sock.recv(MAX_LINE):
                return
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)


class _Line:
    """A connection to a broker that carries lines: over TCP, or without a host to that of this user."""

    def __init__(self, host: str | None, at: int, timeout: float) -> None:
        if host is None:
            self.sock = _connect_here(at, timeout)
        else:
            self.sock = socket.create_connection((host, at), timeout)
        self._got = bytearray()
        try:
            if self.receive(timeout) != BANNER:
                raise ValueError(f"the program on port {at} is not a Peerway broker")
        except BaseException:
            self.sock.close()
            raise

    def send(self, said: dict[str, object]) -> None:
        self.sock.sendall(to_line(said))

    def receive(self, timeout: float) -> dict[str, object]:
        """The next line.

        Raises ``OSError`` if none arrives in time, ``ValueError`` if it is not valid.
        """
        deadline = time.monotonic() + timeout
        while (end := self._got.find(b"\n")) < 0:
            if len(self._got) > MAX_LINE:
                raise ValueError("the answer is too long for a Peerway broker")
            # Each call gets only the remaining time, so single bytes cannot prolong the wait.
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the broker's answer was not complete in time")
            self.sock.settimeout(left)
            data = self.sock.recv(4096)
            if not data:
                raise ConnectionError("the broker closed the connection")
            self._got += data
        line = bytes(self._got[:end])
        del self._got[: end + 1]
        self.sock.settimeout(_ANSWER_TIME)
        return from_line(line)

    def __enter__(self) -> "_Line":
        return self

    def __exit__(self, *_error: object) -> None:
        self.sock.close()


def _connect_here(at: int, timeout: float) -> socket.socket:
    """Connects to the broker of this user on this host."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(local_name(at))
        _pid, uid = credentials(sock)
        # Any user may bind the name.
        if uid != os.geteuid():
            raise ValueError(f"the broker for port {at} belongs to user {uid}")
    except BaseException:
        sock.close()
        raise
    return sock


_agents: dict[int, Agent] = {}
_agents_lock = threading.Lock()


def _forget_parent() -> None:
    """After a fork, the child starts without agents and closes the parent's sockets."""
    global _agents_lock
    for agent in _agents.values():
        agent.abandon()
    _agents.clear()
    _agents_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_parent)
