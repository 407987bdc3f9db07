"""``Endpoint``: the calls of ``uccl.p2p``, implemented with the engine.

An invalid argument raises ``TypeError``, ``ValueError`` or ``RuntimeError`` with the argument's
name. A failure of the transfer, the peer or the memory returns ``False``, and
:meth:`Endpoint.last_error` returns the reason. No call aborts the process, and Ctrl-C in a call
that waits raises ``KeyboardInterrupt``.
"""

from typing import Any

import peerway

from . import broker, ipc, metadata
from .arguments import (
    NONE_ID,
    also,
    blob,
    blobs,
    integer,
    items,
    same_length,
    seconds,
    text,
    u64,
    u64s,
)
from .core import Core, Op, Refused
from .descriptors import XferDesc, descs, deserialize, serialize
from .engine import ENGINE_ERRORS, run
from .floats import FloatType
from .ipc import DESCRIPTOR_SIZE, IPC_INFO_SIZE, IpcInfo
from .log import logger, reason
from .notices import EITHER, LOCAL, NETWORK, pack_note
from .parts import in_parts


class Endpoint(Core):
    """Drop-in for ``uccl.p2p.Endpoint``.

    The index identifies the endpoint on its host. ``PEERWAY_GPU_MAP`` can map it to a GPU (see
    :mod:`peerway.uccl.gpus`). The metadata contains the GPU's PCI address. ``Endpoint(gpu)`` and
    ``Endpoint()`` (GPU 0) need no GPU; without one, they use a substitute address. Every call that
    accepts host memory also accepts memory of any GPU. Before a transfer that reads GPU memory, the
    caller waits for its own queued work there.

    Both sides can use a connection for transfers. Connections count from 0, registrations and
    transfers from 1. No number is reused.
    """

    # Connections

    def start_passive_accept(self) -> bool:
        """Lets peers connect without calls of :meth:`accept`. Returns True.

        The engine always accepts peers, so this starts no thread. It only stops reporting them.
        """
        self._reception.be_passive()
        return True

    @also(remote_gpu_idx="remote_gpu_bdf")
    def connect(
        self, remote_ip_addr: str, remote_gpu_bdf: str | int | None = None, remote_port: int = -1
    ) -> tuple[bool, int]:
        """Connects to ``remote_ip_addr:remote_port``; ``(success, conn_id)``.

        Without a port, it asks the broker on the host for the endpoint of this GPU (an index, or an
        address as in the metadata) and waits for it to appear: see :mod:`peerway.uccl.broker`. With
        a port, the GPU has no effect.
        """
        host = text(remote_ip_addr, "remote_ip_addr")
        gpu = remote_gpu_bdf
        if gpu is not None and not isinstance(gpu, str):
            gpu = integer(gpu, "remote_gpu_idx", 0, metadata.MAX_GPUS - 1)
        port = integer(remote_port, "remote_port", -1, 65535)
        if port == 0:
            raise ValueError("remote_port must be a port, or -1 to find the endpoint by its GPU, not 0")
        try:
            address = (host, port) if port > 0 else self._find(host, gpu)
            return True, self._open(address, NETWORK).id
        except Refused as error:
            return self._no(error), NONE_ID

    def accept(self, timeout: float | None = None) -> tuple[bool, str, int, int]:
        """Waits for a peer to connect; ``(success, its address, its GPU index, conn_id)``.

        The index is -1 for a peer that did not send it. The call fails after ``timeout`` seconds,
        when the endpoint is closed, and after :meth:`start_passive_accept`.
        """
        try:
            arrival = self._arrival(NETWORK, seconds(timeout, "timeout"))
        except Refused as error:
            return self._no(error), "", -1, NONE_ID
        return True, arrival.peer.address[0], arrival.gpu, self._connections.accept(arrival.peer).id

    def add_remote_endpoint(self, metadata_bytes: bytes) -> tuple[bool, int]:
        """Connects to the endpoint with this metadata; ``(success, conn_id)``.

        The same metadata returns the same number while the peer is alive and the number is not
        removed.
        """
        given = blob(metadata_bytes, "metadata_bytes")
        ip, port, _gpu = metadata.parse(given)
        known = self._connections.known(given)
        if known is not None:
            return True, known.id
        try:
            # If the peer is on this host, it may wait in accept() or in accept_local().
            way = EITHER if ip in self._ips() else NETWORK
            return True, self._open((ip, port), way, given).id
        except Refused as error:
            return self._no(error), NONE_ID

    def remove_remote_endpoint(self, conn_id: int) -> bool:
        """Removes a connection; False if it does not exist. Its pending transfers may fail.

        This also closes the session, unless the peer has connected to this endpoint, too.
        """
        if self._connections.remove(u64(conn_id, "conn_id")):
            return True
        return self._no(f"connection {conn_id} does not exist")

    def get_metadata(self) -> bytes:
        """The bytes that a peer needs to connect: address, port, and the GPU's address.

        They are 19 bytes long (31 for IPv6).
        """
        ip, port = self._native.addresses[0]
        return metadata.pack(ip, port, self._bdf)

    @staticmethod
    def parse_metadata(metadata: bytes) -> tuple[str, int, str]:
        """``(ip, port, gpu_bdf)`` of an endpoint's metadata.

        Raises ``RuntimeError`` for anything else.
        """
        return _parse_metadata(blob(metadata, "metadata"))

    @also(remote_gpu_idx="remote_gpu_bdf")
    def connect_local(self, remote_gpu_bdf: str | int) -> tuple[bool, int]:
        """Connects to the newest other endpoint of a GPU on this host; ``(success, conn_id)``."""
        gpu = remote_gpu_bdf
        if not isinstance(gpu, str):
            gpu = integer(gpu, "remote_gpu_bdf", 0, metadata.MAX_GPUS - 1)
        try:
            return True, self._open(self._find("127.0.0.1", gpu), LOCAL).id
        except Refused as error:
            return self._no(error), NONE_ID

    def accept_local(self, timeout: float | None = None) -> tuple[bool, str, int]:
        """Waits for a peer that used :meth:`connect_local`; ``(success, its gpu_bdf, conn_id)``."""
        try:
            arrival = self._arrival(LOCAL, seconds(timeout, "timeout"))
        except Refused as error:
            return self._no(error), "", NONE_ID
        return True, arrival.bdf, self._connections.accept(arrival.peer).id

    def conn_id_of_rank(self, rank: int) -> int:
        """Returns 2**64 - 1, because connections have no rank."""
        integer(rank, "rank", -(2**31), 2**31 - 1)
        return NONE_ID

    # Memory

    def reg(self, ptr: int, size: int, floatType: FloatType = FloatType.kUndefined) -> tuple[bool, int]:
        """Registers memory of the host or of a GPU; ``(success, mr_id)``.

        The caller keeps the memory alive until :meth:`dereg`.
        """
        float_type = _float_type(floatType)
        try:
            return True, self._register(u64(ptr, "ptr"), u64(size, "size"), float_type).id
        except Refused as error:
            return self._no(error), 0

    def regv(self, ptrs: list[int], sizes: list[int]) -> tuple[bool, list[int]]:
        """Registers several ranges: all of them or none."""
        starts, lengths = u64s(ptrs, "ptrs"), u64s(sizes, "sizes")
        same_length(len(starts), "the number of ptrs", sizes=lengths)
        made: list[int] = []
        for start, length in zip(starts, lengths, strict=True):
            try:
                made.append(self._register(start, length, FloatType.kUndefined).id)
            except Refused as error:
                for mr_id in made:
                    self._registrations.remove(mr_id)
                return self._no(error), []
        return True, made

    def reg_compress_only(self, ptr: int, size: int, floatType: FloatType = FloatType.kUndefined) -> tuple[bool, int]:
        """As :meth:`reg`, because this build does not compress."""
        logger.warning("reg_compress_only() works like reg(), because this build does not compress")
        return self.reg(ptr, size, floatType)

    def dereg(self, mr_id: int) -> bool:
        """Ends a registration and its advertisements; False if it does not exist."""
        if self._registrations.remove(u64(mr_id, "mr_id")):
            return True
        return self._no(f"registration {mr_id} does not exist")

    def register_memory(self, tensor_list: list[Any]) -> list[XferDesc]:
        """Registers tensors and keeps them alive until :meth:`deregister_memory`."""
        found = [_tensor(tensor, f"tensor_list[{at}]") for at, tensor in enumerate(items(tensor_list, "tensor_list"))]
        made: list[XferDesc] = []
        try:
            for at, (tensor, addr, size) in enumerate(found):
                try:
                    registration = self._register(addr, size, FloatType.kFloat32, tensor)
                    offer = self._info(registration, addr, size)
                except Refused as error:
                    raise RuntimeError(f"tensor_list[{at}] cannot be registered: {error}") from error
                keys = registration.keys
                made.append(XferDesc.of(addr, size, registration.id, keys.lkeys, keys.rkeys, offer.to_bytes()))
        except BaseException:
            self.deregister_memory(made)
            raise
        return made

    def deregister_memory(self, desc_list: list[XferDesc]) -> None:
        """Ends the registrations of descriptors from :meth:`register_memory`. It ignores others."""
        for desc in descs(desc_list, "desc_list"):
            if desc.mr_id != NONE_ID:
                self.dereg(desc.mr_id)

    def get_serialized_descs(self, desc_list: list[XferDesc]) -> bytes:
        """The serialized descriptors, for a peer."""
        return serialize(descs(desc_list, "desc_list"))

    def deserialize_descs(self, serialized_bytes: bytes) -> list[XferDesc]:
        """A peer's descriptors, with 2**64 - 1 as ``mr_id``.

        Raises ``RuntimeError`` for invalid bytes.
        """
        return deserialize(blob(serialized_bytes, "serialized_bytes"))

    @also(addr="ptr", len="size")
    def advertise(self, mr_id: int, ptr: int, size: int) -> tuple[bool, bytes]:
        """Makes a descriptor that lets a peer read and write these bytes of a registration.

        Returns ``(success, 64 bytes)``.
        """
        try:
            return True, self._advertise(self._registered(u64(mr_id, "mr_id")), u64(ptr, "ptr"), u64(size, "size"))
        except Refused as error:
            return self._no(error), b""

    @also(mr_id_list="mr_id_v", addr_list="ptr_v", len_list="size_v")
    def advertisev(
        self, mr_id_v: list[int], ptr_v: list[int], size_v: list[int], num_iovs: int
    ) -> tuple[bool, list[bytes]]:
        """As :meth:`advertise`, for several ranges.

        On failure, the list has the same length and every blob is all zeros.
        """
        ids, starts, sizes = u64s(mr_id_v, "mr_id_v"), u64s(ptr_v, "ptr_v"), u64s(size_v, "size_v")
        same_length(u64(num_iovs, "num_iovs"), "num_iovs", mr_id_v=ids, ptr_v=starts, size_v=sizes)
        try:
            pieces = zip(ids, starts, sizes, strict=True)
            return True, [self._advertise(self._registered(id), start, size) for id, start, size in pieces]
        except Refused as error:
            return self._no(error), [bytes(DESCRIPTOR_SIZE)] * len(ids)

    # Transfers

    @also(dst="ptr", slot_item="meta")
    def read(self, conn_id: int, mr_id: int, ptr: int, size: int, meta: bytes) -> bool:
        """Reads ``size`` bytes to ``ptr`` and waits.

        ``meta`` comes from the peer's :meth:`advertise`.
        """
        return self._run("read", conn_id, [mr_id], [ptr], [size], [blob(meta, "meta", DESCRIPTOR_SIZE)])

    @also(src="ptr", slot_item="meta")
    def write(self, conn_id: int, mr_id: int, ptr: int, size: int, meta: bytes) -> bool:
        """Writes ``size`` bytes from ``ptr`` and waits until they are in the peer's memory.

        ``meta`` comes from the peer's :meth:`advertise`.
        """
        return self._run("write", conn_id, [mr_id], [ptr], [size], [blob(meta, "meta", DESCRIPTOR_SIZE)])

    @also(dst="ptr", slot_item="meta")
    def read_async(self, conn_id: int, mr_id: int, ptr: int, size: int, meta: bytes) -> tuple[bool, int]:
        """As :meth:`read`, but returns ``(success, transfer_id)`` at once."""
        return self._start("read", conn_id, [mr_id], [ptr], [size], [blob(meta, "meta", DESCRIPTOR_SIZE)])

    @also(src="ptr", slot_item="meta")
    def write_async(self, conn_id: int, mr_id: int, ptr: int, size: int, meta: bytes) -> tuple[bool, int]:
        """As :meth:`write`, but returns ``(success, transfer_id)`` at once."""
        return self._start("write", conn_id, [mr_id], [ptr], [size], [blob(meta, "meta", DESCRIPTOR_SIZE)])

    @also(mr_id_list="mr_id_v", dst_list="ptr_v", size_list="size_v", slot_item_list="meta_blob_v")
    def readv(
        self,
        conn_id: int,
        mr_id_v: list[int],
        ptr_v: list[int],
        size_v: list[int],
        meta_blob_v: list[bytes],
        num_iovs: int,
    ) -> bool:
        """Reads several pieces as one transfer and waits."""
        return self._run("read", conn_id, *_vectors(mr_id_v, ptr_v, size_v, meta_blob_v, num_iovs))

    @also(mr_id_list="mr_id_v", src_list="ptr_v", size_list="size_v", slot_item_list="meta_blob_v")
    def writev(
        self,
        conn_id: int,
        mr_id_v: list[int],
        ptr_v: list[int],
        size_v: list[int],
        meta_blob_v: list[bytes],
        num_iovs: int,
    ) -> bool:
        """Writes several pieces as one transfer and waits."""
        return self._run("write", conn_id, *_vectors(mr_id_v, ptr_v, size_v, meta_blob_v, num_iovs))

    @also(mr_id_list="mr_id_v", dst_list="ptr_v", size_list="size_v", slot_item_list="meta_blob_v")
    def readv_async(
        self,
        conn_id: int,
        mr_id_v: list[int],
        ptr_v: list[int],
        size_v: list[int],
        meta_blob_v: list[bytes],
        num_iovs: int,
    ) -> tuple[bool, int]:
        """As :meth:`readv`, but returns ``(success, transfer_id)`` at once."""
        return self._start("read", conn_id, *_vectors(mr_id_v, ptr_v, size_v, meta_blob_v, num_iovs))

    @also(mr_id_list="mr_id_v", src_list="ptr_v", size_list="size_v", slot_item_list="meta_blob_v")
    def writev_async(
        self,
        conn_id: int,
        mr_id_v: list[int],
        ptr_v: list[int],
        size_v: list[int],
        meta_blob_v: list[bytes],
        num_iovs: int,
    ) -> tuple[bool, int]:
        """As :meth:`writev`, but returns ``(success, transfer_id)`` at once."""
        return self._start("write", conn_id, *_vectors(mr_id_v, ptr_v, size_v, meta_blob_v, num_iovs))

    def transfer(
        self, conn_id: int, op_name: str, local_desc_list: list[XferDesc], remote_desc_list: list[XferDesc]
    ) -> tuple[bool, int]:
        """Starts to ``"read"`` or ``"write"`` pieces; ``(success, transfer_id)``.

        Descriptors name the pieces. Each piece is as long as its local descriptor. Raises
        ``RuntimeError`` for a connection that does not exist, another operation, lists of different
        lengths, and descriptors without a registration.
        """
        op = _op(text(op_name, "op_name"))
        ours, theirs = descs(local_desc_list, "local_desc_list"), descs(remote_desc_list, "remote_desc_list")
        same_length(len(ours), "the number of local descriptors", remote_desc_list=theirs)
        if self._connections.get(u64(conn_id, "conn_id")) is None:
            raise RuntimeError(f"Invalid conn_id: {conn_id}")
        metas = [_remote(at, local, remote) for at, (local, remote) in enumerate(zip(ours, theirs, strict=True))]
        if self._unopened is not None:
            self._reach([IpcInfo.from_bytes(remote._ipc_info) for remote in theirs])
        return self._start(op, conn_id, [d.mr_id for d in ours], [d.addr for d in ours], [d.size for d in ours], metas)

    def poll_async(self, transfer_id: int) -> tuple[bool, bool]:
        """Polls a transfer; ``(success, is_done)``.

        The result is ``(True, False)`` while the transfer is pending, ``(True, True)`` after
        success, and ``(False, True)`` after a failure. The end of a transfer is reported once.
        After that, and for an unknown number, the result is ``(False, True)``. The endpoint keeps a
        transfer until its end has been reported, so a transfer that is never polled stays until the
        endpoint closes.
        """
        success, done, why = self._transfers.poll(u64(transfer_id, "transfer_id"))
        if not success:
            self._no(why)
        return success, done

    def check_xfer_state(self, transfer_id: int) -> bool:
        """Whether a transfer has ended: ``is_done`` of :meth:`poll_async`."""
        return self.poll_async(transfer_id)[1]

    # Memory of processes on this host

    def advertise_ipc(self, conn_id: int, ptr: int, size: int) -> tuple[bool, bytes]:
        """Offers these bytes to a process on this host; ``(success, 104 bytes)``.

        The memory does not need to be registered. The offer stays valid until the endpoint is
        closed. ``conn_id`` has no effect.
        """
        u64(conn_id, "conn_id")
        try:
            return True, self._offer(u64(ptr, "ptr"), u64(size, "size"))
        except Refused as error:
            return self._no(error), b""

    def advertisev_ipc(self, conn_id: int, ptr_v: list[int], size_v: list[int]) -> tuple[bool, list[bytes]]:
        """As :meth:`advertise_ipc`, for several ranges.

        On failure, the list has the same length and every blob is all zeros.
        """
        u64(conn_id, "conn_id")
        starts, sizes = u64s(ptr_v, "ptr_v"), u64s(size_v, "size_v")
        same_length(len(starts), "the number of ptr_v", size_v=sizes)
        try:
            return True, [self._offer(start, size) for start, size in zip(starts, sizes, strict=True)]
        except Refused as error:
            return self._no(error), [bytes(IPC_INFO_SIZE)] * len(starts)

    def read_ipc(self, conn_id: int, ptr: int, size: int, info: bytes) -> bool:
        """Reads ``size`` bytes to ``ptr`` and waits.

        ``info`` comes from the peer's :meth:`advertise_ipc`.
        """
        return self._run_ipc("read", conn_id, [ptr], [size], [blob(info, "info", IPC_INFO_SIZE)])

    def write_ipc(self, conn_id: int, ptr: int, size: int, info: bytes) -> bool:
        """Writes ``size`` bytes from ``ptr`` and waits until they are in the peer's memory.

        ``info`` comes from the peer's :meth:`advertise_ipc`.
        """
        return self._run_ipc("write", conn_id, [ptr], [size], [blob(info, "info", IPC_INFO_SIZE)])

    def read_ipc_async(self, conn_id: int, ptr: int, size: int, info: bytes) -> tuple[bool, int]:
        """As :meth:`read_ipc`, but returns ``(success, transfer_id)`` at once."""
        return self._start_ipc("read", conn_id, [ptr], [size], [blob(info, "info", IPC_INFO_SIZE)])

    def write_ipc_async(self, conn_id: int, ptr: int, size: int, info: bytes) -> tuple[bool, int]:
        """As :meth:`write_ipc`, but returns ``(success, transfer_id)`` at once."""
        return self._start_ipc("write", conn_id, [ptr], [size], [blob(info, "info", IPC_INFO_SIZE)])

    def readv_ipc(self, conn_id: int, ptr_v: list[int], size_v: list[int], info_v: list[bytes]) -> bool:
        """Reads several pieces as one transfer and waits."""
        return self._run_ipc("read", conn_id, *_ipc_vectors(ptr_v, size_v, info_v))

    def writev_ipc(self, conn_id: int, ptr_v: list[int], size_v: list[int], info_v: list[bytes]) -> bool:
        """Writes several pieces as one transfer and waits."""
        return self._run_ipc("write", conn_id, *_ipc_vectors(ptr_v, size_v, info_v))

    def readv_ipc_async(
        self, conn_id: int, ptr_v: list[int], size_v: list[int], info_v: list[bytes]
    ) -> tuple[bool, int]:
        """As :meth:`readv_ipc`, but returns ``(success, transfer_id)`` at once."""
        return self._start_ipc("read", conn_id, *_ipc_vectors(ptr_v, size_v, info_v))

    def writev_ipc_async(
        self, conn_id: int, ptr_v: list[int], size_v: list[int], info_v: list[bytes]
    ) -> tuple[bool, int]:
        """As :meth:`writev_ipc`, but returns ``(success, transfer_id)`` at once."""
        return self._start_ipc("write", conn_id, *_ipc_vectors(ptr_v, size_v, info_v))

    # Beyond uccl.p2p

    def send_notif(self, conn_id: int, name: str, message: bytes) -> bool:
        """Sends a message to the peer and waits until it has arrived.

        The peer's :meth:`get_notifs` returns it.
        """
        note = pack_note(text(name, "name"), blob(message, "message"))
        connection = self._connections.get(u64(conn_id, "conn_id"))
        if connection is None:
            return self._no(f"connection {conn_id} does not exist")
        try:
            for message in in_parts(note):
                run(connection.peer.notify(message))
        except ENGINE_ERRORS as error:
            return self._no(reason(error))
        return True

    def get_notifs(self) -> list[tuple[str, bytes]]:
        """The messages that have arrived since the last call, as ``(name, message)``."""
        found: list[tuple[str, bytes]] = []
        try:
            while (note := self._reception.next_note()) is not None:
                found.append(note)
        except ENGINE_ERRORS as error:
            self._no(reason(error))
        return found

    def last_error(self) -> str:
        """Why the last failed call on this endpoint returned ``False``; empty if none failed."""
        return self._last_error

    def close(self) -> None:
        """Closes the endpoint and ends its transfers, connections and registrations."""
        broker.unregister(self._id)
        self._reception.close()
        self._connections.clear()
        self._transfers.clear()
        self._native.close()
        self._registrations.clear()

    def __repr__(self) -> str:
        return "<UCCL P2P Endpoint>"


