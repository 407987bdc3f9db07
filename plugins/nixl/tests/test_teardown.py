"""Ends, in every order, over and over, leaving nothing behind."""

import gc
import itertools
import os
import random

from nixl_of_tests import pair, released_within

ROUNDS = int(os.environ.get("PEERWAY_NIXL_ROUNDS", "1000"))


def counted():
    """Descriptors, threads and mappings of this process."""
    with open("/proc/self/maps") as maps:
        mappings = len(maps.readlines())
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mappings


def test_agents_end_in_every_order():
    orders = list(itertools.permutations(["request", "forget", "memory", "first", "second"]))
    random.Random(0).shuffle(orders)
    before = None
    for turn in range(ROUNDS):
        order = orders[turn % len(orders)]
        a, b = pair()
        requests = [a.request("WRITE", [(0, 4096)], [(0, 4096)], b.name, b.address)]
        state = a.agent.transfer(requests[0], b"done")
        # Some are left under way.
        if turn % 2:
            assert a.ended(requests[0], state) == "DONE"
        sides = {"first": a, "second": b}
        for step in order:
            if step == "request" and sides["first"] is not None:
                released_within(a, requests.pop(), 5)
            elif step == "forget" and sides["first"] is not None:
                try:
                    a.agent.remove_remote_agent(b.name)
                except Exception as error:
                    # It noticed by itself that the other is gone.
                    assert "NOT_FOUND" in str(error).upper(), error
            elif step == "memory" and sides["second"] is not None:
                b.agent.deregister_memory(b.registered)
            elif step in sides:
                if step == "first":
                    requests.clear()
                sides[step].agent = None
                sides[step] = None
        del a, b, sides, requests
        gc.collect()
        if turn == ROUNDS // 10:
            before = counted()
    fds, threads, mappings = counted()
    assert fds <= before[0] + 2, (before, (fds, threads, mappings))
    assert threads <= before[1] + 1
    assert mappings <= before[2] + 40
