"""Finding the endpoint of a GPU on a host, without knowing its port.

Every process with an endpoint takes part, in one thread that sleeps. The first on a host to take the broker's
port serves it (:mod:`.broker_server`), on the loopback interface and wherever its endpoints are reached; the others
keep a connection to that one, over which they register. When it drops, whoever takes the port next serves, and the
rest register there.

``PEERWAY_BROKER_PORT`` is the port (default 51780, the same on all hosts); 0 turns the broker off.
``PEERWAY_BROKER_WAIT`` is for how many seconds a connect waits for an endpoint to appear (default 10).

The broker only tells where to connect. Whoever may use the loopback interface of a host can register endpoints
there, as they could listen on its ports; what they cannot do is reach memory, which takes a descriptor from its
owner.
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

from .broker_server import BANNER, MAX_LINE, Entry, Server, from_line, listen, number, short_text, to_line
from .log import logger

_DEFAULT_PORT = 51780
_DEFAULT_WAIT = 10.0
_LOOPBACK = "127.0.0.1"
#: Seconds for one exchange with a broker that is there.
_ANSWER_TIME = 2.0


def port() -> int:
    """The broker's port; 0 when there is to be no broker."""
    asked = os.environ.get("PEERWAY_BROKER_PORT", "").strip()
    if not asked:
        return _DEFAULT_PORT
    if not asked.isascii() or not asked.isdigit() or len(asked) > 5 or int(asked) > 65535:
        raise ValueError(f"PEERWAY_BROKER_PORT must be a port, or 0 for no broker, not {asked[:64]!r}")
    return int(asked)


def patience() -> float:
    """For how long to wait for an endpoint to appear."""
    asked = os.environ.get("PEERWAY_BROKER_WAIT", "").strip()
    try:
        seconds = float(asked) if asked else _DEFAULT_WAIT
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise ValueError(f"PEERWAY_BROKER_WAIT must be a number of seconds up to 3600, not {asked[:64]!r}")
    return seconds


def register(entry: Entry, owner: object) -> None:
    """Makes an endpoint known on this host for as long as ``owner`` lives."""
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
    """Makes it unknown again."""
    with _agents_lock:
        agents = list(_agents.values())
    for agent in agents:
        agent.remove(id)


def find(host: str, *, gpu: int | None = None, bdf: str | None = None, but: str | None = None) -> tuple[str, int]:
    """Where the newest endpoint of that GPU on ``host`` is, leaving out the one with the id ``but``.

    Waits for one to appear. Raises ``LookupError`` when none does, saying why.
    """
    at, seconds = port(), patience()
    wanted = f"GPU {gpu}" if bdf is None else f"GPU {bdf}"
    if at == 0:
        off = "PEERWAY_BROKER_PORT=0 turns the broker off"
        raise LookupError(f"cannot look for {wanted} on {host}: {off}; give a port")
    deadline = time.monotonic() + seconds
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            with _Line(host, at, min(_ANSWER_TIME, max(left, 0.1))) as line:
                line.send({"op": "find", "gpu": gpu, "bdf": bdf, "not": but, "wait": left})
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


class Agent:
    """This process's part in the broker on one port."""

    def __init__(self, at: int) -> None:
        self._port = at
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._thread: threading.Thread | None = None
        self._sockets: set[socket.socket] = set()
        # Written to when the endpoints of this process change.
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
        # A forked child's copy may have been locked when it was made, and its endpoints are not its own.
        if os.getpid() != self._pid:
            return
        with self._lock:
            known = self._entries.pop(id, None) is not None
        if known:
            self._ring()

    def abandon(self) -> None:
        """In a forked child: lets go of the parent's sockets, which would stay open with nobody behind them."""
        for sock in self._sockets:
            sock.close()

    def _ring(self) -> None:
        # A bell that is full has been rung.
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def _ours(self) -> list[Entry]:
        with self._lock:
            return list(self._entries.values())

    def _track(self, sock: socket.socket) -> socket.socket:
        self._sockets.add(sock)
        return sock

    def _drop(self, sock: socket.socket) -> None:
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
                # Whatever it is, endpoints are found by their metadata all the same.
                logger.exception("the broker's thread goes on after an error")
                took_part = False
            # At random, so that of many that lost their broker one comes first; longer where something else has
            # the port.
            pause = 0.05 if took_part else min(1.0, pause * 2)
            select.select([self._wake], [], [], random.uniform(pause / 10, pause))
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(4096)

    def _serve(self) -> bool:
        """Serves, if the port can be had."""
        try:
            listener = self._track(listen(_LOOPBACK, self._port))
        except OSError as error:
            logger.debug("the broker's port %d is not ours: %s", self._port, error)
            return False
        Server(listener, self._wake, self._ours, self._track, self._drop).run()
        return True

    def _follow(self) -> bool:
        """Registers with the one who serves, until that one goes; False when nobody serves."""
        try:
            with _Line(_LOOPBACK, self._port, 1.0) as line:
                self._track(line.sock)
                try:
                    self._stay(line)
                finally:
                    self._sockets.discard(line.sock)
        except (OSError, ValueError) as error:
            logger.debug("no broker to follow on port %d: %s", self._port, error)
            return False
        return True

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
    """A connection to a broker, over which lines go."""

    def __init__(self, host: str, at: int, timeout: float) -> None:
        self.sock = socket.create_connection((host, at), timeout)
        self._got = bytearray()
        try:
            if self.receive(timeout) != BANNER:
                raise ValueError("something else answers there")
        except BaseException:
            self.sock.close()
            raise

    def send(self, said: dict[str, object]) -> None:
        self.sock.sendall(to_line(said))

    def receive(self, timeout: float) -> dict[str, object]:
        """The next line. Raises ``OSError`` when none comes in time, ``ValueError`` for what is no line of ours."""
        deadline = time.monotonic() + timeout
        while (end := self._got.find(b"\n")) < 0:
            if len(self._got) > MAX_LINE:
                raise ValueError("something else answers there")
            # Each call gets what is left: single bytes cannot prolong the wait.
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the broker's answer was not complete in time")
            self.sock.settimeout(left)
            data = self.sock.recv(4096)
            if not data:
                raise ConnectionError("the broker hung up")
            self._got += data
        line = bytes(self._got[:end])
        del self._got[: end + 1]
        self.sock.settimeout(_ANSWER_TIME)
        return from_line(line)

    def __enter__(self) -> "_Line":
        return self

    def __exit__(self, *_error: object) -> None:
        self.sock.close()


_agents: dict[int, Agent] = {}
_agents_lock = threading.Lock()


def _forget_parent() -> None:
    """After a fork: the child starts without agents, and holds none of the parent's sockets."""
    global _agents_lock
    for agent in _agents.values():
        agent.abandon()
    _agents.clear()
    _agents_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_parent)
