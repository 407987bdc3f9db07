//! Lost TCP lanes come back: the opener replaces them, and the session goes on.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use peerway::{Access, Batch, DataProtection, Endpoint, Pin, Reason};
use peerway_core::metadata::Metadata;
use peerway_core::wire::{Control, Refusal};
use peerway_testkit::memory;
use peerway_testkit::proxy::Proxy;
use peerway_testkit::random::Random;
use peerway_testkit::raw::{Raw, control};
use peerway_testkit::tls::Side;

const WATCHDOG: Duration = Duration::from_secs(60);
/// Bulk lanes of a session. It has one lane more, for control and small transfers.
const BULK: u16 = 3;
const LEN: u64 = 4 << 20;

fn endpoint(data: DataProtection) -> Endpoint {
    let builder = Endpoint::builder().transport(Pin::Tcp).lanes(BULK);
    builder.setting("PEERWAY_DATA", data.to_string()).build().unwrap()
}

/// The metadata of an endpoint with another address.
fn through(addr: SocketAddr, endpoint: &Endpoint) -> Vec<u8> {
    let metadata = Metadata::from_bytes(&endpoint.metadata()).unwrap();
    Metadata { addresses: vec![addr], ..metadata }.to_bytes()
}

/// Waits until `is_so`.
fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < WATCHDOG, "not within {WATCHDOG:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A proxy cuts one lane after the other during transfers, each lane several times. Every transfer
/// is done with the right bytes, its notification and count come once, and every lane comes back.
fn lanes_come_back(data: DataProtection) {
    const ROUNDS: u64 = 14;
    let (a, b) = (endpoint(data), endpoint(data));
    let proxy = Proxy::new(b.addresses()[0]).unwrap();
    let peer = a.connect(&through(proxy.addr(), &b)).unwrap();
    let back = b.accept(WATCHDOG).unwrap();
    let theirs = b.register(vec![0u8; LEN as usize]).unwrap();
    let ours = a.register(vec![0u8; LEN as usize]).unwrap();
    let remote = peer.import(&theirs.advertise(Access::READ_WRITE).unwrap()).unwrap();
    // The connection of each lane.
    let mut connections: Vec<usize> = (0..=usize::from(BULK)).collect();
    assert_eq!(proxy.connections(), connections.len());
    let mut random = Random::new(0x1A9E5);
    for round in 0..ROUNDS {
        let lane = round as usize % connections.len();
        let connection = connections[lane];
        assert!(proxy.is_open(connection), "lane {lane} is not back in round {round}");
        // The lane breaks at any place: in a frame, between frames, or after the transfer.
        proxy.kill_after(connection, 1 + random.below(LEN / 8));
        let is_write = random.one_in(2);
        let (from, to) = if is_write { (&ours, &theirs) } else { (&theirs, &ours) };
        memory::fill_all(from, round).unwrap();
        to.fill(0, LEN, 0).unwrap();
        let batch = match is_write {
            true => Batch::write(&ours.all(), &remote.all()).unwrap(),
            false => Batch::read(&ours.all(), &remote.all()).unwrap(),
        };
        let batch = batch.notify(&round.to_le_bytes()).unwrap().count(5);
        let ended = peer.post(&batch).unwrap().wait(WATCHDOG).expect("every transfer ends");
        assert_eq!(ended.reason, Reason::Done, "round {round}");
        memory::check(to, round, 0, 0, LEN).unwrap();
        let note = b.notification(WATCHDOG).expect("a notification follows");
        assert_eq!(note.message, round.to_le_bytes());
        assert_eq!(b.counter(5), round + 1);
        proxy.kill(connection);
        eventually("the lane is back", || peer.stats().lanes_reopened > round);
        connections[lane] = proxy.connections() - 1;
    }
    assert!(peer.is_alive() && back.is_alive(), "the session ended");
    assert_eq!(peer.stats().lanes_lost, ROUNDS);
    assert_eq!(peer.stats().lanes_reopened, ROUNDS);
    eventually("the acceptor has the lanes too", || back.stats().lanes_reopened == ROUNDS);
    assert!(b.try_notification().is_none(), "a notification came twice");
    // The new lanes carry bytes.
    let before: Vec<u64> = connections.iter().map(|at| proxy.forwarded(*at)).collect();
    let carry = || {
        peer.write(&ours.all(), &remote.all()).unwrap();
        peer.notify(b"small").unwrap().join().ok().unwrap();
        let now = connections.iter().map(|at| proxy.forwarded(*at));
        now.zip(&before).all(|(now, before)| now > *before)
    };
    eventually("each lane carries bytes", carry);
}

