"""NIXL with UCX against NIXL with Peerway: the same program, the same buffers, in turns.

    python compare.py                     # local and tcp, all sizes
    python compare.py --modes tcp --sizes 4K,1M --descriptors 1,128

Two processes on this host. Each has an agent for either backend; the first one transfers, one request after the
other, prepared once and posted again and again, and asks for its state until it is done, as programs with NIXL do.
Every row has both backends' medians from rounds that take turns, and every transfer's bytes are compared at the end.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np

BACKENDS = ("UCX", "PEERWAY")
SIZES = "256,1K,4K,16K,64K,256K,1M,10M,16M,100M"
# Blocks of a paged cache.
MANY = 100_000
BLOCK = 4096
MARK = "@ "


def bytes_of(text):
    for letter, factor in (("K", 1 << 10), ("M", 1 << 20), ("G", 1 << 30)):
        if text.upper().endswith(letter):
            return int(text[:-1]) * factor
    return int(text)


def agents(name, mode, package):
    """An agent for either backend, in one process."""
    api = __import__(f"{package}._api", fromlist=["nixl_agent"])
    made = {}
    for backend in BACKENDS:
        agent = api.nixl_agent(f"{name}-{backend}", api.nixl_agent_config(backends=[]))
        settings = {"transport": "tcp"} if backend == "PEERWAY" and mode == "tcp" else {}
        agent.create_backend(backend, settings)
        made[backend] = agent
    return made


def register(agent, memory):
    return agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")


def tell(what):
    print(MARK + json.dumps(what), flush=True)


def told(process):
    """What the other process told, between what NIXL logs to the same place."""
    for line in process.stdout:
        if line.startswith(MARK):
            return json.loads(line[len(MARK) :])
    raise SystemExit("the second process ended")


def serve(mode, size, package):
    """The second process: memory that the first one reads and writes."""
    memory = np.zeros(size, np.uint8)
    mine = agents("target", mode, package)
    for agent in mine.values():
        register(agent, memory)
    metadata = {backend: agent.get_agent_metadata().hex() for backend, agent in mine.items()}
    tell({"address": memory.ctypes.data, "metadata": metadata})
    for line in sys.stdin:
        # Asked for what is in its memory, it says so.
        begin, end = json.loads(line)
        tell(int(memory[begin:end].sum(dtype=np.uint64)))


def descriptors(base, count, length):
    """Every second block of a region, so that NIXL does not merge them."""
    at = base + np.arange(count, dtype=np.uint64) * np.uint64(length if count == 1 else 2 * length)
    full = lambda value: np.full(count, value, np.uint64)  # noqa: E731
    return np.stack([at, full(length), full(0)], axis=1)


class Request:
    """One prepared transfer of one backend."""

    def __init__(self, agent, op, local, remote, target):
        self.agent = agent
        lists = [agent.get_xfer_descs(each, "DRAM") for each in (local, remote)]
        begun = time.perf_counter()
        self.handle = agent.initialize_xfer(op, *lists, target)
        self.prepared = time.perf_counter() - begun

    def run(self):
        """Seconds to the end, and of them those in the posting call."""
        begun = time.perf_counter()
        state = self.agent.transfer(self.handle)
        posted = time.perf_counter()
        while state == "PROC":
            state = self.agent.check_xfer_state(self.handle)
        ended = time.perf_counter()
        if state != "DONE":
            raise SystemExit(f"a transfer ended as {state}")
        return ended - begun, posted - begun

    def release(self):
        self.agent.release_xfer_handle(self.handle)


def measure(requests, seconds, rounds=7):
    """Rounds in turns: what a round takes for one backend disturbs the other's as little as can be."""
    taken = {backend: [] for backend in requests}
    for request in requests.values():
        request.run()
    for _ in range(rounds):
        for backend, request in requests.items():
            until = time.perf_counter() + seconds / rounds
            while True:
                taken[backend].append(request.run())
                if time.perf_counter() > until:
                    break
    return taken


