//! Operations that must fail, and their errors.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use peerway::{
    Access, Batch, ConnectError, Endpoint, Fence, ImportError, Pin, PostError, Reason,
    RegisterError, TransferError, WorkError,
};
use peerway_core::ids::Incarnation;
use peerway_core::metadata::{Metadata, NetworkId};

fn endpoint(pin: Pin) -> Endpoint {
    Endpoint::builder().transport(pin).connect_timeout(Duration::from_secs(2)).build().unwrap()
}

const PINS: [Pin; 5] = [Pin::Auto, Pin::LocalMap, Pin::LocalCma, Pin::LocalRing, Pin::Tcp];

#[test]
fn malformed_metadata_and_descriptors_are_named() {
    let (a, b) = (endpoint(Pin::Auto), endpoint(Pin::Auto));
    assert!(matches!(a.connect(b"nonsense"), Err(ConnectError::Metadata(_))));
    assert!(matches!(a.connect(&[]), Err(ConnectError::Metadata(_))));
    let peer = a.connect(&b.metadata()).unwrap();
    assert!(matches!(peer.import(&[0; 64]), Err(ImportError::Descriptor(_))));
    assert!(matches!(peer.import(&[0; 63]), Err(ImportError::Descriptor(_))));
    let ours = a.allocate(64).unwrap();
    let not_theirs = ours.advertise(Access::READ).unwrap();
    assert!(matches!(peer.import(&not_theirs), Err(ImportError::OtherIncarnation)));
}

#[test]
fn a_wrong_token_reaches_nothing() {
    for pin in PINS {
        let (a, b) = (endpoint(pin), endpoint(pin));
        let peer = a.connect(&b.metadata()).unwrap();
        let theirs = b.allocate(4096).unwrap();
        let mut descriptor = theirs.advertise(Access::READ_WRITE).unwrap();
        descriptor[32] ^= 1;
        let refused = peer.import(&descriptor).unwrap_err();
        assert!(
            matches!(refused, ImportError::Refused(TransferError::RemoteAccess)),
            "{pin}: {refused}"
        );
    }
}

#[test]
fn a_descriptor_bound_to_another_peer_is_refused() {
    for pin in PINS {
        let (a, b, c) = (endpoint(pin), endpoint(pin), endpoint(pin));
        let theirs = b.allocate(4096).unwrap();
        let (to_b, from_c) = (a.connect(&b.metadata()).unwrap(), c.connect(&b.metadata()).unwrap());
        let of_a = loop {
            let peer = b.accept(Duration::from_secs(5)).unwrap();
            if peer.incarnation() == a.incarnation() {
                break peer;
            }
        };
        let descriptor = theirs.advertise_to(&of_a, Access::READ).unwrap();
        assert!(to_b.import(&descriptor).is_ok(), "{pin}");
        let refused = from_c.import(&descriptor);
        assert!(matches!(refused, Err(ImportError::Refused(TransferError::RemoteAccess))), "{pin}");
    }
}

#[test]
fn direction_range_and_shape_are_checked_before_anything_moves() {
    let (a, b) = (endpoint(Pin::Tcp), endpoint(Pin::Tcp));
    let peer = a.connect(&b.metadata()).unwrap();
    let theirs = b.allocate(4096).unwrap();
    let ours = a.allocate(8192).unwrap();
    let remote = peer.import(&theirs.advertise(Access::READ).unwrap()).unwrap();
    let write = Batch::write(&ours.slice(0..16), &remote.slice(0..16));
    assert!(matches!(write, Err(PostError::Access { .. })));
    for (local, far) in [(0..4097, 0..4097), (0..16, 4090..4106), (8190..8206, 0..16)] {
        let batch = Batch::read(&ours.slice(local), &remote.slice(far));
        assert!(matches!(batch, Err(PostError::Work(WorkError::Outside { .. }))));
    }
    let batch = Batch::read(&ours.slice(0..16), &remote.slice(u64::MAX - 8..u64::MAX));
    assert!(matches!(batch, Err(PostError::Work(_))));
    let batch = Batch::read(&ours.slice(0..16), &remote.slice(0..17));
    assert!(matches!(batch, Err(PostError::Work(WorkError::LengthMismatch { .. }))));
    let batch = Batch::read_blocks(
        ours.blocks(0, 4096, 4096, &[0, 1]),
        remote.blocks(0, 4096, 4096, &[0, 1]),
    );
    assert!(matches!(batch, Err(PostError::Work(WorkError::BlockOutside { index: 1, .. }))));
    let too_long = vec![0; peerway::MAX_NOTIFICATION + 1];
    assert!(matches!(peer.notify(&too_long), Err(PostError::NotificationTooLong { .. })));
    assert!(matches!(
        ours.advertise_range(0..9000, Access::READ, None),
        Err(RegisterError::Outside { .. })
    ));
}

