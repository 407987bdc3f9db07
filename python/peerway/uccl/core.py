"""The parts of an endpoint, and the common code of its calls.

Where a public call must return ``False``, the methods here raise :class:`Refused`. Nothing here is
public.
"""

import secrets
from typing import Any, Literal

import peerway
from peerway import _native

from . import broker, gpus, metadata
from .arguments import integer, u64
from .broker_server import Entry
from .connections import Connection, Connections
from .engine import ENGINE_ERRORS, run
from .floats import FloatType
from .ipc import IpcInfo
from .log import apply_environment, logger, reason
from .reception import Arrival, Reception
from .registrations import Registration, Registrations
from .transfers import Nothing, Transfer, Transfers

Op = Literal["read", "write"]


class Refused(Exception):
    """The reason why a call returns ``False``."""


class Core:
    """The parts of an endpoint."""

    def __init__(self, local_gpu_idx: int | None = None) -> None:
        gpu = 0 if local_gpu_idx is None else integer(local_gpu_idx, "local_gpu_idx", 0, metadata.MAX_GPUS - 1)
        # Report invalid settings before anything starts.
        broker.port()
        device = gpus.device(None if local_gpu_idx is None else gpu)
        try:
            native = peerway.Endpoint()
        except ENGINE_ERRORS as error:
            raise RuntimeError(f"cannot build an endpoint: {reason(error)}") from error
        apply_environment()
        self._native = native
        self._gpu = gpu
        #: The GPU of this endpoint, until a transfer has opened it.
        self._unopened = device
        self._bdf = metadata.gpu_name(gpu) if device is None else device.bus_id
        self._id = secrets.token_hex(8)
        self._reception = Reception(native)
        self._connections = Connections(native, self._reception, gpu, self._bdf)
        self._registrations = Registrations(native)
        self._transfers = Transfers()
        self._last_error = ""
        addresses = native.addresses
        ips = tuple(ip for ip, _port in addresses)
        broker.register(Entry(self._id, gpu, self._bdf, ips, addresses[0][1]), self)

    def _no(self, why: object) -> bool:
        self._last_error = str(why)
        logger.warning("%s", self._last_error)
        return False

    def _ips(self) -> set[str]:
        return {ip for ip, _port in self._native.addresses}

    def _find(self, host: str, gpu: str | int | None) -> tuple[str, int]:
        if gpu is None:
            raise ValueError("remote_port: give a port, or the remote GPU to look for")
        try:
            if isinstance(gpu, str):
                return broker.find(host, bdf=gpu.lower(), but=self._id)
            return broker.find(host, gpu=gpu, but=self._id)
        except LookupError as error:
            raise Refused(error) from error

    def _open(self, address: tuple[str, int], way: str, given: bytes | None = None) -> Connection:
        try:
            if given is not None:
                return self._connections.open_once(address, way, given)
            return self._connections.open(address, way)
        except ENGINE_ERRORS as error:
            raise Refused(reason(error)) from error

    def _arrival(self, way: str, timeout: float | None) -> Arrival:
        if self._reception.passive:
            raise Refused("accept is not possible after start_passive_accept()")
        try:
            arrival = self._reception.next_arrival(way, timeout)
        except ENGINE_ERRORS as error:
            raise Refused(reason(error)) from error
        if arrival is None:
            raise Refused("no peer connected in time, or the endpoint was closed")
        return arrival

    def _register(self, addr: int, size: int, float_type: FloatType, owner: object = None) -> Registration:
        try:
            return self._registrations.add(addr, size, float_type, owner)
        except ENGINE_ERRORS as error:
            raise Refused(reason(error)) from error

    def _registered(self, mr_id: int) -> Registration:
        registration = self._registrations.get(mr_id)
        if registration is None:
            raise Refused(f"registration {mr_id} does not exist")
        return registration

    def _advertise(self, registration: Registration, addr: int, size: int) -> bytes:
        try:
            return registration.advertise(addr, size)
        except ENGINE_ERRORS as error:
            raise Refused(reason(error)) from error

    def _offer(self, addr: int, size: int) -> bytes:
        try:
            registration = self._registrations.covering(addr, size)
        except ENGINE_ERRORS as error:
            raise Refused(reason(error)) from error
        return self._info(registration, addr, size).to_bytes()

    def _info(self, registration: Registration, addr: int, size: int) -> IpcInfo:
        return IpcInfo(self._advertise(registration, addr, size), 0, size, registration.region.gpu)

    def _reach(self, infos: list[IpcInfo]) -> None:
        """Opens this endpoint's GPU before a transfer with offered GPU memory.

        The engine maps the GPU memory of a peer only if the process uses a GPU.
        """
        gpu = self._unopened
        if gpu is None or all(info.is_host for info in infos):
            return
        try:
            _native.open_gpu(gpu.index)
        except ENGINE_ERRORS as error:
            # The owner of the memory then moves the bytes.
            logger.warning("cannot open GPU %d, so the peer moves the bytes: %s", gpu.index, reason(error))
        self._unopened = None

    def _connected(self, conn_id: int) -> "peerway.Peer":
        connection = self._connections.get(conn_id)
        if connection is None:
            raise Refused(f"connection {conn_id} does not exist")
        return connection.peer

    def _post(
        self,
        op: Op,
        peer: "peerway.Peer",
        regions: list["peerway.Region"],
        ptrs: list[int],
        sizes: list[int],
        metas: list[bytes],
    ) -> Transfer:
        if not regions:
            return Nothing()
        try:
            try:
                return peer.post_addresses(op, regions, ptrs, sizes, metas)
            except peerway.Busy:
                # Transfers that have ended but were never polled still hold slots. Polling frees
                # them.
                self._transfers.look()
                return peer.post_addresses(op, regions, ptrs, sizes, metas)
        except ENGINE_ERRORS as error:
            raise Refused(reason(error)) from error

    def _post_registered(
        self, op: Op, conn_id: int, mr_ids: list[int], ptrs: list[int], sizes: list[int], metas: list[bytes]
    ) -> Transfer:
        # Check the types of all arguments before looking up any number.
        number, ids = u64(conn_id, "conn_id"), [u64(mr_id, "mr_id") for mr_id in mr_ids]
        starts, lengths = [u64(ptr, "ptr") for ptr in ptrs], [u64(size, "size") for size in sizes]
        peer = self._connected(number)
        return self._post(op, peer, [self._registered(mr_id).region for mr_id in ids], starts, lengths, metas)

    def _run(self, op: Op, *pieces: Any) -> bool:
        try:
            run(self._post_registered(op, *pieces))
        except Refused as error:
            return self._no(error)
        except ENGINE_ERRORS as error:
            return self._no(reason(error))
        return True

    def _start(self, op: Op, *pieces: Any) -> tuple[bool, int]:
        try:
            return True, self._transfers.add(self._post_registered(op, *pieces))
        except Refused as error:
            return self._no(error), 0

    def _post_ipc(self, op: Op, conn_id: int, ptrs: list[int], sizes: list[int], infos: list[bytes]) -> Transfer:
        number = u64(conn_id, "conn_id")
        starts, lengths = [u64(ptr, "ptr") for ptr in ptrs], [u64(size, "size") for size in sizes]
        peer = self._connected(number)
        offers = [IpcInfo.from_bytes(info) for info in infos]
        try:
            metas = [offer.start(length) for offer, length in zip(offers, lengths, strict=True)]
        except ValueError as error:
            raise Refused(error) from error
        self._reach(offers)
        try:
            ours = [self._registrations.borrow(*piece) for piece in zip(starts, lengths, strict=True)]
        except ENGINE_ERRORS as error:
            raise Refused(reason(error)) from error
        return self._post(op, peer, ours, starts, lengths, metas)

    def _run_ipc(self, op: Op, *pieces: Any) -> bool:
        try:
            run(self._post_ipc(op, *pieces))
        except Refused as error:
            return self._no(error)
        except ENGINE_ERRORS as error:
            return self._no(reason(error))
        return True

    def _start_ipc(self, op: Op, *pieces: Any) -> tuple[bool, int]:
        try:
            return True, self._transfers.add(self._post_ipc(op, *pieces))
        except Refused as error:
            return self._no(error), 0
