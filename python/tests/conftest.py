"""Shared by the tests: pairs of endpoints, peers in other processes, and a limit on every wait."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator

import peerway
import pytest
from far import Far

# Started in the background, a shell has it ignored, and then no test can be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: No test waits longer than this for anything; a hang is dumped and ends the process. Under valgrind it is set higher.
PATIENCE = float(os.environ.get("PEERWAY_TEST_PATIENCE", "180"))


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def endpoint() -> Iterator[peerway.Endpoint]:
    with peerway.Endpoint() as endpoint:
        yield endpoint


@pytest.fixture
def far() -> Iterator[Far]:
    """A peer in a process of its own."""
    with Far() as far:
        yield far


@pytest.fixture(params=["local-map", "local-cma", "local-ring", "tcp"])
def pinned(request: pytest.FixtureRequest) -> str:
    """Every path between two processes."""
    return request.param
