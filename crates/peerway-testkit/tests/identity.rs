//! A peer is what it says it is: impersonation, a relay that changes bytes, replay, spliced lanes
//! and stolen descriptors are refused, and a stranger learns nothing.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use peerway::{Access, ConnectError, Endpoint, Pin, TransferError};
use peerway_core::config::DataProtection;
use peerway_core::descriptor::Descriptor;
use peerway_core::ids::Incarnation;
use peerway_core::metadata::{Metadata, NetworkId};
use peerway_core::wire::{Control, HEADER_LEN, Hello, Kind, Refusal, VERSION, Welcome};
use peerway_testkit::random::Random;
use peerway_testkit::raw::{Raw, control, frame, ready};
use peerway_testkit::tls::{Key, Side, read_record};

/// Longest wait for something that must happen.
const WATCHDOG: Duration = Duration::from_secs(30);

fn endpoint(pin: Pin) -> Endpoint {
    Endpoint::builder().transport(pin).build().unwrap()
}

fn at(endpoint: &Endpoint) -> SocketAddr {
    endpoint.addresses()[0]
}

/// Metadata that names `who` at another address.
fn misdirected(who: Incarnation, addr: SocketAddr) -> Vec<u8> {
    let network = NetworkId::default();
    Metadata { incarnation: who, network, addresses: vec![addr] }.to_bytes()
}

/// Opens a connection for a hand-made peer.
fn raw(to: &Endpoint, seed: u64) -> Raw {
    let raw = Raw::connect(at(to), &mut Random::new(seed)).unwrap();
    raw.stream.set_read_timeout(Some(WATCHDOG)).unwrap();
    raw
}

/// Waits until `is_so`.
fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < WATCHDOG, "not within {WATCHDOG:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Answers every connection as an endpoint would, with a key of its own.
struct Impostor {
    addr: SocketAddr,
    /// The hellos that openers have sent.
    hellos: Arc<Mutex<Vec<Hello>>>,
}

impl Impostor {
    /// `lane` makes the answer to a request for a lane.
    fn start(key: Key, lane: fn() -> Control) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let hellos = Arc::<Mutex<Vec<Hello>>>::default();
        let heard = hellos.clone();
        let serve = move |stream: TcpStream| -> Result<()> {
            let mut first = [0];
            stream.peek(&mut first)?;
            let mut raw = Raw::over(stream, &mut Random::new(1))?;
            raw.stream.set_read_timeout(Some(WATCHDOG))?;
            raw.key = key.clone();
            if first != [22] {
                raw.control()?;
                return raw.send(&control(&lane()));
            }
            raw.secure_as_acceptor()?;
            let Control::Hello(hello) = raw.control()? else { bail!("no hello") };
            heard.lock().unwrap().push(hello);
            let welcome = Welcome {
                detect_ms: 1000,
                data: DataProtection::Off,
                metadata: Vec::new(),
                host: Vec::new(),
                local: String::new(),
                local_why: String::from("none"),
                rdma: Vec::new(),
                rdma_why: String::from("none"),
            };
            raw.send(&control(&Control::Welcome(welcome)))?;
            raw.control()?;
            raw.send(&control(&Control::Ready(ready())))?;
            raw.leave_tls();
            std::thread::sleep(WATCHDOG);
            Ok(())
        };
        let serve = Arc::new(serve);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let serve = serve.clone();
                std::thread::spawn(move || serve(stream));
            }
        });
        Self { addr, hellos }
    }
}

/// The key of an attacker.
fn own_key() -> Key {
    Key::new(&mut Random::new(0x1999)).unwrap()
}

fn false_lane() -> Control {
    Control::LaneOpened { proof: [0; 32] }
}

