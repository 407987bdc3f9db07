import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Child processes of `multiprocessing` also import the tests' modules from here.
sys.path.insert(0, str(Path(__file__).parent))

from uccl_support import WATCHDOG, Pair, free_port

# Use a separate port, because other programs on this host may run a broker.
os.environ["PEERWAY_BROKER_PORT"] = str(free_port())
os.environ["PEERWAY_BROKER_WAIT"] = "40"

from peerway.uccl import p2p


@pytest.fixture
def endpoint() -> Iterator[p2p.Endpoint]:
    endpoint = p2p.Endpoint(0)
    yield endpoint
    endpoint.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = p2p.Endpoint(1), p2p.Endpoint(2)
    ip, port, bdf = b.parse_metadata(b.get_metadata())
    connected, at_a = a.connect(ip, bdf, port)
    assert connected, a.last_error()
    accepted, _ip, gpu, at_b = b.accept(timeout=WATCHDOG)
    assert accepted and gpu == 1
    yield Pair(a, b, at_a, at_b)
    a.close()
    b.close()


@pytest.fixture
def private_broker(monkeypatch: pytest.MonkeyPatch) -> int:
    """A broker port that no endpoint of other tests uses."""
    port = free_port()
    monkeypatch.setenv("PEERWAY_BROKER_PORT", str(port))
    return port
