"""The errors of the engine, as one tuple to catch.

The tuple does not contain ``KeyboardInterrupt``, so Ctrl-C ends any wait.
"""

import peerway

from .transfers import Transfer

#: Exceptions of the engine for which the calls of this interface return ``False``.
ENGINE_ERRORS: tuple[type[Exception], ...] = (
    peerway.PeerwayError,
    OSError,
    ValueError,
    BufferError,
    OverflowError,
)


def run(transfer: Transfer) -> None:
    """Waits for the end of a transfer. An interrupted wait cancels the transfer.

    After an interruption, the caller may reuse its buffers. This therefore cancels the transfer and
    waits for the fence, within the fence deadline, before it raises the interruption.
    """
    try:
        transfer.wait()
    except BaseException:
        if not transfer.done():
            transfer.cancel()
            transfer.exception()
        raise
