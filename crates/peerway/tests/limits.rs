//! Limits against strangers: the endpoint counts each refusal, and the peer gets a reason.

use std::time::{Duration, Instant};

use peerway::{
    Access, Batch, Builder, ConnectError, Endpoint, Pin, Reason, RefusalStats, TransferError,
};

const WATCHDOG: Duration = Duration::from_secs(30);

fn here() -> Builder {
    Endpoint::builder().bind("127.0.0.1:0".parse().unwrap())
}

fn tcp() -> Builder {
    here().transport(Pin::Tcp)
}

/// What an endpoint has refused.
fn refusals(endpoint: &Endpoint) -> RefusalStats {
    endpoint.stats().refusals
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + WATCHDOG;
    while !is_so() {
        assert!(Instant::now() < until, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn sessions_beyond_the_limit_are_refused_with_the_name_of_the_setting() {
    for (setting, value) in
        [("PEERWAY_MAX_SESSIONS", "2"), ("PEERWAY_MAX_SESSIONS_PER_ADDRESS", "2")]
    {
        let target = here().setting(setting, value).build().unwrap();
        let peers: Vec<Endpoint> = (0..3).map(|_| here().build().unwrap()).collect();
        for peer in &peers[..2] {
            peer.connect(&target.metadata()).unwrap();
        }
        let refused = peers[2].connect(&target.metadata()).unwrap_err();
        assert!(matches!(refused, ConnectError::PeerFull { .. }), "{refused:?}");
        let text = refused.to_string();
        assert!(text.contains(setting) && text.contains("2 sessions"), "{text}");
        assert_eq!(refusals(&target).sessions, 1);
        assert!(target.connect(&peers[2].metadata()).is_ok(), "sessions of its own do not count");
        peers[0].close();
        let again = here().build().unwrap();
        wait_for("a place", || again.connect(&target.metadata()).is_ok());
    }
}

#[test]
fn a_session_with_itself_counts_and_gives_its_place_back() {
    let endpoint = here().setting("PEERWAY_MAX_SESSIONS", "1").build().unwrap();
    let itself = || endpoint.connect_addr(endpoint.addresses()[0]);
    for _ in 0..3 {
        // The place comes back when both ends of the session before have ended.
        let mut peer = None;
        wait_for("a place", || {
            peer = itself().ok();
            peer.is_some()
        });
        let full = itself().unwrap_err();
        assert!(matches!(full, ConnectError::PeerFull { .. }), "{full:?}");
        peer.expect("it is connected").remove();
        wait_for("the end of that session", || {
            let other = here().build().unwrap();
            other.connect(&endpoint.metadata()).is_ok()
        });
    }
}

#[test]
fn a_peer_with_more_lanes_than_allowed_does_with_fewer() {
    let target = tcp().setting("PEERWAY_MAX_LANES", "2").build().unwrap();
    let source = tcp().lanes(5).build().unwrap();
    let peer = source.connect(&target.metadata()).unwrap();
    assert!(peer.path().why.contains("PEERWAY_MAX_LANES"), "{}", peer.path().why);
    assert_eq!(refusals(&target).lanes, 1);
    let theirs = target.allocate(8 << 20).unwrap();
    let remote = peer.import(&theirs.advertise(Access::WRITE).unwrap()).unwrap();
    let ours = source.register(vec![9u8; 8 << 20]).unwrap();
    peer.write(&ours.all(), &remote.all()).unwrap();
    let mut last = [0; 1];
    theirs.read_at((8 << 20) - 1, &mut last).unwrap();
    assert_eq!(last, [9]);
}

#[test]
fn a_count_needs_a_right() {
    for builder in [tcp(), here()] {
        let (a, b) = (builder.clone().build().unwrap(), builder.build().unwrap());
        let to_b = a.connect(&b.metadata()).unwrap();
        let to_a = b.accept(WATCHDOG).unwrap();
        let denied = Reason::Failed(TransferError::RemoteAccess);
        assert_eq!(to_b.count(7).unwrap().join().reason, denied, "b knows nothing of a");
        assert_eq!((b.counter(7), refusals(&b).counts_without_right), (0, 1));
        to_a.count(7).unwrap().join().ok().expect("a opened the session");
        assert_eq!(a.counter(7), 1);
        let region = b.register(vec![0u8; 64]).unwrap();
        to_b.import(&region.advertise(Access::READ).unwrap()).unwrap();
        to_b.count(7).unwrap().join().ok().expect("a has imported memory of b");
        assert_eq!((b.counter(7), refusals(&b).counts_without_right), (1, 1));
    }
}

#[test]
fn an_import_by_this_side_gives_the_peer_the_right() {
    for builder in [tcp(), here()] {
        let (a, b) = (builder.clone().build().unwrap(), builder.build().unwrap());
        let to_b = a.connect(&b.metadata()).unwrap();
        let to_a = b.accept(WATCHDOG).unwrap();
        let region = a.register(vec![0u8; 64]).unwrap();
        to_a.import(&region.advertise(Access::READ).unwrap()).unwrap();
        to_b.count(7).unwrap().join().ok().expect("b has imported memory of a");
        assert_eq!(b.counter(7), 1);
    }
}

#[test]
fn a_write_with_a_count_needs_no_more_than_its_grant() {
    let (a, b) = (tcp().build().unwrap(), tcp().build().unwrap());
    let peer = a.connect(&b.metadata()).unwrap();
    let theirs = b.allocate(64).unwrap();
    let remote = peer.import(&theirs.advertise(Access::WRITE).unwrap()).unwrap();
    let ours = a.register(vec![1u8; 64]).unwrap();
    let batch = Batch::write(&ours.all(), &remote.all()).unwrap().count(3);
    peer.run(&batch).unwrap().ok().unwrap();
    assert_eq!((b.counter(3), refusals(&b)), (1, RefusalStats::default()));
}

#[test]
fn refused_notifications_are_counted() {
    let target = tcp().notify_bytes(1 << 20).build().unwrap();
    let source = tcp().build().unwrap();
    let peer = source.connect(&target.metadata()).unwrap();
    peer.notify(&[0; 100_000]).unwrap().join().ok().unwrap();
    let full = Reason::Failed(TransferError::NotificationsFull);
    assert_eq!(peer.notify(&[0; 100_000]).unwrap().join().reason, full);
    assert_eq!(refusals(&target).notifications, 1);
}
