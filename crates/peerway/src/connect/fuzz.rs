//! A fuzz target for the acceptor: real connections on loopback, real TLS, and openers whose every
//! message comes from an input of bytes, in any order and on any connection.
//!
//! One thread plays the openers and serves the acceptor, under a simulated clock. Every input is
//! checked for these properties:
//!
//! 1. Nothing panics.
//! 2. A session comes about only for an identity that its opener has proven, after a hello and a
//!    ready on the same connection, with lanes that proved that they belong to it.
//! 3. Connections in the handshake stay within their limits, and each half-open session has its
//!    connection.
//! 4. Refusals are no more than what was asked.
//! 5. When the openers are gone, or the time is over, nothing is left.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use peerway_core::config::{Config, DataProtection};
use peerway_core::ids::Incarnation;
use peerway_core::wire::{
    Admission, Control, Hello, Proof, QueueEnd, QueueOffer, Ready, SubSession,
};
use rustix::event::epoll;
use rustls::ClientConnection;

use super::acceptor::{Acceptor, Completed};
use super::hello::{Attach, Attached, frame};
use super::opener::decode_host;
use crate::clock;
use crate::identity::{Identity, Side};
use crate::progress::engine::Engine;
use crate::progress::sessions::NewSession;
use crate::threads::Cpus;
use crate::transport::error::RdmaError;

/// Connections of an input at most.
const OPENERS: usize = 24;
/// Identities that openers prove.
const IDENTITIES: usize = 3;
const HANDSHAKES: u32 = 16;
const LANES: u16 = 2;
const SESSIONS: u32 = 2;
const TIMEOUT: Duration = Duration::from_secs(3);

/// What inputs reached, summed up.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Tally {
    /// Connections, and those that completed TLS.
    pub(crate) connections: u64,
    /// See `connections`.
    pub(crate) secure: u64,
    /// Messages that the acceptor sent, by TLS.
    pub(crate) answers: u64,
    /// Sessions that came about.
    pub(crate) sessions: u64,
    /// Lanes of these sessions.
    pub(crate) lanes: u64,
    /// Refusals that the endpoint counted.
    pub(crate) refusals: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, more: Self) {
        self.connections += more.connections;
        self.secure += more.secure;
        self.answers += more.answers;
        self.sessions += more.sessions;
        self.lanes += more.lanes;
        self.refusals += more.refusals;
    }
}

/// The fuzz target: fails by a panic.
pub fn handshake(input: &[u8]) {
    if let Err(why) = run(input) {
        panic!("{why}");
    }
}

/// A packet on the local socket that parses survives a round trip.
pub fn attach(data: &[u8]) {
    if let Some(parsed) = Attach::from_bytes(data) {
        assert_eq!(parsed.to_bytes(), data);
    }
    if let Some(parsed) = Attached::from_bytes(data) {
        assert_eq!(parsed.to_bytes()[1..], data[1..]);
    }
}

/// The description of a host parses or does not.
pub fn host(data: &[u8]) {
    if let Some(parsed) = decode_host(data) {
        assert_eq!(decode_host(&super::opener::encode_host(&parsed)), Some(parsed));
    }
}

/// Runs one input; the broken property where there is one.
pub(crate) fn run(input: &[u8]) -> Result<Tally, String> {
    let _clock = clock::simulate(1_000_000_000);
    let mut world = World::new(input).map_err(|error| format!("cannot make a world: {error}"))?;
    world.run()?;
    Ok(world.tally)
}

static IDENTITY: LazyLock<[Identity; IDENTITIES]> = LazyLock::new(|| {
    std::array::from_fn(|_| Identity::new(&Config::default()).expect("a key pair"))
});

/// A connection of an opener.
struct Opener {
    stream: TcpStream,
    tls: Option<ClientConnection>,
    who: usize,
    session: [u8; 16],
    /// Bytes of a half-sent message.
    rest: Vec<u8>,
}

struct World<'a> {
    input: &'a [u8],
    acceptor: Acceptor,
    epoll: Arc<OwnedFd>,
    engine: Arc<Engine>,
    addr: SocketAddr,
    openers: Vec<Opener>,
    made: usize,
    /// Sessions that openers have offered, under the identity that they have proven.
    offered: HashSet<([u8; 16], Incarnation)>,
    hellos: u64,
    readies: u64,
    lanes_asked: u64,
    tally: Tally,
}

