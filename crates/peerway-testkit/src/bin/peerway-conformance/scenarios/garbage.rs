//! Invalid data in every state of the protocol. The victim is the peer process: it must survive,
//! keep no extra descriptors and serve other peers.

use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway_core::wire::{Control, Hello, Kind, Ready, Refusal, SubSession};
use peerway_testkit::procfs::{self, Holdings};
use peerway_testkit::random::Random;
use peerway_testkit::raw::{Raw, control, frame, ready};
use peerway_testkit::tls::Side;

use crate::healthy::Healthy;
use crate::options::Options;
use crate::remote::Remote;
use crate::world::{Verdict, World, fine_with};

/// Descriptors that may come and go by themselves, such as a connection of the third peer.
const FEW: u64 = 4;

/// The victim, and a third peer that it serves all the time.
pub(super) struct Victim {
    pub(super) b: Remote,
    healthy: Healthy,
    /// Kept alive because it writes to and reads from the victim all the time.
    bystander: peerway::Endpoint,
    fds: u64,
    /// What it held before the invalid data.
    pub(super) held: Holdings,
}

impl Victim {
    pub(super) fn new(world: &World) -> Result<Self> {
        Self::with(world, &world.options())
    }

    /// A victim with these settings.
    pub(super) fn with(world: &World, options: &Options) -> Result<Self> {
        let mut b = world.remote(options)?;
        // The bystander is an endpoint of this process. It is the victim's third peer.
        let bystander = options.build()?;
        let healthy = Healthy::with(world, &bystander, &mut b)?;
        let fds = fds(&mut b)?;
        let held = procfs::holdings(b.pid())?;
        Ok(Self { b, healthy, bystander, fds, held })
    }

    /// Checks that the victim lives, serves other peers and has released the descriptors that the
    /// invalid data took.
    pub(super) fn finish(mut self, world: &World) -> Result<()> {
        let until = Instant::now() + world.options().connect + world.profile.slack;
        loop {
            let now = fds(&mut self.b)?;
            if now <= self.fds + FEW {
                break;
            }
            ensure!(Instant::now() < until, "{now} descriptors are open, {} were before", self.fds);
            std::thread::sleep(Duration::from_millis(50));
        }
        world.step("a new peer is served");
        let c = world.options().build()?;
        let peer = world.connect(&c, &self.b).context("connecting after the invalid data")?;
        peer.notify(b"still here")?.join().ok()?;
        self.healthy.finish(world)
    }
}

fn fds(b: &mut Remote) -> Result<u64> {
    let held = b.ask("holdings")?;
    Ok(held.split(' ').next().context("no holdings")?.parse()?)
}

