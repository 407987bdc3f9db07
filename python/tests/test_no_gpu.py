"""Behaviour without a GPU, and in processes that do not use one."""

from __future__ import annotations

import os
import subprocess
import sys


def run(code: str, **environment: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "PEERWAY_CUDA_SO"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=variables | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_driver_it_is_said() -> None:
    """Simulates a machine without GPUs: on a machine with GPUs, the driver is told to hide them."""
    said = run(
        """
import peerway
class Array:
    __cuda_array_interface__ = {"shape": (64,), "typestr": "|u1", "data": (1 << 40, False), "version": 3}
endpoint = peerway.Endpoint()
for call in [
    peerway.gpus,
    lambda: endpoint.register(Array()),
    lambda: endpoint.allocate(64, gpu=0),
    lambda: peerway.empty(64, gpu=0),
]:
    try:
        call()
    except peerway.NoCuda as error:
        print(error)
endpoint.register(bytearray(64))
""",
        CUDA_VISIBLE_DEVICES="",
    )
    lines = said.splitlines()
    assert len(lines) == 4 and all("no GPU can be used: " in line for line in lines)
    assert lines[1].startswith("buffer: ")


def test_host_transfers_do_not_initialise_the_driver() -> None:
    code = """
import peerway
from peerway import _native
import peerway.uccl.p2p as p2p
with peerway.Endpoint() as one, peerway.Endpoint() as other:
    theirs = other.allocate(64)
    one.connect(other.metadata).write(b"x" * 64, theirs.advertise())
endpoint = p2p.Endpoint()
endpoint.close()
print(_native.gpu_in_use())
try:
    there = bool(peerway.gpus())
except peerway.NoCuda:
    there = False
print(_native.gpu_in_use() == there)
"""
    named = {name: os.environ[name] for name in ["PEERWAY_CUDA_SO"] if name in os.environ}
    assert run(code, **named).split() == ["False", "True"]