impl<'a> World<'a> {
    fn new(input: &'a [u8]) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let mut config = Config::default();
        (config.shards, config.slots, config.copy_threads) = (1, 8, 0);
        config.connect_timeout = TIMEOUT;
        (config.limits.handshakes, config.limits.lanes) = (HANDSHAKES, LANES);
        (config.limits.sessions, config.limits.sessions_per_address) = (SESSIONS, SESSIONS);
        let rdma = Err(RdmaError::NoDevice { kind: "simulated" });
        let cpus = Cpus::choose(None).map_err(io::Error::other)?;
        let identity = Identity::new(&config).map_err(io::Error::other)?;
        let (name, addresses) = (String::new(), vec![addr]);
        let engine = Engine::new(identity, config, cpus, name, Vec::new(), addresses, rdma);
        engine.make_shards().map_err(io::Error::other)?;
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let acceptor = Acceptor::new(epoll.clone(), vec![listener], None)?;
        Ok(Self {
            input,
            acceptor,
            epoll,
            engine,
            addr,
            openers: Vec::new(),
            made: 0,
            offered: HashSet::new(),
            hellos: 0,
            readies: 0,
            lanes_asked: 0,
            tally: Tally::default(),
        })
    }

    fn byte(&mut self) -> u8 {
        self.input.split_off_first().copied().unwrap_or(0)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::from(self.byte()) % bound.max(1)
    }

    fn run(&mut self) -> Result<(), String> {
        while !self.input.is_empty() {
            let code = self.byte();
            let at = self.below(self.openers.len());
            match code & 0x0F {
                0 | 1 => self.connect(),
                _ if self.openers.is_empty() => self.connect(),
                2..5 => self.shake_hands(at)?,
                5..8 => {
                    let message = self.message(at);
                    self.say(at, &frame(&message), true);
                }
                8 => self.open_session(at)?,
                9 => self.open_lane(at),
                10 => {
                    let len = self.below(200);
                    let bytes = self.input.split_off(..len.min(self.input.len()));
                    self.say(at, bytes.unwrap_or_default(), code & 0x10 != 0);
                }
                11 => {
                    // A message out of place, without TLS.
                    let message = self.message(at);
                    self.say(at, &frame(&message), false);
                }
                12 => drop(self.openers.swap_remove(at)),
                13 => {
                    let ms = u64::from(self.byte()) * if code & 0x20 != 0 { 20 } else { 1 };
                    clock::advance(Duration::from_millis(ms));
                    self.acceptor.tick(clock::now());
                }
                _ => self.hear(at),
            }
            if code & 0x40 != 0 {
                self.serve()?;
            }
        }
        self.finish()
    }

    /// Connects from one of a few addresses.
    fn connect(&mut self) {
        let (source, who) = (self.byte() % 4, self.below(IDENTITIES));
        if self.made == OPENERS {
            return;
        }
        self.made += 1;
        let stream = || -> io::Result<TcpStream> {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
            socket.bind(&SocketAddr::from((Ipv4Addr::new(127, 0, 0, 1 + source), 0)).into())?;
            // The end is a reset, which leaves no port behind.
            socket.set_linger(Some(Duration::ZERO))?;
            socket.connect(&self.addr.into())?;
            socket.set_nonblocking(true)?;
            socket.set_tcp_nodelay(true)?;
            Ok(socket.into())
        };
        // Without a free port, the input does with the connections that it has.
        let Ok(stream) = stream() else { return };
        self.tally.connections += 1;
        let session = [self.made as u8; 16];
        self.openers.push(Opener { stream, tls: None, who, session, rest: Vec::new() });
    }

    /// Goes on with TLS, one flight or all of them.
    fn shake_hands(&mut self, at: usize) -> Result<(), String> {
        let flights = if self.byte() & 3 == 0 { 1 } else { 6 };
        let opener = &mut self.openers[at];
        if opener.tls.is_none() {
            opener.tls = IDENTITY[opener.who].open(None).ok();
        }
        for _ in 0..flights {
            let Some(opener) = self.openers.get_mut(at) else { return Ok(()) };
            let was_secure = opener.is_secure();
            opener.pump();
            if opener.is_secure() {
                self.tally.secure += u64::from(!was_secure);
                break;
            }
            self.serve()?;
        }
        Ok(())
    }

