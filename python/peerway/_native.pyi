"""The API of the extension module. Times are in seconds."""

from collections.abc import Generator, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from typing_extensions import Buffer

from peerway._types import SupportsArrayInterface, SupportsDataPtr

Access: TypeAlias = Literal["r", "w", "rw"]
Kind: TypeAlias = Literal["auto", "latency", "bulk"]

#: Local memory of a transfer: a region, a part of one, or any contiguous buffer on the host or on a
#: GPU (the buffer protocol, ``__array_interface__``, ``__cuda_array_interface__``, ``__dlpack__``,
#: torch's ``data_ptr()``). The transfer registers such a buffer and keeps it alive.
Local: TypeAlias = Region | LocalSlice | BlockList | Buffer | Any
#: The peer's memory in a transfer: an imported region, a part of one, or a 64-byte descriptor.
Remote: TypeAlias = RemoteRegion | RemoteSlice | BlockList | bytes
#: The numbers of blocks: integers in a list, or in an array such as NumPy's or torch's, from which
#: they are taken without a Python loop.
Indices: TypeAlias = Sequence[int] | Buffer | SupportsArrayInterface | SupportsDataPtr
#: The source or a destination of a forwarding rule.
Place: TypeAlias = Region | LocalSlice | tuple[Region, int, int]
#: The number of blocks or threads, in one to three dimensions.
Extent: TypeAlias = int | Sequence[int]

__version__: str

class Endpoint:
    """Listens for peers, connects to them, and owns registered memory.

    Settings that are not given come from the environment. ``peerway doctor --config`` lists
    the variables.
    """

    def __init__(
        self,
        *,
        bind: str | None = None,
        advertise: str | None = None,
        transport: str | None = None,
        deadline: float | str | None = None,
        detect: float | str | None = None,
        fence: float | str | None = None,
        connect_timeout: float | str | None = None,
        spin: float | str | None = None,
        lanes: int | None = None,
        shards: int | None = None,
        copy_threads: int | None = None,
        slots: int | None = None,
        notify_bytes: int | None = None,
    ) -> None: ...
    @property
    def metadata(self) -> bytes:
        """The bytes that a peer needs to connect. Send them to the peer by any means."""
    @property
    def incarnation(self) -> str:
        """The identity of this incarnation of the endpoint. A restart changes it."""
    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The addresses at which peers can connect, best first."""
    @property
    def closed(self) -> bool:
        """True after ``close()``, and in a child process after a fork."""
    @property
    def stats(self) -> dict[str, Any]:
        """``peers``: those with an open session. The keys of ``Peer.stats``, summed over all peers,
        also those that are gone. ``cpus``: the processors that the endpoint's threads may run on.
        ``quarantine``: the result of ``peerway.quarantine()``. ``refusals``: what the endpoint has
        refused to peers, by reason, such as ``sessions`` or ``counts_without_right``.
        """
    def connect(self, to: bytes | str | tuple[str, int], timeout: float | str | None = None) -> Peer:
        """Connects to an endpoint by its metadata, ``"host:port"`` or ``(host, port)``.

        A second connect to the same incarnation returns the same peer.
        """
    def accept(self, timeout: float | str | None = None) -> Peer:
        """Returns the next peer that connected to this endpoint. Raises ``AcceptTimeout``."""
    def peers(self) -> list[Peer]:
        """Returns every live peer."""
    def register(self, buffer: Any, *, order: Literal["C", "any"] = "C") -> Region:
        """Registers writable, contiguous memory. The region keeps the object alive.

        The bytes of an array in Fortran order are not in the order of its elements, so such an
        array is registered only with ``order="any"``.
        """
    def register_address(self, address: int, nbytes: int, owner: object = None) -> Region:
        """Registers memory by address. The region keeps ``owner`` alive. Without an owner, the
        caller must keep the memory valid until the region and all its transfers are gone.
        """
    def allocate(self, nbytes: int, *, gpu: int | None = None) -> Region:
        """Allocates zeroed memory that local peers can map, on the host or on a GPU.

        The region exposes host memory by the buffer protocol and GPU memory by
        ``__cuda_array_interface__``.
        """
    def notification(self, timeout: float | str | None = 0.0) -> Notification | None:
        """Returns the oldest notification, or None after ``timeout`` seconds. ``None`` as the
        timeout waits without limit.
        """
    def counter(self, id: int) -> int:
        """Returns the number of arrivals counted under this id."""
    def wait_counter(self, id: int, n: int, timeout: float | str | None = None) -> int:
        """Waits for at least ``n`` arrivals and returns the count. Raises ``CounterTimeout``."""
    def reset_counter(self, id: int) -> int:
        """Removes a counter and returns its last value."""
    def close(self) -> None:
        """Ends all transfers, stops the endpoint's threads and closes its sockets."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

