"""Rendezvous through Ray actors: Ray places and connects the actors, and Peerway moves the bytes.

    python rendezvous_ray.py

Metadata and descriptors are plain bytes, so actor methods can take and return them. The memory
itself never goes through Ray's object store.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Any

import peerway

try:
    import numpy
except ImportError:
    sys.exit("this example needs NumPy, which is not installed: pip install numpy")

SIZE = 4 << 20
#: Seconds that this example waits for an actor, whose start takes long on a busy machine.
PATIENCE = 120.0
ARRIVED = 1
#: This example runs on one host. On a cluster, omit `bind`.
HERE = "127.0.0.1:0"


class Worker:
    """An actor with an endpoint and one buffer that other actors may write."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.endpoint = peerway.Endpoint(bind=HERE)
        self.buffer = peerway.empty(SIZE)
        self.region = self.endpoint.register(self.buffer)

    def introduce(self) -> tuple[bytes, bytes]:
        """The metadata and the descriptor that another actor needs to write to this one."""
        return self.endpoint.metadata, self.region.advertise("w")

    def send(self, introduction: tuple[bytes, bytes]) -> str:
        """Writes into another actor's memory and returns the path."""
        metadata, descriptor = introduction
        peer = self.endpoint.connect(metadata)
        peer.write(message(self.name), peer.remote(descriptor), count=ARRIVED)
        return peer.path

    def received(self, sender: str) -> bool:
        """Whether the sender's bytes have arrived."""
        self.endpoint.wait_counter(ARRIVED, 1, timeout=PATIENCE)
        return numpy.array_equal(self.buffer, message(sender))

    def close(self) -> None:
        self.endpoint.close()


def message(sender: str) -> numpy.ndarray:
    """The bytes that an actor sends. The receiver can compute them, too."""
    return numpy.random.default_rng(list(sender.encode())).integers(0, 256, SIZE, dtype="uint8")


def main() -> int:
    argparse.ArgumentParser(description="Meet through Ray actors and exchange memory.").parse_args()
    # Keep this example on this host: send no usage statistics, use no configured cluster, and use
    # the loopback address for Ray's processes. The last variable names other systems, but it also
    # controls the address on Linux.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.pop("RAY_ADDRESS", None)
    try:
        import ray
    except ImportError:
        sys.exit("this example needs Ray, which is not installed: pip install ray")
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
    # Each actor gets the other's introduction directly, not through this process.
    paths = [first.send.remote(second.introduce.remote()), second.send.remote(first.introduce.remote())]
    checks = [first.received.remote(names[1]), second.received.remote(names[0])]
    paths, checks = ray.get(paths, timeout=PATIENCE), ray.get(checks, timeout=PATIENCE)
    ray.get([first.close.remote(), second.close.remote()], timeout=PATIENCE)
    if not all(checks):
        print("the received bytes differ from the sent bytes", file=sys.stderr)
        return 1
    print(f"2 actors met through Ray and exchanged {2 * SIZE / 1e6:.1f} MB by {paths[0]}, verified")
    return 0


if __name__ == "__main__":
    sys.exit(main())