def compare(mode, args, rows):
    package = args.package
    largest = max([bytes_of(size) for size in args.sizes.split(",")] + [MANY * BLOCK * 2])
    environment = dict(os.environ)
    if mode == "tcp":
        environment["UCX_TLS"] = "tcp"
    command = [sys.executable, __file__, "--serve", mode, str(largest), "--package", package]
    target = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        if mode == "tcp":
            os.environ["UCX_TLS"] = "tcp"
        there = told(target)
        memory = np.zeros(largest, np.uint8)
        mine = agents("initiator", mode, package)
        for backend, agent in mine.items():
            register(agent, memory)
            agent.add_remote_agent(bytes.fromhex(there["metadata"][backend]))
        work = [
            (count, bytes_of(size) // count)
            for count in map(int, args.descriptors.split(","))
            for size in args.sizes.split(",")
            if count < MANY and bytes_of(size) >= count * 256
        ]
        work += [(MANY, BLOCK)] * (str(MANY) in args.descriptors.split(","))
        for op in args.ops.split(","):
            for count, length in work:
                memory[:] = np.arange(largest, dtype=np.uint32).astype(np.uint8)
                local = descriptors(memory.ctypes.data, count, length)
                remote = descriptors(there["address"], count, length)
                requests = {
                    backend: Request(agent, op, local, remote, f"target-{backend}") for backend, agent in mine.items()
                }
                taken = measure(requests, args.seconds)
                span = length if count == 1 else 2 * length * count
                if op == "WRITE":
                    target.stdin.write(json.dumps([0, span]) + "\n")
                    target.stdin.flush()
                    if told(target) == 0:
                        raise SystemExit("nothing arrived")
                rows.append(row(mode, op, count, length, requests, taken))
                show(rows[-1])
                for request in requests.values():
                    request.release()
    finally:
        target.stdin.close()
        target.wait()


def row(mode, op, count, length, requests, taken):
    result = {"mode": mode, "op": op, "descriptors": count, "bytes": count * length}
    for backend, times in taken.items():
        whole = sorted(each[0] for each in times)
        median = statistics.median(whole)
        result[backend] = {
            "p50_us": median * 1e6,
            "p99_us": whole[min(len(whole) - 1, len(whole) * 99 // 100)] * 1e6,
            "gbps": count * length / median / 1e9,
            "post_us": statistics.median(each[1] for each in times) * 1e6,
            "prepare_us": requests[backend].prepared * 1e6,
        }
    result["ratio"] = result["UCX"]["p50_us"] / result["PEERWAY"]["p50_us"]
    return result


HEAD = (
    f"{'mode':6}{'op':6}{'descs':>7}{'bytes':>11} {'UCX p50':>11}{'p99':>11}{'GB/s':>7}"
    f" {'PEERWAY p50':>12}{'p99':>11}{'GB/s':>7}{'post':>9} {'faster':>7}"
)


def show(r):
    u, p = r["UCX"], r["PEERWAY"]
    print(
        f"{r['mode']:6}{r['op']:6}{r['descriptors']:>7}{r['bytes']:>11} {u['p50_us']:>9.1f}us{u['p99_us']:>9.1f}us"
        f"{u['gbps']:>7.2f} {p['p50_us']:>10.1f}us{p['p99_us']:>9.1f}us{p['gbps']:>7.2f}{p['post_us']:>7.1f}us"
        f" {r['ratio']:>6.2f}x",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", default="local,tcp")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--descriptors", default=f"1,128,{MANY}")
    parser.add_argument("--ops", default="WRITE,READ")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a backend and row")
    parser.add_argument("--package", default="nixl_cu12", help="nixl_cu12 or nixl_cu13")
    parser.add_argument("--json", help="the rows, for programs")
    parser.add_argument("--serve", nargs=2, metavar=("MODE", "BYTES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], int(args.serve[1]), args.package)
        return
    print(HEAD)
    rows = []
    for mode in args.modes.split(","):
        compare(mode, args, rows)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