class Region:
    """Registered local memory. Its advertisements end when this object is destroyed."""

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
    @property
    def nbytes(self) -> int:
        """Bytes in the region."""
    @property
    def writable(self) -> bool:
        """Whether transfers may write into the region. False for read-only memory that was
        registered by address.
        """
    @property
    def shareable(self) -> bool:
        """Whether local peers can map the region."""
    @property
    def gpu(self) -> int | None:
        """The number of the GPU that holds the memory; None for host memory."""
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, bytes: slice) -> LocalSlice: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def blocks(self, indices: Indices, nbytes: int, *, stride: int | None = None, base: int = 0) -> BlockList:
        """Selects blocks of ``nbytes`` bytes. Block ``i`` starts at ``base + indices[i] *
        stride``.
        """
    def advertise(
        self, access: Access = "rw", *, start: int = 0, stop: int | None = None, to: Peer | None = None
    ) -> bytes:
        """Returns a 64-byte descriptor that lets any peer, or only ``to``, access these bytes."""
    def revoke(self) -> bool:
        """Ends every advertisement of the region. True: the fence is held, and no peer accesses
        the memory any more.

        False: a peer may still access the memory. The memory stays allocated until that peer
        leaves or dies, even after the region and its endpoint are gone (see ``quarantine``).
        Call again to wait again.
        """

class LocalSlice:
    """A part of a region."""

    def __len__(self) -> int: ...
    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
    @property
    def nbytes(self) -> int:
        """Bytes in the slice."""

class RemoteRegion:
    """Memory that a peer advertised."""

    @property
    def nbytes(self) -> int:
        """Bytes that the descriptor covers."""
    @property
    def access(self) -> Access:
        """The access that the owner allows: ``r``, ``w`` or ``rw``."""
    @property
    def direct_path(self) -> str | None:
        """The path by which this process accesses the memory on its own; None when transfers go
        over lanes.
        """
    def __len__(self) -> int: ...
    def __getitem__(self, bytes: slice) -> RemoteSlice: ...
    def blocks(self, indices: Indices, nbytes: int, *, stride: int | None = None, base: int = 0) -> BlockList:
        """Selects blocks of ``nbytes`` bytes. Block ``i`` starts at ``base + indices[i] *
        stride``.
        """

