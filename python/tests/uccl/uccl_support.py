"""Helpers of the drop-in's tests: buffers, tensors without torch, child processes."""

import ctypes
import multiprocessing
import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerway.uccl import gpus, metadata, p2p

#: The limit of a wait in a test, in seconds.
WATCHDOG = 60.0
NONE_ID = 2**64 - 1


def pattern(size: int, seed: int) -> bytes:
    """Bytes that depend on the seed."""
    return random.Random(seed).randbytes(size)


class Buffer:
    """Memory with an address."""

    def __init__(self, data: bytes | int) -> None:
        self._memory = bytearray(data)
        self.size = len(self._memory)
        self._view = (ctypes.c_char * self.size).from_buffer(self._memory)
        self.ptr = ctypes.addressof(self._view)

    def __bytes__(self) -> bytes:
        return bytes(self._memory)

    def fill(self, data: bytes) -> None:
        self._memory[:] = data


class Tensor:
    """A minimal tensor."""

    def __init__(self, data: bytes | int, element: int = 4) -> None:
        self.buffer = Buffer(data)
        self._element = element

    def data_ptr(self) -> int:
        return self.buffer.ptr

    def numel(self) -> int:
        return self.buffer.size // self._element

    def element_size(self) -> int:
        return self._element

    def part(self, start: int, stop: int) -> "View":
        return View(self, start, stop)


class View:
    """Some elements of a tensor."""

    def __init__(self, base: Tensor, start: int, stop: int) -> None:
        self._base, self._start, self._stop = base, start, stop

    def data_ptr(self) -> int:
        return self._base.data_ptr() + self._start * self._base.element_size()

    def numel(self) -> int:
        return self._stop - self._start

    def element_size(self) -> int:
        return self._base.element_size()


def finish(endpoint: p2p.Endpoint, transfer_id: int) -> bool:
    """Polls a transfer to its end."""
    until = time.monotonic() + WATCHDOG
    while time.monotonic() < until:
        success, done = endpoint.poll_async(transfer_id)
        if done:
            return success
        assert success, "poll_async() reported a pending transfer as failed"
        time.sleep(0.0005)
    raise AssertionError(f"transfer {transfer_id} did not end")


@dataclass
class Pair:
    """Two endpoints; ``a`` connected to ``b``."""

    a: p2p.Endpoint
    b: p2p.Endpoint
    #: The number of the connection on each side.
    at_a: int
    at_b: int


def shown(index: int | None) -> str:
    """The GPU's name in the metadata of an endpoint, with or without a GPU."""
    gpu = gpus.device(index)
    return metadata.gpu_name(index or 0) if gpu is None else gpu.bus_id


def free_port() -> int:
    """A free port below the kernel's ephemeral range, so that no socket of another test gets it."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(10_000, max(first, 10_100)), 100):
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("none of a hundred ports is free")


class Child:
    """A process that runs ``program(line, *arguments)``. ``line`` is a pipe to the test."""

    def __init__(self, program: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(program, theirs, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, what: Any) -> None:
        self._line.send(what)

    def receive(self) -> Any:
        assert self._line.poll(WATCHDOG), "the child sent nothing in time"
        return self._line.recv()

    def end(self) -> None:
        """Waits for the process to end with exit code 0."""
        self.process.join(WATCHDOG)
        assert self.process.exitcode == 0, f"the child ended with {self.process.exitcode}"

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WATCHDOG)

    def stop(self) -> None:
        """Stops the process and waits until all its threads have stopped, which takes time."""
        os.kill(self.process.pid, signal.SIGSTOP)
        until = time.monotonic() + WATCHDOG
        while not all(_is_stopped(task) for task in Path(f"/proc/{self.process.pid}/task").iterdir()):
            assert time.monotonic() < until, "the child did not stop"
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_error: object) -> None:
        if self.process.is_alive():
            self.kill()
        self._line.close()


def _is_stopped(task: Path) -> bool:
    # The state follows the name, which is in parentheses and may contain any character.
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def _run(program: Callable[..., None], line: Any, arguments: tuple[Any, ...]) -> None:
    try:
        program(line, *arguments)
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None


def listen(line: Any) -> Any:
    """Waits in a child for a message from the parent."""
    assert line.poll(WATCHDOG), "the parent sent nothing in time"
    return line.recv()