pub(crate) fn handshake(world: &World) -> Result<Verdict> {
    let victim = Victim::new(world)?;
    let addr = victim.b.addr()?;
    let mut random = Random::new(0x6a7b);
    let open = |random: &mut Random| Raw::connect(addr, random);

    world.step("random bytes, half a header, other protocols");
    for len in [1, 3, 63, 64, 65, 1000, 100_000] {
        let mut raw = open(&mut random)?;
        let bytes = random.bytes(len);
        raw.send(&bytes)?;
    }
    for text in ["GET / HTTP/1.1\r\nHost: x\r\n\r\n", "\x16\x03\x01\x00\x01\x01", "SSH-2.0-x\r\n"] {
        let mut raw = open(&mut random)?;
        raw.send(text.repeat(20).as_bytes())?;
        ensure!(
            raw.is_hung_up(world.profile.slack),
            "the victim kept a connection of another protocol open"
        );
    }
    world.step("mutated TLS");
    for _ in 0..world.profile.tries {
        let mut raw = open(&mut random)?;
        let mut bytes = raw.client_hello()?;
        random.mutate(&mut bytes);
        raw.send(&bytes)?;
    }
    world.step("more bytes than an unknown opener may send");
    let mut raw = open(&mut random)?;
    raw.send(&[b"\x16\x03\x01\x20\x00", &[0; 100][..]].concat())?;
    ensure!(raw.is_hung_up(world.profile.slack), "the victim waits for 8 KiB of a stranger");
    drop(raw);
    let mut raw = open(&mut random)?;
    raw.secure()?;
    raw.send(&frame(Kind::Control, |_| {}, &[], &[0; 8000]))?;
    ensure!(raw.is_hung_up(world.profile.slack), "the victim read 8 KiB of a stranger");
    drop(raw);
    world.step("frame lengths over the limit");
    let kinds = [Kind::Control, Kind::Notify, Kind::Write, Kind::Beat];
    for (kind, is_secure) in kinds.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        let mut raw = open(&mut random)?;
        if is_secure {
            raw.secure()?;
        }
        let mut bytes = frame(kind, |_| {}, &[], &[]);
        // `body` lies at byte 8 of the header.
        bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        raw.send(&bytes)?;
        ensure!(
            raw.is_hung_up(world.profile.slack),
            "the victim waits for a {kind:?} frame of 4 GiB"
        );
    }
    world.step("control messages in the wrong state");
    let misplaced = [
        Control::Ready(ready()),
        Control::LaneOpened { proof: [0; 32] },
        Control::Bye,
        Control::Refuse(Refusal::Full),
        Control::LaneLost { lane: 0, generation: 0 },
        Control::LaneFenced {
            lane: 9,
            generation: 0,
            applied: u64::MAX,
            refused: Vec::new(),
            immediates: 0,
        },
        Control::Import { request: 1, descriptor: vec![0; 64] },
        Control::Imported { request: 1, result: Err(3) },
        Control::OpenLane { session: [7; 16], lane: 1, proof: [0; 32] },
        Control::OpenLane { session: [0; 16], lane: u16::MAX, proof: [0; 32] },
    ];
    for (message, is_secure) in misplaced.iter().flat_map(|m| [(m, false), (m, true)]) {
        let mut raw = open(&mut random)?;
        if is_secure {
            raw.secure()?;
        }
        raw.send(&control(message))?;
        ensure!(
            raw.is_hung_up(world.profile.slack),
            "{message:?} as the first message did not close the connection"
        );
    }
    world.step("a hello, then a wrong message");
    for message in &misplaced[1..] {
        let mut raw = open(&mut random)?;
        if raw.greet().is_err() {
            // A pinned endpoint may refuse a peer without a local path.
            continue;
        }
        raw.send(&control(message))?;
        let garbage = random.bytes(200);
        raw.send(&garbage)?;
    }
    world.step("false claims about the session");
    for (same_process, linked) in [(true, false), (false, true), (true, true)] {
        let mut raw = open(&mut random)?;
        if raw.greet().is_ok() {
            let ready = Ready { same_process, linked, ..ready() };
            raw.send(&control(&Control::Ready(ready)))?;
            ensure!(
                raw.is_hung_up(world.profile.slack),
                "a false claim did not close the connection"
            );
        }
    }
    world.step("a hello without TLS");
    let mut raw = open(&mut random)?;
    raw.send(&control(&raw.hello()))?;
    ensure!(raw.is_hung_up(world.profile.slack), "the victim listens to a hello without TLS");
    drop(raw);
    world.step("mutated hellos");
    for _ in 0..world.profile.tries {
        let mut raw = open(&mut random)?;
        raw.secure()?;
        let mut bytes = control(&raw.hello());
        random.mutate(&mut bytes);
        raw.send(&bytes)?;
        if random.one_in(3) {
            let more = control(&Control::Ready(ready()));
            raw.send(&more)?;
        }
    }
    world.step("a hello with absurd numbers");
    let mut raw = open(&mut random)?;
    raw.secure()?;
    if let Control::Hello(hello) = raw.hello() {
        let absurd = Hello { lanes: u16::MAX, detect_ms: u32::MAX, host: [0xFF; 32], ..hello };
        raw.send(&control(&Control::Hello(absurd)))?;
        raw.send(&control(&Control::Ready(ready())))?;
    }
    world.step("sub-sessions of unknown sessions");
    for number in [0, 1, 64, 65, u16::MAX] {
        let mut raw = open(&mut random)?;
        raw.secure()?;
        let Control::Hello(hello) = raw.hello() else { continue };
        // One attempt claims the identity of a peer that has a session.
        let near = victim.bystander.incarnation();
        let incarnation = if number == 1 { near } else { hello.incarnation };
        let sub_session = Some(SubSession { number, of: [7; 16] });
        raw.send(&control(&Control::Hello(Hello { incarnation, sub_session, ..hello })))?;
        let answer = raw.control()?;
        let fits = match answer {
            Control::Refuse(Refusal::Identity(_)) => number == 1,
            Control::Refuse(Refusal::UnknownSession) => number != 1,
            _ => false,
        };
        ensure!(fits, "a sub-session of an unknown session was answered with {answer:?}");
    }
    world.step("many connections at once");
    let crowd: Vec<Raw> = (0..200).map(|_| open(&mut random)).collect::<Result<_>>()?;
    drop(crowd);
    victim.finish(world)?;
    fine_with("")
}

