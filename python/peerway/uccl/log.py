"""The logger and its level."""

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
    """The text of an error, or the name of its class if it has no text."""
    return str(error) or type(error).__name__


def apply_environment() -> None:
    """Sets the level from the environment, unless the program has set one.

    The names are those of the engine's log. The engine has already reported an invalid name.
    """
    if logger.level != logging.NOTSET:
        return
    for name in ("PEERWAY_LOG_LEVEL", "UCCL_P2P_LOG_LEVEL", "UCCL_DEBUG"):
        asked = os.environ.get(name, "").strip().lower()
        if asked:
            logger.setLevel(_LEVELS.get(asked, logging.NOTSET))
            return
