"""What the extension module offers; `peerway` exports all of it. Times are seconds."""

from collections.abc import Generator, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from typing_extensions import Buffer

Access: TypeAlias = Literal["r", "w", "rw"]
Kind: TypeAlias = Literal["auto", "latency", "bulk"]

#: What can stand for local memory in a transfer: a region, a part of one, or any contiguous buffer on the host or
#: on a GPU (the buffer protocol, ``__array_interface__``, ``__cuda_array_interface__``, ``__dlpack__``, torch's
#: ``data_ptr()``), which is registered for that transfer and kept alive by it.
Local: TypeAlias = Region | LocalSlice | BlockList | Buffer | Any
#: What can stand for the peer's memory: an imported region, a part of one, or a 64-byte descriptor.
Remote: TypeAlias = RemoteRegion | RemoteSlice | BlockList | bytes
#: Where arrivals come from or are forwarded to.
Place: TypeAlias = Region | LocalSlice | tuple[Region, int, int]
#: Blocks or threads, in up to three directions.
Extent: TypeAlias = int | Sequence[int]

__version__: str

class Endpoint:
    """One end of transfers: it listens, connects, and owns registered memory.

    What is not given comes from the environment (``peerway doctor --config`` lists the variables).
    """

    def __init__(
        self,
        *,
        bind: str | None = None,
        advertise: str | None = None,
        transport: str | None = None,
        deadline: float | None = None,
        detect: float | None = None,
        fence: float | None = None,
        connect_timeout: float | None = None,
        spin: float | None = None,
        lanes: int | None = None,
        shards: int | None = None,
        copy_threads: int | None = None,
        slots: int | None = None,
        notify_bytes: int | None = None,
    ) -> None: ...
    @property
    def metadata(self) -> bytes:
        """What others need to connect: hand it over by any means."""
    @property
    def incarnation(self) -> str:
        """The name of this life of the endpoint."""
    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where peers can connect, best first."""
    @property
    def closed(self) -> bool:
        """Whether it has been closed, or belongs to the parent process."""
    @property
    def stats(self) -> dict[str, Any]:
        """How the endpoint runs: ``cpus``, the processors that its threads may run on, and ``quarantine``, as
        ``peerway.quarantine()`` tells it."""
    def connect(self, to: bytes | str | tuple[str, int], timeout: float | None = None) -> Peer:
        """Connects to an endpoint's metadata, or to whoever listens at ``"host:port"`` or ``(host, port)``.

        A second connect to the same incarnation returns the same peer.
        """
    def accept(self, timeout: float | None = None) -> Peer:
        """The next peer that connected to us. Raises ``AcceptTimeout``."""
    def peers(self) -> list[Peer]:
        """Every live peer."""
    def register(self, buffer: Any) -> Region:
        """Registers writable, contiguous memory; the region keeps the object alive."""
    def register_address(self, address: int, nbytes: int, owner: object = None) -> Region:
        """Registers memory by address. ``owner`` is kept alive; without one, keeping the memory valid until
        the region and all its transfers are gone is the caller's promise."""
    def allocate(self, nbytes: int, *, gpu: int | None = None) -> Region:
        """Zeroed memory that local peers can map, on the host or on a GPU; the region offers it by the buffer
        protocol or by ``__cuda_array_interface__``."""
    def notification(self, timeout: float | None = 0.0) -> Notification | None:
        """The oldest notification, waiting for one for so long (``None``: for ever)."""
    def counter(self, id: int) -> int:
        """Arrivals counted under this id."""
    def wait_counter(self, id: int, n: int, timeout: float | None = None) -> int:
        """Waits for at least ``n`` arrivals; returns how many there are. Raises ``CounterTimeout``."""
    def reset_counter(self, id: int) -> int:
        """Forgets a counter and returns what it had."""
    def close(self) -> None:
        """Ends transfers, threads and sockets."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

class Region:
    """Registered local memory. Its advertisements end with the object."""

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
    @property
    def nbytes(self) -> int:
        """Bytes in the region."""
    @property
    def writable(self) -> bool:
        """Whether bytes may be put into it: False for memory that was registered by address and is read-only."""
    @property
    def shareable(self) -> bool:
        """Whether local peers can map it."""
    @property
    def gpu(self) -> int | None:
        """The number of the GPU whose memory it is; None for host memory."""
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, bytes: slice) -> LocalSlice: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def blocks(
        self, indices: Sequence[int] | Buffer, nbytes: int, *, stride: int | None = None, base: int = 0
    ) -> BlockList:
        """Blocks of ``nbytes`` bytes; block ``i`` starts at ``base + indices[i] * stride``."""
    def advertise(
        self, access: Access = "rw", *, start: int = 0, stop: int | None = None, to: Peer | None = None
    ) -> bytes:
        """The 64-byte descriptor that lets a peer (or only ``to``) reach these bytes."""
    def revoke(self) -> bool:
        """Ends every advertisement. True: no peer touches the memory any more (the fence is held).

        False: a peer may still be inside. The memory stays alive until that peer leaves or dies, even
        when the region and its endpoint are gone (see ``quarantine``); another call asks again.
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
        """Bytes that the descriptor names."""
    @property
    def access(self) -> Access:
        """What the owner allows."""
    @property
    def direct_path(self) -> str | None:
        """The path by which this process reaches it alone; None when it goes over lanes."""
    def __len__(self) -> int: ...
    def __getitem__(self, bytes: slice) -> RemoteSlice: ...
    def blocks(
        self, indices: Sequence[int] | Buffer, nbytes: int, *, stride: int | None = None, base: int = 0
    ) -> BlockList:
        """Blocks of ``nbytes`` bytes; block ``i`` starts at ``base + indices[i] * stride``."""