    /// Reads what the acceptor has sent.
    fn hear(&mut self, at: usize) {
        let opener = &mut self.openers[at];
        opener.pump();
        if let Some(tls) = &mut opener.tls {
            let mut plain = Vec::new();
            let _ = tls.reader().read_to_end(&mut plain);
            self.tally.answers += u64::from(!plain.is_empty());
        }
    }

    /// A valid hello and ready, with or without a lane between them.
    fn open_session(&mut self, at: usize) -> Result<(), String> {
        let with_lane = self.byte() & 1 == 1;
        if !self.openers[at].is_secure() {
            self.shake_hands(at)?;
        }
        let Some(hello) = self.hello(at) else { return Ok(()) };
        self.say(at, &frame(&hello), true);
        self.serve()?;
        if with_lane && at < self.openers.len() {
            self.connect();
            self.lane_of(self.openers.len() - 1, at, 1, true);
            self.serve()?;
        }
        if at < self.openers.len() {
            self.readies += 1;
            self.say(at, &frame(&Control::Ready(ready())), true);
        }
        Ok(())
    }

    /// Asks for a lane of some session on some connection, with a right or a wrong proof.
    fn open_lane(&mut self, at: usize) {
        let (of, choice) = (self.below(self.openers.len()), self.byte());
        self.lane_of(at, of, u16::from(choice & 3), choice & 0xC0 != 0);
    }

    fn lane_of(&mut self, on: usize, of: usize, lane: u16, is_right: bool) {
        let opener = &self.openers[of];
        let session = opener.session;
        let mut proof = opener.proof(lane).unwrap_or_default();
        proof[7] ^= u8::from(!is_right);
        self.lanes_asked += 1;
        self.say(on, &frame(&Control::OpenLane { session, lane, proof }), false);
    }

    /// Sends bytes, inside TLS or not. Now and then a part stays behind.
    fn say(&mut self, at: usize, bytes: &[u8], is_secure: bool) {
        let is_cut = self.byte() & 0x1F == 0x1F;
        let opener = &mut self.openers[at];
        let mut all = std::mem::take(&mut opener.rest);
        match &mut opener.tls {
            Some(tls) if is_secure => {
                let _ = tls.writer().write_all(bytes);
                while tls.wants_write() && tls.write_tls(&mut all).is_ok() {}
            }
            _ => all.extend_from_slice(bytes),
        }
        if is_cut {
            opener.rest = all.split_off(all.len() / 2);
        }
        // The acceptor may have closed the connection.
        let _ = opener.stream.write_all(&all);
    }

    /// A hello that names the identity and a session of the connection. `None` before TLS.
    fn hello(&mut self, at: usize) -> Option<Control> {
        let opener = &self.openers[at];
        if !opener.is_secure() {
            return None;
        }
        self.hellos += 1;
        self.offered.insert((opener.session, IDENTITY[opener.who].incarnation));
        Some(Control::Hello(Hello {
            incarnation: IDENTITY[opener.who].incarnation,
            session: opener.session,
            replaces: None,
            sub_session: None,
            lanes: 2,
            detect_ms: 1000,
            data: DataProtection::Off,
            host: [0; 32],
            local: false,
            rdma: Vec::new(),
        }))
    }

    /// A message of any kind, right or wrong.
    fn message(&mut self, at: usize) -> Control {
        let choice = self.byte();
        match choice & 0x0F {
            0..5 => {
                let Some(Control::Hello(mut hello)) = self.hello(at) else { return Control::Bye };
                match choice >> 4 {
                    0 => hello.incarnation = Incarnation([choice; 16]),
                    1 => hello.incarnation = IDENTITY[usize::from(choice) % IDENTITIES].incarnation,
                    2 => hello.session = [self.byte() % 16; 16],
                    3 => {
                        let number = u16::from(self.byte());
                        hello.sub_session = Some(SubSession { number, of: hello.session });
                    }
                    4 => hello.replaces = Some([self.byte() % 16; 16]),
                    5 => hello.lanes = u16::MAX,
                    6 => hello.detect_ms = u32::MAX,
                    _ => {}
                }
                let opener = &mut self.openers[at];
                opener.session = hello.session;
                self.offered.insert((hello.session, IDENTITY[opener.who].incarnation));
                Control::Hello(hello)
            }
            5..8 => {
                let mut ready = ready();
                match choice >> 4 {
                    0 => ready.linked = true,
                    1 => ready.same_process = true,
                    2 => ready.queues = true,
                    3 => ready.host = vec![choice; 200],
                    _ => {}
                }
                self.readies += 1;
                Control::Ready(ready)
            }
            8 => Control::OpenQueues { queues: vec![offer(); usize::from(choice >> 4)] },
            9 => Control::Admit(Admission::Secret([choice; 32])),
            10 => Control::Bye,
            11 => Control::Import { request: 1, descriptor: vec![choice; 64] },
            12 => Control::LaneLost { lane: choice.into(), generation: 0 },
            13 => Control::LaneOpened { proof: [choice; 32] },
            14 => match choice >> 4 {
                0 => Control::QueuesOpened { queues: vec![(1, Err("why".into()))] },
                generation => {
                    let (session, generation) = (self.openers[at].session, generation.into());
                    // The proof for another purpose.
                    let proof = self.openers[at].proof(1).unwrap_or_default();
                    Control::ReplaceLane { session, lane: 1, generation, proof }
                }
            },
            _ => {
                self.lanes_asked += 1;
                let proof = self.openers[at].proof(1).unwrap_or_default();
                Control::OpenLane { session: self.openers[at].session, lane: 1, proof }
            }
        }
    }

