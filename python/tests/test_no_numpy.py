"""The package without NumPy: everything works but arrays, and these say what they want."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HIDES = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
"""

BUFFERS = """
import peerway

with peerway.Endpoint() as a, peerway.Endpoint() as b:
    theirs = b.allocate(8192)
    peer = a.connect(b.metadata)
    remote = peer.remote(theirs.advertise("rw"))
    peer.write(bytes(range(256)) * 32, remote)
    page = bytearray(8192)
    ours = a.register(page)
    peer.post_read(ours.blocks([0, 1], 4096), remote.blocks(b"\\1\\0", 4096)).wait()
    assert page[:256] == bytes(range(256)) and bytes(memoryview(theirs)[:4]) == bytes(range(4))
"""


def run(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(HIDES)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)


def test_buffers_are_enough(tmp_path: Path) -> None:
    ran = run(tmp_path, BUFFERS)
    assert ran.returncode == 0, ran.stderr
    assert run(tmp_path, "import numpy").returncode == 1, "NumPy is not hidden"


def test_empty_says_what_it_wants_in_a_sentence(tmp_path: Path) -> None:
    for dtype in ('"uint8"', '"float16", gpu=0'):
        ran = run(tmp_path, f"import peerway; peerway.empty(4, {dtype})")
        last = ran.stderr.strip().splitlines()[-1]
        assert last == (
            "ImportError: peerway.empty makes NumPy arrays, and NumPy is not installed: run "
            '`pip install "peerway[numpy]"`, or use Endpoint.allocate(nbytes), whose memory is a buffer'
        )
