"""What the tests of the NIXL backend have in common.

They run in a real NIXL: `PEERWAY_NIXL` names its package (`nixl_cu12`, as usual), which has found the plugin by itself.
"""

import json
import os
import subprocess
import sys
import time
import uuid

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))

import nixl_of_tests as of_tests


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes its time, and is the same with every version of NIXL")


@pytest.fixture
def two():
    """Two agents in one process, each with a MiB, that know each other."""
    pair = of_tests.pair()
    yield pair
    for side in pair:
        side.close()


@pytest.fixture
def peer_process():
    """Starts further processes with an agent each; ends what is left of them."""
    started = []

    def start(size=1 << 20, **settings):
        process = PeerProcess(size, settings)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


class PeerProcess:
    """Another process with an agent, that does what it is told: see `peer.py`."""

    def __init__(self, size, settings):
        self.name = f"peer-{uuid.uuid4().hex[:8]}"
        program = os.path.join(os.path.dirname(__file__), "peer.py")
        self.process = subprocess.Popen(
            [sys.executable, program, self.name, str(size), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        facts = self._answer()
        self.address = facts["address"]
        self.metadata = bytes.fromhex(facts["metadata"])
        self.size = size

    @property
    def pid(self):
        return self.process.pid

    def ask(self, what, **more):
        self.process.stdin.write(json.dumps({"what": what, **more}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        # NIXL logs to the same place.
        for line in self.process.stdout:
            if line.startswith(of_tests.MARK):
                return json.loads(line[len(of_tests.MARK) :])
        raise AssertionError("the other process ended")

    def bytes(self, offset, length):
        return bytes.fromhex(self.ask("bytes", offset=offset, length=length))

    def notifications(self, count, timeout=10.0):
        """As many as were expected, or what came of them in time."""
        found, until = [], time.monotonic() + timeout
        while len(found) < count and time.monotonic() < until:
            for name, messages in self.ask("notifications").items():
                found += [(name, bytes.fromhex(message)) for message in messages]
        return found

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def one():
    """An agent with 16 MiB, for transfers with other processes."""
    side = of_tests.Side(size=16 << 20)
    yield side
    side.close()


def pattern(length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, length, np.uint8)