pub(crate) fn session(world: &World) -> Result<Verdict> {
    let victim = Victim::new(world)?;
    let addr = victim.b.addr()?;
    let mut random = Random::new(0x5e55);
    let mut opened = 0;
    let payload = vec![0xAB; 5000];
    let frames = frames(&payload);
    for (name, bytes) in &frames {
        world.step(name);
        let mut raw = Raw::connect(addr, &mut random)?;
        if raw.open().is_err() {
            // Endpoints pinned to a local path accept no session over TCP. Only the handshake is
            // tested.
            continue;
        }
        opened += 1;
        raw.send(bytes)?;
        let more = random.bytes(100);
        raw.send(&more)?;
    }
    world.step("mutated frames");
    for i in 0..world.profile.tries {
        let mut raw = Raw::connect(addr, &mut random)?;
        if raw.open().is_err() {
            break;
        }
        opened += 1;
        for _ in 0..=random.below(5) {
            let mut bytes = frames[random.below(frames.len() as u64) as usize].1.clone();
            if !random.one_in(4) {
                random.mutate(&mut bytes);
            }
            raw.send(&bytes)?;
        }
        if i % 4 == 0 {
            let rest = random.bytes(300);
            raw.send(&rest)?;
        }
    }
    world.step("half a frame, then silence");
    let mut half = Raw::connect(addr, &mut random)?;
    if half.open().is_ok() {
        let whole = frame(Kind::Notify, |h| h.sequence = 1.into(), &[], &payload);
        half.send(&whole[..2000])?;
        let patience = world.profile.detect + world.profile.slack;
        ensure!(
            half.is_hung_up(patience),
            "a peer that is silent in mid-frame was not disconnected"
        );
    }
    victim.finish(world)?;
    if opened == 0 {
        return Ok(Verdict::Skip(
            "an endpoint pinned to a local path accepts no session without a segment".into(),
        ));
    }
    fine_with(format!("{opened} sessions"))
}

/// One frame of every kind. None of them is valid on a fresh session.
fn frames(payload: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    let mut add = |name: &str, bytes: Vec<u8>| all.push((name.to_owned(), bytes));
    for (kind, sequence) in [
        (Kind::Ack, u64::MAX),
        (Kind::Ack, 5),
        (Kind::Nack, 1),
        (Kind::Nack, u64::MAX),
        (Kind::Pulled, 1),
        (Kind::ReadData, 1),
        (Kind::Count, 2),
        (Kind::Cancel, 1),
        (Kind::Cancel, 7),
        (Kind::Beat, u64::MAX),
    ] {
        let bytes = frame(kind, |head| head.sequence = sequence.into(), &[], &[]);
        add(&format!("{kind:?} {sequence}"), bytes);
    }
    let first = |head: &mut peerway_core::wire::Header| head.sequence = 1.into();
    add("a write to no grant", frame(Kind::Write, first, &[], payload));
    add(
        "a write with a false segment table",
        frame(Kind::Write, first, &[(0, 1), (u64::MAX, 9)], payload),
    );
    add("a read of no grant", frame(Kind::Read, first, &[(0, u32::MAX)], &[]));
    add("a read of too much", frame(Kind::Read, first, &[(0, u32::MAX); 256], &[]));
    add("read data without a read", frame(Kind::ReadData, first, &[], payload));
    add("a notification", frame(Kind::Notify, first, &[], payload));
    add(
        "a notification out of order",
        frame(Kind::Notify, |h| h.sequence = 9.into(), &[], payload),
    );
    let mut pull = frame(Kind::Pull, first, &[], &[0xFF; 40]);
    pull[6] = 2;
    add("a pull", pull);
    for message in [
        Control::LaneLost { lane: 0, generation: 0 },
        Control::LaneLost { lane: 500, generation: 0 },
        Control::LaneLost { lane: u16::MAX, generation: 0 },
        Control::LaneFenced {
            lane: 0,
            generation: 0,
            applied: u64::MAX,
            refused: Vec::new(),
            immediates: 0,
        },
        Control::LaneFenced {
            lane: 77,
            generation: 0,
            applied: 3,
            refused: Vec::new(),
            immediates: 0,
        },
        Control::Import { request: u64::MAX, descriptor: vec![0xFF; 64] },
        Control::Import { request: 0, descriptor: vec![1; 10_000] },
        Control::Imported { request: 0, result: Err(200) },
        Control::OpenLane { session: [0; 16], lane: 1, proof: [0; 32] },
        Control::LaneOpened { proof: [0; 32] },
        Control::Bye,
    ] {
        add(&format!("{message:?}").chars().take(60).collect::<String>(), control(&message));
    }
    all
}