class RemoteSlice:
    """A part of a peer's memory."""

    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Bytes in the slice."""

class BlockList:
    """Equal blocks of a region or a remote region, for example of a paged KV cache."""

    def __init__(
        self,
        region: Region | RemoteRegion,
        indices: Indices,
        nbytes: int,
        *,
        stride: int | None = None,
        base: int = 0,
    ) -> None: ...
    @property
    def nbytes(self) -> int:
        """Bytes of all blocks together."""
    def __len__(self) -> int:
        """Number of blocks."""

class Peer:
    """One incarnation of a remote endpoint. A restarted peer is a different peer."""

    def remote(self, descriptor: bytes) -> RemoteRegion:
        """Imports a descriptor that this peer advertised and returns the memory that it names."""
    def write(
        self,
        local: Local | Sequence[Local],
        remote: Remote | Sequence[Remote],
        *,
        notify: bytes | None = None,
        count: int | None = None,
        deadline: float | str | None = None,
        kind: Kind = "auto",
    ) -> None:
        """Writes local bytes into the peer's memory and waits until they are there.

        Two sequences of equal length make one transfer of many pieces. ``notify`` sends a
        message and ``count`` increments a counter of the peer. The peer sees both after the
        bytes, exactly once.
        """
    def read(
        self,
        local: Local | Sequence[Local],
        remote: Remote | Sequence[Remote],
        *,
        notify: bytes | None = None,
        count: int | None = None,
        deadline: float | str | None = None,
        kind: Kind = "auto",
    ) -> None:
        """Reads the peer's memory into local memory and waits until the bytes are there."""
    def post_write(
        self,
        local: Local | Sequence[Local],
        remote: Remote | Sequence[Remote],
        *,
        notify: bytes | None = None,
        count: int | None = None,
        deadline: float | str | None = None,
        kind: Kind = "auto",
    ) -> Transfer:
        """As ``write``, but returns at once."""
    def post_read(
        self,
        local: Local | Sequence[Local],
        remote: Remote | Sequence[Remote],
        *,
        notify: bytes | None = None,
        count: int | None = None,
        deadline: float | str | None = None,
        kind: Kind = "auto",
    ) -> Transfer:
        """As ``read``, but returns at once."""
    def prepare_write(
        self,
        local: Local | Sequence[Local],
        remote: Remote | Sequence[Remote],
        *,
        notify: bytes | None = None,
        count: int | None = None,
        deadline: float | str | None = None,
        kind: Kind = "auto",
    ) -> Prepared:
        """Checks a write once. Any thread can then post it many times."""
    def prepare_read(
        self,
        local: Local | Sequence[Local],
        remote: Remote | Sequence[Remote],
        *,
        notify: bytes | None = None,
        count: int | None = None,
        deadline: float | str | None = None,
        kind: Kind = "auto",
    ) -> Prepared:
        """Checks a read once. Any thread can then post it many times."""
    def stage(self, stages: Sequence[Prepared]) -> Staged:
        """Groups prepared transfers as stages that the caller releases one by one: layer-wise
        streaming.
        """
    def post_addresses(
        self,
        op: Literal["read", "write"],
        regions: Sequence[Region],
        addresses: Sequence[int],
        sizes: Sequence[int],
        descriptors: Sequence[bytes],
    ) -> Transfer:
        """Posts one transfer of pieces that are given by local address.

        Each piece lies in its region. Each descriptor names where the remote side of its piece
        starts. The four sequences have the same length.
        """
    def notify(self, message: bytes) -> Transfer:
        """Sends a message to the peer's notification queue."""
    def count(self, id: int) -> Transfer:
        """Adds one to a counter of the peer."""
    def notification(self, timeout: float | str | None = 0.0) -> Notification | None:
        """Returns the oldest notification from this peer; None after ``timeout`` seconds, or when
        the peer is gone.
        """
    @property
    def path(self) -> str:
        """The best path that both sides support."""
    @property
    def why(self) -> str:
        """Why this path was chosen and not a better one, and what ``PEERWAY_DATA`` protects on it."""
    @property
    def data(self) -> str:
        """How the TCP connections to the peer protect what they carry: ``off``, ``integrity`` or
        ``encrypt``, the stricter ``PEERWAY_DATA`` of both sides. ``why`` says what that covers.
        """
    @property
    def trusted(self) -> bool:
        """Whether access limits on this path bind only honest peers."""
    @property
    def address(self) -> tuple[str, int]:
        """The address with which the session was established."""
    @property
    def incarnation(self) -> str:
        """The identity of this incarnation of the peer."""
    @property
    def initiator(self) -> bool:
        """Whether this side opened the session."""
    @property
    def alive(self) -> bool:
        """Whether transfers can be posted to the peer."""
    @property
    def stats(self) -> dict[str, int]:
        """``transfers`` posted; bytes that this side moved (``bytes_written``, ``bytes_read``) and
        that the peer moved (``bytes_served``, ``bytes_landed``), on every path; ``lanes_lost``;
        ``lanes_reopened``: TCP lanes that took the place of lost ones; ``corrupt_records``: lanes
        that were closed because of them.

        The peer tells what it moved without this side's processor (by a mapping, CMA, a GPU or a
        device): with each notification and count, and otherwise within an eighth of the detection
        time.
        """
    def remove(self) -> None:
        """Closes the session. Its transfers end."""
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class Transfer:
    """A posted transfer. It continues when this object is dropped. It can be awaited."""

    def done(self) -> bool:
        """Whether the transfer has ended, with success or with an error."""
    def wait(self, timeout: float | str | None = None) -> None:
        """Waits for the end. Raises the transfer's error, or ``WaitTimeout`` when it has not ended
        in time.
        """
    def exception(self, timeout: float | str | None = None) -> BaseException | None:
        """Waits as ``wait`` does, but returns the transfer's error, or None after success. Raises
        only ``WaitTimeout``.
        """
    def cancel(self) -> None:
        """Asks the transfer to stop. It ends within the fence deadline."""
    def cancelled(self) -> bool:
        """Whether the transfer ended because it was cancelled."""
    @property
    def fenced(self) -> bool | None:
        """True: the transfer no longer changes memory. False: it may still change memory. None: it
        has not ended.
        """
    @property
    def path(self) -> str:
        """The path that the transfer took."""
    @property
    def stats(self) -> dict[str, int | float | None]:
        """``bytes_done`` and ``bytes_total``; ``until_sent`` and ``until_ended`` in seconds, or
        None.
        """
    def __await__(self) -> Generator[Any]: ...

