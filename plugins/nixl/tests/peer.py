"""The other process of a test: an agent that executes requests from its standard input."""

import json
import sys

from nixl_of_tests import MARK, Side


def tell(what):
    print(MARK + json.dumps(what), flush=True)


def main():
    name, size, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    side = Side(name, size, settings=settings)
    tell({"address": side.address, "metadata": side.agent.get_agent_metadata().hex()})
    for line in sys.stdin:
        told = json.loads(line)
        tell(globals()[f"do_{told.pop('what')}"](side, **told))


def do_bytes(side, offset, length):
    return side.memory[offset : offset + length].tobytes().hex()


def do_fill(side, value):
    side.memory[:] = value
    return True


def do_only(side, value):
    """Whether every byte of the memory has this value."""
    return bool((side.memory == value).all())


def do_notifications(side):
    found = side.agent.get_new_notifs()
    return {name: [m.hex() for m in messages] for name, messages in found.items()}


def do_write(side, metadata, address, length):
    """Writes to the memory of the requesting agent."""
    name = side.agent.add_remote_agent(bytes.fromhex(metadata))
    name = name.decode() if isinstance(name, bytes) else name
    side.memory[:length] = 0x77
    handle = side.request("WRITE", [(0, length)], [(0, length)], name, address)
    return side.run(handle)


def do_forget(side):
    """Deregisters the memory."""
    side.agent.deregister_memory(side.registered)
    return True


if __name__ == "__main__":
    main()