#[test]
fn an_attacker_that_answers_in_a_peers_place_gets_no_session_and_no_hello() {
    let (a, b) = (endpoint(Pin::Tcp), endpoint(Pin::Tcp));
    let impostor = Impostor::start(own_key(), false_lane);
    let error = a.connect(&misdirected(b.incarnation(), impostor.addr)).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, ConnectError::OtherIncarnation { .. }), "{error:?}");
    assert!(text.contains("did not prove"), "{text}");
    assert!(impostor.hellos.lock().unwrap().is_empty(), "the impostor was told a hello");
    assert!(a.peers().is_empty());
    // The real peer can still be reached.
    assert_eq!(a.connect(&b.metadata()).unwrap().incarnation(), b.incarnation());
}

#[test]
fn a_hello_that_claims_the_identity_of_another_is_refused_in_a_sentence() {
    let (a, b) = (endpoint(Pin::Tcp), endpoint(Pin::Tcp));
    let mut attacker = raw(&a, 2);
    assert_eq!(attacker.secure().unwrap(), a.incarnation(), "the acceptor proves its own key");
    attacker.incarnation = b.incarnation();
    attacker.send(&control(&attacker.hello())).unwrap();
    let answer = attacker.control().unwrap();
    let Control::Refuse(Refusal::Identity(why)) = &answer else { panic!("{answer:?}") };
    assert!(why.contains(&b.incarnation().to_string()), "{why}");
    assert!(attacker.is_hung_up(WATCHDOG));
    let peer = a.connect(&b.metadata()).unwrap();
    assert_eq!(peer.incarnation(), b.incarnation());
    assert_eq!(peer.address(), at(&b), "the session is with the attacker");
}

#[test]
fn a_public_key_proves_nothing_without_its_private_half() {
    let (a, b) = (endpoint(Pin::Tcp), endpoint(Pin::Tcp));
    // Any stranger can learn the public key of an endpoint.
    let mut curious = raw(&b, 3);
    curious.secure().unwrap();
    let disguise = own_key().disguised(curious.tls.as_ref().unwrap().peer_key().unwrap());
    assert_eq!(disguise.incarnation, b.incarnation());

    let impostor = Impostor::start(disguise.clone(), false_lane);
    let error = a.connect(&misdirected(b.incarnation(), impostor.addr)).unwrap_err();
    assert!(matches!(error, ConnectError::NotSecure { .. }), "{error:?}");
    assert!(impostor.hellos.lock().unwrap().is_empty(), "the impostor was told a hello");

    let mut opener = raw(&a, 4);
    opener.key = disguise;
    // The opener's own TLS ends before the acceptor has checked the signature.
    opener.secure().unwrap();
    opener.send(&control(&opener.hello())).unwrap();
    assert!(opener.control().is_err(), "the acceptor answered the hello");
    assert!(a.peers().is_empty() && b.accept(Duration::ZERO).is_err());
}

#[test]
fn an_address_alone_learns_the_proven_identity() {
    let (a, b) = (endpoint(Pin::Tcp), endpoint(Pin::Tcp));
    assert_eq!(a.connect_addr(at(&b)).unwrap().incarnation(), b.incarnation());
    let theirs = b.accept(WATCHDOG).unwrap();
    assert_eq!(theirs.incarnation(), a.incarnation());
}

/// Relays connections record by record as long as both sides speak TLS, then byte by byte.
struct Relay {
    addr: SocketAddr,
    seen: Arc<Mutex<Seen>>,
}

/// The records that passed in TLS, and the bytes of connections without TLS.
#[derive(Default)]
struct Seen {
    /// From the opener.
    forth: Vec<Vec<u8>>,
    /// From the acceptor.
    back: Vec<Vec<u8>>,
    /// The first bytes that openers sent without TLS.
    plain: Vec<Vec<u8>>,
}

/// A byte of a record to change.
#[derive(Clone, Copy, Debug)]
struct Change {
    forth: bool,
    record: usize,
    at: usize,
}

