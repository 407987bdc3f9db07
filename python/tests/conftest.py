"""Fixtures of the tests: endpoints, peers in other processes, and a time limit for every test."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator

import peerway
import pytest
from far import Far

# A background shell job starts with SIGINT ignored. Then no test could be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: The limit for a test, in seconds. A test that hangs dumps its stacks and ends the process. Runs
#: under valgrind set a higher limit.
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
    """A peer in another process."""
    with Far() as far:
        yield far


@pytest.fixture(params=["local-map", "local-cma", "local-ring", "tcp"])
def pinned(request: pytest.FixtureRequest) -> str:
    """Every path between two processes."""
    return request.param
