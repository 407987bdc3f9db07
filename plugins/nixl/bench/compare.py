"""Compares NIXL over UCX with NIXL over Peerway: the same program and the same buffers, in turns.

    python compare.py                     # local and tcp, all sizes
    python compare.py --modes tcp --sizes 4K,1M --descriptors 1,128

Each backend has two processes on this host: one transfers, the other owns the memory. A request is
prepared once, posted many times, and polled until it is done, as programs with NIXL do. Rounds of
the two backends alternate. The processes of the other backend are stopped meanwhile, because a
backend that polls would take CPU time from a backend that sleeps. The medians are over all rounds.
The bytes are compared at the end of each row.
"""

import argparse
import json
import os
import signal
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
ROUNDS = 7
MARK = "@ "


def bytes_of(text):
    for letter, factor in (("K", 1 << 10), ("M", 1 << 20), ("G", 1 << 30)):
        if text.upper().endswith(letter):
            return int(text[:-1]) * factor
    return int(text)


# The four processes ----------------------------------------------------------------------------


def tell(what):
    print(MARK + json.dumps(what), flush=True)


class Side:
    """An agent with memory that executes requests from its standard input."""

    def __init__(self, role, backend, mode, size, package):
        api = __import__(f"{package}._api", fromlist=["nixl_agent"])
        self.memory = np.zeros(size, np.uint8)
        self.agent = api.nixl_agent(role, api.nixl_agent_config(backends=[]))
        settings = {}
        if backend == "PEERWAY":
            # A process that is stopped for a round must not count as dead.
            settings = {"detect": "1m", "transport": "tcp" if mode == "tcp" else "auto"}
        self.agent.create_backend(backend, settings)
        self.agent.register_memory([(self.memory.ctypes.data, size, 0, "")], "DRAM")
        self.request = None
        tell({"address": self.memory.ctypes.data, "metadata": self.agent.get_agent_metadata().hex()})
        for line in sys.stdin:
            told = json.loads(line)
            tell(getattr(self, told.pop("do"))(**told))

    def load(self, metadata, address):
        self.agent.add_remote_agent(bytes.fromhex(metadata))
        self.there = address

    def fill(self, seed, count, length):
        """Fills the memory with a pattern. The two sides use different seeds."""
        part = self.memory[: spread(count, length) * count]
        part[:] = np.resize(np.arange(251, dtype=np.uint8), part.nbytes) + np.uint8(seed)

    def sum(self, count, length):
        """The sum of the blocks that a row transfers."""
        rows = self.memory[: spread(count, length) * count].reshape(count, -1)
        return int(rows[:, :length].sum(dtype=np.uint64))

    def prepare(self, op, count, length):
        lists = [
            self.agent.get_xfer_descs(descriptors(base, count, length), "DRAM")
            for base in (self.memory.ctypes.data, self.there)
        ]
        begun = time.perf_counter()
        self.request = self.agent.initialize_xfer(op, *lists, "target")
        prepared = time.perf_counter() - begun
        self._once()
        return prepared

    def round(self, seconds):
        """Pairs of the total time and the time in the posting call."""
        taken, until = [], time.perf_counter() + seconds
        while not taken or time.perf_counter() < until:
            taken.append(self._once())
        return taken

    def _once(self):
        begun = time.perf_counter()
        state = self.agent.transfer(self.request)
        posted = time.perf_counter()
        while state == "PROC":
            state = self.agent.check_xfer_state(self.request)
        ended = time.perf_counter()
        if state != "DONE":
            raise SystemExit(f"a transfer ended with state {state}")
        return ended - begun, posted - begun

    def release(self):
        self.agent.release_xfer_handle(self.request)


def spread(count, length):
    """The distance between blocks. Several blocks have gaps, so that NIXL does not merge them."""
    return length if count == 1 else 2 * length


