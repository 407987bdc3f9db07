"""The processors that the engine's threads run on."""

from __future__ import annotations

import os
import subprocess
import sys

import peerway
import pytest

# Pins the interpreter's thread between the import and the first endpoint, as frameworks pin their
# workers.
PINNED = """
import os, sys, time
import peerway

everywhere = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(everywhere)})
one, other = peerway.Endpoint(transport="local-map"), peerway.Endpoint(transport="local-map")
size = 64 << 20
ours, theirs = one.allocate(size), other.allocate(size)
peer = one.connect(other.metadata)
peer.write(ours, peer.remote(theirs.advertise("w")))

def masks():
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as comm:
                name = comm.read().strip()
            if name.startswith("peerway-"):
                found[name, task] = os.sched_getaffinity(int(task))
        except (FileNotFoundError, ProcessLookupError):
            pass  # the thread has ended
    return found

until = time.monotonic() + 60
while not (found := masks()) or any(mask != everywhere for mask in found.values()):
    assert time.monotonic() < until, f"expected {everywhere}: {found}"
    time.sleep(0.01)
assert {"peerway-serve", "peerway-copy"} <= {name for name, _ in found}, found
assert one.stats["cpus"] == sorted(everywhere), one.stats
"""


def test_threads_do_not_inherit_the_mask_of_a_pinned_interpreter() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this process has one processor")
    environment = {name: value for name, value in os.environ.items() if name != "PEERWAY_CPUS"}
    subprocess.run([sys.executable, "-c", PINNED], check=True, env=environment, timeout=120)


def test_a_setting_that_cannot_be_met_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERWAY_CPUS", "0-")
    with pytest.raises(peerway.InvalidSetting, match="PEERWAY_CPUS"):
        peerway.Endpoint()
