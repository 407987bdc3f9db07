"""Drop-in for ``uccl.utils``: sockets that retry, objects over sockets, intervals."""

import pickle
import resource
import socket
import struct
import sys
import time
from typing import Any

from .intervals import ClosedIntervalTree

__all__ = ["ClosedIntervalTree", "create_socket_and_connect", "recv_obj", "send_obj", "set_files_limit"]

_LENGTH = struct.Struct("!Q")


def set_files_limit() -> None:
    """Raises the limit of open files as far as it may be raised, and says so on standard error."""
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            print(f"open files: limit raised from {soft} to {hard}", file=sys.stderr)
        else:
            print(f"open files: the limit is {soft} and cannot be raised", file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"open files: the limit stays: {error}", file=sys.stderr)


def create_socket_and_connect(
    host: str,
    port: int,
    max_retries: int | None = None,
    initial_delay: float = 0.5,
    backoff: float = 2,
    max_delay: float = 10,
    timeout: float | None = None,
) -> socket.socket:
    """Connects by TCP, again and again with growing pauses.

    After ``max_retries`` further tries it raises ``OSError``; without them it never gives up.
    """
    tries, delay = 0, initial_delay
    while True:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            if timeout:
                sock.settimeout(timeout)
            sock.connect((host, port))
            return sock
        except OSError as error:
            sock.close()
            tries += 1
            if max_retries is not None and tries > max_retries:
                raise OSError(f"cannot connect to {host}:{port}, tried {tries} times: {error}") from error
            print(f"cannot connect to {host}:{port} yet ({error}); again in {delay:.1f} s", file=sys.stderr)
        except BaseException:
            sock.close()
            raise
        time.sleep(delay)
        delay = min(delay * backoff, max_delay)


def send_obj(sock: socket.socket, obj: Any, *, protocol: int = pickle.HIGHEST_PROTOCOL) -> None:
    """Sends an object, pickled, after its length."""
    payload = pickle.dumps(obj, protocol=protocol)
    sock.sendall(_LENGTH.pack(len(payload)) + payload)


def recv_obj(sock: socket.socket) -> Any:
    """Receives what :func:`send_obj` sent. Only for peers that are trusted: unpickling runs what they say."""
    (length,) = _LENGTH.unpack(_recv_exact(sock, _LENGTH.size))
    return pickle.loads(_recv_exact(sock, length)) if length else None


def _recv_exact(sock: socket.socket, n: int) -> bytes:
    """Exactly ``n`` bytes; ``ConnectionError`` when the peer hangs up before."""
    got = bytearray()
    while len(got) < n:
        # In pieces, so that a length from outside does not decide how much is allocated.
        piece = sock.recv(min(n - len(got), 1 << 20))
        if not piece:
            raise ConnectionError(f"the connection ended {n - len(got)} bytes early")
        got += piece
    return bytes(got)
