"""A peer in another process that runs one call at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

ANSWER_WITHIN = float(os.environ.get("PEERWAY_TEST_PATIENCE", "180")) / 2


class Far:
    """A process with its own endpoint.

    ``far(function, *args)`` runs the function in that process and returns its result. The first
    argument of the function is a dictionary that lives as long as the process.
    """

    def __init__(self, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, options), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.begin(function, *args)()

    def begin(self, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Runs the function without waiting. The result waits for it."""
        self._pipe.send((function, args))

        def result() -> Any:
            if not self._pipe.poll(ANSWER_WITHIN):
                raise TimeoutError(f"{function.__name__} did not answer within {ANSWER_WITHIN:g} s")
            ok, value = self._pipe.recv()
            if not ok:
                raise value
            return value

        return result

    @property
    def metadata(self) -> bytes:
        return self(_metadata)

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(ANSWER_WITHIN)

    def kill_in(self, seconds: float) -> None:
        # Only send the signal. Two threads that wait for one process would interfere.
        threading.Timer(seconds, os.kill, (self.process.pid, signal.SIGKILL)).start()

    def __enter__(self) -> Far:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self.resume()
            self._pipe.close()
            self.process.join(ANSWER_WITHIN)
        if self.process.is_alive():
            self.kill()
            raise TimeoutError("the peer did not end")


def _metadata(here: dict[str, Any]) -> bytes:
    return here["endpoint"].metadata


def _serve(pipe: Any, options: dict[str, Any]) -> None:
    import peerway

    here: dict[str, Any] = {"endpoint": peerway.Endpoint(**options)}
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, OSError):
            here["endpoint"].close()
            return
        try:
            pipe.send((True, function(here, *args)))
        except Exception as error:  # the caller raises it
            pipe.send((False, error))


def advertise(here: dict[str, Any], nbytes: int, fill: int = 0, access: str = "rw", shared: bool = True) -> bytes:
    """Registers memory, filled with one byte value, and advertises it."""
    import numpy
    import peerway

    array = peerway.empty(nbytes) if shared else numpy.empty(nbytes, "uint8")
    array[:] = fill
    region = here["endpoint"].register(array)
    here["array"], here["region"] = array, region
    here.setdefault("all", []).append((array, region))
    return region.advertise(access)


def content(here: dict[str, Any]) -> bytes:
    """The contents of the memory that was advertised last."""
    return here["array"].tobytes()


def counter(here: dict[str, Any], id: int, n: int) -> int:
    return here["endpoint"].wait_counter(id, n, 10)


def notification(here: dict[str, Any], timeout: float = 10) -> bytes | None:
    found = here["endpoint"].notification(timeout)
    return None if found is None else found.message


def revoke(here: dict[str, Any]) -> bool:
    return here["region"].revoke()


def write_over_and_over(here: dict[str, Any], metadata: bytes, descriptor: bytes, nbytes: int) -> None:
    """Starts a thread that writes into a peer's memory until a write fails."""
    import peerway

    peer = here["endpoint"].connect(metadata)
    remote, array = peer.remote(descriptor), peerway.empty(nbytes)
    array[:] = 1
    source = here["endpoint"].register(array)

    def write() -> None:
        try:
            while True:
                peer.write(source, remote)
        except peerway.PeerwayError:
            pass

    threading.Thread(target=write, daemon=True).start()


def connect_and_time(here: dict[str, Any], metadata: bytes) -> float:
    """Connects to an endpoint and returns the seconds that it took."""
    began = time.monotonic()
    here["peer"] = here["endpoint"].connect(metadata)
    return time.monotonic() - began
