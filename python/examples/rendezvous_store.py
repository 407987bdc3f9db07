"""Rendezvous through the store of torch.distributed, without a process group.

    python rendezvous_store.py --ranks 4

Each rank stores its metadata and a descriptor under its own key. It gets those of the other ranks
and writes into their memory. Between machines, pass TCPStore the host and port of rank 0, as for a
process group.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import peerway

try:
    import numpy
except ImportError:
    sys.exit("this example needs NumPy, which is not installed: pip install numpy")

if TYPE_CHECKING:
    from torch.distributed import TCPStore

#: Bytes that each rank writes into each other rank's memory.
SLOT = 1 << 20
#: Seconds that a rank waits for another one. The import of torch takes long on a busy machine.
PATIENCE = 120.0
#: The counter of arrivals.
ARRIVED = 1


def main() -> int:
    ranks = arguments().ranks
    if importlib.util.find_spec("torch") is None:
        sys.exit("this example needs torch, which is not installed: pip install torch")
    # Without a socket, the store would listen on all addresses. A rank that connects before the
    # store exists waits for it.
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
    """The store. The rank with the listener serves it."""
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
            await_keys(store, rank, [f"peerway/{other}"])
            value = store.get(f"peerway/{other}")
            peer = endpoint.connect(value[64:])
            remote = peer.remote(value[:64])
            mine = slice(rank * SLOT, (rank + 1) * SLOT)
            peer.write(message(rank, other), remote[mine], count=ARRIVED)

        endpoint.wait_counter(ARRIVED, len(others), timeout=PATIENCE)
        for other in others:
            if not numpy.array_equal(inbox[other], message(other, rank)):
                sys.exit(f"rank {rank}: the bytes from rank {other} differ from the bytes that it sent")

        # A rank keeps its endpoint until every other rank has finished its transfers.
        store.set(f"peerway/done/{rank}", b"1")
        await_keys(store, rank, [f"peerway/done/{other}" for other in others])

        # Rank 0 hosts the store, so it must leave last. Each other rank sets a key as its last use
        # of the store, and rank 0 waits for these keys. If rank 0 left after `done` alone, the
        # store would vanish while another rank still waits for `done` keys.
        if rank == 0:
            await_keys(store, rank, [f"peerway/left/{other}" for other in others])
        else:
            store.set(f"peerway/left/{rank}", b"1")


def await_keys(store: TCPStore, rank: int, keys: list[str]) -> None:
    """Waits until other ranks have set all of these keys. Ends the process if they do not."""
    try:
        store.wait(keys, timedelta(seconds=PATIENCE))
    except RuntimeError as error:  # DistStoreError and DistNetworkError of torch are RuntimeErrors
        sys.exit(f"rank {rank}: the keys {', '.join(keys)} were not set within {PATIENCE:.0f} s: {error}")


def message(sender: int, receiver: int) -> numpy.ndarray:
    """The message of one rank to another. All messages differ."""
    return numpy.random.default_rng([sender, receiver]).integers(0, 256, SLOT, dtype="uint8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Meet through torch.distributed's store and exchange memory.")
    parser.add_argument("--ranks", type=int, choices=range(2, 17), default=2, metavar="N", help="2 to 16 [2]")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
