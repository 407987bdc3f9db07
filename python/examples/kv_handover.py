"""Hands a paged KV cache from a prefill process to a decode process, layer by layer.

    python kv_handover.py --layers 16 --blocks 512 --block-bytes 32768

Each process keeps its cache in blocks that are scattered over a pool, with a block table. Decode
allocates blocks for the request and advertises its cache. Prefill writes each layer into them as
soon as it is computed. A counter per layer shows decode that the layer has arrived. So decode works
on layer i while prefill still computes layer i + 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import peerway

try:
    import numpy
except ImportError:
    sys.exit("this example needs NumPy, which is not installed: pip install numpy")


@dataclass(frozen=True)
class Shape:
    """The settings that both sides know."""

    layers: int
    blocks: int
    block_bytes: int
    compute_ms: float
    torch: bool

    @property
    def pool(self) -> int:
        """Blocks of the whole cache. The rest would belong to other requests."""
        return 2 * self.blocks


def main() -> int:
    shape = arguments()
    if shape.torch and importlib.util.find_spec("torch") is None:
        sys.exit("--torch needs torch, which is not installed: pip install torch")
    context = multiprocessing.get_context("spawn")
    # The pipe replaces your scheduler. It carries a few hundred bytes and the block table.
    to_decode, to_prefill = context.Pipe()
    sides = [
        context.Process(target=prefill, args=(shape, to_decode), name="prefill"),
        context.Process(target=decode, args=(shape, to_prefill), name="decode"),
    ]
    for side in sides:
        side.start()
    # Only the two sides keep the pipe open, so that each notices when the other dies.
    to_decode.close()
    to_prefill.close()
    for side in sides:
        side.join()
    failed = [side.name for side in sides if side.exitcode != 0]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    return 0


def prefill(shape: Shape, decode: Connection) -> None:
    cache = new_cache(shape)
    table = block_table(shape, seed=1)
    with peerway.Endpoint() as endpoint:
        region = endpoint.register(cache)
        metadata, descriptor, their_table = decode.recv()
        peer = endpoint.connect(metadata)
        remote = peer.remote(descriptor)

        # Check all transfers once, before the first token is computed. A layer is one transfer of
        # all its blocks. It increments the counter with the layer's number when it has arrived.
        layer_bytes = shape.pool * shape.block_bytes
        parts = []
        for layer in range(shape.layers):
            ours = region.blocks(table, shape.block_bytes, base=layer * layer_bytes)
            theirs = remote.blocks(their_table, shape.block_bytes, base=layer * layer_bytes)
            parts.append(peer.prepare_write(ours, theirs, count=layer))
        staged = peer.stage(parts)

        released = []
        for layer in range(shape.layers):
            compute(shape, cache, table, layer)
            released.append(time.monotonic())
            staged.release(layer)  # returns at once: the next layer is computed while it moves
        staged.wait()
        decode.send((released, peer.path))
        decode.recv()  # keep the endpoint open until decode has finished


def decode(shape: Shape, prefill: Connection) -> None:
    cache = new_cache(shape)
    table = block_table(shape, seed=2)
    with peerway.Endpoint() as endpoint:
        region = endpoint.register(cache)
        prefill.send((endpoint.metadata, region.advertise("w"), table))

        arrived = []
        for layer in range(shape.layers):
            endpoint.wait_counter(layer, 1, timeout=60)
            arrived.append(time.monotonic())
            # All bytes of this layer have arrived, so attention over it can start here.
        released, path = prefill.recv()
        prefill.send("done")
    check(shape, cache, table)
    print_times(shape, released, arrived, path)


def check(shape: Shape, cache: Any, table: numpy.ndarray) -> None:
    """Checks every byte of the pool."""
    others = numpy.delete(numpy.arange(shape.pool), table)
    for layer in range(shape.layers):
        if not numpy.array_equal(blocks_of(cache, layer)[table], keys_and_values(shape, layer)):
            sys.exit(f"decode: layer {layer} differs from the layer that prefill computed")
        if blocks_of(cache, layer)[others].any():
            sys.exit(f"decode: layer {layer} has bytes in blocks of other requests")


def new_cache(shape: Shape) -> Any:
    """A NumPy array or torch tensor that a peer on this host can map, which saves a copy."""
    dtype: Any = "uint8"
    if shape.torch:
        import torch

        dtype = torch.uint8
    cache = peerway.empty((shape.layers, shape.pool, shape.block_bytes), dtype)
    cache[:] = 0  # touch all pages now, so that no transfer waits for page faults
    return cache


def block_table(shape: Shape, seed: int) -> numpy.ndarray:
    """The request's blocks in the pool, in order. They are scattered, as after hours of service."""
    return numpy.random.default_rng(seed).permutation(shape.pool)[: shape.blocks].astype("uint32")


def blocks_of(cache: Any, layer: int) -> numpy.ndarray:
    """The blocks of one layer, without a copy."""
    return numpy.asarray(cache[layer])


def compute(shape: Shape, cache: Any, table: numpy.ndarray, layer: int) -> None:
    """Fills the request's blocks of a layer, in place of a model's computation."""
    time.sleep(shape.compute_ms / 1e3)
    blocks_of(cache, layer)[table] = keys_and_values(shape, layer)


def keys_and_values(shape: Shape, layer: int) -> numpy.ndarray:
    """The content of the request's blocks of a layer: random bytes that both sides can compute."""
    content = numpy.random.default_rng(layer).bytes(shape.blocks * shape.block_bytes)
    return numpy.frombuffer(content, "uint8").reshape(shape.blocks, shape.block_bytes)


def print_times(shape: Shape, released: list[float], arrived: list[float], path: str) -> None:
    layer_bytes = shape.blocks * shape.block_bytes
    print(" layer  released ms  arrived ms  moving ms   GB/s")
    spent = []
    for layer, (start, end) in enumerate(zip(released, arrived, strict=True)):
        spent.append(end - start)
        since = [1e3 * (moment - released[0]) for moment in (start, end)]
        rate = layer_bytes / spent[-1] / 1e9
        print(f" {layer:5}  {since[0]:11.2f}  {since[1]:10.2f}  {1e3 * spent[-1]:9.2f}  {rate:5.2f}")
    early = sum(moment < released[-1] for moment in arrived)
    total, moving = shape.layers * layer_bytes, sum(spent)
    print(f"decode had {early} of {shape.layers} layers before prefill had computed the last one")
    rate = total / moving / 1e9
    print(f"handed over {total / 1e6:.1f} MB by {path} in {1e3 * moving:.1f} ms of moving: {rate:.2f} GB/s, verified")


def arguments() -> Shape:
    parser = argparse.ArgumentParser(description="Hand a paged KV cache from prefill to decode, layer by layer.")
    parser.add_argument("--layers", type=positive, default=8, help="layers of the model [8]")
    parser.add_argument("--blocks", type=positive, default=256, help="blocks of the request in each layer [256]")
    parser.add_argument("--block-bytes", type=positive, default=16384, help="bytes of a block, keys and values [16384]")
    parser.add_argument("--compute-ms", type=float, default=5.0, help="how long computing a layer takes [5]")
    parser.add_argument("--torch", action="store_true", help="keep the caches as torch tensors, not NumPy arrays")
    return Shape(**vars(parser.parse_args()))


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive integer")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
