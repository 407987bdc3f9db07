"""The package: names, import, running scripts, the distribution ``peerway-uccl``, settings."""

import enum
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import peerway
import peerway.uccl
import pytest
from peerway.uccl import alias, log, p2p
from uccl_support import WATCHDOG

COMPAT = Path(__file__).parents[3] / "compat" / "uccl" / "src"


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the interpreter without ``PYTHONPATH``, unless ``environment`` sets it."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=2 * WATCHDOG,
        env=kept | environment,
    )


def test_float_types() -> None:
    assert issubclass(p2p.FloatType, enum.Enum)
    values = {
        "kUndefined": 0,
        "kFloat16": 1,
        "kBFloat16": 2,
        "kFloat32": 3,
        "kFloat8E4M3FN": 4,
        "kFloat8E5M2": 5,
    }
    assert {kind.name: kind.value for kind in p2p.FloatType} == values
    assert all(getattr(p2p, name) is p2p.FloatType[name] for name in values)
    with pytest.raises(ValueError):
        p2p.FloatType(6)


def test_oob_ip(monkeypatch: pytest.MonkeyPatch) -> None:
    assert p2p.get_oob_ip().count(".") == 3
    monkeypatch.setenv("UCCL_SOCKET_IFNAME", "=lo")
    assert p2p.get_oob_ip() == "127.0.0.1"
    endpoint = p2p.Endpoint(0)
    assert endpoint.parse_metadata(endpoint.get_metadata())[0] == "127.0.0.1"
    endpoint.close()
    monkeypatch.setenv("UCCL_SOCKET_IFNAME", "=nosuchinterface")
    with pytest.raises(RuntimeError, match="nosuchinterface"):
        p2p.get_oob_ip()
    with pytest.raises(RuntimeError, match="nosuchinterface"):
        p2p.Endpoint(0)


def test_helpers() -> None:
    assert peerway.uccl.__version__ == "0.1.1"
    assert peerway.uccl.has_efa() is peerway.uccl.is_efa
    for call in ("nccl_plugin_path", "rccl_plugin_path", "efa_plugin_path", "efa_nccl_path"):
        with pytest.raises(FileNotFoundError, match=r"\.so"):
            getattr(peerway.uccl, call)()


def test_has_efa(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peerway.uccl, "_DEVICES", tmp_path)
    assert peerway.uccl.has_efa() is False
    (tmp_path / "rdmap16s27").mkdir()
    assert peerway.uccl.has_efa() is True
    monkeypatch.setattr(peerway.uccl, "_DEVICES", tmp_path / "missing")
    assert peerway.uccl.has_efa() is False