    /// The acceptor handles everything that has come.
    fn serve(&mut self) -> Result<(), String> {
        let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        for _ in 0..8 {
            let mut buffer = [const { MaybeUninit::uninit() }; 64];
            let events = epoll::wait(&self.epoll, &mut buffer, Some(&zero));
            let words: Vec<u64> =
                events.map_or(Vec::new(), |(all, _)| all.iter().map(|e| e.data.u64()).collect());
            let mut new = Vec::new();
            for word in &words {
                new.extend(self.acceptor.handle_event(&self.engine, *word, clock::now()));
            }
            // Drivers adopt sessions after the acceptor has handled all events.
            for new in new {
                match new {
                    Completed::Session(new) => self.check_session(*new)?,
                    Completed::Lane(_) => return Err("a lane joined without a proof".into()),
                }
            }
            self.check()?;
            if words.is_empty() {
                break;
            }
        }
        Ok(())
    }

    fn check_session(&mut self, new: NewSession) -> Result<(), String> {
        let session = &new.session;
        let is_offered = self.offered.contains(&(session.id, session.incarnation));
        let lanes = new.lanes.len();
        self.tally.sessions += 1;
        if !is_offered || self.tally.sessions > self.readies || lanes > usize::from(LANES) + 1 {
            return Err(format!("a session of {} came from nothing", session.incarnation));
        }
        self.tally.lanes += lanes as u64;
        // Without a driver it is only known to exist.
        self.engine.peers.accepted(session, new.claim);
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        let held = self.acceptor.occupancy();
        let lanes = held.half_open * usize::from(LANES);
        // Sessions without a driver never end.
        let opened = self.engine.peers.opened_by_peers().len();
        if opened > SESSIONS as usize {
            return Err(format!("{opened} sessions are open"));
        }
        let is_bounded = held.pending <= HANDSHAKES as usize + 1
            && held.half_open <= held.pending
            && held.without_connection == 0
            && held.lanes <= lanes;
        if !is_bounded {
            return Err(format!("the acceptor holds too much: {held:?}"));
        }
        let stats = self.engine.refusals.stats();
        // Each hello and each ready asks once, and valid lanes over the limit.
        let is_fair = stats.handshakes <= self.tally.connections
            && stats.sessions <= 2 * self.hellos
            && stats.lanes <= self.lanes_asked
            && stats.other_users == 0;
        if is_fair { Ok(()) } else { Err(format!("refusals without a request: {stats:?}")) }
    }

    /// Some openers go, and the time of the others is over.
    fn finish(&mut self) -> Result<(), String> {
        let stats = self.engine.refusals.stats();
        self.tally.refusals += stats.handshakes + stats.sessions + stats.lanes;
        let half = self.openers.len() / 2;
        self.openers.truncate(half);
        self.serve()?;
        clock::advance(TIMEOUT + Duration::from_secs(1));
        self.acceptor.tick(clock::now());
        // A listener that rested accepts the last ones.
        self.serve()?;
        clock::advance(TIMEOUT + Duration::from_secs(1));
        self.acceptor.tick(clock::now());
        self.openers.clear();
        self.serve()?;
        let held = self.acceptor.occupancy();
        if held.pending + held.half_open + held.lanes > 0 {
            return Err(format!("something is left: {held:?}"));
        }
        Ok(())
    }
}

