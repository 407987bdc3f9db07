"""What can go wrong in the engine, as one tuple to catch.

Nothing here catches ``KeyboardInterrupt``: Ctrl-C ends any wait.
"""

import peerway

from .transfers import Transfer

#: What a call into the engine may raise for reasons that this interface answers with ``False``.
ENGINE_ERRORS: tuple[type[Exception], ...] = (
    peerway.PeerwayError,
    OSError,
    ValueError,
    BufferError,
    OverflowError,
)


def run(transfer: Transfer) -> None:
    """Waits for the end of a transfer; an interrupted wait takes the transfer along.

    A caller that was interrupted believes its buffers to be its own again, so the transfer is stopped and its fence
    waited for (the engine bounds that) before the interruption goes on.
    """
    try:
        transfer.wait()
    except BaseException:
        if not transfer.done():
            transfer.cancel()
            transfer.exception()
        raise
