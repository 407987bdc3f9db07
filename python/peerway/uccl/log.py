"""The logger, and how much it says."""

import logging
import os

logger = logging.getLogger("uccl.p2p")

_LEVELS = {
    "off": logging.CRITICAL + 10,
    "fatal": logging.CRITICAL,
    "abort": logging.CRITICAL,
    "3": logging.CRITICAL,
    "error": logging.ERROR,
    "2": logging.ERROR,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "version": logging.WARNING,
    "1": logging.WARNING,
    "info": logging.INFO,
    "0": logging.INFO,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
}


def reason(error: BaseException) -> str:
    """An error as a sentence."""
    return str(error) or type(error).__name__


def apply_environment() -> None:
    """Sets the level that the environment asks for, unless the program has set one.

    The names are those of the engine's own log; it has complained already where one cannot be used.
    """
    if logger.level != logging.NOTSET:
        return
    for name in ("PEERWAY_LOG_LEVEL", "UCCL_P2P_LOG_LEVEL", "UCCL_DEBUG"):
        asked = os.environ.get(name, "").strip().lower()
        if asked:
            logger.setLevel(_LEVELS.get(asked, logging.NOTSET))
            return