def test_import_starts_nothing() -> None:
    done = python(
        "-c",
        "import os, sys, threading\n"
        "before = len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd'))\n"
        "import peerway.uccl, peerway.uccl.p2p, peerway.uccl.utils\n"
        "assert (len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd'))) == before\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "pid = os.fork()\n"
        "if pid == 0: peerway.uccl.p2p.Endpoint(0).close(); os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_endpoint_needs_no_close() -> None:
    done = python(
        "-c",
        "import os, threading\n"
        "from peerway.uccl import p2p\n"
        "a, b = p2p.Endpoint(0), p2p.Endpoint(1)\n"
        "assert a.add_remote_endpoint(b.get_metadata())[0]\n"
        "threads = len(os.listdir('/proc/self/task'))\n"
        "del b\n"
        "assert len(os.listdir('/proc/self/task')) < threads\n",
    )
    assert (done.returncode, done.stderr) == (0, "")


SCRIPT = """
import sys
import multiprocessing
from uccl import p2p
import uccl.p2p, uccl.utils
import uccl

def child(queue):
    from uccl import p2p
    queue.put(p2p.Endpoint.__module__)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(sys.argv, p2p is uccl.p2p, p2p.Endpoint.__module__, queue.get(timeout=30), uccl.utils.__name__)
    process.join(30)
    sys.exit(process.exitcode or 3)
"""


def test_running_a_script(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    done = python("-m", "peerway.uccl", str(script), "--one", "-m", "two")
    assert done.returncode == 3, done.stderr
    name = "peerway.uccl.endpoint"
    assert done.stdout == f"{[str(script), '--one', '-m', 'two']} True {name} {name} peerway.uccl.utils\n"


def test_running_a_module(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    done = python("-m", "peerway.uccl", "-m", "program", "--one", PYTHONPATH=str(tmp_path))
    assert done.returncode == 3, done.stderr
    assert "'--one'] True peerway.uccl.endpoint peerway.uccl.endpoint" in done.stdout


def test_a_script_that_fails_fails(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("from uccl import p2p\nraise ValueError('reason')\n")
    done = python("-m", "peerway.uccl", str(script))
    assert done.returncode == 1 and "ValueError: reason" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["-m"], ["no/such/file.py"]])
def test_running_nothing(arguments: list[str]) -> None:
    done = python("-m", "peerway.uccl", *arguments)
    assert done.returncode == 1 and "peerway.uccl" in done.stderr and "Traceback" not in done.stderr


def test_help() -> None:
    done = python("-m", "peerway.uccl", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage:")


def test_the_path_for_children_is_set_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    alias.install_for_children()
    alias.install_for_children()
    assert os.environ["PYTHONPATH"] == f"{alias.FOLDER}{os.pathsep}/somewhere"
    assert sys.path.count(alias.FOLDER) == 1


def test_the_distribution(tmp_path: Path) -> None:
    done = python(
        "-c",
        "import uccl, uccl.p2p, uccl.utils, peerway.uccl\n"
        "from uccl import p2p\n"
        "assert p2p.Endpoint is peerway.uccl.p2p.Endpoint and p2p.kFloat16 is p2p.FloatType.kFloat16\n"
        "assert uccl.utils.recv_obj is peerway.uccl.utils.recv_obj and uccl.utils._recv_exact\n"
        "assert uccl.__version__ == '0.1.1' and uccl.is_efa is uccl.has_efa()\n"
        "print(uccl.__file__)\n",
        PYTHONPATH=str(COMPAT),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(COMPAT / "uccl" / "__init__.py")


@pytest.mark.parametrize("file", ["uccl/p2p.abi3.so", "uccl/lib/libuccl_p2p.so", "uccl-0.1.1.dist-info/METADATA"])
def test_the_distribution_refuses_to_be_beside_upstream(tmp_path: Path, file: str) -> None:
    shutil.copytree(COMPAT, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("Metadata-Version: 2.1\nName: uccl\nVersion: 0.1.1\n" if "METADATA" in file else "")
    done = python("-c", "import uccl.p2p", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: peerway-uccl and UCCL itself both provide the package 'uccl'")
    python("-c", "import peerway.uccl").check_returncode()


def test_versions_are_told_apart() -> None:
    assert peerway.__version__ != "" and "peerway.uccl" in sys.modules


@pytest.mark.parametrize(
    "level, shown", [("INFO", logging.INFO), ("3", logging.CRITICAL), ("off", 60), ("", logging.NOTSET)]
)
def test_log_level(monkeypatch: pytest.MonkeyPatch, level: str, shown: int) -> None:
    monkeypatch.setattr(log.logger, "level", logging.NOTSET)
    monkeypatch.setenv("UCCL_P2P_LOG_LEVEL", level)
    log.apply_environment()
    assert log.logger.level == shown
    monkeypatch.setattr(log.logger, "level", logging.ERROR)
    log.apply_environment()
    assert log.logger.level == logging.ERROR, "the level that the program set must stay"


RESERVED = [
    "UCCL_P2P_RDMA_CC",
    "UCCL_P2P_RDMA_LINK_GBPS",
    "UCCL_CXI_DOMAIN",
    "UCCL_CXI_DEVICE_INDEX",
    "UCCL_CXI_THREADING",
    "UCCL_CXI_TX_QUEUE_SIZE",
    "UCCL_CXI_RX_QUEUE_SIZE",
    "UCCL_CXI_CQ_SIZE",
    "UCCL_P2P_COMPRESS_STRATEGY",
    "UCCL_P2P_MIN_COMPRESS_BYTES",
    "UCCL_P2P_COMPRESS_BUFFER_BYTES",
    "UCCL_TCP_OOB_PORT",
    "UCCL_RDMA_ADAPTIVE_SLEEP",
    "UCCL_DEBUG_SUBSYS",
    "UCCL_DEBUG_VLOG_LEVEL",
    "UCCL_RCMODE",
    "UCCL_IB_HCA",
    "UCCL_GPU_RT",
    "UCCL_GPU_RT_LIB",
]

MAKE = "from peerway.uccl import p2p; e = p2p.Endpoint(0); print(e.parse_metadata(e.get_metadata())[0])"


@pytest.mark.parametrize("names", [RESERVED, ["UCCL_TCPX_OOB_PORT"]])
def test_variables_of_other_transports_are_answered_with_a_warning(names: list[str]) -> None:
    done = python("-c", MAKE, **dict.fromkeys(names, "1"))
    assert done.returncode == 0, done.stderr
    for name in names:
        assert sum(f"{name} " in line or f"{name}:" in line for line in done.stderr.splitlines()) >= 1, name


USED = {
    "UCCL_P2P_TRANSPORT": "tcp",
    "UCCL_P2P_RDMA_DEV": "mlx5_0",
    "UCCL_P2P_RDMA_GID_INDEX": "3",
    "UCCL_P2P_RDMA_MAX_RD_ATOMIC": "16",
    "UCCL_P2P_RDMA_MAX_DEST_RD_ATOMIC": "16",
    "UCCL_P2P_RDMA_SL": "3",
    "UCCL_P2P_RDMA_TC": "104",
    "UCCL_P2P_LOG_LEVEL": "WARN",
    "UCCL_P2P_MAX_INFLIGHT_OPS": "32",
    "UCCL_P2P_DISABLE_IPC": "1",
    "UCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "UCCL_LIBFABRIC_SO": "libfabric.so.1",
    "UCCL_IBV_SO": "libibverbs.so.1",
    "UCCL_EFA_SO": "libefa.so.1",
    "UCCL_NCCL_SO": "libnccl.so.2",
    "UCCL_DEBUG": "WARN",
    "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_COMM_ID": "127.0.0.1:1",
    "NCCL_IB_GID_INDEX": "3",
    "NCCL_IB_HCA": "mlx5_0",
}


@pytest.mark.parametrize("name", USED)
def test_variables_that_are_used_say_nothing(name: str) -> None:
    done = python("-c", MAKE, **{name: USED[name]})
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize("transport", ["ib", "rdma", "efa", "nccl", "tcpx", "cxi", "pigeon"])
def test_an_unavailable_transport_is_an_error(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    monkeypatch.setenv("UCCL_P2P_TRANSPORT", transport)
    # No machine has a device with this name.
    monkeypatch.setenv("UCCL_P2P_RDMA_DEV", "no-such-device")
    with pytest.raises(RuntimeError, match="ib" if transport == "rdma" else transport) as error:
        p2p.Endpoint(0)
    assert "transport" in str(error.value).lower()
