"""The exceptions of Peerway. The native module raises them."""

from __future__ import annotations


class PeerwayError(Exception):
    """The base class of all errors of Peerway."""


class BuildError(PeerwayError):
    """An endpoint could not be built."""


class InvalidSetting(BuildError, ValueError):
    """A setting of the environment or of the constructor is not valid."""


class InvalidMetadata(PeerwayError, ValueError):
    """The bytes are not the metadata of an endpoint."""


class InvalidDescriptor(PeerwayError, ValueError):
    """The bytes are not a descriptor."""


class InvalidWork(PeerwayError, ValueError):
    """A transfer is not valid: for example, a range leaves its region, or lengths differ."""


class RegisterError(PeerwayError):
    """Memory could not be registered, allocated or advertised."""


class GpuError(RegisterError):
    """A GPU operation failed, or memory is not GPU memory as declared."""


class NoCuda(GpuError, TypeError):
    """The call needs a GPU, but this process can use none."""


class NoSuchGpu(GpuError, ValueError):
    """The process sees no GPU with this number."""


class ConnectError(PeerwayError, ConnectionError):
    """A peer could not be reached."""


class ConnectTimeout(ConnectError, TimeoutError):
    """A peer did not answer in time."""


class PeerIncompatible(ConnectError):
    """The remote side does not speak this protocol, or speaks another version of it."""


class NotSecure(ConnectError):
    """The connection cannot be secured: the peer did not prove its identity, or bytes changed."""


class NotAdmitted(ConnectError):
    """One of the two endpoints does not admit the other (``PEERWAY_IDENTITY``)."""


class PathUnavailable(ConnectError):
    """A pinned path is not available."""


class AcceptTimeout(PeerwayError, TimeoutError):
    """No peer connected in time."""


class CounterTimeout(PeerwayError, TimeoutError):
    """A counter did not reach the value in time."""


class WaitTimeout(PeerwayError, TimeoutError):
    """A transfer has not ended within the timeout of the wait. It continues."""


class ProxyError(PeerwayError):
    """A call of a proxy, or a command pushed to one, failed."""


class InvalidCommand(ProxyError, ValueError):
    """A ring, peer, counter, offset, length or forwarding rule is not valid."""


class InvalidPeerInfo(ProxyError, ValueError):
    """The bytes are not the ``peer_info`` of a proxy."""


InvalidCard = InvalidPeerInfo  # the former name


class ProxyClosed(ProxyError):
    """The proxy is closed."""


class RingFull(ProxyError, TimeoutError):
    """A ring stayed full for the proxy's time-out. Check that the proxy is armed."""


class RingDead(ProxyError):
    """A producer abandoned a push while the ring was full. The ring cannot be used any more."""


class CommandTimeout(ProxyError, TimeoutError):
    """The answer to ``quiet`` did not arrive in time."""


class CommandFailed(ProxyError):
    """A command failed. ``Proxy.take_fault`` returns the command and the reason."""


class CompileError(PeerwayError):
    """A kernel could not be compiled. The message contains the compiler's output."""


class NoCompiler(CompileError):
    """There is no compiler, and the kernel is not in the cache."""


class InvalidSource(CompileError, ValueError):
    """A source text or an option cannot be passed to the compiler."""


class NoKernel(CompileError, LookupError):
    """The program has no kernel with this name."""


class Busy(PeerwayError):
    """Every transfer slot is in use."""


class TransferError(PeerwayError):
    """A transfer ended without success.

    The attributes say what is known of it. They are None if the error has another source. A call
    that posts nothing because the peer is gone sets only ``peer`` and ``incarnation``.
    """

    #: The address of the peer.
    peer: str | None = None
    #: The incarnation of the peer: a restarted peer has another.
    incarnation: str | None = None
    #: The path of the transfer, as in ``Transfer.path``.
    path: str | None = None
    #: What the transfer did: ``"read"``, ``"write"``, ``"notify"`` or ``"count"``.
    op: str | None = None
    #: Bytes known to have arrived.
    bytes_done: int | None = None
    #: Bytes asked for: 0 for a notification or a count alone.
    bytes_total: int | None = None
    #: ``"held"``, or ``"open"`` while the peer may still touch the transfer's memory.
    fence: str | None = None
    #: The last end of a lane or of the session, with the operating system's reason, or None.
    last_event: str | None = None


class EndpointClosed(TransferError):
    """The endpoint is closed, or belongs to the parent process."""


class PeerGone(TransferError, ConnectionError):
    """The peer's process ended, every lane to it broke, or another endpoint has its address now."""


class PeerSilent(PeerGone):
    """The peer sent nothing for longer than the detection time."""


class PeerMisbehaved(TransferError):
    """The peer sent bytes that do not follow the protocol."""


class AccessDenied(TransferError, PermissionError):
    """The peer refused access: unknown region, wrong token, wrong direction, or another's grant."""


class OutOfBounds(AccessDenied):
    """The range lies outside what the peer advertised."""


class Revoked(AccessDenied):
    """The peer revoked the region."""


class NotificationsFull(TransferError):
    """The peer's notification queue is full."""


class CountersFull(TransferError):
    """The peer has no room for another counter."""


class MemoryFault(TransferError):
    """Memory was unmapped while it was registered."""


class DeliveryUnknown(TransferError):
    """A lane broke, so it is not known whether the notification was delivered."""


class DeviceError(TransferError):
    """An RDMA device refused a work request before it sent it."""


class TransferCancelled(TransferError):
    """The transfer was cancelled."""


class TransferTimeout(TransferError, TimeoutError):
    """The transfer's deadline passed."""


class Unfenced(TransferError):
    """The transfer ended, but the peer may still access its memory, which is kept alive.

    The exception also has the class of the reason. Both ``except Unfenced`` and ``except PeerGone``
    catch a peer that was stopped in the middle of a write.
    """


def _unfenced(reason: type[TransferError]) -> None:
    name = f"Unfenced{reason.__name__}"
    doc = f"{reason.__doc__} Its fence is open: see `Unfenced`."
    globals()[name] = type(name, (Unfenced, reason), {"__doc__": doc, "__module__": __name__})


for _reason in [value for value in list(globals().values()) if isinstance(value, type)]:
    if issubclass(_reason, TransferError) and not issubclass(_reason, Unfenced):
        _unfenced(_reason)
del _reason

__all__ = [
    "AcceptTimeout",
    "AccessDenied",
    "BuildError",
    "Busy",
    "CommandFailed",
    "CommandTimeout",
    "CompileError",
    "ConnectError",
    "ConnectTimeout",
    "CounterTimeout",
    "CountersFull",
    "DeliveryUnknown",
    "DeviceError",
    "EndpointClosed",
    "GpuError",
    "InvalidCard",
    "InvalidPeerInfo",
    "InvalidCommand",
    "InvalidDescriptor",
    "InvalidMetadata",
    "InvalidSetting",
    "InvalidSource",
    "InvalidWork",
    "MemoryFault",
    "NoCompiler",
    "NoCuda",
    "NoKernel",
    "NoSuchGpu",
    "NotAdmitted",
    "NotSecure",
    "NotificationsFull",
    "OutOfBounds",
    "PathUnavailable",
    "PeerGone",
    "PeerIncompatible",
    "PeerMisbehaved",
    "PeerSilent",
    "PeerwayError",
    "ProxyClosed",
    "ProxyError",
    "RegisterError",
    "Revoked",
    "RingDead",
    "RingFull",
    "TransferCancelled",
    "TransferError",
    "TransferTimeout",
    "Unfenced",
    "WaitTimeout",
]
