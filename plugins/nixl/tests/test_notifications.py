"""Notifications: of any length, after the bytes, once, and only on request."""

import pytest
from conftest import pattern
from nixl_of_tests import Side

LENGTHS = [1, 255, 257, 4096, 1 << 16, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5_000_000]


@pytest.mark.parametrize("length", LENGTHS)
def test_alone_of_any_length(two, length):
    a, b = two
    message = pattern(length).tobytes()
    a.agent.send_notif(b.name, message)
    assert b.notifications() == [(a.name, message)]


@pytest.mark.parametrize("length", LENGTHS)
def test_with_a_transfer_after_its_bytes(one, peer_process, length):
    peer = peer_process()
    one.agent.add_remote_agent(peer.metadata)
    message = pattern(length).tobytes()
    request = one.request("WRITE", [(0, 1 << 20)], [(0, 1 << 20)], peer.name, peer.address)
    for turn in range(1, 4):
        one.memory[:] = turn
        one.agent.transfer(request, message)
        # The bytes are there when the notification arrives, even if the sender has not polled.
        assert peer.notifications(1) == [(one.name, message)]
        assert peer.ask("only", value=turn)
        assert one.ended(request) == "DONE"


def test_bytes_are_bytes(two):
    a, b = two
    for message in (b"\x00\xff\x00", b"caf\xc3\xa9", bytes(range(256))):
        a.agent.send_notif(b.name, message)
        assert b.notifications() == [(a.name, message)]


def test_none_is_sent_that_was_not_asked_for(two):
    a, b = two
    request = a.request("WRITE", [(0, 64)], [(0, 64)], b.name, b.address)
    for _ in range(3):
        assert a.run(request) == "DONE"
    a.agent.send_notif(b.name, b"last")
    assert b.notifications() == [(a.name, b"last")]
    # NIXL sends a given message with every later post, until another message is given.
    for given, sent in [(b"first", b"first"), (b"", b"first"), (b"second", b"second")]:
        assert a.run(request, given) == "DONE"
        assert b.notifications() == [(a.name, sent)]
    assert b.notifications(timeout=0.2) == []


def test_a_message_given_at_creation_goes_with_the_post(two):
    a, b = two
    request = a.request("READ", [(0, 64)], [(0, 64)], b.name, b.address, message=b"was read")
    assert a.run(request) == "DONE"
    assert b.notifications() == [(a.name, b"was read")]


def test_to_an_agent_that_never_loaded_the_sender(one, peer_process):
    peer = peer_process()
    one.agent.add_remote_agent(peer.metadata)
    one.agent.send_notif(peer.name, b"you do not know me")
    assert peer.notifications(1) == [(one.name, b"you do not know me")]


def test_under_the_name_of_another_agent_is_dropped(two):
    a, b = two
    impostor = Side(a.name)
    impostor.agent.add_remote_agent(b.agent.get_agent_metadata())
    impostor.agent.send_notif(b.name, b"forged")
    assert b.notifications(timeout=0.5) == []
    a.agent.send_notif(b.name, b"true")
    assert b.notifications() == [(a.name, b"true")]
    impostor.close()


def test_to_oneself(two):
    a, _ = two
    a.agent.send_notif(a.name, b"note")
    assert a.notifications() == [(a.name, b"note")]


def test_many_keep_their_order(two):
    a, b = two
    for i in range(2000):
        a.agent.send_notif(b.name, b"%d" % i)
    assert b.notifications(2000) == [(a.name, b"%d" % i) for i in range(2000)]


def test_two_agents_in_one_process_get_their_own(two):
    a, b = two
    a.agent.send_notif(b.name, b"for b")
    b.agent.send_notif(a.name, b"for a")
    assert a.notifications() == [(b.name, b"for a")]
    assert b.notifications() == [(a.name, b"for b")]
