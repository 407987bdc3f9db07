"""``python -m peerway.bench``: its rows, its figures, and its errors."""

from __future__ import annotations

import faulthandler
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import far as there
import numpy
import peerway
import pytest
from far import Far
from peerway.bench import awaited, calls, pattern, plan, sizes
from peerway.bench.report import figure

PATIENCE = 300.0
QUICK = ["--seconds", "0.01"]
PATHS = ["local-map", "local-cma", "local-ring", "tcp"]


@pytest.fixture(autouse=True)
def _longer_watchdog(_watchdog: None) -> Iterator[None]:
    faulthandler.dump_traceback_later(PATIENCE + 20, exit=True)
    yield


def bench(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "peerway.bench", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, **options)


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def one_line(ran: subprocess.CompletedProcess[str]) -> str:
    assert ran.stdout == "" and ran.stderr.count("\n") == 1 and ran.stderr.endswith("\n"), ran.stderr
    return ran.stderr


def test_rows_of_every_path(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    ran = bench(*QUICK, "--sizes", "256,5000", "--iovs", "1,3,1100", "--json", str(file), "--no-compare")
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    found = json.loads(file.read_text())
    assert set(found) == {
        "version",
        "seconds",
        "clock_cost_ns",
        "rows",
        "call",
        "posting",
        "asyncio",
        "notes",
    }
    assert found["version"] == peerway.__version__ and found["seconds"] == 0.01

    keys = [(row["path"], row["op"], row["iovs"], row["size"]) for row in found["rows"]]
    measured = list(dict.fromkeys(key[0] for key in keys))
    # A path that this machine does not support is a note. Every machine supports these two.
    assert {"local-ring", "tcp"} <= set(measured)
    assert all(f"{path}: not measured" in ran.stdout for path in PATHS if path not in measured)
    assert keys == [
        (path, op, iovs, size)
        for path in measured
        for op in ("write", "read")
        for iovs in (1, 3, 1100)
        for size in (256, 5000)
    ]
    fields = {"path", "op", "size", "iovs", "p50_us", "p99_us", "gbps", "prepared_p50_us", "baseline"}
    for row in found["rows"]:
        assert set(row) == fields
        assert 0 < row["p50_us"] <= row["p99_us"] and row["prepared_p50_us"] > 0
        assert row["gbps"] == pytest.approx(row["size"] * row["iovs"] / row["p50_us"] / 1e3)
        assert (row["baseline"] is None) == (row["path"] == "tcp")
        if row["baseline"] is not None:
            baseline = row["baseline"]
            assert baseline["name"] == "numpy.copyto" and baseline["gbps"] > 0
            assert 0 < baseline["low"] <= baseline["ratio"] <= baseline["high"]

    call = found["call"]
    assert call["size"] == 256 and call["write_ns"] > call["prepared_ns"] > 0
    assert call["overhead_ns"] == pytest.approx(call["write_ns"] - call["empty_ns"])
    assert [row["path"] for row in found["asyncio"]] == measured
    for row in found["asyncio"]:
        assert (row["transfers"], row["size"]) == (1000, 4096) and row["total_ms"] > 0
        assert row["threads_during"] <= row["threads_before"] + 2
    assert found["posting"] == [] and found["notes"] == []
    for text in (
        "GB/s",
        "ratio (low-high)",
        "numpy.copyto",
        "verified:",
        "an empty Python call",
        "awaited at once",
    ):
        assert text in unwrapped(ran.stdout)
    assert all(line == line.rstrip() and len(line) <= 80 for line in ran.stdout.splitlines()), ran.stdout


def test_a_hundred_thousand_blocks() -> None:
    what = "--sizes 4K --iovs 100000 --op write --paths local-map --json - --no-compare"
    ran = bench(*QUICK, *what.split())
    assert ran.returncode == 0, ran.stderr
    # Standard output contains only the JSON; the table is on standard error.
    found = json.loads(ran.stdout)
    assert "inside the posting call" in unwrapped(ran.stderr)
    assert [(row["iovs"], row["size"]) for row in found["rows"]] == [(100_000, 4096)] * len(found["rows"])
    for row in found["posting"]:
        assert (row["iovs"], row["size"]) == (100_000, 4096)
        # A Python loop over the blocks would take more than ten milliseconds, and moving them even
        # more.
        assert 0 < row["post_us"] < 10_000 and row["blocks_us"] > 0 and row["prepare_us"] > 0
    assert found["posting"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--paths pigeon", "'pigeon': expected local-map"),
        ("--paths", "--paths"),
        ("--sizes 0", "expected a size"),
        ("--sizes 4X", "'4X'"),
        ("--sizes 4K,,1M", "expected a size"),
        ("--sizes -1", "--sizes"),
        ("--iovs 0", "from 1 to 4194304"),
        ("--iovs 5000000", "'5000000'"),
        ("--iovs 1.5", "'1.5'"),
        ("--seconds 0", "expected seconds"),
        ("--seconds nan", "expected seconds"),
        ("--seconds x", "expected seconds"),
        ("--op copy", "'copy'"),
        ("--sizes 1G --iovs 2", "2 x 1G"),
        ("--compare x --no-compare", "not allowed with"),
        ("--pigeon", "--pigeon"),
        ("pigeon", "pigeon"),
    ],
)
def test_bad_arguments(line: str, text: str) -> None:
    ran = bench(*line.split())
    assert ran.returncode == 2 and text in one_line(ran), ran.stderr