#[test]
fn a_revoked_region_is_gone_for_everyone() {
    for pin in PINS {
        let (a, b) = (endpoint(pin), endpoint(pin));
        let peer = a.connect(&b.metadata()).unwrap();
        for len in [512usize, 1 << 20, 2 << 20] {
            let theirs = b.allocate(len).unwrap();
            let descriptor = theirs.advertise(Access::READ_WRITE).unwrap();
            let remote = peer.import(&descriptor).unwrap();
            let ours = a.register(vec![9u8; len]).unwrap();
            assert_eq!(theirs.revoke(), Fence::Held);
            let write = Batch::write(&ours.all(), &remote.all()).unwrap();
            let ended = peer.run(&write).unwrap();
            assert_eq!(ended.reason, Reason::Failed(TransferError::Revoked), "{pin} {len}");
            let read = Batch::read(&ours.all(), &remote.all()).unwrap();
            let ended = peer.run(&read).unwrap();
            assert_eq!(ended.reason, Reason::Failed(TransferError::Revoked), "{pin} {len}");
            let mut bytes = vec![1; len];
            theirs.read_at(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|b| *b == 0), "{pin}: a revoked region was written");
            // A new advertisement of the same memory works, with another descriptor.
            let again = theirs.advertise(Access::READ_WRITE).unwrap();
            assert_ne!(again, descriptor);
            let remote = peer.import(&again).unwrap();
            peer.write(&ours.all(), &remote.all()).unwrap();
        }
    }
}

#[test]
fn dead_addresses_and_other_protocols_are_told_apart_in_time() {
    let a = endpoint(Pin::Auto);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let start = Instant::now();
    let refused = a.connect_addr("127.0.0.1:1".parse().unwrap()).unwrap_err();
    assert!(matches!(refused, ConnectError::Unreachable { .. }), "{refused}");
    let late = a.connect_addr(silent.local_addr().unwrap()).unwrap_err();
    assert!(matches!(late, ConnectError::TimedOut { .. }), "{late}");
    assert!(start.elapsed() < Duration::from_secs(60));

    let http = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = http.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        use std::io::Write;
        let (mut stream, _) = http.accept().unwrap();
        let _ = stream.write_all(&b"HTTP/1.1 400 Bad Request\r\n".repeat(8));
        // Wait until the client has closed: closing with unread bytes would discard the written
        // ones.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let other = a.connect_addr(addr).unwrap_err();
    assert!(matches!(other, ConnectError::PeerIncompatible { .. }), "{other}");
    server.join().unwrap();
}

/// The text of the error of a connect to these addresses of a peer that does not exist.
fn error_at(a: &Endpoint, network: [u8; 8], addresses: &[&str]) -> String {
    let addresses = addresses.iter().map(|addr| addr.parse().unwrap()).collect();
    let (incarnation, network) = (Incarnation([3; 16]), NetworkId(network));
    let metadata = Metadata { incarnation, network, addresses };
    let error = a.connect(&metadata.to_bytes()).unwrap_err();
    assert!(matches!(error, ConnectError::Unreachable { .. }), "{error:?}");
    error.to_string()
}

