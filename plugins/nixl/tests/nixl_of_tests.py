"""An agent with memory, for the tests and the processes that they start."""

import importlib
import os
import time
import uuid

import numpy as np

MARK = "@ "
PACKAGE = os.environ.get("PEERWAY_NIXL", "nixl_cu12")
BACKEND = os.environ.get("PEERWAY_NIXL_BACKEND", "PEERWAY")

# Seconds after which a test gives up. A test passes as soon as its condition holds, so this value
# can be generous for busy machines.
WATCHDOG = 180.0

api = importlib.import_module(f"{PACKAGE}._api")
bindings = importlib.import_module(f"{PACKAGE}._bindings")

# The exceptions that NIXL raises for a status other than success.
REFUSED = tuple(kind for name, kind in vars(bindings).items() if name.startswith("nixl") and name.endswith("Error"))


def until(condition, what):
    """Waits until the condition holds, and returns its value. `what` describes the condition."""
    deadline = time.monotonic() + WATCHDOG
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {WATCHDOG} s: {what}"
        time.sleep(0.005)
    return found


class Side:
    """An agent, its memory, and transfers between its memory and another agent's."""

    def __init__(self, name=None, size=1 << 20, memory=None, settings=None, threads=False):
        self.name = name or f"agent-{uuid.uuid4().hex[:8]}"
        self.memory = np.zeros(size, np.uint8) if memory is None else memory
        config = api.nixl_agent_config(backends=[])
        if threads:
            # By default, only one thread may use an agent of NIXL.
            config.sync_mode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self.agent = api.nixl_agent(self.name, config)
        self.agent.create_backend(BACKEND, settings or {})
        whole = [(self.address, self.memory.nbytes, 0, "")]
        self.registered = self.agent.register_memory(whole, "DRAM")

    @property
    def address(self):
        return self.memory.ctypes.data

    def descriptors(self, *ranges, base=None):
        """Descriptors of (offset, length) pairs, in the own memory or in memory from `base` on."""
        base = self.address if base is None else base
        listed = [(base + offset, length, 0) for offset, length in ranges]
        return self.agent.get_xfer_descs(listed, "DRAM")

    def request(self, op, ours, theirs, name, base, message=b""):
        local = self.descriptors(*ours)
        remote = self.descriptors(*theirs, base=base)
        return self.agent.initialize_xfer(op, local, remote, name, message)

    def run(self, handle, message=b""):
        """Posts the request and returns its final state."""
        state = self.agent.transfer(handle, message) if message else self.agent.transfer(handle)
        return self.ended(handle, state)

    def ended(self, handle, state="PROC"):
        deadline = time.monotonic() + WATCHDOG
        while state == "PROC":
            assert time.monotonic() < deadline, f"the transfer has not ended within {WATCHDOG} s"
            state = self.agent.check_xfer_state(handle)
        return state

    def notifications(self, count=1, timeout=WATCHDOG):
        """The expected number of notifications, or those that arrived in time."""
        found, deadline = [], time.monotonic() + timeout
        while len(found) < count and time.monotonic() < deadline:
            for name, messages in self.agent.get_new_notifs().items():
                found += [(name, message) for message in messages]
        return found

    def close(self):
        if self.agent is not None:
            self.agent.deregister_memory(self.registered)
            self.agent = None


def pair(**settings):
    """Two agents that have loaded each other's metadata."""
    a, b = Side(settings=settings), Side(settings=settings)
    a.agent.add_remote_agent(b.agent.get_agent_metadata())
    b.agent.add_remote_agent(a.agent.get_agent_metadata())
    return a, b


def release(side, request):
    """Retries until the request is released."""

    def is_released():
        try:
            side.agent.release_xfer_handle(request)
        except bindings.nixlRepostActiveError:
            return False
        return True

    until(is_released, "the request is released")
