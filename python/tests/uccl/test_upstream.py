"""UCCL's own test programs, unmodified.

Programs that need a GPU run if torch has one; one is enough. ``PEERWAY_UPSTREAM`` names a checkout
of UCCL; without it these tests are skipped.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

UPSTREAM = os.environ.get("PEERWAY_UPSTREAM", "")
pytestmark = pytest.mark.skipif(not UPSTREAM, reason="PEERWAY_UPSTREAM does not name a checkout of UCCL")
P2P = Path(UPSTREAM) / "p2p"
RUN = [sys.executable, "-m", "peerway.uccl"]
TORCHRUN = ["-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=2", "--master_addr=127.0.0.1"]
#: The time limit of a program in seconds. Some of the programs sleep a lot.
PATIENCE = 120

#: The calls of the GPU runtime that the programs use, implemented with host memory.
FAKE_HIP = """
#include <stdlib.h>
#include <string.h>
int hipInit(unsigned flags) { return 0; }
int hipSetDevice(int device) { return 0; }
int hipMalloc(void **ptr, size_t size) { return (*ptr = malloc(size)) ? 0 : 2; }
int hipMemcpy(void *to, const void *from, size_t size, int kind) { memcpy(to, from, size); return 0; }
int hipFree(void *ptr) { free(ptr); return 0; }
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run(*arguments: str, **environment: str) -> str:
    """Runs a program, checks its exit code, and returns its output."""
    done = subprocess.run(
        [*RUN, *arguments], capture_output=True, text=True, timeout=PATIENCE, env=os.environ | environment
    )
    said = done.stdout + done.stderr
    print(said)
    assert done.returncode == 0, said
    return said


def torchrun(*arguments: str, **environment: str) -> str:
    pytest.importorskip("torch")
    return run(*TORCHRUN, f"--master_port={free_port()}", *arguments, **environment)


@pytest.fixture
def gpu() -> None:
    """Skips the test unless torch can use a GPU."""
    torch = pytest.importorskip("torch")
    if not (torch.version.cuda and torch.cuda.device_count()):
        pytest.skip("torch sees no GPU")


#: Maps the endpoints of GPUs 0 and 1 to one GPU.
ONE_GPU = {"PEERWAY_GPU_MAP": "0,0"}
BENCHMARK = str(P2P / "benchmarks/benchmark_uccl.py")
OPTIONS = [["--float-type", "none"], ["--async-api"], ["--num-iovs", "8"], ["--device", "cpu", "--pinned"]]


@pytest.fixture(scope="session")
def fake_hip(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the fake GPU runtime")
    folder = tmp_path_factory.mktemp("hip")
    (folder / "hip.c").write_text(FAKE_HIP)
    library = folder / "libfakehip.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(library), str(folder / "hip.c")],
        check=True,
        timeout=PATIENCE,
    )
    # The engine would warn about these two variables, which only the test programs use.
    return {"UCCL_GPU_RT": "hip", "UCCL_GPU_RT_LIB": str(library), "PEERWAY_LOG_LEVEL": "error"}


def test_register_memory_cache() -> None:
    pytest.importorskip("torch")
    said = run(str(P2P / "tests/test_register_memory_cache.py"))
    assert said.count("verification passed") == 4 and "Skipping" not in said


def test_remove_remote_endpoint_alone() -> None:
    pytest.importorskip("torch")
    assert "5 passed, 0 failed" in run(str(P2P / "tests/test_remove_remote_endpoint.py"))


def test_remove_remote_endpoint_in_two_processes() -> None:
    said = torchrun(str(P2P / "tests/test_remove_remote_endpoint.py"))
    assert said.count("5 passed, 0 failed") == 2 and "Skipping" not in said
    assert said.count("PASSED") == 10


def test_gpu_index_mapping() -> None:
    pytest.importorskip("torch")
    assert "passed" in run(str(P2P / "tests/test_gpu_index_mapping.py"))


