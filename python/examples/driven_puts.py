"""Sends tokens to another process from inside a kernel, without waiting for the host.

    python driven_puts.py --rounds 10 --tokens 64 --token-bytes 4096

In each round, the sender's kernel makes tokens and puts each into the receiver's memory with a
count. The receiver's kernel waits for all tokens and answers with a count. The example compiles the
kernels from source text. Without a GPU (or with --cpu), host threads push the same commands. The
sender reads the receiver's memory back and checks every byte.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import peerway

try:
    import numpy
except ImportError:
    sys.exit("this example needs NumPy, which is not installed: pip install numpy")

#: The receiver's counter of arrived tokens, and the sender's counter of answered rounds.
ARRIVED, ANSWERED = 0, 1
#: The number that each side uses for the other.
PEER = 0
#: The limit of every wait, in seconds.
PATIENCE = 60.0

KERNELS = """
#include "peerway_device.cuh"

// One block per token. The receiver stores the tokens in reverse order.
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

// A consumer waits, uses the tokens, and signals the sender.
extern "C" __global__ void answer(const peerway_proxy *proxy, peerway_u64 arrived) {
    if (peerway_wait_counter(proxy, 0, arrived, 0) == PEERWAY_OK) peerway_signal(proxy, 0, 0, 1);
}
"""


@dataclass(frozen=True)
class Shape:
    """The settings that both sides know."""

    rounds: int
    tokens: int
    token_bytes: int
    cpu: bool

    @property
    def nbytes(self) -> int:
        return self.tokens * self.token_bytes

    def tokens_of(self, round: int) -> numpy.ndarray:
        """The tokens of a round in the sender's order, one per row."""
        words = numpy.arange(1, self.nbytes // 4 + 1, dtype="uint32") * numpy.uint32(2654435761)
        return (words + numpy.uint32(round)).reshape(self.tokens, -1)


def main() -> int:
    shape = arguments()
    context = multiprocessing.get_context("spawn")
    # The pipe replaces your rendezvous.
    to_receiver, to_sender = context.Pipe()
    sides = [
        context.Process(target=sender, args=(shape, to_receiver), name="sender"),
        context.Process(target=receiver, args=(shape, to_sender), name="receiver"),
    ]
    for side in sides:
        side.start()
    # Only the two sides keep the pipe open, so that each notices when the other dies.
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
            # The proxy's threads poll for commands while kernels can push, and sleep otherwise.
            with proxy.armed():
                push(round)
                proxy.wait_counter(ANSWERED, round, PATIENCE)
            fault = proxy.take_fault()
            if fault is not None:
                sys.exit(f"sender: {fault}")
            peer.read(found, descriptor)
            if not numpy.array_equal(found[::-1], shape.tokens_of(round)):
                sys.exit(f"sender: the receiver's memory differs from the tokens of round {round}")
        if gpu is not None:
            peerway.gpu.synchronize(gpu=gpu)  # a proxy must be closed after its kernels have ended
        stats = proxy.stats
        receiver.send("done")
    who = "host threads" if gpu is None else f"kernels of GPU {gpu}"
    print(f"{who} pushed {stats['puts']} puts of {shape.token_bytes} bytes, {stats['faults']} failed, verified")


def by_processor(
    shape: Shape, proxy: peerway.Proxy, region: peerway.Region, ours: peerway.Window, theirs: peerway.Window
) -> Callable[[int], None]:
    """Does the work of the kernel ``send`` on the host."""
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
        # An int gets the size of the kernel's parameter. A region passes its address, a proxy its
        # handle.
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
            sender.recv()  # keep the endpoint open until the sender has finished


def kernels(shape: Shape) -> Any:
    """The kernels on GPU 0, or None if host threads push."""
    if shape.cpu:
        return None
    try:
        peerway.gpus()
    except peerway.NoCuda:
        return None
    try:
        return peerway.gpu.compile(KERNELS, "driven_puts.cu", gpu=0)
    except peerway.NoCompiler as error:
        print(f"host threads push, because there is a GPU but no compiler: {error}", file=sys.stderr)
        return None


def arguments() -> Shape:
    parser = argparse.ArgumentParser(description="Send tokens to another process from inside a kernel.")
    parser.add_argument("--rounds", type=positive, default=5, help="how often all tokens are sent [5]")
    parser.add_argument("--tokens", type=positive, default=64, help="tokens in each round [64]")
    parser.add_argument("--token-bytes", type=positive, default=4096, help="bytes of a token, a multiple of 4 [4096]")
    parser.add_argument("--cpu", action="store_true", help="push from the host, even if there is a GPU")
    shape = Shape(**vars(parser.parse_args()))
    if shape.token_bytes % 4 or shape.token_bytes >= 1 << 24:
        parser.error("--token-bytes: must be a multiple of 4 and less than 16 MiB")
    return shape


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive integer")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
