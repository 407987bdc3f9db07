"""Wrong arguments: each error names the argument, what it got and what it takes."""

import numpy
import peerway
import pytest


@pytest.fixture
def endpoint():
    with peerway.Endpoint() as made:
        yield made


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lanes": 1000}, r"lanes \(PEERWAY_LANES\)=\"1000\" is invalid: expected .* from 1 to 64"),
        ({"deadline": 0}, r"deadline \(PEERWAY_DEADLINE\)=\"0\""),
        ({"deadline": -1}, "deadline: -1 is not a time"),
        ({"deadline": "soon"}, "deadline: 'soon' is not a time; .* such as '30s'"),
        ({"transport": "infiniband"}, "^transport: 'infiniband' is not one of auto, local"),
        ({"bind": "nowhere"}, "bind: 'nowhere'"),
    ],
)
def test_settings_of_an_endpoint(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        peerway.Endpoint(**settings)


def test_a_time_is_seconds_or_text():
    with peerway.Endpoint(deadline="30s", connect_timeout="1500ms", detect=2) as endpoint:
        assert endpoint.notification(timeout="1ms") is None
        assert endpoint.notification(timeout=0.001) is None
        with pytest.raises(peerway.ConnectError) as error:
            endpoint.connect("127.0.0.1:1", timeout="1s")
        assert "127.0.0.1:1" in str(error.value)
        with pytest.raises(TypeError, match=r"(?s)such as '30s', not list.*timeout"):
            endpoint.notification(timeout=[1])


def test_a_range_that_leaves_the_region_is_refused(endpoint):
    region = endpoint.allocate(16)
    assert [len(region[a:b]) for a, b in [(0, 16), (4, 4), (None, None), (-4, None), (16, 16)]] == [16, 0, 16, 4, 0]
    for wrong in [slice(0, 17), slice(17, None), slice(-17, None), slice(5, 3), slice(0, 1 << 70)]:
        with pytest.raises(IndexError, match="is not inside the region's 16 bytes"):
            region[wrong]
    with pytest.raises(TypeError, match=r"such as region\[0:4096\], not int \(0\)"):
        region[0]
    with pytest.raises(TypeError, match="stop of a slice of a region: expected int, not float"):
        region[0:1.5]
    with pytest.raises(ValueError, match="step 1; use blocks"):
        region[0:8:2]


def test_indices_name_their_type(endpoint):
    region = endpoint.allocate(64)
    with pytest.raises(TypeError, match="indices: expected an array of integers .*, not an array of dtype float64"):
        region.blocks(numpy.array([0.5]), 4)
    with pytest.raises(ValueError, match="indices: number -1 at 1"):
        region.blocks(numpy.array([0, -1], dtype=numpy.int8), 4)
    with pytest.raises(TypeError, match="indices: expected .*, not str"):
        region.blocks("abc", 4)


def test_memory_that_the_machine_does_not_have(endpoint):
    with pytest.raises(peerway.PeerwayError, match="this machine has .* MiB of memory and swap"):
        endpoint.allocate(1 << 45)
    with pytest.raises(TypeError, match="(?s)-1 is out of range.*nbytes"):
        endpoint.allocate(-1)


def test_an_array_in_fortran_order_is_registered_only_when_asked_for(endpoint):
    array = numpy.asfortranarray(numpy.arange(12, dtype=numpy.uint8).reshape(3, 4))
    with pytest.raises(BufferError, match="buffer: the array is in Fortran order"):
        endpoint.register(array)
    assert endpoint.register(array, order="any").nbytes == 12
    assert endpoint.register(numpy.ascontiguousarray(array)).nbytes == 12
    with peerway.Endpoint() as owner, pytest.raises(BufferError, match="local: the array is in Fortran order"):
        remote = owner.allocate(12)
        peer = endpoint.connect(owner.metadata)
        peer.write(array, peer.remote(remote.advertise()))
    with pytest.raises(BufferError, match="not contiguous"):
        endpoint.register(array[::2], order="any")
    with pytest.raises(ValueError, match="order: 'F'"):
        endpoint.register(array, order="F")