class RemoteSlice:
    """A part of a peer's memory."""

    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Bytes in the slice."""

class BlockList:
    """Equal blocks of a region or a remote region: paged KV cache."""

    def __init__(
        self,
        region: Region | RemoteRegion,
        indices: Sequence[int] | Buffer,
        nbytes: int,
        *,
        stride: int | None = None,
        base: int = 0,
    ) -> None: ...
    @property
    def nbytes(self) -> int:
        """Bytes of all blocks together."""
    def __len__(self) -> int:
        """How many blocks."""

class Peer:
    """One remote endpoint incarnation. A restarted peer is another peer."""

    def remote(self, descriptor: bytes) -> RemoteRegion:
        """Turns a descriptor that the peer advertised into memory that can be read and written."""
    def write(
        self,
        local: Local | Sequence[Local],
        remote: Remote | Sequence[Remote],
        *,
        notify: bytes | None = None,
        count: int | None = None,
        deadline: float | None = None,
        kind: Kind = "auto",
    ) -> None:
        """Writes local bytes into the peer's memory and waits until they are there.

        Sequences of equal length are one transfer of many pieces. ``notify`` is a message and ``count`` a
        counter of the peer's, both seen after the bytes, once.
        """
    def read(
        self,
        local: Local | Sequence[Local],
        remote: Remote | Sequence[Remote],
        *,
        notify: bytes | None = None,
        count: int | None = None,
        deadline: float | None = None,
        kind: Kind = "auto",
    ) -> None:
        """Reads the peer's memory into local memory and waits."""
    def post_write(
        self,
        local: Local | Sequence[Local],
        remote: Remote | Sequence[Remote],
        *,
        notify: bytes | None = None,
        count: int | None = None,
        deadline: float | None = None,
        kind: Kind = "auto",
    ) -> Transfer:
        """As ``write``, returning at once."""
    def post_read(
        self,
        local: Local | Sequence[Local],
        remote: Remote | Sequence[Remote],
        *,
        notify: bytes | None = None,
        count: int | None = None,
        deadline: float | None = None,
        kind: Kind = "auto",
    ) -> Transfer:
        """As ``read``, returning at once."""
    def prepare_write(
        self,
        local: Local | Sequence[Local],
        remote: Remote | Sequence[Remote],
        *,
        notify: bytes | None = None,
        count: int | None = None,
        deadline: float | None = None,
        kind: Kind = "auto",
    ) -> Prepared:
        """Checks a write once, to be posted many times, from any thread."""
    def prepare_read(
        self,
        local: Local | Sequence[Local],
        remote: Remote | Sequence[Remote],
        *,
        notify: bytes | None = None,
        count: int | None = None,
        deadline: float | None = None,
        kind: Kind = "auto",
    ) -> Prepared:
        """Checks a read once, to be posted many times, from any thread."""
    def stage(self, stages: Sequence[Prepared]) -> Staged:
        """Parts that go when they are released: layer-wise streaming."""
    def post_addresses(
        self,
        op: Literal["read", "write"],
        regions: Sequence[Region],
        addresses: Sequence[int],
        sizes: Sequence[int],
        descriptors: Sequence[bytes],
    ) -> Transfer:
        """One transfer of pieces given by local address; each lies in its region, and each descriptor says
        where the piece's remote side starts. All five have one length."""
    def notify(self, message: bytes) -> Transfer:
        """Sends a message to the peer's notification queue."""
    def count(self, id: int) -> Transfer:
        """Adds one to a counter of the peer's."""
    def notification(self, timeout: float | None = 0.0) -> Notification | None:
        """The oldest notification from this peer."""
    @property
    def path(self) -> str:
        """The best path both sides can speak."""
    @property
    def why(self) -> str:
        """Why this path and not a better one."""
    @property
    def trusted(self) -> bool:
        """Whether the path binds honest peers only."""
    @property
    def address(self) -> tuple[str, int]:
        """The address the session was made with."""
    @property
    def incarnation(self) -> str:
        """The name of this life of the peer."""
    @property
    def initiator(self) -> bool:
        """Whether we opened the session."""
    @property
    def alive(self) -> bool:
        """Whether transfers can be posted."""
    @property
    def stats(self) -> dict[str, int]:
        """Transfers posted, bytes that lanes moved each way, and lanes that broke."""
    def remove(self) -> None:
        """Closes the session; its transfers end."""
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class Transfer:
    """A posted transfer. Dropping it lets it go on. Awaitable."""

    def done(self) -> bool:
        """Whether it has ended, however."""
    def wait(self, timeout: float | None = None) -> None:
        """Waits for the end; raises what it ended with, or ``WaitTimeout`` when it has not ended in time."""
    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits as ``wait`` does and returns what that would raise."""
    def cancel(self) -> None:
        """Asks it to stop; it ends within the fence deadline."""
    def cancelled(self) -> bool:
        """Whether it ended because it was cancelled."""
    @property
    def fenced(self) -> bool | None:
        """True: no byte of it changes memory any more. False: that is not sure. None: it has not ended."""
    @property
    def path(self) -> str:
        """The path it took."""
    @property
    def stats(self) -> dict[str, int | float | None]:
        """``bytes_done``, ``bytes_total``, ``until_sent``, ``until_ended``."""
    def __await__(self) -> Generator[Any]: ...

class Prepared:
    """A checked transfer, to be posted many times, from any thread."""

    @property
    def nbytes(self) -> int:
        """Bytes in the transfer."""
    def post(self) -> Transfer:
        """Posts it."""
    def run(self) -> None:
        """Posts it and waits."""
    def enqueue(self, stream: Any) -> Enqueued:
        """Puts it into a CUDA stream, or into the graph that the stream is captured into."""

class Enqueued:
    """A transfer in a CUDA stream, or in a graph."""

    @property
    def runs(self) -> int:
        """How often it has come to its end."""
    def wait(self, timeout: float | None = None) -> None:
        """Waits for its end, or for how it ended the last time; raises what that was, or ``WaitTimeout``."""
    def release(self) -> None:
        """Lets go of what was kept for a graph that it was captured into, which must be gone."""

class Staged:
    """Parts of one transfer that the caller releases one by one."""

    def __len__(self) -> int: ...
    def release(self, stage: int, *, stream: Any = None, event: Any = None) -> None:
        """Lets a stage go: now, when a CUDA stream has come so far, or when a CUDA event has happened."""
    def done(self, stage: int) -> bool:
        """Whether a stage was released and has ended."""
    def cancel(self) -> None:
        """Stops every stage that was released; those that were not never go."""
    def wait(self, timeout: float | None = None) -> None:
        """Waits for every released stage; raises what the first that failed ended with, or ``WaitTimeout``."""

class Notification:
    """A message from a peer."""

    @property
    def sender(self) -> str:
        """The sender's incarnation."""
    @property
    def message(self) -> bytes:
        """What it says."""

