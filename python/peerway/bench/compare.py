"""The rows of the Rust program, measured with the same flags."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: The key of a row: path, op, size, iovs.
Key = tuple[str, str, int, int]


class NoRows(Exception):
    """The Rust program could not be run, or returned no measurements."""


def find() -> str | None:
    """The Rust program on ``PATH``."""
    return shutil.which("peerway")


def rows(program: str, flags: Sequence[str]) -> dict[Key, dict[str, Any]]:
    """Runs ``peerway bench`` with these flags and returns its rows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        try:
            ran = subprocess.run(
                [program, "bench", "--json", str(file), *flags],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:
            raise NoRows(f"cannot run {program}: {error.strerror or error}") from error
        if ran.returncode != 0:
            last = (ran.stderr.strip().splitlines() or ["it printed no error"])[-1]
            raise NoRows(f"{program} bench failed (exit code {ran.returncode}): {last}")
        try:
            found = json.loads(file.read_text())["rows"]
            return {(row["path"], row["op"], row["size"], row["iovs"]): row for row in found}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise NoRows(f"{program} bench wrote no valid JSON rows") from error