/// The victim drops connections that are silent from the start or after a hello.
pub(crate) fn silence(world: &World) -> Result<Verdict> {
    let mut victim = Victim::new(world)?;
    let addr = victim.b.addr()?;
    let mut random = Random::new(0x51e);
    let mut silent: Vec<Raw> = Vec::new();
    for i in 0..50 {
        let mut raw = Raw::connect(addr, &mut random)?;
        match i % 5 {
            0 => {}
            1 => raw.send(&[0x50, 0x57, 3])?,
            2 => raw.send(&raw.client_hello()?[..40])?,
            3 => drop(raw.secure()),
            _ => drop(raw.greet()),
        }
        silent.push(raw);
    }
    let until = Instant::now() + world.profile.slack;
    while fds(&mut victim.b)? <= victim.fds {
        ensure!(Instant::now() < until, "the victim accepted nothing");
        std::thread::sleep(Duration::from_millis(1));
    }
    world.step("waiting for the victim's connect time-out");
    let until = Instant::now() + world.options().connect + world.profile.slack;
    for raw in &mut silent {
        let left = until.saturating_duration_since(Instant::now());
        let hung_up = raw.is_hung_up(left.max(Duration::from_millis(5)));
        ensure!(hung_up, "the victim kept a silent connection beyond its connect time-out");
    }
    drop(silent);
    victim.finish(world)?;
    fine_with("")
}

/// Invalid packets on the abstract socket that local peers attach to.
pub(crate) fn local_socket(world: &World) -> Result<Verdict> {
    let victim = Victim::new(world)?;
    let addr = victim.b.addr()?;
    let mut random = Random::new(0x10ca1);
    let mut raw = Raw::connect(addr, &mut random)?;
    let name = raw.greet().context("asking for the victim's local socket")?.local;
    ensure!(!name.is_empty(), "the victim offers no local socket");
    for i in 0..world.profile.tries {
        let socket = seqpacket(&name)?;
        let len = random.below(5000) as usize;
        let mut bytes = random.bytes(len);
        if i % 3 == 0 && len > 16 {
            // A session whose handshake is in progress.
            bytes[..16].copy_from_slice(&raw.session);
        }
        let _ = rustix::net::send(&socket, &bytes, rustix::net::SendFlags::NOSIGNAL);
        if i % 5 == 0 {
            let stray = TcpStream::connect(addr)?;
            // One in two has the right proof and fails for its descriptors.
            let right = raw.proof(Side::Opener, "link", &[])?;
            let proof = if i % 10 == 0 { right } else { [7; 32] };
            attach(&socket, &raw.session, &proof, &stray)?;
        }
    }
    drop(raw);
    victim.finish(world)?;
    fine_with("")
}

fn seqpacket(name: &str) -> Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    Ok(socket)
}

/// An attach message of the right length, whose descriptors are neither a segment nor wake
/// descriptors.
fn attach(socket: &OwnedFd, session: &[u8; 16], proof: &[u8; 32], stray: &TcpStream) -> Result<()> {
    use std::io::IoSlice;
    use std::mem::MaybeUninit;
    use std::os::fd::AsFd;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let fds = [stray.as_fd(), stray.as_fd(), stray.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ensure!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)), "no room for descriptors");
    let bytes = [&session[..], proof, &[0; 24]].concat();
    let _ = sendmsg(socket, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL);
    Ok(())
}
