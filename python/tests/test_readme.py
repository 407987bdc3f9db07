"""The example of README.md, run as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import peerway
import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_example_reads_the_pages_that_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("numpy")
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1, "this test runs one example"
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
    exec(compile(blocks[0], str(README), "exec"), {})
    assert [(page.min(), page.max()) for page in made[0][:4]] == [(17, 17), (4, 4), (99, 99), (3, 3)]
