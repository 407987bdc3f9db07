"""Two NIXL agents in two processes, over NIXL's UCCL plugin.

The test covers a write, a read, notifications, a transfer within one agent, and a killed peer.
``NIXL_PLUGIN_DIR`` names the directory of the plugin, which is linked to Peerway's libuccl_p2p.so.
The test needs the wheels ``nixl`` and ``nixl-cu12``, and NumPy, but no GPU.
"""

import multiprocessing
import os
import signal
import sys
import time

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

BYTES = 1 << 20
PATIENCE = 30.0


def agent(name):
    made = nixl_agent(name, nixl_agent_config(backends=[]))
    made.create_backend("UCCL")
    memory = np.zeros(BYTES, np.uint8)
    made.register_memory([(memory.ctypes.data, BYTES, 0, "")], "DRAM", backends=["UCCL"])
    return made, memory


def pieces(made, address):
    """Every second KiB of the first 64."""
    return made.get_xfer_descs([(address + at, 1024, 0) for at in range(0, 65536, 2048)], "DRAM")


def until(what, condition):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        if time.monotonic() > end:
            raise SystemExit(f"{what}: no result within {PATIENCE} s")
        time.sleep(0.001)
    return found


def run(made, op, local, remote, peer, notice=b""):
    handle = made.initialize_xfer(op, local, remote, peer, notice, backends=["UCCL"])
    made.transfer(handle)
    state = until(op, lambda: (s := made.check_xfer_state(handle)) != "PROC" and s)
    made.release_xfer_handle(handle)
    return state


def owner(pipe):
    made, memory = agent("owner")
    pipe.send((made.get_agent_metadata(), memory.ctypes.data))
    made.add_remote_agent(pipe.recv())
    seen = []

    def came():
        for who, messages in made.get_new_notifs(backends=["UCCL"]).items():
            # The plugin sends a notification after every transfer. It is empty if none was
            # requested.
            seen.extend((who, m) for m in messages if m)
        return len(seen) >= 2

    until("notifications", came)
    assert sorted(seen) == [("user", b"by itself"), ("user", b"written")], seen
    assert (memory[:1024] == 7).all() and (memory[1024:2048] == 0).all()
    memory[:] = 9
    made.send_notif("user", b"go on")
    pipe.send("checked")
    pipe.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    pipe, other = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=owner, args=(other,), daemon=True)
    child.start()
    made, memory = agent("user")
    metadata, address = pipe.recv()
    pipe.send(made.get_agent_metadata())
    peer = made.add_remote_agent(metadata)
    peer = peer.decode() if isinstance(peer, bytes) else peer
    local, remote = pieces(made, memory.ctypes.data), pieces(made, address)

    memory[:] = 7
    assert run(made, "WRITE", local, remote, peer, b"written") == "DONE"
    made.send_notif(peer, b"by itself")
    assert pipe.recv() == "checked"
    print("write and notifications: ok")

    until("the answer", lambda: b"go on" in made.get_new_notifs(backends=["UCCL"]).get("owner", []))
    assert run(made, "READ", local, remote, peer) == "DONE"
    assert (memory[:1024] == 9).all() and (memory[1024:2048] == 7).all()
    print("read: ok")

    half = BYTES // 2
    one, two = (made.get_xfer_descs([(memory.ctypes.data + at, 4096, 0)], "DRAM") for at in (0, half))
    memory[:] = 0
    memory[:4096] = 3
    assert run(made, "WRITE", one, two, "user") == "DONE"
    assert (memory[half : half + 4096] == 3).all()
    print("within one agent: ok")

    pipe.send("end")
    child.join()
    try:
        state = run(made, "WRITE", local, remote, peer)
    except Exception as error:
        state = type(error).__name__
    assert state != "DONE", state
    print(f"to an agent that was killed: {state}")
    print("ok")


if __name__ == "__main__":
    sys.exit(main())
