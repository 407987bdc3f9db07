#!/usr/bin/env python3
"""Measure GPU memory to GPU memory on one GPU with NIXL over UCX, NIXL over Peerway, and NCCL.

Compare the results with `peerway bench --memory gpu`.

    gpu/peers.py [nixl] [nixl-peerway] [nccl]

The default is nixl and nccl. The program skips packages that cannot be imported.

Two processes run one batch at a time; the results are medians. NIXL's time runs from `transfer`
until its state is done. NCCL's time runs from a `send` in one process and a `recv` in the other
until the stream is done. The program compares the bytes at the end. Run it under MPS: otherwise the
GPU serves the contexts of two processes in turns of milliseconds.
"""

import json
import os
import statistics
import subprocess
import sys
import time

SIZES = [4096, 65536, 1 << 20, 16 << 20, 64 << 20, 256 << 20]


def rounds(size: int) -> int:
    return 200 if size <= 1 << 20 else 20


def ask(child, line: bytes) -> bytes:
    child.stdin.write(line.hex().encode() + b"\n")
    child.stdin.flush()
    return told(child)


def told(child) -> bytes:
    """Return the next answer. Skip other lines, because libraries print to the same stream."""
    for line in child.stdout:
        if line.startswith(b"answer "):
            return bytes.fromhex(line.split()[1].decode())
    raise RuntimeError("the second process ended")


def answer(line: bytes) -> None:
    print("answer", line.hex(), flush=True)


def hear() -> bytes:
    return bytes.fromhex(sys.stdin.readline().strip())


# NIXL ---------------------------------------------------------------------------------------------


def nixl_agent(name: str, backend: str):
    try:
        from nixl_cu13._api import nixl_agent, nixl_agent_config
    except ImportError:
        from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=[backend]))


def nixl_second(backend: str) -> None:
    import torch

    agent = nixl_agent("second", backend)
    tensor = torch.zeros(SIZES[-1], dtype=torch.uint8, device="cuda:0")
    descriptors = agent.register_memory([tensor])
    answer(agent.get_agent_metadata())
    answer(agent.get_serialized_descs(descriptors.trim()))
    while hear() == b"sum":
        torch.cuda.synchronize()
        answer(str(int(tensor.sum(dtype=torch.int64))).encode())


def nixl_rows(backend: str = "UCX") -> list:
    import torch

    agent = nixl_agent("first", backend)
    tensor = torch.randint(0, 255, (SIZES[-1],), dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    agent.register_memory([tensor])
    child = subprocess.Popen([sys.executable, __file__, "second-nixl", backend], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    name = agent.add_remote_agent(told(child))
    there = agent.deserialize_descs(told(child))
    base = there[0]
    rows = []
    for op in ("WRITE", "READ"):
        for size in SIZES:
            ours = agent.get_xfer_descs([(tensor.data_ptr(), size, 0)], mem_type="VRAM")
            theirs = agent.get_xfer_descs([(base[0], size, 0)], mem_type="VRAM")
            handle = agent.initialize_xfer(op, ours, theirs, name)
            times = []
            for _ in range(rounds(size) + 5):
                begin = time.perf_counter()
                state = agent.transfer(handle)
                while state == "PROC":
                    state = agent.check_xfer_state(handle)
                assert state == "DONE", state
                times.append(time.perf_counter() - begin)
            agent.release_xfer_handle(handle)
            rows.append((f"nixl-{backend.lower()}", op.lower(), size, statistics.median(times[5:])))
        if op == "WRITE":
            assert int(ask(child, b"sum")) == int(tensor.sum(dtype=torch.int64)), "bytes differ"
    child.stdin.close()
    child.wait(60)
    return rows


# NCCL ---------------------------------------------------------------------------------------------


def nccl_group(rank: int, port: str):
    import torch.distributed as dist

    # NCCL refuses two ranks on one GPU unless they seem to be on two hosts.
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_SOCKET_IFNAME="lo")
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    return dist


def nccl_both(rank: int, port: str) -> list:
    import torch

    dist = nccl_group(rank, port)
    tensor = torch.full((SIZES[-1],), 7 * (1 - rank), dtype=torch.uint8, device="cuda:0")
    rows = []
    for size in SIZES:
        part, times = tensor[:size], []
        for _ in range(rounds(size) // 4 + 5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            (dist.send if rank == 0 else dist.recv)(part, 1 - rank)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        rows.append(("nccl (sockets)", "write", size, statistics.median(times[5:])))
    assert int(tensor[0]) == 7 and int(tensor[-1]) == 7, "bytes differ"
    dist.destroy_process_group()
    return rows


def nccl_rows() -> list:
    child = subprocess.Popen([sys.executable, __file__, "second-nccl", "29611"], stdout=subprocess.DEVNULL)
    rows = nccl_both(0, "29611")
    child.wait(60)
    return rows


MEASURED = {"nixl": nixl_rows, "nixl-peerway": lambda: nixl_rows("PEERWAY"), "nccl": nccl_rows}


def main() -> None:
    if sys.argv[1:2] == ["second-nixl"]:
        return nixl_second(sys.argv[2])
    if sys.argv[1:2] == ["second-nccl"]:
        return print(nccl_both(1, sys.argv[2]))
    rows = []
    for what in sys.argv[1:] or ["nixl", "nccl"]:
        try:
            rows += MEASURED[what]()
        except ImportError as error:
            print(f"{what}: not measured: {error}")
    for who, op, size, seconds in rows:
        print(f"{who:15} {op:6} {size:10} p50 {seconds * 1e6:10.1f} us  {size / seconds / 1e9:9.2f} GB/s")
    if out := os.environ.get("OUT"):
        with open(os.path.join(out, "peers.json"), "w") as file:
            json.dump([dict(zip(("who", "op", "size", "seconds"), row, strict=True)) for row in rows], file, indent=1)


if __name__ == "__main__":
    main()
