"""Rendezvous through the store of torch.distributed; no process group is needed.

    python rendezvous_store.py --ranks 4

Each rank puts its metadata and a descriptor under its own key, gets those of the others, and writes into their
memory. Between machines, give TCPStore the host and port of rank 0 as you would for a process group.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy
import peerway

if TYPE_CHECKING:
    from torch.distributed import TCPStore

#: Bytes that each rank writes into each other rank's memory.
SLOT = 1 << 20
PATIENCE = 60.0
#: The counter under which arrivals are counted.
ARRIVED = 1


def main() -> int:
    ranks = arguments().ranks
    # The store would listen on all addresses; given a socket, it listens on that one. Whoever connects before
    # the store is there waits for it.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run, args=(rank, ranks, port), name=f"rank {rank}") for rank in range(1, ranks)]
    for process in processes:
        process.start()
    run(0, ranks, port, listener)
    for process in processes:
        process.join()
    failed = [process.name for process in processes if process.exitcode != 0]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    print(f"{ranks} ranks met through the store and exchanged {ranks * (ranks - 1) * SLOT / 1e6:.1f} MB, verified")
    return 0


def open_store(port: int, listener: socket.socket | None) -> TCPStore:
    """The store, served by whoever has the listener."""
    from torch.distributed import TCPStore

    patience = timedelta(seconds=PATIENCE)
    if listener is None:
        return TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
    fd = listener.detach()
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=patience, master_listen_fd=fd)


def run(rank: int, ranks: int, port: int, listener: socket.socket | None = None) -> None:
    store = open_store(port, listener)
    inbox = peerway.empty((ranks, SLOT))
    with peerway.Endpoint() as endpoint:
        region = endpoint.register(inbox)
        # A descriptor is always 64 bytes, so both fit into one value.
        store.set(f"peerway/{rank}", region.advertise("w") + endpoint.metadata)

        others = [other for other in range(ranks) if other != rank]
        for other in others:
            value = store.get(f"peerway/{other}")  # waits until it is there
            peer = endpoint.connect(value[64:])
            remote = peer.remote(value[:64])
            mine = slice(rank * SLOT, (rank + 1) * SLOT)
            peer.write(message(rank, other), remote[mine], count=ARRIVED)

        endpoint.wait_counter(ARRIVED, len(others), timeout=PATIENCE)
        for other in others:
            if not numpy.array_equal(inbox[other], message(other, rank)):
                sys.exit(f"rank {rank}: what came from rank {other} is not what it sent")

        # Nobody leaves while others still need it, rank 0 last: it serves the store.
        store.set(f"peerway/done/{rank}", b"1")
        if rank == 0:
            store.wait([f"peerway/done/{other}" for other in others], timedelta(seconds=PATIENCE))
        else:
            store.wait(["peerway/done/0"], timedelta(seconds=PATIENCE))


def message(sender: int, receiver: int) -> numpy.ndarray:
    """What one rank sends to another; no two messages are alike."""
    return numpy.random.default_rng([sender, receiver]).integers(0, 256, SLOT, dtype="uint8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Meet through torch.distributed's store and exchange memory.")
    parser.add_argument("--ranks", type=int, choices=range(2, 17), default=2, metavar="N", help="2 to 16 [2]")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