class Prepared:
    """A checked transfer. Any thread can post it many times."""

    @property
    def nbytes(self) -> int:
        """Bytes in the transfer."""
    def post(self) -> Transfer:
        """Posts the transfer."""
    def run(self) -> None:
        """Posts the transfer and waits for its end."""
    def enqueue(self, stream: Any) -> Enqueued:
        """Enqueues the transfer in a CUDA stream, or in the graph that captures the stream."""

class Enqueued:
    """A transfer that is enqueued in a CUDA stream or captured in a graph."""

    @property
    def runs(self) -> int:
        """How many times the transfer has ended."""
    def wait(self, timeout: float | str | None = None) -> None:
        """Waits until the transfer has ended once and is not running. Raises the error of the last
        run, or ``WaitTimeout``.
        """
    def release(self) -> None:
        """Releases the resources kept for a graph that captured the transfer. That graph must be
        gone.
        """

class Staged:
    """Stages of one transfer that the caller releases one by one."""

    def __len__(self) -> int: ...
    def release(self, stage: int, *, stream: Any = None, event: Any = None) -> None:
        """Releases a stage: at once, when a CUDA stream reaches this point, or when a CUDA event
        has completed.
        """
    def done(self, stage: int) -> bool:
        """Whether a stage was released and has ended."""
    def cancel(self) -> None:
        """Cancels every released stage. Stages that were not released are never sent."""
    def wait(self, timeout: float | str | None = None) -> None:
        """Waits for every released stage. Raises the error of the first stage that failed, or
        ``WaitTimeout``.
        """

class Notification:
    """A message from a peer."""

    @property
    def sender(self) -> str:
        """The incarnation of the sender."""
    @property
    def message(self) -> bytes:
        """The bytes of the message."""

class Memory:
    """Zeroed memory that local peers can map. It exposes the buffer protocol."""

    def __init__(self, nbytes: int) -> None: ...
    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Gpu:
    """Properties of a GPU."""

    @property
    def index(self) -> int:
        """The GPU's number in this process."""
    @property
    def name(self) -> str:
        """The vendor's name for the GPU."""
    @property
    def uuid(self) -> str:
        """The GPU's unique name on every host, as ``nvidia-smi -L`` shows it."""
    @property
    def bus_id(self) -> str:
        """The GPU's PCI address on this host, such as ``0000:4a:00.0``."""
    @property
    def memory(self) -> int:
        """Bytes of memory."""
    @property
    def capability(self) -> tuple[int, int]:
        """The GPU's compute capability, such as ``(9, 0)``."""