def descriptors(base, count, length):
    at = base + np.arange(count, dtype=np.uint64) * np.uint64(spread(count, length))
    return np.stack([at, np.full(count, length, np.uint64), np.zeros(count, np.uint64)], axis=1)


# The controlling process -----------------------------------------------------------------------


class Process:
    def __init__(self, role, backend, mode, size, package):
        environment = dict(os.environ, UCX_TLS="tcp") if mode == "tcp" else None
        command = [sys.executable, __file__, "--side", role, backend, mode, str(size), "--package", package]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.facts = self._told()

    def ask(self, do, **more):
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()
        return self._told()

    def _told(self):
        # NIXL logs to the same stream.
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        raise SystemExit("a process ended before it answered")


class Pair:
    """Both processes of a backend. They run only inside `with`."""

    def __init__(self, backend, mode, size, package):
        sides = [Process(role, backend, mode, size, package) for role in ("initiator", "target")]
        self.initiator, self.target = sides
        self.initiator.ask("load", **self.target.facts)
        self._signal(signal.SIGSTOP)

    def __enter__(self):
        self._signal(signal.SIGCONT)
        return self

    def __exit__(self, *_):
        self._signal(signal.SIGSTOP)

    def _signal(self, which):
        for side in (self.initiator, self.target):
            side.process.send_signal(which)

    def end(self):
        for side in (self.initiator, self.target):
            side.process.kill()
            side.process.wait()


def compare(mode, args, rows):
    sizes = [bytes_of(size) for size in args.sizes.split(",")]
    counts = [int(count) for count in args.descriptors.split(",")]
    work = [(count, size // count) for count in counts if count < MANY for size in sizes if size >= count * 256]
    work += [(MANY, BLOCK)] * (MANY in counts)
    largest = max(spread(count, length) * count for count, length in work)
    pairs = {backend: Pair(backend, mode, largest, args.package) for backend in BACKENDS}
    try:
        for op in args.ops.split(","):
            for count, length in work:
                rows.append(row(mode, op, count, length, pairs, args.seconds))
                show(rows[-1])
    finally:
        for pair in pairs.values():
            pair.end()


def row(mode, op, count, length, pairs, seconds):
    taken, prepared = {backend: [] for backend in pairs}, {}
    for backend, pair in pairs.items():
        with pair:
            from_, to = (pair.initiator, pair.target) if op == "WRITE" else (pair.target, pair.initiator)
            from_.ask("fill", seed=1, count=count, length=length)
            to.ask("fill", seed=2, count=count, length=length)
            prepared[backend] = pair.initiator.ask("prepare", op=op, count=count, length=length)
    for _ in range(ROUNDS):
        for backend, pair in pairs.items():
            with pair:
                taken[backend] += pair.initiator.ask("round", seconds=seconds / ROUNDS)
    for pair in pairs.values():
        with pair:
            blocks = {"count": count, "length": length}
            if pair.initiator.ask("sum", **blocks) != pair.target.ask("sum", **blocks):
                raise SystemExit("the received bytes differ from the sent ones")
            pair.initiator.ask("release")
    result = {"mode": mode, "op": op, "descriptors": count, "bytes": count * length}
    for backend, times in taken.items():
        whole = sorted(each[0] for each in times)
        median = statistics.median(whole)
        result[backend] = {
            "p50_us": median * 1e6,
            "p99_us": whole[min(len(whole) - 1, len(whole) * 99 // 100)] * 1e6,
            "gbps": count * length / median / 1e9,
            "post_us": statistics.median(each[1] for each in times) * 1e6,
            "prepare_us": prepared[backend] * 1e6,
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
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per backend and row")
    parser.add_argument("--package", default="nixl_cu12", help="the NIXL package: nixl_cu12 or nixl_cu13")
    parser.add_argument("--json", help="write the rows to this file as JSON")
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        role, backend, mode, size = args.side
        Side(role, backend, mode, int(size), args.package)
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
