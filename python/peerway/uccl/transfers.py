"""Transfers by number.

The endpoint keeps a posted transfer until ``poll_async`` has reported its end. A transfer that is
never polled stays until the endpoint closes. The numbers come from a counter and are not reused. 0
means no transfer.
"""

import os
import threading
from itertools import count
from typing import Protocol

from .log import reason


class Transfer(Protocol):
    """The methods of the engine's transfers that this package uses."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...
    def exception(self, timeout: float | None = None) -> BaseException | None: ...
    def cancel(self) -> None: ...


class Nothing:
    """A transfer without pieces, which has ended with success."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        return

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return None

    def cancel(self) -> None:
        return


class Transfers:
    """The transfers whose end has not been reported yet."""

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
        """``(success, done, reason of a failure)``."""
        transfer = self._by_id.get(number)
        if transfer is None:
            return False, True, f"no transfer {number}: the number is unknown, or its end was already reported"
        if not transfer.done():
            # Callers poll in a loop. With few cores, this loop may keep the progress thread from
            # running.
            os.sched_yield()
            return True, False, ""
        # Only one of two threads that see the end reports it.
        if self._by_id.pop(number, None) is None:
            return False, True, f"no transfer {number}: its end was already reported"
        error = transfer.exception(0.0)
        if error is None:
            return True, True, ""
        return False, True, f"transfer {number}: {reason(error)}"

    def look(self) -> None:
        """Polls every transfer.

        The engine frees the slot of an ended transfer only after a poll.
        """
        for transfer in list(self._by_id.values()):
            transfer.done()

    def clear(self) -> None:
        self._by_id.clear()

    def __len__(self) -> int:
        return len(self._by_id)