class GpuMemory:
    """Zeroed GPU memory that local peers can map. It exposes ``__cuda_array_interface__`` and
    DLPack.
    """

    def __init__(self, nbytes: int, gpu: int) -> None: ...
    @property
    def address(self) -> int:
        """Address of the first byte. Only GPUs can use it."""
    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
    @property
    def gpu(self) -> int:
        """The GPU's number in this process."""
    @property
    def kind(self) -> str:
        """How the memory was allocated, which limits how it can be shared: ``fabric``,
        ``posix-fd`` or ``plain``.
        """
    @property
    def why_not_better(self) -> str | None:
        """Why the memory is not of a better kind, in the driver's words; None for the best kind."""
    def dlpack(self, shape: Sequence[int], code: int, bits: int) -> Any:
        """Returns the memory as a DLPack tensor with DLPack's type ``code`` and ``bits``."""
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __dlpack__(self, **_options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __len__(self) -> int: ...

def quarantine() -> dict[str, int]:
    """Reports memory of this process that was released while a peer might still access it.

    ``regions`` and ``bytes`` count the memory in quarantine now, over all endpoints,
    including closed ones. The objects stay alive until the peer leaves the memory or dies.
    ``entries_ever`` counts all entries since the process started.
    """

def gpus() -> list[Gpu]:
    """Lists the GPUs that the process sees, by number. Initialises the CUDA driver. Raises
    ``NoCuda``.
    """

def gpu_in_use() -> bool:
    """Whether some code in the process uses a GPU. The call initialises nothing."""

def open_gpu(gpu: int) -> None:
    """Opens a GPU, so that GPU memory of peers on this host is mapped for it."""

def gpu_buffer_at(address: int) -> int | None:
    """Returns the driver's id of the GPU allocation at an address, which the driver never
    reuses; None for other memory.
    """

class Proxy:
    """Command rings that kernels push into, and threads that execute the commands.

    ``gpu`` is the GPU whose kernels push: a number or a ``torch.device``. Without a GPU,
    host threads push by a ``HostProducer``. ``copier`` selects how GPUs copy memory that
    they can access: ``launched``, ``resident`` (lower latency, but takes two
    multiprocessors for each thread) or ``engines``. Close the proxy, or leave its ``with``
    block, after every kernel that uses it has ended.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        gpu: Any = None,
        *,
        threads: int | None = None,
        rings: int | None = None,
        slots: int = 2048,
        peers: int = 64,
        counters: int = 1024,
        timeout: float | str = 10.0,
        copier: str = "launched",
    ) -> None: ...
    @property
    def handle(self) -> int:
        """The address of a ``peerway_proxy`` (``peerway_device.cuh``): the argument for kernels."""
    @property
    def gpu(self) -> int | None:
        """The GPU whose kernels push commands; None when host threads push."""
    @property
    def rings(self) -> int:
        """Number of rings."""
    @property
    def closed(self) -> bool:
        """Whether the proxy was closed."""
    def window(self, memory: Any) -> Window:
        """Makes memory a window, which commands address by offset.

        Peers that receive a later ``peer_info`` can address it, too. ``memory`` is a region, or
        an object with memory, which the proxy registers and keeps alive.
        """
    def peer_info(self) -> bytes:
        """Returns the bytes that a peer's proxy needs to send to this one: the current windows and
        the counters.
        """
    def card(self) -> bytes:
        """The former name of ``peer_info``."""
    def add_peer(self, number: int, peer: Peer, info: bytes) -> list[Window]:
        """Sends commands for ``number`` to this peer and returns the peer's windows. ``info`` is
        the result of ``peer_info()`` of the peer's proxy.
        """
    def arm(self) -> Armed:
        """Makes the threads poll for commands until ``disarm()`` of the returned object."""
    def armed(self) -> Armed:
        """For a ``with`` statement: the threads poll for commands inside the block and sleep
        outside it.
        """
    def counter(self, counter: int) -> int:
        """Returns the value of a counter of this proxy."""
    def wait_counter(self, counter: int, value: int, timeout: float | str | None = None) -> int:
        """Waits until a counter of this proxy reaches ``value`` and returns the counter's value.
        Raises ``CounterTimeout``.
        """
    def forward(
        self,
        counter: int,
        source: Place,
        to: Sequence[Place] = (),
        count: Sequence[int] = (),
        answer: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Copies the bytes of ``source`` to each of ``to`` whenever ``counter`` rises, while the
        proxy is armed.

        A rise of the counter means that the bytes of ``source`` have arrived. After the copies,
        the proxy increments its own counters in ``count`` and the peers' counters in ``answer``
        (pairs of peer and counter). Places are regions, parts of regions, or ``(region, offset,
        nbytes)``.
        """
    def stop_forwarding(self, counter: int) -> bool:
        """Removes the forwarding rule of a counter. Returns False when the counter has no rule."""
    def take_fault(self) -> Fault | None:
        """Returns the first command that failed since the last call, or None. This starts a new
        fault epoch: a later ``quiet`` reports only commands that fail after this call.
        """
    @property
    def stats(self) -> dict[str, int]:
        """Counts of ``commands``, ``puts``, ``bytes``, ``counts``, ``requests`` (submissions that
        carried puts; also under the former name ``flights``) and ``faults``.
        """
    def host_producer(self, ring: int = 0) -> HostProducer:
        """Returns a producer that pushes commands into one ring from the host, as a kernel does."""
    def pusher(self, ring: int = 0) -> HostProducer:
        """The former name of ``host_producer``."""
    def close(self) -> None:
        """Stops the threads and frees the memory. Every kernel that has the handle must have
        ended.
        """
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

class Window:
    """Memory that commands address. An address is ``base`` plus the offset within the window."""

    @property
    def base(self) -> int:
        """The offset of the window's first byte."""
    @property
    def nbytes(self) -> int:
        """Bytes in the window."""
    def __len__(self) -> int: ...

class Armed:
    """Makes a proxy's threads poll for commands. Keep the proxy armed from before kernels are
    launched until after they have ended.
    """

    @property
    def active(self) -> bool:
        """Whether this object keeps the proxy armed."""
    def disarm(self) -> None:
        """Lets the threads sleep, unless another object keeps the proxy armed."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

class Fault:
    """A command of a kernel that failed."""

    @property
    def code(self) -> int:
        """The reason, as one of the numbers ``PEERWAY_FAULT_*``."""
    @property
    def reason(self) -> str:
        """The reason in a word. ``operation``, ``peer``, ``source``, ``destination`` or
        ``counter`` names the field of the command that is not valid. ``peer-gone``,
        ``refused``, ``timed-out`` or ``failed`` says how the transfer ended.
        """
    @property
    def peer(self) -> int:
        """The number of the peer that the command was for."""
    @property
    def address(self) -> str | None:
        """The address of that peer, or None if the number names no peer."""
    @property
    def ring(self) -> int:
        """The ring that the command came from."""
    @property
    def op(self) -> int:
        """The operation of the command, as one of the numbers ``PEERWAY_OP_*``."""
    @property
    def position(self) -> int:
        """The position of the command in the ring; for commands submitted together, the position
        of the first.
        """

class HostProducer:
    """Pushes commands into one ring, from any thread: the calls of ``peerway_device.cuh``.

    An offset is ``window.base`` plus the position within the window. Offsets and lengths
    are multiples of four bytes.
    """

    @property
    def ring(self) -> int:
        """The number of the ring."""
    def put(self, peer: int, dst: int, src: int, nbytes: int) -> None:
        """Copies local bytes into the peer's memory."""
    def put_with_count(self, peer: int, dst: int, src: int, nbytes: int, counter: int) -> None:
        """As ``put``, and then increments a counter of the peer by one."""
    def signal(self, peer: int, counter: int) -> None:
        """Increments a counter of the peer by one. It does not wait for earlier puts; call
        ``quiet`` first if the order matters.
        """
    def quiet(self, peer: int, timeout: float | str | None = None) -> None:
        """Waits until all commands pushed here earlier for the peer have reached its memory.

        Raises ``CommandFailed`` when a command failed (``Proxy.take_fault`` says which), and
        ``CommandTimeout`` after ``timeout`` or, without one, the proxy's time-out.
        """
    def wait_counter(
        self, counter: int, value: int, peer: int | None = None, timeout: float | str | None = None
    ) -> None:
        """Waits until a counter of this proxy reaches ``value``. With ``peer``, a failure of that
        peer ends the wait (``CommandFailed``). Raises ``CounterTimeout`` after ``timeout`` or,
        without one, the proxy's time-out.
        """

class Module:
    """A compiled program on a GPU. Keep it, or one of its kernels, until every launch has
    ended and every graph that contains one is gone.
    """

    def kernel(self, name: str) -> Kernel:
        """Returns the kernel with this name, ready to launch. A kernel declared ``extern "C"`` has
        the name in the source.
        """
    @property
    def gpu(self) -> int:
        """The GPU that the program is loaded on."""
    @property
    def architecture(self) -> str:
        """The architecture that the program was compiled for, such as ``sm_90``."""
    @property
    def compiler(self) -> str:
        """The compiler that made the program."""
    @property
    def cached(self) -> bool:
        """Whether the program came from the cache on disk (``PEERWAY_KERNEL_CACHE``)."""

class Kernel:
    """A kernel of a compiled program. Call it to launch it."""

    @property
    def name(self) -> str:
        """The kernel's name."""
    @property
    def gpu(self) -> int:
        """The GPU that the kernel is loaded on."""
    @property
    def parameters(self) -> list[int] | None:
        """The size of each parameter in bytes; None where the driver does not report it (before
        CUDA 12.4).
        """
    @property
    def handle(self) -> int:
        """The driver's handle, a ``CUfunction``, for other code that launches the kernel."""
    def __call__(self, grid: Extent, block: Extent, *args: Any, stream: Any = None, shared: int = 0) -> None: ...

def log_select(level: int) -> int | None:
    """Prepares the queue, and selects lines of this level of ``logging`` and above. Returns the
    level that the environment sets instead, if it does.
    """

def log_lines() -> tuple[list[tuple[int, float, str, int, str, list[tuple[str, str]]]], int] | None:
    """Waits for lines and returns them, with the number of lines that were dropped before them.
    None after ``log_stop``.
    """

def log_stop() -> None:
    """Makes ``log_lines`` return None when no lines are left."""

def log_forget() -> None:
    """Forgets the parent's lines in a forked child."""

def device_headers() -> dict[str, str]:
    """Returns the headers for kernels that issue transfers, by the names to include."""

def compile_kernels(
    source: str,
    name: str,
    headers: Sequence[tuple[str, str]],
    options: Sequence[str],
    gpu: Any,
    compiler: PathLike[str] | str | None,
) -> Module:
    """Compiles a program for a GPU and loads it there. ``compiler`` is the path of a libnvrtc,
    used when PEERWAY_NVRTC_SO names none.
    """

def synchronize(stream: Any = None, gpu: Any = 0) -> None:
    """Waits until a stream of a GPU has completed all its work. The default is torch's current
    stream.
    """

class Wakeups:
    """Reports ended transfers to one event loop: a file descriptor becomes readable, and
    ``take`` says which ended.
    """

    def __init__(self) -> None: ...
    def fileno(self) -> int:
        """The file descriptor."""
    def watch(self, transfer: Transfer, token: int) -> bool:
        """Reports ``token`` when the transfer ends. Returns False when the transfer has ended
        already.
        """
    def take(self) -> list[int]:
        """Returns the tokens reported since the last call."""
    def close(self) -> None:
        """Closes the file descriptor. No more tokens are reported."""
