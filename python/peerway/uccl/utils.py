"""Drop-in for ``uccl.utils``: connecting with retries, sending objects over sockets, intervals."""

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
    """Raises the limit of open files to the hard limit and reports it on standard error."""
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            print(f"open files: limit raised from {soft} to {hard}", file=sys.stderr)
        else:
            print(f"open files: the limit is {soft} and cannot be raised", file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"open files: the limit is not changed: {error}", file=sys.stderr)


def create_socket_and_connect(
    host: str,
    port: int,
    max_retries: int | None = None,
    initial_delay: float = 0.5,
    backoff: float = 2,
    max_delay: float = 10,
    timeout: float | None = None,
) -> socket.socket:
    """Connects by TCP and retries with growing delays.

    After ``max_retries`` retries it raises ``OSError``. Without a limit it retries without end.
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
            print(f"cannot connect to {host}:{port} yet ({error}); retry in {delay:.1f} s", file=sys.stderr)
        except BaseException:
            sock.close()
            raise
        time.sleep(delay)
        delay = min(delay * backoff, max_delay)


def send_obj(sock: socket.socket, obj: Any, *, protocol: int = pickle.HIGHEST_PROTOCOL) -> None:
    """Sends the length of the pickled object and then the pickled object."""
    payload = pickle.dumps(obj, protocol=protocol)
    sock.sendall(_LENGTH.pack(len(payload)) + payload)


def recv_obj(sock: socket.socket) -> Any:
    """Receives an object from :func:`send_obj`.

    Use it only with trusted peers: unpickling runs their code.
    """
    (length,) = _LENGTH.unpack(_recv_exact(sock, _LENGTH.size))
    return pickle.loads(_recv_exact(sock, length)) if length else None


def _recv_exact(sock: socket.socket, n: int) -> bytes:
    """Exactly ``n`` bytes. Raises ``ConnectionError`` if the peer closes the connection before."""
    got = bytearray()
    while len(got) < n:
        # Receive in pieces, so that a length from the peer does not control the allocation.
        piece = sock.recv(min(n - len(got), 1 << 20))
        if not piece:
            raise ConnectionError(f"the connection ended {n - len(got)} bytes early")
        got += piece
    return bytes(got)
