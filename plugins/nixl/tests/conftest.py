"""Fixtures of the tests of the NIXL backend.

The tests run in a real NIXL, in which the plugin is installed. `PEERWAY_NIXL` names its package
(default `nixl_cu12`).
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))

import nixl_of_tests as of_tests


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long, and does not depend on the version of NIXL")


@pytest.fixture
def two():
    """Two agents in one process, each with 1 MiB, that have loaded each other's metadata."""
    pair = of_tests.pair()
    yield pair
    for side in pair:
        side.close()


@pytest.fixture
def peer_process():
    """Starts further processes with an agent each, and kills them after the test."""
    started = []

    def start(size=1 << 20, **settings):
        process = PeerProcess(size, settings)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


class PeerProcess:
    """Another process with an agent that executes requests: see `peer.py`."""

    def __init__(self, size, settings):
        self.name = f"peer-{uuid.uuid4().hex[:8]}"
        program = os.path.join(os.path.dirname(__file__), "peer.py")
        self.process = subprocess.Popen(
            [sys.executable, program, self.name, str(size), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        os.set_blocking(self.process.stdout.fileno(), False)
        self._unread = b""
        facts = self._answer()
        self.address = facts["address"]
        self.metadata = bytes.fromhex(facts["metadata"])
        self.size = size

    @property
    def pid(self):
        return self.process.pid

    def ask(self, what, **more):
        self.process.stdin.write(json.dumps({"what": what, **more}).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        # NIXL logs to the same stream.
        mark = of_tests.MARK.encode()
        while True:
            line = self._line()
            if line.startswith(mark):
                return json.loads(line[len(mark) :])

    def _line(self):
        deadline = time.monotonic() + of_tests.WATCHDOG
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left = deadline - time.monotonic()
                assert left > 0 and selector.select(left), "the other process does not answer"
                more = os.read(self.process.stdout.fileno(), 1 << 20)
                assert more, "the other process ended"
                self._unread += more
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def bytes(self, offset, length):
        return bytes.fromhex(self.ask("bytes", offset=offset, length=length))

    def notifications(self, count):
        """The expected number of notifications, or those that arrived in time."""
        found, deadline = [], time.monotonic() + of_tests.WATCHDOG
        while len(found) < count and time.monotonic() < deadline:
            for name, messages in self.ask("notifications").items():
                found += [(name, bytes.fromhex(message)) for message in messages]
        return found

    def stop(self):
        """Stops the process, and waits until each of its threads has stopped."""
        os.kill(self.pid, signal.SIGSTOP)

        def is_stopped():
            return all(state == "T" for state in thread_states(self.pid))

        of_tests.until(is_stopped, "every thread of the peer has stopped")

    def go_on(self):
        os.kill(self.pid, signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()


def thread_states(pid):
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/stat") as stat:
            # The state follows the name, which is in parentheses and may contain anything.
            yield stat.read().rpartition(") ")[2][0]


class Log:
    """The lines of the backend on standard error since the test began."""

    def __init__(self, capfd):
        self._capfd = capfd
        self._text = ""

    def lines(self, sentence):
        self._text += self._capfd.readouterr().err
        return [line for line in self._text.splitlines() if "[PEERWAY]" in line and sentence in line]


@pytest.fixture
def log(capfd):
    return Log(capfd)


@pytest.fixture
def one():
    """An agent with 16 MiB, for transfers with other processes."""
    side = of_tests.Side(size=16 << 20)
    yield side
    side.close()


def pattern(length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, length, np.uint8)
