"""The Python of README.md and of the guide: it runs as it stands, and type checkers accept it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import peerway
import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/book/src/guide/python.md"


def blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


#: The owner and the reader, and the first example of the guide, in one process.
README, PAGED = blocks(ROOT / "README.md"), blocks(GUIDE)[0]
#: Type checkers take some seconds, and more on a busy machine.
PATIENCE = 300.0


def test_the_quick_start_is_that_of_the_examples() -> None:
    for block, name in zip(README, ("owner.py", "reader.py"), strict=True):
        assert block == (ROOT / "python/examples" / name).read_text(), name
        assert len(block.splitlines()) <= 25, f"{name} is no quick start any more"


def test_the_example_reads_the_pages_that_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("numpy")
    empty, zeros, made = peerway.empty, numpy.zeros, []

    def numbered(*args: Any) -> Any:
        """Memory of the owner, in which each page has its number as bytes."""
        cache = empty(*args)
        cache[:] = numpy.arange(len(cache)).reshape(-1, 1) % 251
        return cache

    def kept(*args: Any) -> Any:
        """Memory of the other side, which this test looks at afterwards."""
        made.append(zeros(*args))
        return made[-1]

    monkeypatch.setattr(peerway, "empty", numbered)
    monkeypatch.setattr(numpy, "zeros", kept)
    exec(compile(PAGED, str(GUIDE), "exec"), {})
    assert [(page.min(), page.max()) for page in made[0][:4]] == [(17, 17), (4, 4), (99, 99), (3, 3)]


#: What users write and type checkers must understand: the arrays of `empty`, and index arrays.
TYPED = """
from typing import Any, assert_type

import numpy
import peerway
from numpy.typing import NDArray

assert_type(peerway.empty(4), NDArray[numpy.uint8])
assert_type(peerway.empty((4, 2), "uint8"), NDArray[numpy.uint8])
assert_type(peerway.empty((4, 2), numpy.float32), NDArray[numpy.float32])
assert_type(peerway.empty((4, 2), numpy.dtype("float16")), NDArray[numpy.float16])
assert_type(peerway.empty([4, 2], "float16"), NDArray[Any])
assert_type(peerway.empty(4, "float16", gpu=0), peerway.GpuArray)


def blocks(region: peerway.Region, remote: peerway.RemoteRegion) -> None:
    for indices in (numpy.arange(3), numpy.array([1], "uint32")):
        region.blocks(indices, 4096)
        remote.blocks(indices, 4096)
    region.blocks([1, 2], 4096)
    region.blocks(range(3), 4096)
    region.blocks(b"\\1\\2", 4096)
"""
#: What type checkers must refuse, one line each.
REFUSED = """
import peerway

region = peerway.Endpoint().allocate(1 << 20)
region.blocks([0.5], 4096)
region.blocks(7, 4096)
region.advertise("x")
peerway.empty(0.5)
peerway.empty("4")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("numpy")
    for i, block in enumerate([*README, PAGED, TYPED]):
        (tmp_path / f"block_{i}.py").write_text(block)
    (tmp_path / "refused.py").write_text(REFUSED)
    return tmp_path


def wrong_lines(text: str, pattern: str) -> dict[str, set[int]]:
    """The lines with errors, by file."""
    found: dict[str, set[int]] = {}
    for name, line in re.findall(pattern, text):
        found.setdefault(Path(name).name, set()).add(int(line))
    return found


#: Every line of REFUSED after the region, and nothing else.
EXPECTED = {"refused.py": set(range(5, 10))}


def test_mypy_accepts_it(folder: Path) -> None:
    pytest.importorskip("mypy")
    files = sorted(path.name for path in folder.glob("*.py"))
    command = [sys.executable, "-m", "mypy", "--strict", "--python-version", "3.11", "--no-incremental", *files]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert wrong_lines(ran.stdout, r"(?m)^(\S+?):(\d+): error") == EXPECTED, ran.stdout + ran.stderr


def test_pyright_accepts_it(folder: Path) -> None:
    pytest.importorskip("basedpyright")
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert wrong_lines(ran.stdout, r"(\S+?):(\d+):\d+ - error") == EXPECTED, ran.stdout + ran.stderr