#[test]
fn an_unreachable_peer_is_named_by_all_its_addresses() {
    let a = endpoint(Pin::Auto);
    // No process listens on port 1.
    let text = error_at(&a, [0; 8], &["127.0.0.2:1", "127.0.0.3:1", "127.0.0.1:1"]);
    assert!(text.starts_with("cannot reach the peer at 127.0.0.2:1: Connection refused"), "{text}");
    for other in ["127.0.0.3:1 (Connection refused", "127.0.0.1:1 (Connection refused"] {
        assert!(text.contains(other), "{text}");
    }
    assert_eq!(text.matches(", after 0.").count(), 2, "each has its time: {text}");
}

#[test]
fn loopback_of_another_host_is_not_tried() {
    let a = endpoint(Pin::Auto);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = listener.local_addr().unwrap().to_string();
    let elsewhere = [9; 8];
    let text = error_at(&a, elsewhere, &["127.0.0.2:1", &here]);
    assert!(text.contains("it listens on loopback only"), "{text}");
    assert!(text.contains("PEERWAY_BIND"), "{text}");
    listener.set_nonblocking(true).unwrap();
    let tried = listener.accept();
    assert_eq!(tried.unwrap_err().kind(), ErrorKind::WouldBlock, "loopback was tried");
}

#[test]
fn an_endpoint_listens_on_the_first_free_port_of_a_range() {
    // Below the kernel's ephemeral ports, so that no other socket gets them in between.
    let first = 19_000 + (std::process::id() as u16 % 9000);
    let on = |first: u16, last: u16| {
        let range = format!("{first}-{last}");
        Endpoint::builder().setting("PEERWAY_BIND", "127.0.0.1").setting("PEERWAY_PORTS", range)
    };
    let one = on(first, first + 99).build().unwrap();
    let two = on(first, first + 99).build().unwrap();
    let port = |endpoint: &Endpoint| endpoint.addresses()[0].port();
    assert!((first..first + 100).contains(&port(&one)));
    assert!(port(&two) > port(&one) && port(&two) < first + 100);
    let error = on(port(&one), port(&one)).build().unwrap_err().to_string();
    let range = format!("PEERWAY_PORTS={0}-{0}", port(&one));
    assert!(error.contains(&range) && error.contains("in use"), "{error}");
}

#[test]
fn a_restarted_endpoint_on_the_same_port_is_another_one() {
    let a = endpoint(Pin::Tcp);
    let bind = |port| {
        let addr = std::net::SocketAddr::from(([127, 0, 0, 1], port));
        Endpoint::builder().bind(addr).transport(Pin::Tcp).build()
    };
    // Below the kernel's ephemeral ports, so that no other socket gets it between the two binds.
    let mut ports = (0..1000).map(|at| 10_000 + (std::process::id() as u16 % 9000) + at);
    let (port, b) = ports.find_map(|port| Some((port, bind(port).ok()?))).unwrap();
    let old = b.metadata();
    let theirs = b.allocate(64).unwrap();
    let descriptor = theirs.advertise(Access::READ).unwrap();
    let peer = a.connect(&old).unwrap();
    b.close();
    let deadline = Instant::now() + Duration::from_secs(60);
    while peer.is_alive() {
        assert!(Instant::now() < deadline, "the old peer should be gone");
        std::thread::sleep(Duration::from_millis(5));
    }
    let again = bind(port).unwrap();
    assert!(matches!(a.connect(&old), Err(ConnectError::OtherIncarnation { .. })));
    let peer = a.connect(&again.metadata()).unwrap();
    assert!(matches!(peer.import(&descriptor), Err(ImportError::OtherIncarnation)));
}

