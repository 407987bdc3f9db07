"""What can go wrong, by kind. The native module raises these; each message is a whole sentence."""

from __future__ import annotations


class PeerwayError(Exception):
    """Anything that Peerway reports."""


class BuildError(PeerwayError):
    """An endpoint could not be made."""


class InvalidSetting(BuildError, ValueError):
    """A setting of the environment or of the constructor cannot be used."""


class InvalidMetadata(PeerwayError, ValueError):
    """The bytes are no endpoint's metadata."""


class InvalidDescriptor(PeerwayError, ValueError):
    """The bytes are no descriptor."""


class InvalidWork(PeerwayError, ValueError):
    """A transfer that makes no sense: ranges that leave their regions, lengths that differ."""


class RegisterError(PeerwayError):
    """Memory could not be registered, allocated or advertised."""


class GpuError(RegisterError):
    """A GPU refused, or memory is not the GPU memory that it was said to be."""


class NoCuda(GpuError, TypeError):
    """GPU memory, and no GPU that this process can use."""


class NoSuchGpu(GpuError, ValueError):
    """The process sees no GPU of that number."""


class ConnectError(PeerwayError, ConnectionError):
    """A peer could not be reached."""


class ConnectTimeout(ConnectError, TimeoutError):
    """A peer did not answer in time."""


class PeerIncompatible(ConnectError):
    """Whoever answered does not speak this protocol, or another version of it."""


class PathUnavailable(ConnectError):
    """A pinned path cannot be had."""


class AcceptTimeout(PeerwayError, TimeoutError):
    """Nobody connected in time."""


class CounterTimeout(PeerwayError, TimeoutError):
    """A counter did not get there in time."""


class WaitTimeout(PeerwayError, TimeoutError):
    """A transfer has not ended in the time that was waited; it goes on."""


class ProxyError(PeerwayError):
    """A proxy, or a command pushed to one, could not do what was asked."""


class InvalidCommand(ProxyError, ValueError):
    """What cannot be meant: no such ring, peer or counter, an offset that is no multiple of four, a senseless rule."""


class InvalidPeerInfo(ProxyError, ValueError):
    """The bytes are not the ``peer_info`` of a proxy."""


InvalidCard = InvalidPeerInfo  # the former name


class ProxyClosed(ProxyError):
    """The proxy is closed."""


class RingFull(ProxyError, TimeoutError):
    """Nobody made room in a ring in time: is the proxy armed?"""


class RingDead(ProxyError):
    """A push was abandoned while the ring was full; the ring is of no more use."""


class CommandTimeout(ProxyError, TimeoutError):
    """An answer to ``quiet`` did not come in time."""


class CommandFailed(ProxyError):
    """A command failed; ``Proxy.take_fault`` says which, and why."""


class CompileError(PeerwayError):
    """A kernel could not be compiled; the compiler's words are in the message."""


class NoCompiler(CompileError):
    """There is nothing to compile with, and the kernel was not compiled earlier."""


class InvalidSource(CompileError, ValueError):
    """A text or an option that no compiler can be given."""


class NoKernel(CompileError, LookupError):
    """The program has no kernel of that name."""


class Busy(PeerwayError):
    """Every transfer slot is in use."""


class TransferError(PeerwayError):
    """A transfer ended otherwise than done."""


class EndpointClosed(TransferError):
    """The endpoint is closed, or belongs to the parent process."""


class PeerGone(TransferError, ConnectionError):
    """The peer's process ended, or every lane to it broke, or another endpoint has its address now."""


class PeerSilent(PeerGone):
    """Nothing was heard from the peer for longer than the detection time."""


class PeerMisbehaved(TransferError):
    """The peer sent bytes that do not follow the protocol."""


class AccessDenied(TransferError, PermissionError):
    """The peer refused: unknown region, wrong token, wrong direction, or not for us."""


class OutOfBounds(AccessDenied):
    """The range lies outside what the peer advertised."""


class Revoked(AccessDenied):
    """The peer revoked the region."""


class NotificationsFull(TransferError):
    """The peer's notification queue is full."""


class CountersFull(TransferError):
    """The peer has no room for another counter."""


class MemoryFault(TransferError):
    """Registered memory was unmapped while it was registered."""


class DeliveryUnknown(TransferError):
    """A lane broke and it is not known whether the notification was delivered."""


class DeviceError(TransferError):
    """An RDMA device refused a request before it went out."""


class TransferCancelled(TransferError):
    """The transfer was cancelled."""


class TransferTimeout(TransferError, TimeoutError):
    """The transfer's deadline passed."""


class Unfenced(TransferError):
    """The transfer ended, but the peer may still touch its memory; that memory is kept alive.

    What such a transfer raises is of this class and of the class of its reason: both ``except Unfenced`` and
    ``except PeerGone`` catch a peer that was stopped in the middle of a write.
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
