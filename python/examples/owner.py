"""The owner: shares a mebibyte, and waits until a reader has been there."""

import sys

import peerway

with peerway.Endpoint() as endpoint:
    region = endpoint.allocate(1 << 20)
    memory = memoryview(region)
    memory[:5] = b"hello"

    # A peer needs these two words and nothing else. Send them by any means: here by a pipe.
    print(region.advertise("rw").hex(), endpoint.metadata.hex(), flush=True)

    message = endpoint.notification(timeout=60)
    if message is None:
        sys.exit("owner: no reader came within 60 s")
    print(f"owner: a reader wrote {bytes(memory[4096:4101])!r} and says {message.message!r}", file=sys.stderr)