def get_oob_ip() -> str:
    """The address that endpoints of this process advertise to peers."""
    try:
        native = peerway.Endpoint()
    except ENGINE_ERRORS as error:
        raise RuntimeError(f"no address can be advertised to peers: {reason(error)}") from error
    try:
        return native.addresses[0][0]
    finally:
        native.close()


_parse_metadata = metadata.parse


def _op(name: str) -> Op:
    if name.lower() == "read":
        return "read"
    if name.lower() == "write":
        return "write"
    raise RuntimeError(f"Invalid op_name: {name}")


def _float_type(value: object) -> FloatType:
    if not isinstance(value, FloatType):
        raise TypeError(f"floatType must be a FloatType, not {type(value).__name__}")
    return value


def _vectors(
    mr_id_v: object, ptr_v: object, size_v: object, meta_blob_v: object, num_iovs: object
) -> tuple[list[int], list[int], list[int], list[bytes]]:
    ids, starts, sizes = u64s(mr_id_v, "mr_id_v"), u64s(ptr_v, "ptr_v"), u64s(size_v, "size_v")
    metas = items(meta_blob_v, "meta_blob_v")
    same_length(u64(num_iovs, "num_iovs"), "num_iovs", mr_id_v=ids, ptr_v=starts, size_v=sizes, meta_blob_v=metas)
    return ids, starts, sizes, blobs(metas, "meta_blob_v", DESCRIPTOR_SIZE)