#[test]
fn pins_that_cannot_be_met_say_why() {
    let (a, b) = (endpoint(Pin::LocalMap), endpoint(Pin::Tcp));
    let error = a.connect(&b.metadata()).unwrap_err();
    assert!(matches!(error, ConnectError::PathUnavailable { .. }), "{error}");
    assert!(error.to_string().contains("pinned to tcp"), "{error}");
    let error = b.connect(&a.metadata()).unwrap_err();
    assert!(matches!(error, ConnectError::PeerRefuses { .. }), "{error}");
    let error = Endpoint::builder().transport(Pin::Unavailable("efa")).build().err().unwrap();
    assert!(error.to_string().contains("efa"), "{error}");
    let (a, b) = (endpoint(Pin::LocalMap), endpoint(Pin::LocalMap));
    let peer = a.connect(&b.metadata()).unwrap();
    let private = b.register(vec![0u8; 64]).unwrap();
    let error = peer.import(&private.advertise(Access::READ).unwrap()).unwrap_err();
    assert!(matches!(error, ImportError::PathUnavailable { .. }), "{error}");
}

#[test]
fn a_closed_endpoint_says_so() {
    let (a, b) = (endpoint(Pin::Auto), endpoint(Pin::Auto));
    let peer = a.connect(&b.metadata()).unwrap();
    a.close();
    assert!(matches!(a.connect(&b.metadata()), Err(ConnectError::EndpointClosed)));
    assert!(matches!(peer.notify(b"x"), Err(PostError::EndpointClosed)));
    assert!(matches!(a.allocate(1), Err(RegisterError::EndpointClosed)));
}

#[test]
fn a_full_slot_table_is_busy_and_recovers() {
    let a = Endpoint::builder().transport(Pin::Tcp).slots(4).build().unwrap();
    let b = endpoint(Pin::Tcp);
    let peer = a.connect(&b.metadata()).unwrap();
    let theirs = b.allocate(32 << 20).unwrap();
    let remote = peer.import(&theirs.advertise(Access::WRITE).unwrap()).unwrap();
    let ours = a.allocate(32 << 20).unwrap();
    let batch = Batch::write(&ours.all(), &remote.all()).unwrap();
    let mut running = Vec::new();
    let busy = loop {
        match peer.post(&batch) {
            Ok(transfer) => running.push(transfer),
            Err(error) => break error,
        }
    };
    assert_eq!(busy, PostError::Busy { slots: 4 });
    assert_eq!(running.len(), 4);
    for transfer in running {
        assert_eq!(transfer.join().reason, Reason::Done);
    }
    assert_eq!(peer.run(&batch).unwrap().reason, Reason::Done);
}

#[test]
fn a_post_that_finds_no_slot_has_written_nothing() {
    let a = Endpoint::builder().slots(1).build().unwrap();
    let b = endpoint(Pin::Auto);
    let peer = a.connect(&b.metadata()).unwrap();
    let theirs = b.allocate(8 << 20).unwrap();
    let remote = peer.import(&theirs.advertise(Access::WRITE).unwrap()).unwrap();
    let ours = a.register(vec![9u8; 8 << 20]).unwrap();
    // Small enough for the posting call to copy. Its count needs a slot.
    let small = Batch::write(&ours.slice(0..64), &remote.slice(0..64)).unwrap().count(3);
    let rest = Batch::write(&ours.slice(64..8 << 20), &remote.slice(64..8 << 20)).unwrap();
    // Takes the only slot and makes no progress until the test waits for it.
    let first = peer.begin(&rest).unwrap();
    assert_eq!(peer.post(&small).err(), Some(PostError::Busy { slots: 1 }));
    let mut bytes = [1; 64];
    theirs.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 64]);
    assert_eq!(first.join().reason, Reason::Done);
    assert_eq!(peer.run(&small).unwrap().reason, Reason::Done);
    theirs.read_at(0, &mut bytes).unwrap();
    assert_eq!((bytes, b.counter(3)), ([9; 64], 1));
}