#[test]
fn lanes_that_are_cut_again_and_again_come_back() {
    lanes_come_back(DataProtection::Off);
}

#[test]
fn lanes_with_integrity_come_back() {
    lanes_come_back(DataProtection::Integrity);
}

#[test]
fn lanes_with_encryption_come_back() {
    lanes_come_back(DataProtection::Encrypt);
}

/// While no new connection is possible, the session lives on its other lanes. It tries again, more
/// and more rarely, and has all lanes when connections are possible.
#[test]
fn a_lane_comes_back_when_the_network_does() {
    let (a, b) = (endpoint(DataProtection::Off), endpoint(DataProtection::Off));
    let proxy = Proxy::new(b.addresses()[0]).unwrap();
    let peer = a.connect(&through(proxy.addr(), &b)).unwrap();
    // A connection that breaks in the last moment of the handshake takes the session with it.
    b.accept(WATCHDOG).unwrap();
    proxy.bar(true);
    proxy.kill(1);
    proxy.kill(0);
    eventually("two lanes are lost", || peer.stats().lanes_lost == 2);
    eventually("the opener tries", || proxy.dropped() >= 4);
    let tried = proxy.dropped();
    std::thread::sleep(Duration::from_millis(500));
    let more = proxy.dropped() - tried;
    // Two lanes with pauses of 10, 20, 40, 80, 160 and 320 ms.
    assert!(more <= 12, "{more} attempts in half a second");
    assert_eq!(peer.stats().lanes_reopened, 0);
    peer.notify(b"by the others").unwrap().join().ok().unwrap();
    proxy.bar(false);
    eventually("both lanes are back", || peer.stats().lanes_reopened == 2);
    peer.notify(b"by the new one").unwrap().join().ok().unwrap();
    assert!(peer.is_alive());
}

/// With its last lane a session is over: only a live session has lanes that can be replaced.
#[test]
fn a_session_without_lanes_is_over() {
    let (a, b) = (endpoint(DataProtection::Off), endpoint(DataProtection::Off));
    let proxy = Proxy::new(b.addresses()[0]).unwrap();
    let peer = a.connect(&through(proxy.addr(), &b)).unwrap();
    // A connection that breaks in the last moment of the handshake takes the session with it.
    b.accept(WATCHDOG).unwrap();
    proxy.bar(true);
    proxy.kill_all();
    eventually("the session is over", || !peer.is_alive());
    eventually("the peer's end too", || b.peers().is_empty());
}

fn raw(to: &Endpoint, seed: u64) -> Raw {
    let raw = Raw::connect(to.addresses()[0], &mut Random::new(seed)).unwrap();
    raw.stream.set_read_timeout(Some(WATCHDOG)).unwrap();
    raw
}

/// Asks for the place of a lost lane on a connection of its own. `None` if the endpoint closes the
/// connection without a word.
fn ask(
    to: &Endpoint,
    session: [u8; 16],
    lane: u16,
    generation: u32,
    proof: [u8; 32],
) -> (Raw, Option<Control>) {
    let mut raw = raw(to, 7);
    let request = Control::ReplaceLane { session, lane, generation, proof };
    raw.send(&control(&request)).unwrap();
    let answer = raw.control().ok();
    (raw, answer)
}

/// Opens a session with one bulk lane by hand.
fn with_lane(to: &Endpoint, seed: u64) -> (Raw, Raw) {
    let (mut session, mut lane) = (raw(to, seed), raw(to, seed + 1));
    session.greet().unwrap();
    let answer = session.ask_for_lane(&mut lane, 1).unwrap();
    assert!(matches!(answer, Control::LaneOpened { .. }), "{answer:?}");
    session.finish().unwrap();
    (session, lane)
}

/// Reads control messages until the endpoint asks about a lost lane, and answers.
fn answer_lost(session: &mut Raw) -> u32 {
    loop {
        let message = session.next_control().unwrap();
        if let Control::LaneLost { lane, generation } = message {
            let (applied, refused, immediates) = (0, Vec::new(), 0);
            let answer = Control::LaneFenced { lane, generation, applied, refused, immediates };
            session.send(&control(&answer)).unwrap();
            return generation;
        }
    }
}

