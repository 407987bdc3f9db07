"""The reader: reads the owner's memory and writes to it. The owner's code takes no part."""

import sys

import peerway

words = sys.stdin.readline().split()
if len(words) != 2:
    sys.exit("reader: no invitation on standard input; run: python owner.py | python reader.py")
descriptor, metadata = (bytes.fromhex(word) for word in words)

with peerway.Endpoint() as endpoint:
    peer = endpoint.connect(metadata)
    remote = peer.remote(descriptor)

    page = bytearray(4096)
    peer.read(page, remote[:4096])
    print(f"reader: read {bytes(page[:5])!r} by {peer.path}: {peer.why}")

    # The owner sees the message after the bytes, exactly once.
    peer.write(b"world", remote[4096:4101], notify=b"done")