class Memory:
    """Zeroed memory that local peers can map, offered by the buffer protocol."""

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
    """What is known of a GPU."""

    @property
    def index(self) -> int:
        """Its number in this process."""
    @property
    def name(self) -> str:
        """What its maker calls it."""
    @property
    def uuid(self) -> str:
        """Its name in every process and on every host, as ``nvidia-smi -L`` shows it."""
    @property
    def bus_id(self) -> str:
        """Its PCI address on this host, such as ``0000:4a:00.0``."""
    @property
    def memory(self) -> int:
        """Bytes of memory."""
    @property
    def capability(self) -> tuple[int, int]:
        """Its compute capability, such as ``(9, 0)``."""

class GpuMemory:
    """Zeroed memory of a GPU that local peers can map, offered by ``__cuda_array_interface__`` and DLPack."""

    def __init__(self, nbytes: int, gpu: int) -> None: ...
    @property
    def address(self) -> int:
        """Address of the first byte, which only GPUs can use."""
    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
    @property
    def gpu(self) -> int:
        """The GPU's number in this process."""
    @property
    def kind(self) -> str:
        """How it was allocated, and so how far it can be handed: ``fabric``, ``posix-fd`` or ``plain``."""
    @property
    def why_not_better(self) -> str | None:
        """Why not a better way, in the driver's words; None where it is the best."""
    def dlpack(self, shape: Sequence[int], code: int, bits: int) -> Any:
        """The memory as a tensor: its kind is DLPack's code and bits."""
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __dlpack__(self, **_options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __len__(self) -> int: ...

def quarantine() -> dict[str, int]:
    """Memory of this process that was released while a peer may still reach it.

    ``regions`` and ``bytes`` are in quarantine now, over all endpoints and those that are gone; their
    objects stay alive until the peer leaves them or dies. ``entries_ever`` counts since the start.
    """

def gpus() -> list[Gpu]:
    """The GPUs that the process sees, by number. Binds the process to the driver. Raises ``NoCuda``."""

def gpu_in_use() -> bool:
    """Whether something in the process uses a GPU. Initialises nothing."""

def open_gpu(gpu: int) -> None:
    """Takes a GPU into use, so that GPU memory of peers on this host is mapped for it."""

def gpu_buffer_at(address: int) -> int | None:
    """The driver's name for the GPU allocation at an address, never given to another; None for all else."""

class Proxy:
    """Rings that kernels push commands into, and threads that carry them out.

    ``gpu`` is the GPU whose kernels push: a number or a ``torch.device``. Without one, processors do, by a
    ``HostProducer``. ``copier`` is how GPUs copy what they reach: ``launched``, ``resident`` (sooner, and takes two
    multiprocessors for each thread) or ``engines``. Close it, or leave its ``with`` block, when every kernel that
    was given it has ended.
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
        timeout: float = 10.0,
        copier: str = "launched",
    ) -> None: ...
    @property
    def handle(self) -> int:
        """What a kernel is given: the address of a ``peerway_proxy`` (``peerway_device.cuh``)."""
    @property
    def gpu(self) -> int | None:
        """The GPU whose kernels push; None where processors do."""
    @property
    def rings(self) -> int:
        """Rings that there are."""
    @property
    def closed(self) -> bool:
        """Whether it was closed."""
    def window(self, memory: Any) -> Window:
        """Makes memory a window: commands name it by offset, and so do those of peers that get a later ``peer_info``.

        A region, or an object with memory, which is registered and kept.
        """
    def peer_info(self) -> bytes:
        """What a peer's proxy needs to send to this one: the windows that there are now, and the counters."""
    def card(self) -> bytes:
        """The former name of ``peer_info``."""
    def add_peer(self, number: int, peer: Peer, info: bytes) -> list[Window]:
        """Sends commands for ``number`` to this peer; ``info`` is its proxy's ``peer_info()``. Returns the peer's windows."""
    def arm(self) -> Armed:
        """Has the threads look for commands, until the answer's ``disarm()``."""
    def armed(self) -> Armed:
        """For a ``with`` statement: the threads look for commands inside it, and sleep outside."""
    def counter(self, counter: int) -> int:
        """Where a counter of ours is."""
    def wait_counter(self, counter: int, value: int, timeout: float | None = None) -> int:
        """Waits until a counter of ours has come to a value; returns where it is. Raises ``CounterTimeout``."""
    def forward(
        self,
        counter: int,
        source: Place,
        to: Sequence[Place] = (),
        count: Sequence[int] = (),
        answer: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Whenever ``counter`` rises, the bytes of ``source`` have arrived: they are copied to each of ``to``, then
        counters of ours (``count``) and of peers (``answer``: pairs of peer and counter) go up. While it is armed.

        Places are regions, parts of regions, or ``(region, offset, nbytes)``.
        """
    def stop_forwarding(self, counter: int) -> bool:
        """Takes the rule of a counter away; False where it had none."""
    def take_fault(self) -> Fault | None:
        """The first command that failed since the last time this was asked. This starts a new fault epoch: a
        later ``quiet`` reports only commands that fail after this call.
        """
    @property
    def stats(self) -> dict[str, int]:
        """``commands``, ``puts``, ``bytes``, ``counts``, ``requests`` (submissions that carried puts; also as ``flights``, its former name), ``faults``."""
    def host_producer(self, ring: int = 0) -> HostProducer:
        """A processor in a kernel's place, on one of the rings."""
    def pusher(self, ring: int = 0) -> HostProducer:
        """The former name of ``host_producer``."""
    def close(self) -> None:
        """Ends its threads and gives its memory back. Kernels that have its handle must have ended."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

class Window:
    """Memory that commands name: ``base`` is what is added to an offset in it."""

    @property
    def base(self) -> int:
        """The offset of its first byte."""
    @property
    def nbytes(self) -> int:
        """Bytes in it."""
    def __len__(self) -> int: ...

class Armed:
    """Has a proxy's threads look for commands: from before kernels are launched until after they have ended."""

    @property
    def active(self) -> bool:
        """Whether it holds the proxy armed."""
    def disarm(self) -> None:
        """Lets the threads sleep, unless another holds the proxy armed."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

class Fault:
    """A command of a kernel's that failed."""

    @property
    def code(self) -> int:
        """Why, as one of the numbers ``PEERWAY_FAULT_*``."""
    @property
    def reason(self) -> str:
        """Why, in a word: ``operation``, ``peer``, ``source``, ``destination`` or ``counter`` names what there is none
        of; ``peer-gone``, ``refused``, ``timed-out`` and ``failed`` say what became of the transfer.
        """
    @property
    def peer(self) -> int:
        """Whom it was for, by number."""
    @property
    def ring(self) -> int:
        """The ring it came from."""
    @property
    def op(self) -> int:
        """Its operation, as one of the numbers ``PEERWAY_OP_*``."""
    @property
    def position(self) -> int:
        """Its position in the ring; of commands that went together, the first one's."""

class HostProducer:
    """Pushes commands into one ring, from any thread: the calls of ``peerway_device.cuh``.

    Offsets are those of windows (``window.base`` and more) and, as lengths, multiples of four bytes.
    """

    @property
    def ring(self) -> int:
        """Its ring."""
    def put(self, peer: int, dst: int, src: int, nbytes: int) -> None:
        """Bytes of ours into the peer's memory."""
    def put_with_count(self, peer: int, dst: int, src: int, nbytes: int, counter: int) -> None:
        """The same, and a counter of the peer goes up by one after them."""
    def signal(self, peer: int, counter: int) -> None:
        """A counter of the peer goes up by one. It waits for no earlier put: ``quiet`` first where that matters."""
    def quiet(self, peer: int, timeout: float | None = None) -> None:
        """Waits until everything pushed here before for the peer is in its memory. Raises ``CommandFailed`` where
        something failed (``Proxy.take_fault`` says what), ``CommandTimeout`` after ``timeout`` or the proxy's own.
        """
    def wait_counter(self, counter: int, value: int, peer: int | None = None, timeout: float | None = None) -> None:
        """Waits until a counter of ours has come to a value; with ``peer``, its failure ends the wait
        (``CommandFailed``). Raises ``CounterTimeout`` after ``timeout`` or the proxy's own.
        """

class Module:
    """A compiled program on a GPU. Hold it, or one of its kernels, until every launch has ended and every graph
    that has one is gone.
    """

    def kernel(self, name: str) -> Kernel:
        """The kernel of that name, ready to be launched. One declared ``extern "C"`` has the name that is written."""
    @property
    def gpu(self) -> int:
        """The GPU it is on."""
    @property
    def architecture(self) -> str:
        """What it was compiled for, such as ``sm_90``."""
    @property
    def compiler(self) -> str:
        """Which compiler made it."""
    @property
    def cached(self) -> bool:
        """Whether it was found on disk (``PEERWAY_KERNEL_CACHE``), compiled earlier."""

class Kernel:
    """A kernel of a compiled program: call it to launch it."""

    @property
    def name(self) -> str:
        """Its name."""
    @property
    def gpu(self) -> int:
        """The GPU it is on."""
    @property
    def parameters(self) -> list[int] | None:
        """Bytes of each parameter; None where the driver does not tell (before CUDA 12.4)."""
    @property
    def handle(self) -> int:
        """The driver's handle, a ``CUfunction``, for others who launch it."""
    def __call__(self, grid: Extent, block: Extent, *args: Any, stream: Any = None, shared: int = 0) -> None: ...

def device_headers() -> dict[str, str]:
    """The headers for kernels that issue transfers, by the names they are included by."""

def compile_kernels(
    source: str,
    name: str,
    headers: Sequence[tuple[str, str]],
    options: Sequence[str],
    gpu: Any,
    compiler: PathLike[str] | str | None,
) -> Module:
    """Compiles a program for a GPU and loads it there. ``compiler`` is where a libnvrtc is, for want of one that is
    named in PEERWAY_NVRTC_SO.
    """

def synchronize(stream: Any = None, gpu: Any = 0) -> None:
    """Waits until a stream of a GPU has done everything that is in it: torch's current one, unless another is given."""

class Wakeups:
    """Ends of transfers for one event loop: a descriptor that turns readable, and which ones ended."""

    def __init__(self) -> None: ...
    def fileno(self) -> int:
        """The descriptor."""
    def watch(self, transfer: Transfer, token: int) -> bool:
        """Has ``token`` reported when the transfer ends; False when it has ended already."""
    def take(self) -> list[int]:
        """Tokens reported since the last call."""
    def close(self) -> None:
        """Closes the descriptor; nothing is reported any more."""
