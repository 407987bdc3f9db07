"""The engine's log as records of the logger ``peerway``.

Engine threads never wait for the interpreter. They leave their lines in a queue, and a thread of this
module passes them to ``logging``. ``record.fields`` has the values that a message ends with.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading

from peerway import _native

logger = logging.getLogger("peerway")

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_lock = threading.Lock()
_thread: threading.Thread | None = None


def follow() -> None:
    """Selects the lines that the logger wants now. The first call starts the thread."""
    global _thread
    chosen = _native.log_select(logger.getEffectiveLevel())
    if _thread is not None:
        return
    with _lock:
        if _thread is not None:
            return
        if chosen is not None:
            _show(chosen)
        _thread = threading.Thread(target=_pass_on, name="peerway-log", daemon=True)
        _thread.start()


def _show(level: int) -> None:
    """Shows lines of this level, which the environment asks for.

    What the program has chosen stays.
    """
    if logger.level == logging.NOTSET:
        logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)


def _pass_on() -> None:
    while (waiting := _native.log_lines()) is not None:
        lines, dropped = waiting
        for level, created, file, number, message, fields in lines:
            if logger.isEnabledFor(level):
                values = ", ".join(f"{name}={value}" for name, value in fields)
                text = f"{message} ({values})" if values else message
                extra = {"fields": dict(fields)}
                record = logger.makeRecord(logger.name, level, file, number, text, (), None, extra=extra)
                record.created, record.msecs = created, created % 1 * 1000
                logger.handle(record)
        if dropped:
            logger.warning("%d lines of the log came too fast and were dropped", dropped)


def _stop() -> None:
    """Passes on what is left before the interpreter ends."""
    if _thread is not None:
        _native.log_stop()
        _thread.join(timeout=5)


def _forget() -> None:
    """Begins anew in a forked child, where the thread does not exist."""
    global _lock, _thread
    _lock, _thread = threading.Lock(), None
    _native.log_forget()


atexit.register(_stop)
os.register_at_fork(after_in_child=_forget)