impl Opener {
    fn is_secure(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| !tls.is_handshaking())
    }

    /// Exchanges the bytes that TLS has and wants.
    fn pump(&mut self) {
        let Some(tls) = &mut self.tls else { return };
        let mut bytes = Vec::new();
        while tls.wants_write() && tls.write_tls(&mut bytes).is_ok() {}
        let _ = self.stream.write_all(&bytes);
        let mut buffer = [0; 4096];
        while let Ok(read) = self.stream.read(&mut buffer) {
            let mut rest = &buffer[..read];
            while !rest.is_empty() && tls.read_tls(&mut rest).is_ok_and(|read| read > 0) {
                if tls.process_new_packets().is_err() {
                    return;
                }
            }
            if read == 0 {
                return;
            }
        }
        let mut bytes = Vec::new();
        while tls.wants_write() && tls.write_tls(&mut bytes).is_ok() {}
        let _ = self.stream.write_all(&bytes);
    }

    /// The proof for a lane of this connection's session. `None` before TLS.
    fn proof(&self, lane: u16) -> Option<Proof> {
        let tls = self.tls.as_ref().filter(|tls| !tls.is_handshaking())?;
        let context = [&[Side::Opener as u8], &self.session[..], &lane.to_le_bytes()].concat();
        let label = b"EXPORTER-peerway-lane";
        tls.export_keying_material(Proof::default(), label, Some(&context)).ok()
    }
}

fn ready() -> Ready {
    Ready {
        same_process: false,
        linked: false,
        opener_pulls: false,
        queues: false,
        host: Vec::new(),
        why: String::new(),
    }
}

fn offer() -> QueueOffer {
    let end = QueueEnd {
        port: 0,
        number: 1,
        first_packet: 1,
        key: 1,
        to: 0,
        reads: 1,
        receives: 1,
        flush_addr: 1,
        flush_key: 1,
    };
    QueueOffer { lane: 1, to_port: 0, latency: true, end }
}

#[cfg(test)]
mod tests {
    use peerway_core::fuzz::{self, Mutator, Target};

    use super::*;
    use crate::connect::hello::Probe;
    use crate::os::process::HostFacts;

    /// Cases in a usual test run; `cargo xtask fuzz` runs more.
    const CASES: u64 = 200_000;
    const HANDSHAKE_CASES: u64 = 300;
    /// Bytes of an input at most: about a hundred operations.
    const INPUT: usize = 400;

    #[test]
    fn every_packet_of_a_local_peer_is_parsed_or_refused() {
        let probe = Probe { addr: 77, secret: [1; 16] };
        let one = Attach { session: [2; 16], proof: [3; 32], probe }.to_bytes();
        let other = Attached { pulls: true, proof: [3; 32], probe }.to_bytes();
        let facts = crate::connect::opener::encode_host(&HostFacts::here());
        let targets: [(Target, Vec<Vec<u8>>); 2] =
            [(("attach", attach), vec![one, other]), (("host", host), vec![facts])];
        for ((name, target), corpus) in targets {
            let mut mutator = Mutator::new(0xA77, corpus);
            let run = |data: &[u8]| {
                target(data);
                Ok(())
            };
            fuzz::explore(name, fuzz::cases(name, CASES), || mutator.mutated(), run)
                .unwrap_or_else(|why| panic!("{why}"));
        }
    }

    #[test]
    fn no_handshake_breaks_the_acceptor() {
        let cases = fuzz::cases("handshake", HANDSHAKE_CASES);
        if let (Some(input), true) = (fuzz::input(), cases > 0) {
            run(&input).map(|tally| println!("{tally:?}")).unwrap_or_else(|why| panic!("{why}"));
            return;
        }
        let mut mutator = Mutator::new(0x5AFE, Vec::new());
        let mut total = Tally::default();
        fuzz::explore(
            "handshake",
            cases,
            || mutator.random(INPUT),
            |data| run(data).map(|tally| total += tally),
        )
        .unwrap_or_else(|why| panic!("{why}"));
        println!("{total:?}");
        let Tally { connections, secure, answers, sessions, lanes, refusals } = total;
        let reached = [connections, secure, answers, sessions, lanes, refusals];
        assert!(cases == 0 || reached.iter().all(|number| *number > 0), "{total:?}");
    }
}
