"""Transfers by number.

A transfer that was posted is remembered until ``poll_async`` has reported its end; one that is never polled
stays for as long as the endpoint. The numbers are a counter, never reused, and 0 is none.
"""

import os
import threading
from itertools import count
from typing import Protocol

from .log import reason


class Transfer(Protocol):
    """What is needed of the engine's transfers."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...
    def exception(self, timeout: float | None = None) -> BaseException | None: ...
    def cancel(self) -> None: ...


class Nothing:
    """A transfer of no pieces: it has ended well."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        return

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return None

    def cancel(self) -> None:
        return


class Transfers:
    """The transfers that somebody may ask about."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = count(1)
        self._by_id: dict[int, Transfer] = {}

    def add(self, transfer: Transfer) -> int:
        with self._lock:
            number = next(self._ids)
            self._by_id[number] = transfer
            return number

    def poll(self, number: int) -> tuple[bool, bool, str]:
        """``(success, done, why not)``."""
        transfer = self._by_id.get(number)
        if transfer is None:
            return False, True, f"there is no transfer {number}, or its end has been reported"
        if not transfer.done():
            # Callers ask in a loop; where cores are scarce, this one is what the transfer waits for.
            os.sched_yield()
            return True, False, ""
        # Of two threads that find the end, one reports it.
        if self._by_id.pop(number, None) is None:
            return False, True, f"the end of transfer {number} has been reported"
        error = transfer.exception(0.0)
        if error is None:
            return True, True, ""
        return False, True, f"transfer {number}: {reason(error)}"

    def look(self) -> None:
        """Looks at every transfer: the engine keeps a place for one that has ended until somebody does."""
        for transfer in list(self._by_id.values()):
            transfer.done()

    def clear(self) -> None:
        self._by_id.clear()

    def __len__(self) -> int:
        return len(self._by_id)