def test_a_failure_prints_one_line(tmp_path: Path) -> None:
    ran = bench(*QUICK, "--json", str(tmp_path / "no" / "such.json"))
    assert ran.returncode == 1 and "cannot write" in one_line(ran)
    ran = bench(*QUICK, "--sizes", "100T", "--iovs", "1")
    assert ran.returncode == 1 and "choose smaller --sizes" in one_line(ran)


SMALL = [*QUICK, "--sizes", "256", "--iovs", "1", "--op", "write", "--paths", "local-ring"]


def rust(folder: Path, script: str) -> str:
    """A script that replaces the Rust program."""
    program = folder / "peerway"
    program.write_text(f"#!{sys.executable}\nimport json, sys\n{script}\n")
    program.chmod(0o755)
    return str(program)


ROW = {"path": "local-ring", "op": "write", "size": 256, "iovs": 1, "gbps": 0.125, "p50_us": 2.048}
WRITES_ROW = f"""
assert sys.argv[1] == "bench"
with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
    json.dump({{"rows": [{ROW!r}]}}, file)
"""


def test_beside_the_rust_program(tmp_path: Path) -> None:
    program = rust(tmp_path, WRITES_ROW)
    file = tmp_path / "bench.json"
    on_path = {**os.environ, "PATH": f"{tmp_path}:{os.environ.get('PATH', '')}"}
    for args, env in ((["--compare", program], None), ([], on_path)):
        ran = bench(*SMALL, *args, "--json", str(file), env=env)
        assert ran.returncode == 0, ran.stderr
        assert "Rust µs" in ran.stdout and "2.05" in ran.stdout
        row = json.loads(file.read_text())["rows"][0]
        assert row["rust_gbps"] == 0.125 and row["rust_p50_us"] == 2.048
    ran = bench(*SMALL, "--no-compare", env=on_path)
    assert ran.returncode == 0 and "Rust" not in ran.stdout


@pytest.mark.parametrize("script", ["sys.exit('no luck')", "pass"])
def test_a_rust_program_that_fails(tmp_path: Path, script: str) -> None:
    program = rust(tmp_path, script)
    ran = bench(*SMALL, "--compare", program)
    # The table of the Python benchmark is still printed.
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1 and "local-ring write" in ran.stdout
    assert program in ran.stderr
    ran = bench(*SMALL, env={**os.environ, "PATH": str(tmp_path)})
    assert ran.returncode == 0 and "not compared" in ran.stdout
    ran = bench(*SMALL, "--compare", str(tmp_path / "nothing"))
    assert ran.returncode == 1 and "cannot run" in ran.stderr


