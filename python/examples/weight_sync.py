"""Weight sync: a trainer publishes new versions of its weights, and several readers pull them.

    python weight_sync.py --readers 4 --versions 5 --megabytes 256

The trainer registers and advertises the weights once. For each version, it changes them in place
and notifies the readers. The readers read the weights from the trainer's memory and then answer.
With --kill-one, a reader is killed in the middle of a read. The trainer drops it, and the other
readers are not affected.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import time

import peerway

try:
    import numpy
except ImportError:
    sys.exit("this example needs NumPy, which is not installed: pip install numpy")

#: The limit of every wait, in seconds.
PATIENCE = 60.0


def main() -> int:
    args = arguments()
    context = multiprocessing.get_context("spawn")
    weights = peerway.empty(args.megabytes * 250_000, "float32")
    processes = []
    with peerway.Endpoint() as endpoint:
        region = endpoint.register(weights)
        # Readers get read access only.
        descriptor = region.advertise("r")
        # The process arguments replace your own rendezvous.
        for rank in range(args.readers):
            killed_in = args.versions // 2 + 1 if args.kill_one and rank == 0 else None
            what = rank, endpoint.metadata, descriptor, weights.size, killed_in
            processes.append(context.Process(target=reader, args=what, name=f"reader {rank}"))
            processes[-1].start()
        readers = [endpoint.accept(PATIENCE) for _ in processes]
        lost = 0
        for version in range(1, args.versions + 1):
            weights[:] = content(weights.size, version)
            before = len(readers)
            readers = publish(version, weights.nbytes, readers)
            lost += before - len(readers)
        for peer in readers:
            # A reader ends when it receives this, possibly before it has acknowledged the
            # notification.
            with contextlib.suppress(peerway.PeerGone):
                peer.notify(b"end").wait()
        for process in processes:
            process.join(PATIENCE)

    killed = [process.name for process in processes if process.exitcode == -signal.SIGKILL]
    failed = [process.name for process in processes if process.exitcode not in (0, -signal.SIGKILL)]
    expected = 1 if args.kill_one else 0
    if failed or len(killed) != expected or lost != expected:
        print(f"failed: {failed}, killed: {killed}, lost: {lost}", file=sys.stderr)
        return 1
    if killed:
        print(f"{killed[0]} was killed in the middle of a read; the others continued")
    print(f"synced {args.versions} versions of {weights.nbytes / 1e6:.0f} MB to {len(readers)} readers, verified")
    return 0


def publish(version: int, nbytes: int, readers: list[peerway.Peer]) -> list[peerway.Peer]:
    """Lets all readers read this version and returns the readers that did.

    Then the weights may change.
    """
    start = time.monotonic()
    have_it = []
    for peer in readers:
        try:
            peer.notify(b"version %d" % version).wait()
        except peerway.PeerGone:
            continue
        have_it.append(peer)
    # A wait for a notification ends at once when the peer is gone.
    have_it = [peer for peer in have_it if answer(peer, version)]
    spent = time.monotonic() - start
    rate = len(have_it) * nbytes / spent / 1e9
    who = f"{len(have_it)} of {len(readers)} readers"
    print(f"version {version}: {who} have it after {1e3 * spent:.1f} ms, {rate:.2f} GB/s in all")
    return have_it


def answer(peer: peerway.Peer, version: int) -> bool:
    """Waits until a reader has the version. False if the reader has ended."""
    note = peer.notification(PATIENCE)
    if note is None and peer.alive:
        sys.exit(f"{peer} did not answer within {PATIENCE:g} s")
    return note is not None and note.message == b"have %d" % version


def reader(rank: int, metadata: bytes, descriptor: bytes, size: int, killed_in: int | None) -> None:
    with peerway.Endpoint() as endpoint:
        trainer = endpoint.connect(metadata)
        remote = trainer.remote(descriptor)
        weights = numpy.ones(size, "float32")
        ours = endpoint.register(weights)
        while True:
            note = trainer.notification(PATIENCE)
            if note is None:
                sys.exit(f"reader {rank}: the trainer is gone")
            if note.message == b"end":
                return
            version = int(note.message.removeprefix(b"version "))
            transfer = trainer.post_read(ours, remote)
            if version == killed_in:
                os.kill(os.getpid(), signal.SIGKILL)
            transfer.wait(PATIENCE)
            # After this notification, the trainer may change its weights. The reader has its own
            # copy.
            trainer.notify(b"have %d" % version).wait()
            if not numpy.array_equal(weights, content(size, version)):
                sys.exit(f"reader {rank}: version {version} differs from the version that the trainer published")


def content(size: int, version: int) -> numpy.ndarray:
    """The weights of a version.

    Both sides can compute them, and versions differ in every number.
    """
    return numpy.arange(size, dtype="float32") * numpy.float32(version) + numpy.float32(version)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pull new versions of a trainer's weights into several readers.")
    parser.add_argument("--readers", type=positive, default=3, help="reader processes [3]")
    parser.add_argument("--versions", type=positive, default=4, help="versions to publish [4]")
    parser.add_argument("--megabytes", type=positive, default=64, help="size of the weights [64]")
    parser.add_argument("--kill-one", action="store_true", help="kill a reader in the middle of a read")
    args = parser.parse_args()
    if args.kill_one and args.readers < 2:
        parser.error("--kill-one needs at least two readers, because one must remain")
    return args


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive integer")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
