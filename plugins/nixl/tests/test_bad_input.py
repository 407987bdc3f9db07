"""Invalid input: it gives the right NIXL status and one log line, and the agent stays usable."""

import struct

import pytest
from conftest import pattern
from nixl_of_tests import BACKEND, REFUSED, Side, api

# The first bytes of an endpoint's metadata.
MAGIC = b"PWMD"


@pytest.fixture
def lives(two):
    """Two agents, which must still be able to transfer after the test."""
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
    # NIXL itself crashes on corrupted metadata of its own, so the test corrupts only the backend's
    # part.
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


def test_an_agent_that_is_not_loaded(lives):
    a, b = lives
    with pytest.raises(Exception, match="(?i)not.?found"):
        a.request("WRITE", [(0, 64)], [(0, 64)], "unknown", b.address)
    with pytest.raises(Exception, match="(?i)not.?found"):
        a.agent.send_notif("unknown", b"hello")


def test_memory_that_is_not_registered(lives):
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
    # A stopped peer keeps the first post in progress. With these settings it does not count as
    # dead.
    settings = {"transport": "tcp", "detect": "120s", "deadline": "120s"}
    size = 128 << 20
    peer = peer_process(size=size, **settings)
    side = Side(size=size, settings=settings)
    side.agent.add_remote_agent(peer.metadata)
    request = side.request("WRITE", [(0, size)], [(0, size)], peer.name, peer.address)
    peer.stop()
    assert side.agent.transfer(request) == "PROC"
    with pytest.raises(Exception, match="(?i)repost"):
        side.agent.transfer(request)
    peer.go_on()
    assert side.ended(request) == "DONE"
    side.close()


def test_messages_that_are_no_notifications(lives, capfd):
    # A peer that is no NIXL agent can send anything, also a number of parts that would exhaust
    # memory.
    peerway = pytest.importorskip("peerway", reason="the peerway package, which sends the messages, is not installed")
    a, b = lives
    metadata = b.agent.get_agent_metadata()
    at = metadata.index(MAGIC)
    with peerway.Endpoint() as stranger:
        # The bytes after the addresses belong to NIXL, so cut the endpoint's metadata at its end.
        peer = stranger.connect(metadata[at : end_of_metadata(metadata, at)])
        head = lambda name, part, parts: struct.pack("<4sIQII", b"PWN\x01", name, 7, part, parts)  # noqa: E731
        for message in [
            b"",
            b"x",
            b"PWN\x01",
            head(0, 0, 2**32 - 1),
            head(2**32 - 1, 0, 1),
            head(0, 3, 3),
            head(0, 0, 0),
        ]:
            peer.notify(message).wait()
    a.agent.send_notif(b.name, b"after all that")
    assert b.notifications() == [(a.name, b"after all that")]
    lines = [line for line in capfd.readouterr().err.splitlines() if "[PEERWAY]" in line]
    assert len(lines) == 7 and all("dropped" in line for line in lines), lines


def end_of_metadata(metadata, at):
    """The end of the metadata: magic, version, incarnation, addresses (family, IP, port)."""
    at += len(MAGIC) + 1 + 16 + 8
    count, at = metadata[at], at + 1
    for _ in range(count):
        at += 1 + (4 if metadata[at] == 4 else 16) + 2
    return at