def test_progress_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "peerway.bench", *SMALL, "--no-compare"]
    ran = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, timeout=PATIENCE, check=False)
    os.close(theirs)
    seen = os.read(ours, 10_000).decode()
    os.close(ours)
    assert ran.returncode == 0 and "1/2 local-ring write 256" in seen and seen.endswith("\r\x1b[K")


def test_threads_do_not_grow_with_transfers(far: Far) -> None:
    # On this path, transfers are still pending when the posting call returns.
    with peerway.Endpoint(transport="tcp", slots=4096) as endpoint:
        peer = endpoint.connect(far.metadata)
        size, most = awaited.SIZE, 2000
        remote = peer.remote(far(there.advertise, most * size))
        region = endpoint.register(numpy.ones(most * size, "uint8"))
        pieces = [(region[i : i + size], remote[i : i + size]) for i in range(0, most * size, size)]
        found = []
        for count in (10, 100, 1000, most):
            local, theirs = zip(*pieces[:count], strict=True)
            found.append(awaited.measure(peer, "tcp", local, theirs))
        assert [one.transfers for one in found] == [10, 100, 1000, most]
        # Threads of earlier tests may end during this test. One thread per transfer would be
        # hundreds.
        assert found[-1].threads_during <= found[0].threads_during + 2, found
        assert far(there.content) == bytes([1]) * most * size


def test_a_call_is_measured() -> None:
    found = calls.measure(0.05)
    assert 0 < found.empty_ns < found.write_ns and found.prepared_ns > 0


def test_sizes() -> None:
    for size in (1, 255, 256, 1024, 1025, 4096, 10 << 20, 100 << 20, 3 << 30, 5 << 40):
        assert sizes.parse(sizes.show(size)) == size
    assert sizes.show(100 << 20) == "100M" and sizes.show(1536) == "1536" and sizes.parse("4k") == 4096
    for text in ("", "0", "0K", "-1", "K", "1.5M", "4Q", "99999999999T"):
        with pytest.raises(ValueError, match="expected a size"):
            sizes.parse(text)


def test_the_plan_is_that_of_the_rust_program() -> None:
    # Per operation: 10 single sizes, 7 sizes of 128 pieces (up to 1M), and the block list.
    made = plan.make(["write", "read"], [], [], full=True)
    assert len(made.rows) == 2 * (10 + 7 + 1) and made.largest == 409_600_000
    assert made.left_out == ["128 x 10M", "128 x 16M", "128 x 100M"]
    assert "read 100000 x 4K" in [row.name for row in made.rows]
    assert len(plan.make(["read"], [4096], [], full=True).rows) == 2
    # Without --full, a run shows single pieces of five sizes.
    quick = plan.make(["write", "read"], [], [])
    assert [(row.size, row.iovs) for row in quick.rows] == [(size, 1) for size in plan.FEW_SIZES] * 2
    assert len(plan.make(["read"], [4096], []).rows) == 1


@pytest.mark.parametrize(("size", "iovs"), [(256, 1), (1003, 1), (1000, 37)])
def test_every_byte_and_the_order_are_looked_at(size: int, iovs: int) -> None:
    row = plan.Row("write", size, iovs, seed=3)
    ours, theirs = numpy.zeros(row.total, "uint8"), numpy.zeros(row.total + 5, "uint8")
    pattern.fill(ours, row)
    pattern.blank(theirs, row)
    assert not pattern.arrived(theirs, row, "theirs")
    blocks = theirs[: row.total].reshape(iovs, size)
    blocks[row.order("theirs")] = ours.reshape(iovs, size)[row.order("ours")]
    assert pattern.arrived(theirs, row, "theirs")
    for at in (0, row.total // 2, row.total - 1):
        theirs[at] ^= 1
        assert not pattern.arrived(theirs, row, "theirs")
        theirs[at] ^= 1
    if iovs > 1:
        blocks[[0, 1]] = blocks[[1, 0]]
        assert not pattern.arrived(theirs, row, "theirs")


def test_figures_are_short() -> None:
    shown = [figure(value) for value in (0.0, 0.00123, 0.15, 1.0, 9.996, 25.04, 99.96, 1234.5)]
    assert shown == ["0", "0.0012", "0.150", "1.00", "10.0", "25.0", "100", "1234"]
