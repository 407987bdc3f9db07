"""Sends tokens to another process from inside a kernel, which waits for no host.

    python driven_puts.py --rounds 10 --tokens 64 --token-bytes 4096

In every round the sender's kernel makes its tokens and puts each into the receiver's memory itself, with a count;
the receiver's kernel waits for all of them and answers with a count of its own. The kernels are text, compiled here.
Without a GPU (or with --cpu) processors push the same commands. The sender reads the receiver's memory back and looks
at every byte.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy
import peerway

#: Counters: of the receiver's, tokens that arrived; of the sender's, rounds that were answered.
ARRIVED, ANSWERED = 0, 1
#: How each side numbers the other.
PEER = 0
#: Nothing is waited for longer, in seconds.
PATIENCE = 60.0

KERNELS = """
#include "peerway_device.cuh"

// A block for each token. Tokens arrive in the opposite order of places.
extern "C" __global__ void send(const peerway_proxy *proxy, peerway_u32 *ours, peerway_u64 dst, peerway_u64 src,
                                peerway_u32 words, peerway_u32 round) {
    peerway_u32 token = blockIdx.x, last = gridDim.x - 1;
    for (peerway_u32 i = threadIdx.x; i < words; i += blockDim.x) {
        peerway_u32 at = token * words + i;
        ours[at] = (at + 1) * 2654435761u + round;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    peerway_u64 bytes = 4ull * words;
    peerway_put_with_count(proxy, token % proxy->rings, 0, dst + (last - token) * bytes, src + token * bytes, bytes, 0);
}

// What a consumer would do: wait, use what has arrived, tell the sender.
extern "C" __global__ void answer(const peerway_proxy *proxy, peerway_u64 arrived) {
    if (peerway_wait_counter(proxy, 0, arrived, 0) == PEERWAY_OK) peerway_signal(proxy, 0, 0, 1);
}
"""


@dataclass(frozen=True)
class Shape:
    """What both sides know beforehand."""

    rounds: int
    tokens: int
    token_bytes: int
    cpu: bool

    @property
    def nbytes(self) -> int:
        return self.tokens * self.token_bytes

    def tokens_of(self, round: int) -> numpy.ndarray:
        """The tokens of a round, one in each row, as the sender has them."""
        words = numpy.arange(1, self.nbytes // 4 + 1, dtype="uint32") * numpy.uint32(2654435761)
        return (words + numpy.uint32(round)).reshape(self.tokens, -1)


def main() -> int:
    shape = arguments()
    context = multiprocessing.get_context("spawn")
    # The pipes stand for your rendezvous.
    to_receiver, to_sender = context.Pipe()
    sides = [
        context.Process(target=sender, args=(shape, to_receiver), name="sender"),
        context.Process(target=receiver, args=(shape, to_sender), name="receiver"),
    ]
    for side in sides:
        side.start()
    # Theirs alone from here on, so that when one side dies the other one hears of it.
    to_receiver.close()
    to_sender.close()
    for side in sides:
        side.join()
    failed = [side.name for side in sides if side.exitcode != 0]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    return 0


def sender(shape: Shape, receiver: Connection) -> None:
    module = kernels(shape)
    gpu = None if module is None else module.gpu
    with peerway.Endpoint() as endpoint, peerway.Proxy(endpoint, gpu) as proxy:
        region = endpoint.allocate(shape.nbytes, gpu=gpu)
        window = proxy.window(region)
        receiver.send((endpoint.metadata, proxy.peer_info()))
        metadata, info, descriptor = receiver.recv()
        peer = endpoint.connect(metadata)
        (theirs,) = proxy.add_peer(PEER, peer, info)
        if module is None:
            push = by_processor(shape, proxy, region, window, theirs)
        else:
            push = by_kernel(shape, module, proxy, region, window, theirs)
        found = numpy.empty((shape.tokens, shape.token_bytes // 4), "uint32")
        for round in range(1, shape.rounds + 1):
            # The proxy's threads look for commands while kernels may push some, and sleep otherwise.
            with proxy.armed():
                push(round)
                proxy.wait_counter(ANSWERED, round, PATIENCE)
            fault = proxy.take_fault()
            if fault is not None:
                sys.exit(f"sender: {fault}")
            peer.read(found, descriptor)
            if not numpy.array_equal(found[::-1], shape.tokens_of(round)):
                sys.exit(f"sender: the receiver does not have what was sent in round {round}")
        if gpu is not None:
            peerway.gpu.synchronize(gpu=gpu)  # a proxy goes after its kernels
        stats = proxy.stats
        receiver.send("done")
    who = "processors" if gpu is None else f"kernels of GPU {gpu}"
    print(f"{who} pushed {stats['puts']} puts of {shape.token_bytes} bytes, {stats['faults']} failed, verified")


def by_processor(
    shape: Shape, proxy: peerway.Proxy, region: peerway.Region, ours: peerway.Window, theirs: peerway.Window
) -> Callable[[int], None]:
    """What the kernel ``send`` does, step by step."""
    memory = numpy.frombuffer(region, "uint32").reshape(shape.tokens, -1)
    producers = [proxy.host_producer(ring) for ring in range(proxy.rings)]

    def push(round: int) -> None:
        memory[:] = shape.tokens_of(round)
        for token in range(shape.tokens):
            src = ours.base + token * shape.token_bytes
            dst = theirs.base + (shape.tokens - 1 - token) * shape.token_bytes
            producers[token % len(producers)].put_with_count(PEER, dst, src, shape.token_bytes, ARRIVED)

    return push


def by_kernel(
    shape: Shape,
    module: peerway.gpu.Module,
    proxy: peerway.Proxy,
    region: peerway.Region,
    ours: peerway.Window,
    theirs: peerway.Window,
) -> Callable[[int], None]:
    send = module.kernel("send")
    words = shape.token_bytes // 4

    def push(round: int) -> None:
        # A number is as wide as the kernel takes it; a region is its address, a proxy its handle.
        send(shape.tokens, min(words, 256), proxy, region, theirs.base, ours.base, words, round)

    return push


def receiver(shape: Shape, sender: Connection) -> None:
    module = kernels(shape)
    gpu = None if module is None else module.gpu
    with peerway.Endpoint() as endpoint, peerway.Proxy(endpoint, gpu) as proxy:
        region = endpoint.allocate(shape.nbytes, gpu=gpu)
        proxy.window(region)
        metadata, info = sender.recv()
        proxy.add_peer(PEER, endpoint.connect(metadata), info)
        sender.send((endpoint.metadata, proxy.peer_info(), region.advertise("r")))
        if module is not None:
            answer = module.kernel("answer")
        with proxy.armed():
            for round in range(1, shape.rounds + 1):
                arrived = round * shape.tokens
                if module is not None:
                    answer(1, 1, proxy, arrived)
                    peerway.gpu.synchronize(gpu=gpu)
                else:
                    proxy.wait_counter(ARRIVED, arrived, PATIENCE)
                    proxy.host_producer().signal(PEER, ANSWERED)
            sender.recv()  # both sides stay until the other one needs them no more


def kernels(shape: Shape) -> Any:
    """The kernels on GPU 0, or None where processors are to push."""
    if shape.cpu:
        return None
    try:
        peerway.gpus()
    except peerway.NoCuda:
        return None
    try:
        return peerway.gpu.compile(KERNELS, "driven_puts.cu", gpu=0)
    except peerway.NoCompiler as error:
        print(f"processors push, for there is a GPU but no compiler: {error}", file=sys.stderr)
        return None


def arguments() -> Shape:
    parser = argparse.ArgumentParser(description="Send tokens to another process from inside a kernel.")
    parser.add_argument("--rounds", type=positive, default=5, help="how often all tokens are sent [5]")
    parser.add_argument("--tokens", type=positive, default=64, help="tokens in each round [64]")
    parser.add_argument("--token-bytes", type=positive, default=4096, help="bytes of a token, a multiple of 4 [4096]")
    parser.add_argument("--cpu", action="store_true", help="have processors push, even where there is a GPU")
    shape = Shape(**vars(parser.parse_args()))
    if shape.token_bytes % 4 or shape.token_bytes >= 1 << 24:
        parser.error("--token-bytes: a put is a multiple of 4 bytes, and less than 16 MiB")
    return shape


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
