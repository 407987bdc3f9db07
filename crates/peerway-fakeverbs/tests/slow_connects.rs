//! Queue pairs that take seconds to connect, as with a far end whose address the kernel cannot
//! resolve. The other peers of the same endpoint are served meanwhile, and no queue pair is left.
//!
//! Each test makes one connection slow. While the call is under way, another peer makes round trips
//! that need the endpoint's driver. A driver that waits for the call answers them only afterwards.

mod support;

use std::thread;
use std::time::{Duration, Instant};

use peerway::{Access, Batch, Endpoint, Peer, Pin, Reason};

use support::{WATCHDOG, scripted_with, stats};

/// Queue pairs of a session on one device: one for small transfers, one for large ones.
const OF_SESSION: u64 = 2;
/// Connections that a session makes, at both ends.
const BOTH_ENDS: u64 = 2 * OF_SESSION;
/// Round trips of the other peer.
const ROUND_TRIPS: u64 = 20;
const SETTINGS: [(&str, &str); 1] = [("PEERWAY_RDMA_QUEUE_PAIRS", "1")];

fn endpoint() -> Endpoint {
    let builder = Endpoint::builder().transport(Pin::Ib).detect(Duration::from_secs(30));
    let built = builder.connect_timeout(WATCHDOG).deadline(WATCHDOG).build();
    built.expect("the fake has devices")
}

/// Waits until `over` holds.
fn wait_until(what: &str, over: impl Fn() -> bool) {
    let begun = Instant::now();
    while !over() {
        assert!(begun.elapsed() < WATCHDOG, "{what}: {:?}", stats());
        thread::sleep(Duration::from_millis(1));
    }
}

/// The peer makes round trips through the driver of `of` while the slow connection, which has this
/// number, is under way.
fn is_served_meanwhile(peer: &Peer, of: &Endpoint, slow: u64) {
    wait_until("the slow connection begins", || stats().connects == slow);
    for _ in 0..ROUND_TRIPS {
        let told = peer.notify(b"round trip").expect("the session is alive").join();
        assert_eq!(told.reason, Reason::Done);
        assert!(of.notification(WATCHDOG).is_some(), "a notification has arrived");
    }
    assert_eq!(stats().connected, slow - 1, "the round trips waited for the slow connection");
    assert!(peer.is_alive());
}

#[test]
fn a_slow_handshake_delays_no_other_peer() {
    let test = "a_slow_handshake_delays_no_other_peer";
    // The first session connects four ends. The acceptor of the second one connects first.
    if !scripted_with(test, "devices=1,modify_qp=3s@5", &SETTINGS) {
        return;
    }
    let (healthy, slow, server) = (endpoint(), endpoint(), endpoint());
    let peer = healthy.connect(&server.metadata()).expect("the devices connect");
    assert_eq!(stats().connected, BOTH_ENDS);
    let metadata = server.metadata();
    thread::scope(|scope| {
        let connecting = scope.spawn(|| slow.connect(&metadata));
        is_served_meanwhile(&peer, &server, BOTH_ENDS + 1);
        let late = connecting.join().expect("no panic").expect("slow, but it connects");
        assert_eq!(late.notify(b"late").expect("it works").join().reason, Reason::Done);
    });
    drop(peer);
    drop((healthy, slow, server));
    wait_until("all queue pairs are destroyed", || stats().queue_pairs == 0);
}

#[test]
fn an_endpoint_that_closes_does_not_wait_for_a_slow_handshake() {
    let test = "an_endpoint_that_closes_does_not_wait_for_a_slow_handshake";
    if !scripted_with(test, "devices=1,modify_qp=3s@1", &SETTINGS) {
        return;
    }
    let (opener, server) = (endpoint(), endpoint());
    let metadata = server.metadata();
    thread::scope(|scope| {
        let connecting = scope.spawn(|| opener.connect(&metadata));
        wait_until("the slow connection begins", || stats().connects == 1);
        server.close();
        assert!(connecting.join().expect("no panic").is_err(), "the server has closed");
        assert_eq!(stats().connected, 0, "the server waited for the slow connection");
    });
    drop((opener, server));
    wait_until("all queue pairs are destroyed", || stats().queue_pairs == 0);
}

/// The initiator or the acceptor of a session.
#[derive(Clone, Copy, PartialEq)]
enum Side {
    Initiator,
    Acceptor,
}

/// The queue pair of a session fails. The end of its replacement at one side has this number and
/// connects slowly. That side serves another peer meanwhile, and then closes.
fn replace_slowly(side: Side, slow: u64) {
    let (healthy, failing, server) = (endpoint(), endpoint(), endpoint());
    let waiting = if side == Side::Initiator { &failing } else { &server };
    let peer = healthy.connect(&waiting.metadata()).expect("the devices connect");
    let other = failing.connect(&server.metadata()).expect("the devices connect");
    let (ours, theirs) = (failing.allocate(4096).unwrap(), server.allocate(4096).unwrap());
    let remote = other.import(&theirs.advertise(Access::WRITE).unwrap()).unwrap();
    let write = Batch::write(&ours.all(), &remote.all()).unwrap();
    let begun = Instant::now();
    while stats().connects < slow {
        // A write ends on the other queue pair if its own fails.
        assert_eq!(other.run(&write).unwrap().reason, Reason::Done);
        assert!(begun.elapsed() < WATCHDOG, "no queue pair was replaced: {:?}", stats());
    }
    is_served_meanwhile(&peer, waiting, slow);
    waiting.close();
    drop((peer, other, remote, write));
    drop((healthy, failing, server));
    wait_until("all queue pairs are destroyed", || stats().queue_pairs == 0);
}

#[test]
fn a_slow_answer_to_an_offer_delays_no_other_peer() {
    let test = "a_slow_answer_to_an_offer_delays_no_other_peer";
    if scripted_with(test, "devices=1,flush_after=300,modify_qp=3s@9", &SETTINGS) {
        replace_slowly(Side::Acceptor, 2 * BOTH_ENDS + 1);
    }
}

#[test]
fn a_slow_end_of_an_offer_delays_no_other_peer() {
    let test = "a_slow_end_of_an_offer_delays_no_other_peer";
    // The initiator connects its end after the acceptor.
    if scripted_with(test, "devices=1,flush_after=300,modify_qp=3s@10", &SETTINGS) {
        replace_slowly(Side::Initiator, 2 * BOTH_ENDS + 2);
    }
}