def _ipc_vectors(ptr_v: object, size_v: object, info_v: object) -> tuple[list[int], list[int], list[bytes]]:
    starts, sizes, infos = u64s(ptr_v, "ptr_v"), u64s(size_v, "size_v"), items(info_v, "info_v")
    same_length(len(starts), "the number of ptr_v", size_v=sizes, info_v=infos)
    return starts, sizes, blobs(infos, "info_v", IPC_INFO_SIZE)


def _tensor(tensor: Any, name: str) -> tuple[Any, int, int]:
    """A tensor's address and size."""
    for method in ("data_ptr", "numel", "element_size"):
        if not callable(getattr(tensor, method, None)):
            raise RuntimeError(f"{name} is not a tensor: it has no {method}()")
    if callable(getattr(tensor, "is_contiguous", None)) and not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous; make a contiguous copy")
    size = u64(tensor.numel() * tensor.element_size(), f"{name}'s size")
    return tensor, u64(tensor.data_ptr(), f"{name}.data_ptr()"), size


def _remote(at: int, local: XferDesc, remote: XferDesc) -> bytes:
    """The peer's descriptor, for as many bytes as the local descriptor has."""
    if local.mr_id == NONE_ID:
        raise RuntimeError(f"local_desc_list[{at}] has no mr_id; register_memory() of this endpoint must make it")
    if len(remote._ipc_info) != IPC_INFO_SIZE:
        raise RuntimeError(f"remote_desc_list[{at}] has no grant; register_memory() of the peer must make it")
    if local.size > remote.size:
        raise RuntimeError(
            f"local_desc_list[{at}] has {local.size} bytes, but remote_desc_list[{at}] has only {remote.size}"
        )
    try:
        return ipc.retarget(IpcInfo.from_bytes(remote._ipc_info).descriptor, remote.addr, local.size)
    except ValueError as error:
        raise RuntimeError(f"remote_desc_list[{at}]: {error}") from error