#[test]
fn a_stranger_cannot_splice_a_lane_into_a_session() {
    let b = endpoint(DataProtection::Off);
    let (mut honest, lane) = with_lane(&b, 10);
    let (other, _other_lane) = with_lane(&b, 20);
    let proof =
        |raw: &Raw, side, lane, generation| raw.replacement_proof(side, lane, generation).unwrap();
    drop(lane);
    assert_eq!(answer_lost(&mut honest), 0);
    let first = honest.proof(Side::Opener, "lane", &1u16.to_le_bytes()).unwrap();
    let bad = [
        ("no proof", [0; 32]),
        ("the proof of the first connection", first),
        ("the proof of another session", proof(&other, Side::Opener, 1, 5)),
        ("the proof of another lane", proof(&honest, Side::Opener, 0, 5)),
        ("the proof of another attempt", proof(&honest, Side::Opener, 1, 4)),
        ("the acceptor's proof", proof(&honest, Side::Acceptor, 1, 5)),
    ];
    let refused = Some(Control::Refuse(Refusal::UnknownSession));
    for (what, bad) in bad {
        let (_, answer) = ask(&b, honest.session, 1, 5, bad);
        assert_eq!(answer, refused, "{what}");
    }
    let good = proof(&honest, Side::Opener, 1, 5);
    let (_, answer) = ask(&b, other.session, 1, 5, good);
    assert_eq!(answer, refused, "spliced into another session");
    let (_, answer) = ask(&b, [9; 16], 1, 5, good);
    assert_eq!(answer, refused, "a session that does not exist");
    for lane in [2, 64, u16::MAX] {
        let more = proof(&honest, Side::Opener, lane, 5);
        let (_, answer) = ask(&b, honest.session, lane, 5, more);
        assert_eq!(answer, refused, "lane {lane} would be one more");
    }
    // The answer to the endpoint's question may still be on its way.
    let mut generation = 5;
    let joined = loop {
        let good = proof(&honest, Side::Opener, 1, generation);
        let (raw, answer) = ask(&b, honest.session, 1, generation, good);
        if let Some(answer) = answer {
            let theirs = proof(&honest, Side::Acceptor, 1, generation);
            assert_eq!(answer, Control::LaneOpened { proof: theirs }, "the right proof");
            break raw;
        }
        generation += 1;
        assert!(generation < 1000, "the lane may not join");
    };
    for old in [generation, generation - 1] {
        let seen = proof(&honest, Side::Opener, 1, old);
        let (_, answer) = ask(&b, honest.session, 1, old, seen);
        assert_eq!(answer, refused, "a replay");
    }
    assert_eq!(b.peers().len(), 2);
    let (session, next) = (honest.session, generation + 1);
    let late = proof(&honest, Side::Opener, 1, next);
    drop((joined, honest));
    eventually("the session is over", || b.peers().len() == 1);
    let (_, answer) = ask(&b, session, 1, next, late);
    assert_eq!(answer, refused, "a session that is over");
}

/// Answers every request for a lane as an acceptor would, without its secret. Counts the requests.
fn impostor() -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let asked = Arc::<AtomicUsize>::default();
    let count = asked.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut raw = Raw::over(stream, &mut Random::new(1)).unwrap();
            if raw.control().is_ok() {
                let _ = raw.send(&control(&Control::LaneOpened { proof: [0; 32] }));
                count.fetch_add(1, Ordering::SeqCst);
            }
        }
    });
    (addr, asked)
}

#[test]
fn an_opener_takes_no_lane_from_another_acceptor() {
    let (a, b) = (endpoint(DataProtection::Off), endpoint(DataProtection::Off));
    let proxy = Proxy::new(b.addresses()[0]).unwrap();
    let peer = a.connect(&through(proxy.addr(), &b)).unwrap();
    b.accept(WATCHDOG).unwrap();
    let (impostor, asked) = impostor();
    proxy.redirect(impostor);
    proxy.kill(2);
    eventually("the impostor was asked", || asked.load(Ordering::SeqCst) >= 3);
    assert_eq!(peer.stats().lanes_reopened, 0, "the impostor has a lane");
    proxy.redirect(b.addresses()[0]);
    eventually("the lane is back", || peer.stats().lanes_reopened == 1);
    assert!(peer.is_alive());
}
