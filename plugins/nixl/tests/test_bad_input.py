"""What makes no sense: NIXL's proper status, one line that says what it was, and an agent that lives on."""

import pytest
from conftest import pattern
from nixl_of_tests import BACKEND, REFUSED, Side, api

# How an endpoint's metadata begins.
MAGIC = b"PWMD"


@pytest.fixture
def lives(two):
    """Two agents; afterwards they still transfer."""
    a, b = two
    yield a, b
    a.memory[:64] = pattern(64)
    assert a.run(a.request("WRITE", [(0, 64)], [(0, 64)], b.name, b.address)) == "DONE"
    assert (b.memory[:64] == a.memory[:64]).all()


def made_with(**settings):
    agent = api.nixl_agent("with-settings", api.nixl_agent_config(backends=[]))
    agent.create_backend(BACKEND, settings)
    return agent


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dedline": "5s"}, "did you mean PEERWAY_DEADLINE?"),
        ({"no_such_thing": "1"}, "PEERWAY_NO_SUCH_THING is not a setting"),
        ({"deadline": "soon"}, "expected a time with its unit"),
        ({"transport": "pigeon"}, "PEERWAY_TRANSPORT"),
        ({"bind": "nowhere"}, "nowhere"),
    ],
)
def test_a_parameter_that_makes_no_sense(capfd, settings, sentence):
    with pytest.raises(Exception, match="(?i)backend"):
        made_with(**settings)
    lines = [line for line in capfd.readouterr().err.splitlines() if "[PEERWAY]" in line]
    assert len(lines) == 1 and sentence in lines[0], lines


def test_parameters_that_are_offered_are_taken():
    agent = api.nixl_agent("offered", api.nixl_agent_config(backends=[]))
    offered = agent.get_plugin_params(BACKEND)
    assert {"transport", "deadline", "lanes"} <= set(offered)
    agent.create_backend(BACKEND, offered)
    made_with(transport="tcp", lanes="2", deadline="1m", num_cpus="4", in_python="true")


def test_metadata_that_is_none(lives):
    a, _ = lives
    for metadata in (b"", b"nonsense", pattern(500).tobytes()):
        with pytest.raises(REFUSED):
            a.agent.add_remote_agent(metadata)


def test_connection_info_that_is_not_ours(lives, capfd):
    # NIXL itself does not survive metadata of its own that was changed, so only the backend's part of it is.
    a, _ = lives
    other = Side()
    metadata = other.agent.get_agent_metadata()
    at = metadata.index(MAGIC)
    for offset, sentence in [(0, "not Peerway endpoint metadata"), (len(MAGIC), "version")]:
        changed = bytearray(metadata)
        changed[at + offset] ^= 0x40
        with pytest.raises(REFUSED):
            a.agent.add_remote_agent(bytes(changed))
        lines = [line for line in capfd.readouterr().err.splitlines() if "[PEERWAY]" in line]
        assert len(lines) == 1 and sentence in lines[0], lines
    other.close()


def test_an_agent_that_nobody_loaded(lives):
    a, b = lives
    with pytest.raises(Exception, match="(?i)not.?found"):
        a.request("WRITE", [(0, 64)], [(0, 64)], "nobody", b.address)
    with pytest.raises(Exception, match="(?i)not.?found"):
        a.agent.send_notif("nobody", b"hello")


def test_memory_that_nobody_registered(lives):
    a, b = lives
    outside = pattern(64)
    local = a.agent.get_xfer_descs([(outside.ctypes.data, 64, 0)], "DRAM")
    remote = a.descriptors((0, 64), base=b.address)
    with pytest.raises(Exception, match="(?i)not.?found"):
        a.agent.initialize_xfer("WRITE", local, remote, b.name)


def test_descriptors_that_leave_their_registration(lives):
    a, b = lives
    size = a.memory.nbytes
    for ours, theirs in [
        ((size - 32, 64), (0, 64)),
        ((0, 64), (size - 32, 64)),
        ((0, 64), (1 << 40, 64)),
    ]:
        with pytest.raises(Exception, match="(?i)not.?found"):
            a.request("WRITE", [ours], [theirs], b.name, b.address)


def test_lists_that_do_not_fit_together(lives):
    a, b = lives
    with pytest.raises(REFUSED):
        a.request("WRITE", [(0, 64)], [(0, 64), (64, 64)], b.name, b.address)
    with pytest.raises(REFUSED):
        a.request("WRITE", [(0, 64)], [(0, 65)], b.name, b.address)


def test_memory_of_a_kind_that_is_not_transferred(lives):
    a, _ = lives
    with pytest.raises(REFUSED):
        a.agent.register_memory([(0, 4096, 3, "file")], "FILE", backends=[BACKEND])


def test_no_memory_at_all(lives):
    a, _ = lives
    with pytest.raises(REFUSED):
        a.agent.register_memory([(a.address, 0, 0, "")], "DRAM", backends=[BACKEND])


def test_a_request_is_not_posted_twice_at_once(peer_process):
    settings = {"transport": "tcp"}
    size = 128 << 20
    peer = peer_process(size=size, **settings)
    side = Side(size=size, settings=settings)
    side.agent.add_remote_agent(peer.metadata)
    request = side.request("WRITE", [(0, size)], [(0, size)], peer.name, peer.address)
    if side.agent.transfer(request) == "PROC":
        with pytest.raises(Exception, match="(?i)repost"):
            side.agent.transfer(request)
    assert side.ended(request) == "DONE"
    side.close()