#[test]
fn a_transfer_goes_on_when_its_handle_is_dropped() {
    for pin in [Pin::Auto, Pin::LocalRing, Pin::Tcp] {
        let (a, b) = (endpoint(pin), endpoint(pin));
        let peer = a.connect(&b.metadata()).unwrap();
        // Smaller than the copy pool's threshold, larger than the posting call copies.
        let theirs = b.allocate(500_000).unwrap();
        let remote = peer.import(&theirs.advertise(Access::WRITE).unwrap()).unwrap();
        let ours = a.register(vec![9u8; 500_000]).unwrap();
        let batch = Batch::write(&ours.all(), &remote.all()).unwrap().count(3);
        drop(peer.begin(&batch).unwrap());
        assert_eq!(b.wait_counter(3, 1, Duration::from_secs(20)), 1, "{pin}");
        let mut byte = [0];
        theirs.read_at(499_999, &mut byte).unwrap();
        assert_eq!(byte, [9], "{pin}");
    }
}

#[test]
fn every_way_of_asking_answers_on_a_closed_endpoint() {
    for pin in [Pin::Auto, Pin::Tcp] {
        let (a, b) = (endpoint(pin), endpoint(pin));
        let peer = a.connect(&b.metadata()).unwrap();
        let theirs = b.allocate(64 << 20).unwrap();
        let remote = peer.import(&theirs.advertise(Access::WRITE).unwrap()).unwrap();
        let ours = a.allocate(64 << 20).unwrap();
        let batch = Batch::write(&ours.all(), &remote.all()).unwrap();
        let transfers: Vec<_> = (0..3).map(|_| peer.begin(&batch).unwrap()).collect();
        let staged = peer.stage(vec![batch]).unwrap();
        staged.release(0).unwrap();
        a.close();
        let closed = Reason::Failed(TransferError::EndpointClosed);
        let ended = staged.join().reason;
        assert!([closed, Reason::Done].contains(&ended), "{pin}: {ended:?}");
        assert!(staged.wait(Duration::ZERO).is_some(), "{pin}");
        assert_eq!(transfers[0].poll().map(|ended| ended.reason), Some(closed), "{pin}");
        assert_eq!(transfers[1].wait(Duration::ZERO).map(|ended| ended.reason), Some(closed));
        assert_eq!(transfers[2].join().reason, closed, "{pin}");
    }
}

#[test]
fn closing_an_endpoint_wakes_the_threads_that_wait_on_it() {
    const LONG: Duration = Duration::from_secs(600);
    let (a, b) = (endpoint(Pin::Tcp), endpoint(Pin::Tcp));
    let _peer = a.connect(&b.metadata()).unwrap();
    let begun = std::time::Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(a.notification(LONG).is_none()));
        scope.spawn(|| assert_eq!(a.wait_counter(1, 1, LONG), 0));
        // Long enough for both threads to block. If it is not, the test only proves less.
        std::thread::sleep(Duration::from_millis(200));
        a.close();
    });
    assert!(begun.elapsed() < LONG / 2, "the threads waited for their time-outs");
}

mod needs_ipv6 {
    use super::*;

    #[test]
    #[ignore = "checks whether this machine has IPv6 on loopback"]
    fn probe() {
        TcpListener::bind("[::1]:0").expect("this machine has no IPv6 on loopback");
    }

    #[test]
    #[ignore = "needs IPv6 on loopback: cargo xtask test --only test"]
    fn ipv6_works() {
        let bind = || {
            let addr = "[::1]:0".parse().unwrap();
            Endpoint::builder().bind(addr).transport(Pin::Tcp).build().unwrap()
        };
        let (a, b) = (bind(), bind());
        let peer = a.connect(&b.metadata()).unwrap();
        assert!(peer.address().is_ipv6());
        let theirs = b.allocate(100_000).unwrap();
        let remote = peer.import(&theirs.advertise(Access::WRITE).unwrap()).unwrap();
        let ours = a.register(vec![3u8; 100_000]).unwrap();
        peer.write(&ours.all(), &remote.all()).unwrap();
        let mut byte = [0];
        theirs.read_at(99_999, &mut byte).unwrap();
        assert_eq!(byte, [3]);
    }
}