impl Relay {
    fn start(to: SocketAddr, change: Option<Change>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let seen = Arc::<Mutex<Seen>>::default();
        let all = seen.clone();
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let far = TcpStream::connect(to).unwrap();
                for (from, into, forth) in [(&near, &far, true), (&far, &near, false)] {
                    let (from, into) = (from.try_clone().unwrap(), into.try_clone().unwrap());
                    let change = change.filter(|change| change.forth == forth);
                    let seen = all.clone();
                    std::thread::spawn(move || {
                        let _ = pass(&from, &into, &seen, forth, change);
                        let _ = into.shutdown(Shutdown::Both);
                        let _ = from.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        Self { addr, seen }
    }
}

fn pass(
    mut from: &TcpStream,
    mut into: &TcpStream,
    seen: &Mutex<Seen>,
    forth: bool,
    change: Option<Change>,
) -> Result<()> {
    let mut count = 0;
    let mut first = [0];
    while from.peek(&mut first)? == 1 && (20..=23).contains(&first[0]) {
        let mut record = read_record(&mut from.try_clone()?)?;
        if let Some(change) = change.filter(|change| change.record == count) {
            record[change.at] ^= 1;
        }
        count += 1;
        let mut seen = seen.lock().unwrap();
        if forth {
            seen.forth.push(record.clone())
        } else {
            seen.back.push(record.clone())
        }
        drop(seen);
        into.write_all(&record)?;
    }
    let mut buffer = vec![0; 1 << 16];
    let mut is_first = count == 0;
    loop {
        let n = from.read(&mut buffer)?;
        if n == 0 {
            return Ok(());
        }
        if forth && std::mem::take(&mut is_first) {
            seen.lock().unwrap().plain.push(buffer[..n].to_vec());
        }
        into.write_all(&buffer[..n])?;
    }
}

/// The records of a handshake, in each direction.
fn recorded(a: &Endpoint, b: &Endpoint) -> Result<Seen> {
    let relay = Relay::start(at(b), None);
    let peer = a.connect(&misdirected(b.incarnation(), relay.addr)).context("through a relay")?;
    peer.notify(b"here")?.join().ok()?;
    let notification = b.notification(WATCHDOG).context("no notification")?;
    assert_eq!(notification.message, b"here");
    a.remove_peer(&peer);
    eventually("the peer is gone", || b.peers().is_empty());
    let mut seen = relay.seen.lock().unwrap();
    Ok(std::mem::take(&mut *seen))
}

#[test]
fn a_relay_that_changes_one_byte_gets_no_session() {
    let (a, b) = (endpoint(Pin::Tcp), endpoint(Pin::Tcp));
    let seen = recorded(&a, &b).unwrap();
    let (mut tried, target) = (0, at(&b));
    for (forth, records) in [(true, &seen.forth), (false, &seen.back)] {
        // Both directions end with `Ready`.
        assert!(records.len() >= 3, "{} records", records.len());
        for (record, bytes) in records.iter().enumerate() {
            // A change cipher spec carries nothing and is ignored (RFC 8446, section 5).
            if bytes[0] == 20 {
                continue;
            }
            // The first byte is the type of the message, and the end of an encrypted record is its
            // tag. Lengths are left alone: a side would wait for more bytes until the time-out.
            for at in [5, 12, 5 + (bytes.len() - 5) / 2, bytes.len() - 9, bytes.len() - 1] {
                let change = Change { forth, record, at };
                let relay = Relay::start(target, Some(change));
                let to = misdirected(b.incarnation(), relay.addr);
                let result = a.connect_within(&to, Duration::from_secs(5));
                assert!(result.is_err(), "{change:?} of {} bytes: {result:?}", bytes.len());
                assert!(a.peers().is_empty(), "{change:?}");
                eventually("the acceptor has no session", || b.peers().is_empty());
                tried += 1;
            }
        }
    }
    assert!(tried >= 30, "{tried} changes");
    a.connect(&b.metadata()).unwrap();
}

#[test]
fn a_recorded_handshake_cannot_be_replayed_to_either_side() {
    let (a, b) = (endpoint(Pin::Tcp), endpoint(Pin::Tcp));
    let seen = recorded(&a, &b).unwrap();
    assert!(!seen.plain.is_empty(), "no lane was opened through the relay");
    while b.accept(Duration::ZERO).is_ok() {}

    let mut again = TcpStream::connect(at(&b)).unwrap();
    again.set_read_timeout(Some(WATCHDOG)).unwrap();
    again.write_all(&seen.forth.concat()).unwrap();
    let mut answer = Vec::new();
    // The acceptor closes the connection.
    let _ = again.read_to_end(&mut answer);
    let told: usize = seen.back.iter().map(Vec::len).sum();
    assert!(answer.len() < told, "the acceptor answered as in the recorded handshake");
    for lane in &seen.plain {
        let mut again = raw(&b, 5);
        again.send_plain(lane).unwrap();
        let answer = again.control().unwrap();
        assert_eq!(answer, Control::Refuse(Refusal::UnknownSession));
    }
    assert!(b.accept(Duration::from_millis(50)).is_err(), "a replay became a session");
    assert!(b.peers().is_empty());

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let back = seen.back.concat();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.write_all(&back);
            std::mem::forget(stream);
        }
    });
    let error = a.connect(&misdirected(b.incarnation(), addr)).unwrap_err();
    assert!(matches!(error, ConnectError::NotSecure { .. }), "{error:?}");
    assert!(a.peers().is_empty());
}

