"""Awaiting transfers: one file descriptor per event loop, no thread per transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import suppress
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from peerway._native import Transfer, Wakeups


class _Ends:
    """The transfers that tasks of one event loop await."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._wakeups = Wakeups()
        self._tokens = count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        loop.add_reader(self._wakeups.fileno(), self._heard)

    def of(self, transfer: Transfer, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """A future that is done when the transfer has ended, with success or with an error."""
        future: asyncio.Future[None] = loop.create_future()
        token = next(self._tokens)
        self._waiting[token] = future
        if not self._wakeups.watch(transfer, token):
            del self._waiting[token]
            future.set_result(None)
        return future

    def close(self) -> None:
        """Closes the descriptor and drops the futures, whose event loop no longer runs."""
        self._waiting.clear()
        self._wakeups.close()

    def _heard(self) -> None:
        for token in self._wakeups.take():
            future = self._waiting.pop(token, None)
            if future is not None and not future.done():
                future.set_result(None)


_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Ends] = WeakKeyDictionary()


def wait(transfer: Transfer) -> Generator[Any, None, None]:
    """Implements ``await transfer``.

    Cancelling the task cancels the transfer. The task then waits until the transfer has ended, with
    the fence held or, after the fence deadline, open.
    """
    loop = asyncio.get_running_loop()
    ends = _loops.get(loop)
    if ends is None:
        for other in [other for other in _loops if other.is_closed()]:
            _loops.pop(other).close()
        ends = _loops[loop] = _Ends(loop)
    try:
        yield from ends.of(transfer, loop)
    except asyncio.CancelledError as cancelled:
        transfer.cancel()
        # The transfer ends within the fence deadline. Until then it may still change memory, so the
        # task keeps waiting however often it is cancelled.
        while not transfer.done():
            with suppress(asyncio.CancelledError):
                yield from ends.of(transfer, loop)
        raise cancelled
    transfer.wait(0)
