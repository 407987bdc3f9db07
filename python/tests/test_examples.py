"""Every example, run as a user would run it."""

from __future__ import annotations

import faulthandler
import importlib.util
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
#: The import of torch or the start of Ray takes long on a small, busy machine.
PATIENCE = 300.0


@pytest.fixture(autouse=True)
def _longer_watchdog(_watchdog: None) -> Iterator[None]:
    faulthandler.dump_traceback_later(PATIENCE + 20, exit=True)
    yield


def needs(module: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed")


def run(name: str, *args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=PATIENCE, check=False)


def passes(name: str, *args: str) -> str:
    ran = run(name, *args)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran.stdout


SMALL_CACHE = ["--layers", "3", "--blocks", "20", "--block-bytes", "1000"]


@pytest.mark.parametrize("extra", [[], pytest.param(["--torch"], marks=needs("torch"))], ids=["numpy", "torch"])
def test_kv_handover(extra: list[str]) -> None:
    out = passes("kv_handover.py", *SMALL_CACHE, *extra)
    assert re.search(r"handed over 0\.1 MB by [\w-]+ in .* GB/s, verified", out), out
    assert re.search(r"decode had \d of 3 layers before", out), out
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["0", "1", "2"], out


def test_kv_handover_by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERWAY_TRANSPORT", "tcp")
    assert "by tcp" in passes("kv_handover.py", *SMALL_CACHE)


def test_weight_sync() -> None:
    out = passes("weight_sync.py", "--readers", "2", "--versions", "3", "--megabytes", "2")
    assert "synced 3 versions of 2 MB to 2 readers, verified" in out
    assert "version 3: 2 of 2 readers" in out


@pytest.mark.parametrize("path", ["local-map", "local-ring", "tcp"])
def test_weight_sync_goes_on_without_a_reader(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERWAY_TRANSPORT", path)
    out = passes("weight_sync.py", "--readers", "3", "--versions", "4", "--megabytes", "8", "--kill-one")
    assert "version 3: 2 of 3 readers" in out and "version 4: 2 of 2 readers" in out, out
    assert "reader 0 was killed in the middle of a read; the others continued" in out
    assert "synced 4 versions of 8 MB to 2 readers, verified" in out


@pytest.mark.parametrize("path", ["local-map", "tcp"])
def test_driven_puts(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERWAY_TRANSPORT", path)
    out = passes("driven_puts.py", "--rounds", "3", "--tokens", "20", "--token-bytes", "100")
    assert re.fullmatch(r"(host threads|kernels of GPU 0) pushed 60 puts of 100 bytes, 0 failed, verified\n", out), out
    assert "host threads pushed 1 puts of 4 bytes" in passes(
        "driven_puts.py", "--cpu", "--rounds", "1", "--tokens", "1", "--token-bytes", "4"
    )


@needs("torch")
def test_rendezvous_store() -> None:
    assert "2 ranks met through the store and exchanged 2.1 MB, verified" in passes("rendezvous_store.py")


class Store:
    """A rank's view of a store that ends when rank 0 leaves. It replaces torch's TCPStore.

    Ranks other than 0 are slow at the end. After such a rank is done, each of its calls waits until
    rank 0 has left, or waits for a key that is not set yet.
    """

    def __init__(
        self, rank: int, shared: dict[str, bytes], changed: threading.Condition, left: threading.Event
    ) -> None:
        self.rank, self.shared, self.changed, self.left = rank, shared, changed, left
        self.done = False

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.let_rank_0_go_on()
            self.shared[key] = value
            self.done = self.done or key == f"peerway/done/{self.rank}"
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=PATIENCE))
        return self.shared[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self.changed:
            self.let_rank_0_go_on()
            if self.rank == 0:
                self.shared["awaited by rank 0"] = "\n".join(keys).encode()
                self.changed.notify_all()
            there = self.changed.wait_for(lambda: self.left.is_set() or self.has(keys), timeout.total_seconds())
            if self.rank == 0:
                self.shared["awaited by rank 0"] = b""
            if self.left.is_set():
                raise RuntimeError("rank 0 has left, and the store with it")
            if not there:
                raise RuntimeError(f"no rank has set {keys}")

    def has(self, keys: list[str]) -> bool:
        return all(key in self.shared for key in keys)

    def let_rank_0_go_on(self) -> None:
        if self.rank == 0 or not self.done:
            return

        def stands_still() -> bool:
            awaited = self.shared.get("awaited by rank 0", b"").decode()
            return self.left.is_set() or (awaited != "" and not self.has(awaited.split("\n")))

        assert self.changed.wait_for(stands_still, PATIENCE), "rank 0 neither waits nor leaves"
        if self.left.is_set():
            raise RuntimeError("rank 0 has left, and the store with it")


@pytest.mark.parametrize("ranks", [2, 3])
def test_rank_0_serves_the_store_until_every_rank_has_left(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("rendezvous_store.py")
    shared: dict[str, bytes] = {}
    changed, left = threading.Condition(), threading.Event()
    # The ports that `run` gets are ranks here.
    monkeypatch.setattr(example, "open_store", lambda port, _: Store(port, shared, changed, left))
    failures = []

    def run(rank: int) -> None:
        try:
            example.run(rank, ranks, rank)
        except BaseException as error:
            failures.append(f"rank {rank}: {error!r}")
        if rank == 0:
            with changed:
                left.set()
                changed.notify_all()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


def load(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), EXAMPLES / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs("ray")
def test_rendezvous_ray() -> None:
    assert "2 actors met through Ray and exchanged 8.4 MB" in passes("rendezvous_ray.py")


#: What an example needs besides Python, and the line that needs it.
WANTED = [
    ("numpy", "NumPy", "kv_handover.py"),
    ("numpy", "NumPy", "weight_sync.py"),
    ("numpy", "NumPy", "driven_puts.py"),
    ("numpy", "NumPy", "rendezvous_store.py"),
    ("numpy", "NumPy", "rendezvous_ray.py"),
    ("torch", "torch", "kv_handover.py --torch"),
    ("torch", "torch", "rendezvous_store.py"),
    ("ray", "Ray", "rendezvous_ray.py"),
]


@pytest.mark.parametrize(("module", "name", "line"), WANTED, ids=lambda value: value.replace(" ", ""))
def test_an_example_says_what_it_wants(
    module: str, name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This finder, which Python runs at its start, hides the module.
    (tmp_path / "sitecustomize.py").write_text(HIDES.format(module=module))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ran = run(*line.split())
    what = f" needs {name}, which is not installed: pip install {module}\n"
    assert ran.returncode == 1 and ran.stderr.endswith(what) and ran.stderr.count("\n") == 1, ran.stderr


HIDES = """
import importlib.util, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "{module}":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "{module}" else find_spec(name, *rest)
"""


def test_two_processes_meet_by_a_pipe() -> None:
    owner, reader = [sys.executable, str(EXAMPLES / "owner.py")], [sys.executable, str(EXAMPLES / "reader.py")]
    pipe, error = subprocess.PIPE, subprocess.PIPE
    with subprocess.Popen(owner, stdout=pipe, stderr=error, text=True) as first:
        second = subprocess.run(
            reader, stdin=first.stdout, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        _, said = first.communicate(timeout=PATIENCE)
    assert second.returncode == 0 and "reader: read b'hello' by " in second.stdout, second.stderr
    assert first.returncode == 0 and said == "owner: a reader wrote b'world' and says b'done'\n", said


def test_a_reader_without_an_owner_says_how_to_run_it() -> None:
    ran = run("reader.py", stdin="")
    assert ran.returncode == 1 and "python owner.py | python reader.py" in ran.stderr, ran.stderr


#: These two have no flags.
QUICK_START = {"owner.py", "reader.py"}


@pytest.mark.parametrize("name", sorted({path.name for path in EXAMPLES.glob("*.py")} - QUICK_START))
def test_help(name: str) -> None:
    assert "usage:" in passes(name, "--help")


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'passes("{path.name}"' in text or f'EXAMPLES / "{path.name}"' in text, path.name


@pytest.mark.parametrize(
    "line",
    [
        "kv_handover.py --layers 0",
        "kv_handover.py --blocks x",
        "weight_sync.py --readers -1",
        "weight_sync.py --readers 1 --kill-one",
        "rendezvous_store.py --ranks 1",
        "driven_puts.py --tokens 0",
        "driven_puts.py --token-bytes 6",
    ],
)
def test_bad_arguments(line: str) -> None:
    ran = run(*line.split())
    assert ran.returncode == 2 and "error:" in ran.stderr and "Traceback" not in ran.stderr