/// Asks for a lane on a connection of its own.
fn ask_for_lane(to: &Endpoint, session: [u8; 16], lane: u16, proof: [u8; 32]) -> (Raw, Control) {
    let mut raw = raw(to, 7);
    raw.send(&control(&Control::OpenLane { session, lane, proof })).unwrap();
    let answer = raw.control().unwrap();
    (raw, answer)
}

#[test]
fn a_lane_joins_only_the_session_that_it_proves_and_only_once() {
    let b = endpoint(Pin::Tcp);
    let (mut honest, mut other) = (raw(&b, 10), raw(&b, 11));
    honest.greet().unwrap();
    other.greet().unwrap();
    let proof = |raw: &Raw, side, lane: u16| raw.proof(side, "lane", &lane.to_le_bytes()).unwrap();
    let good = proof(&honest, Side::Opener, 1);
    let link = honest.proof(Side::Opener, "link", &[]).unwrap();
    let bad = [
        ("no proof", [0; 32]),
        ("the proof of another session", proof(&other, Side::Opener, 1)),
        ("the proof of another lane", proof(&honest, Side::Opener, 2)),
        ("the acceptor's proof", proof(&honest, Side::Acceptor, 1)),
        ("the proof of the link", link),
    ];
    for (what, bad) in bad {
        let (_, answer) = ask_for_lane(&b, honest.session, 1, bad);
        assert_eq!(answer, Control::Refuse(Refusal::UnknownSession), "{what}");
    }
    let (_, answer) = ask_for_lane(&b, other.session, 1, good);
    assert_eq!(answer, Control::Refuse(Refusal::UnknownSession), "spliced into another session");
    let (_lane, answer) = ask_for_lane(&b, honest.session, 1, good);
    let theirs = proof(&honest, Side::Acceptor, 1);
    assert_eq!(answer, Control::LaneOpened { proof: theirs }, "the right proof");
    let (_, answer) = ask_for_lane(&b, honest.session, 1, good);
    assert_eq!(answer, Control::Refuse(Refusal::UnknownSession), "the same lane again");
}

#[test]
fn an_opener_takes_no_lane_from_another_acceptor() {
    let a = endpoint(Pin::Tcp);
    let key = own_key();
    let impostor = Impostor::start(key.clone(), false_lane);
    let error = a.connect(&misdirected(key.incarnation, impostor.addr)).unwrap_err();
    assert!(matches!(error, ConnectError::PeerMisbehaved { .. }), "{error:?}");
    assert_eq!(impostor.hellos.lock().unwrap().len(), 1, "the attempt came as far as the lanes");
}

