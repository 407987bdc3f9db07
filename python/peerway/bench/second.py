"""The second process.

It owns the memory that is read and written, and takes commands over a pipe.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy

import peerway
from peerway.bench import pattern
from peerway.bench.plan import Row

#: Both processes run on this machine.
HERE = "127.0.0.1:0"
#: Filling and comparing half a gigabyte takes one or two seconds. This limit is for busy machines.
ANSWER_WITHIN = 120.0


class Lost(Exception):
    """The second process is gone or does not answer, so the run must end."""


class Refused(Exception):
    """A command failed in the second process, which continues."""


class Second:
    """The second process, as a context manager."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function of this module in the second process."""
        try:
            self._pipe.send((function, args))
            if not self._pipe.poll(ANSWER_WITHIN):
                raise Lost(f"the second process did not answer within {ANSWER_WITHIN:g} s")
            ok, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(5)
            raise Lost(f"the second process ended (exit code {self._process.exitcode})") from error
        if not ok:
            raise Refused(value)
        return value

    def __enter__(self) -> Second:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)


class Owner:
    """The state of the second process."""

    def __init__(self) -> None:
        self.endpoint: peerway.Endpoint | None = None
        self.buffer = numpy.empty(0, "uint8")
        self.region: peerway.Region | None = None

    def close(self) -> None:
        if self.endpoint is not None:
            self.endpoint.close()
        self.endpoint, self.region, self.buffer = None, None, numpy.empty(0, "uint8")


def open_path(owner: Owner, pin: str, nbytes: int, shared: bool) -> tuple[bytes, bytes]:
    """Opens an endpoint with one buffer. Returns its metadata and the buffer's descriptor."""
    owner.close()
    owner.endpoint = peerway.Endpoint(bind=HERE, transport=pin)
    owner.buffer = peerway.empty(nbytes) if shared else numpy.empty(nbytes, "uint8")
    owner.buffer[:] = 1
    owner.region = owner.endpoint.register(owner.buffer)
    return owner.endpoint.metadata, owner.region.advertise("rw")


def fill(owner: Owner, row: Row) -> None:
    pattern.fill(owner.buffer, row)


def blank(owner: Owner, row: Row) -> None:
    pattern.blank(owner.buffer, row)


def arrived(owner: Owner, row: Row) -> bool:
    return pattern.arrived(owner.buffer, row, "theirs")


def close_path(owner: Owner) -> None:
    owner.close()


def _serve(pipe: Connection) -> None:
    # Ctrl-C reaches both processes. The first process reports it and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = Owner()
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, OSError):
            owner.close()
            return
        try:
            answer = True, function(owner, *args)
        except Exception as error:  # the first process reports it
            answer = False, str(error)
        try:
            pipe.send(answer)
        except OSError:
            return
