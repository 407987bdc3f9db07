"""Teardown in every order, many times, without leaks."""

import gc
import itertools
import os
import random

from nixl_of_tests import pair, release, until

ROUNDS = int(os.environ.get("PEERWAY_NIXL_ROUNDS", "1000"))


def counted():
    """The numbers of file descriptors, threads and mappings of this process."""
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
        # Every second transfer may still be in flight.
        if turn % 2:
            assert a.ended(requests[0], state) == "DONE"
        sides = {"first": a, "second": b}
        for step in order:
            if step == "request" and sides["first"] is not None:
                release(a, requests.pop())
            elif step == "forget" and sides["first"] is not None:
                try:
                    a.agent.remove_remote_agent(b.name)
                except Exception as error:
                    # The agent has already detected that the other one is gone.
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
            # Sessions may still be closing, which only makes the comparison more lenient.
            before = counted()

    def is_as_before():
        fds, threads, mappings = counted()
        return fds <= before[0] + 2 and threads <= before[1] + 1 and mappings <= before[2] + 40

    until(is_as_before, Counts(before))


class Counts:
    """Formats the counts of the beginning and the current counts, for the message of a failure."""

    def __init__(self, before):
        self._before = before

    def __str__(self):
        return f"file descriptors, threads and mappings: {self._before} before, {counted()} now"
