"""The engine's log in Python's ``logging``."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import time

import far as there
import peerway
import pytest
from far import Far

#: A program that connects two endpoints in one process and closes them.
CONNECT = """
import peerway
with peerway.Endpoint(transport="tcp") as one, peerway.Endpoint(transport="tcp") as other:
    one.connect(other.metadata)
"""


def run(program: str, **variables: str) -> str:
    """Runs a program and returns its standard error."""
    unset = ("RUST_LOG", "PEERWAY_LOG_LEVEL", "UCCL_P2P_LOG_LEVEL", "UCCL_DEBUG")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment | variables, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def wait_for(caplog: pytest.LogCaptureFixture, text: str) -> logging.LogRecord:
    until = time.monotonic() + 60
    while True:
        for record in caplog.records:
            if text in record.getMessage():
                return record
        assert time.monotonic() < until, [record.getMessage() for record in caplog.records]
        time.sleep(0.01)


def test_the_life_of_a_peer_is_logged_at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="peerway")
    with peerway.Endpoint(transport="tcp") as one, peerway.Endpoint(transport="tcp") as other:
        listens = wait_for(caplog, "an endpoint listens")
        assert listens.name == "peerway" and listens.levelno == logging.INFO
        peer = one.connect(other.metadata)
        connected = wait_for(caplog, "connected to a peer")
        assert connected.fields["path"] == "tcp" and connected.fields["why"] == "pinned to tcp"
        assert connected.fields["peer"] in connected.getMessage()
        wait_for(caplog, "accepted a peer")
        peer.remove()
        assert wait_for(caplog, "a session closed").fields["cause"]


def test_the_level_follows_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="peerway")
    peerway.Endpoint().close()
    caplog.set_level(logging.INFO, logger="peerway")
    with peerway.Endpoint() as endpoint:
        second = wait_for(caplog, str(endpoint.addresses[0][1]))
    assert "an endpoint listens" in second.getMessage()
    assert len([record for record in caplog.records if "listens" in record.getMessage()]) == 1


def test_nothing_is_said_without_need() -> None:
    assert run(CONNECT) == ""


def test_warnings_reach_a_program_that_configures_nothing() -> None:
    assert "PEERWAY_LANE is not a setting" in run(CONNECT, PEERWAY_LANE="3")


@pytest.mark.parametrize(
    ("variables", "said", "unsaid"),
    [
        ({"PEERWAY_LOG_LEVEL": "info"}, ["INFO peerway: an endpoint listens", "connected to a peer"], ["DEBUG"]),
        ({"RUST_LOG": "peerway::session=info"}, ["connected to a peer"], ["an endpoint listens"]),
    ],
)
def test_the_environment_shows_more(variables: dict[str, str], said: list[str], unsaid: list[str]) -> None:
    text = run(CONNECT, **variables)
    assert all(word in text for word in said) and not any(word in text for word in unsaid), text


def test_a_forked_child_logs_its_own_lines() -> None:
    program = f"""
import os, sys
{CONNECT}
pid = os.fork()
if pid == 0:
    with peerway.Endpoint(bind="127.0.0.1") as endpoint:
        sys.stderr.write(f"child listens on {{endpoint.addresses[0][1]}}\\n")
    sys.exit(0)
sys.exit(os.waitpid(pid, 0)[1])
"""
    text = run(program, PEERWAY_LOG_LEVEL="info")
    (port,) = [line.split()[-1] for line in text.splitlines() if line.startswith("child listens on")]
    assert any("an endpoint listens" in line and f":{port}" in line for line in text.splitlines()), text


def test_engine_threads_do_not_wait_for_the_interpreter(caplog: pytest.LogCaptureFixture) -> None:
    """A peer that connects is accepted, and logged, while a thread keeps the interpreter."""
    caplog.set_level(logging.INFO, logger="peerway")
    with peerway.Endpoint(transport="tcp") as endpoint, Far(transport="tcp") as far:
        assert far.metadata, "the process has started"
        answer = far.begin(there.connect_and_time, endpoint.metadata)
        # `PyDLL` keeps the interpreter during the call.
        ctypes.PyDLL(None).sleep(4)
        assert answer() < 3, "the peer had to wait for the interpreter"
        wait_for(caplog, "accepted a peer")
