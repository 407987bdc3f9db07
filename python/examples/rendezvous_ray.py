"""Rendezvous through Ray actors: Ray places them and tells them of each other, Peerway moves the bytes.

    python rendezvous_ray.py

Metadata and descriptors are plain bytes, so they travel as arguments and results of actor methods; the memory
itself never goes through Ray's object store.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Any

import numpy
import peerway

SIZE = 4 << 20
#: Seconds that this example waits for an actor. Starting one takes long on a busy machine.
PATIENCE = 120.0
ARRIVED = 1
#: This example stays on this host. On a cluster, leave `bind` away.
HERE = "127.0.0.1:0"


class Worker:
    """An actor with an endpoint and one buffer that others may write."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.endpoint = peerway.Endpoint(bind=HERE)
        self.buffer = peerway.empty(SIZE)
        self.region = self.endpoint.register(self.buffer)

    def introduce(self) -> tuple[bytes, bytes]:
        """What another actor needs to write to this one."""
        return self.endpoint.metadata, self.region.advertise("w")

    def send(self, introduction: tuple[bytes, bytes]) -> str:
        """Writes into another actor's memory; says by which path."""
        metadata, descriptor = introduction
        peer = self.endpoint.connect(metadata)
        peer.write(message(self.name), peer.remote(descriptor), count=ARRIVED)
        return peer.path

    def received(self, sender: str) -> bool:
        """Whether the sender's bytes are here."""
        self.endpoint.wait_counter(ARRIVED, 1, timeout=PATIENCE)
        return numpy.array_equal(self.buffer, message(sender))

    def close(self) -> None:
        self.endpoint.close()


def message(sender: str) -> numpy.ndarray:
    """What an actor sends; the other one can make it, too."""
    return numpy.random.default_rng(list(sender.encode())).integers(0, 256, SIZE, dtype="uint8")


def main() -> int:
    argparse.ArgumentParser(description="Meet through Ray actors and exchange memory.").parse_args()
    # All of it is only to keep this example on this host: no report to Ray's makers, no cluster that happens to
    # be configured, and the loopback address for Ray's own processes (the name speaks of other systems, but it
    # is what decides that here, too).
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.pop("RAY_ADDRESS", None)
    try:
        import ray
    except ImportError:
        print("skipped: ray is not installed (pip install ray)")
        return 0
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        try:
            return exchange(ray)
        finally:
            ray.shutdown()


def exchange(ray: Any) -> int:
    names = ["prefill", "decode"]
    actor = ray.remote(Worker)
    first, second = (actor.options(num_cpus=1).remote(name) for name in names)
    # Each gets the other's introduction without it passing through here.
    paths = [first.send.remote(second.introduce.remote()), second.send.remote(first.introduce.remote())]
    checks = [first.received.remote(names[1]), second.received.remote(names[0])]
    paths, checks = ray.get(paths, timeout=PATIENCE), ray.get(checks, timeout=PATIENCE)
    ray.get([first.close.remote(), second.close.remote()], timeout=PATIENCE)
    if not all(checks):
        print("what arrived is not what was sent", file=sys.stderr)
        return 1
    print(f"2 actors met through Ray and exchanged {2 * SIZE / 1e6:.1f} MB by {paths[0]}, verified")
    return 0


if __name__ == "__main__":
    sys.exit(main())