#[test]
fn a_stolen_descriptor_is_worth_nothing_to_another_identity() {
    let (a, b) = (endpoint(Pin::Tcp), endpoint(Pin::Tcp));
    let memory = b.allocate(4096).unwrap();
    memory.write_at(0, &[1; 4096]).unwrap();
    let peer = a.connect(&b.metadata()).unwrap();
    let reader = b.accept(WATCHDOG).unwrap();
    let bytes = memory.advertise_to(&reader, Access::READ_WRITE).unwrap();
    let stolen = Descriptor::from_bytes(&bytes).unwrap();

    // The thief cannot take the name of the reader, so it comes under its own.
    let mut thief = raw(&b, 20);
    thief.secure().unwrap();
    thief.incarnation = a.incarnation();
    thief.send(&control(&thief.hello())).unwrap();
    assert!(matches!(thief.control().unwrap(), Control::Refuse(Refusal::Identity(_))));
    let mut thief = raw(&b, 21);
    thief.open().unwrap();
    let set = |head: &mut peerway_core::wire::Header| {
        head.grant = stolen.grant.index.into();
        head.generation = stolen.grant.generation.into();
        head.token = stolen.token;
        head.sequence = 1.into();
    };
    thief.send(&frame(Kind::Write, set, &[(0, 64)], &[0xEE; 64])).unwrap();
    assert_eq!(thief.nack().unwrap(), TransferError::RemoteAccess as u16);
    let mut now = [0; 4096];
    memory.read_at(0, &mut now).unwrap();
    assert_eq!(now, [1; 4096], "the thief wrote");

    let ours = a.register(vec![2; 4096]).unwrap();
    let remote = peer.import(&bytes).unwrap();
    peer.write(&ours.all(), &remote.all()).unwrap();
    memory.read_at(0, &mut now).unwrap();
    assert_eq!(now, [2; 4096], "the reader for which it was advertised");
}

#[test]
fn a_stranger_learns_nothing_about_the_host() {
    let b = endpoint(Pin::Auto);
    // Without TLS there is no answer at all.
    let mut silent = raw(&b, 30);
    silent.send_plain(&control(&silent.hello())).unwrap();
    let mut told = Vec::new();
    let _ = silent.stream.read_to_end(&mut told);
    assert_eq!(told, [], "an answer to a hello without TLS");
    // An opener that cannot name the running boot of the host is not on it.
    let mut far = raw(&b, 31);
    far.secure().unwrap();
    let Control::Hello(hello) = far.hello() else { panic!("no hello") };
    let elsewhere = far.proof(Side::Opener, "host", &[7; 16]).unwrap();
    far.send(&control(&Control::Hello(Hello { host: elsewhere, ..hello }))).unwrap();
    let answer = far.control().unwrap();
    let Control::Welcome(welcome) = answer else { panic!("{answer:?}") };
    assert_eq!((welcome.host.len(), welcome.local.as_str()), (0, ""), "{welcome:?}");
    // One on the same host gets the description.
    let welcome = raw(&b, 32).greet().unwrap();
    assert!(!welcome.host.is_empty() && !welcome.local.is_empty(), "{welcome:?}");
}

#[test]
fn an_opener_of_an_older_version_is_told_this_version() {
    let b = endpoint(Pin::Tcp);
    let mut old = raw(&b, 40);
    let mut hello = control(&old.hello());
    // The version lies at byte 2 of the header.
    hello[2] = 2;
    old.send_plain(&hello).unwrap();
    let mut head = [0; HEADER_LEN];
    old.stream.read_exact(&mut head).unwrap();
    assert_eq!(head[..3], [b'P', b'W', VERSION], "an older build names this version in its error");
    assert!(old.is_hung_up(WATCHDOG));
}