@pytest.mark.parametrize("mode", ["write", "read"])
def test_cross_node_rdma_native(fake_hip: dict[str, str], mode: str) -> None:
    program, port = str(P2P / "tests/test_cross_node_rdma_native.py"), str(free_port())
    common = [*RUN, program, "--mode", mode, "--rendezvous-port", port]
    environment = os.environ | fake_hip | {"PYTHONUNBUFFERED": "1"}
    acceptor = subprocess.Popen(
        [*common, "--role", "acceptor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    try:
        assert acceptor.stdout is not None
        said = acceptor.stdout.readline()
        assert "listening" in said, said
        wait_for_listener(int(port))
        initiator = [*common, "--role", "initiator", "--peer-ip", "127.0.0.1"]
        done = subprocess.run(initiator, capture_output=True, text=True, timeout=PATIENCE, env=environment)
        said += acceptor.communicate(timeout=PATIENCE)[0]
    finally:
        acceptor.kill()
        acceptor.wait()
    print(said, done.stdout, done.stderr)
    assert done.returncode == 0 and acceptor.returncode == 0, said + done.stdout + done.stderr
    assert "test passed" in done.stdout and "test passed" in said
    assert ("correctly written" in said) if mode == "write" else ("data verified" in done.stdout)


def wait_for_listener(port: int) -> None:
    """Waits for a listener without connecting.

    The program takes the first connection as its peer.
    """
    import time

    listening = f":{port:04X} 00000000:0000 0A"
    until = time.monotonic() + PATIENCE
    while listening not in Path("/proc/net/tcp").read_text():
        assert time.monotonic() < until, "no program listens"
        time.sleep(0.02)


def test_engine_onesided_ipc_native(fake_hip: dict[str, str]) -> None:
    said = run(str(P2P / "tests/test_engine_onesided_ipc_native.py"), **fake_hip)
    assert "RESULT: ALL PASS" in said and "write_ipc PASS" in said and "read_ipc PASS" in said


@pytest.mark.parametrize("options", [[], ["--normal"], ["--num-iovs", "16"]], ids=["raw", "normal", "iovs"])
def test_benchmark_ray_p2p(options: list[str]) -> None:
    said = torchrun(str(P2P / "benchmarks/benchmark_ray_p2p.py"), "--device", "cpu", "--iters", "20", *options)
    assert "Benchmark complete (WRITE + READ)" in said
    assert len(re.findall(r"\[Client/(?:WRITE|READ)\] +\S+ \S+ :", said)) == 36, "18 sizes, both ways"


def test_util_interval_tree(tmp_path: Path) -> None:
    """The program imports ``utils`` from its parent folder.

    The test puts Peerway's ``utils`` there.
    """
    (tmp_path / "tests").mkdir()
    shutil.copy(P2P / "tests/test_util_interval_tree.py", tmp_path / "tests")
    (tmp_path / "utils.py").write_text("from uccl.utils import *\n")
    said = run("-m", "pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path / "tests"))
    assert re.search(r"\b\d\d passed", said) and "failed" not in said


@pytest.mark.parametrize("op", ["read", "write"])
def test_engine_read_and_write(gpu: None, op: str) -> None:
    # The program does not check the exit codes of its processes, so check its output.
    said = run(str(P2P / f"tests/test_engine_{op}.py"))
    assert f"\u2713 Server {op} data correctly" in said and "Traceback" not in said


def test_engine_nvlink_metadata(gpu: None) -> None:
    said = torchrun(str(P2P / "tests/test_engine_nvlink_metadata.py"))
    assert "[server] Received correct data" in said and "All UCCL P2P Engine tests completed!" in said


def test_engine_onesided_ipc(gpu: None) -> None:
    said = torchrun(str(P2P / "tests/test_engine_onesided_ipc.py"), **ONE_GPU)
    assert "All one-sided IPC tests passed!" in said
    assert said.count("PASSED") == 24, "8 tests, on the GPU and on the host; both sides report reads"


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
@pytest.mark.parametrize("mode", ["write", "read"])
def test_benchmark_uccl(gpu: None, mode: str, options: list[str]) -> None:
    said = torchrun(BENCHMARK, "--mode", mode, "--iters", "20", *options)
    assert said.count("Benchmark complete") == 2 and len(re.findall(r"\[Client\] .* Gbps", said)) == 18


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
@pytest.mark.parametrize("mode", ["write", "read"])
def test_benchmark_uccl_ipc(gpu: None, mode: str, options: list[str]) -> None:
    launcher = str(Path(__file__).parent / "one_gpu.py")
    said = torchrun(launcher, BENCHMARK, f"--{mode}-ipc", "--iters", "20", *options, **ONE_GPU)
    assert said.count("_ipc benchmark complete") == 2 and len(re.findall(r"\[Client\] .* Gbps", said)) == 18
