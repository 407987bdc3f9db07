"""RDMA: the error without a device, and the path with one (soft-RoCE is enough)."""

from __future__ import annotations

import numpy
import peerway
import pytest


def test_a_pin_that_cannot_be_met_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERWAY_RDMA_DEV", "no-such-device")
    with pytest.raises(peerway.BuildError, match="PEERWAY_TRANSPORT=ib .* cannot be met: "):
        peerway.Endpoint(transport="ib")


def test_others_are_unaffected_by_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERWAY_IBV_SO", "/nonexistent/libibverbs.so")
    with peerway.Endpoint(transport="tcp") as one, peerway.Endpoint(transport="tcp") as other:
        peer = one.connect(other.metadata)
        theirs = numpy.zeros(1000, "uint8")
        region = other.register(theirs)
        remote = peer.remote(region.advertise("rw"))
        peer.write(numpy.full(1000, 7, "uint8"), remote)
        assert (theirs == 7).all()


def test_devices_carry_out_transfers() -> None:
    try:
        one, other = peerway.Endpoint(transport="ib"), peerway.Endpoint(transport="ib")
    except peerway.BuildError as error:
        pytest.skip(str(error))
    with one, other:
        peer = one.connect(other.metadata)
        assert "verbs" in str(peer.path)
        theirs = numpy.zeros(100_000, "uint8")
        region = other.register(theirs)
        remote = peer.remote(region.advertise("rw"))
        peer.write(numpy.full(100_000, 7, "uint8"), remote)
        assert (theirs == 7).all()
        back = numpy.zeros(100_000, "uint8")
        peer.read(back, remote)
        assert (back == 7).all()
