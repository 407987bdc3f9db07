//! Strangers that send every message in every state of a connection, twice, slowly and as
//! fast as they can. The victim ends each of these connections, serves an honest peer beside them,
//! and holds no more afterwards than before.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use peerway::{Access, Descriptor, MAX_NOTIFICATION};
use peerway_core::config::DataProtection;
use peerway_core::ids::Incarnation;
use peerway_core::wire::{
    Admission, Control, Header, Hello, Import, Kind, QueueEnd, QueueOffer, Refusal, SubSession,
    Welcome,
};
use peerway_testkit::procfs;
use peerway_testkit::random::Random;
use peerway_testkit::raw::{Raw, control, frame, ready};
use peerway_testkit::tls::Side;

use super::garbage::Victim;
use super::leaks::nothing_is_left;
use super::limits::connect;
use crate::options::Options;
use crate::world::{Verdict, World, fine_with};

/// Strangers that connect at once.
const CROWD: u8 = 4;
/// The pause of a slow stranger.
const SLOW: Duration = Duration::from_millis(5);
/// The victim's detection time, in those of the profile.
const PATIENT: u32 = 4;
/// Rounds of the usual profile have this many tries for each round here.
const TRIES_A_ROUND: u32 = 200;

/// How far a stranger goes before it sends the message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    /// TCP only.
    Connected,
    /// After TLS.
    Secure,
    /// After `Hello` and `Welcome`.
    Greeted,
    /// The same, with one lane of the session open.
    HalfLane,
    /// After `Ready`.
    Open,
    /// On the bulk lane of a session.
    Lane,
    /// After `Bye`.
    Bye,
}

const STATES: [State; 7] = [
    State::Connected,
    State::Secure,
    State::Greeted,
    State::HalfLane,
    State::Open,
    State::Lane,
    State::Bye,
];

pub(crate) fn run(world: &World) -> Result<Verdict> {
    // The honest peer shares its processors with the strangers, and must not seem silent.
    let options = Options { detect: PATIENT * world.profile.detect, ..world.options() };
    let mut victim = Victim::with(world, &options)?;
    victim.b.region("bait", 4096, world.memory())?;
    let descriptor = victim.b.advertise("bait", Access::READ_WRITE)?;
    let (addr, pid) = (victim.b.addr()?, victim.b.pid());
    let rounds = (world.profile.tries / TRIES_A_ROUND).max(1);

    // The slow strangers make the victim start its threads and fill its caches.
    world.step("strangers at a slow rate");
    let mut sent = crowd(world, addr, &descriptor, SLOW)?;
    // What strangers have sent waits for the program.
    victim.b.ask("drain e")?;
    let before = procfs::holdings(pid)?;
    for round in 0..rounds {
        world.step(format!("strangers as fast as they can, round {round}"));
        sent += crowd(world, addr, &descriptor, Duration::ZERO)?;
        victim.b.ask("drain e")?;
    }
    world.step("the victim releases everything");
    nothing_is_left(world, pid, before).context("the victim")?;
    victim.finish(world)?;
    fine_with(format!("{sent} connections"))
}

/// Several strangers at once, each from an address of its own.
fn crowd(world: &World, addr: SocketAddr, descriptor: &[u8], pause: Duration) -> Result<u64> {
    std::thread::scope(|scope| {
        let play = |number| scope.spawn(move || play(world, addr, number, descriptor, pause));
        let crowd: Vec<_> = (0..CROWD).map(play).collect();
        let mut sent = 0;
        for stranger in crowd {
            sent += stranger.join().map_err(|_| anyhow!("a stranger panicked"))??;
        }
        Ok(sent)
    })
}

/// One stranger: all messages in all states, with a pause before each.
fn play(
    world: &World,
    addr: SocketAddr,
    number: u8,
    descriptor: &[u8],
    pause: Duration,
) -> Result<u64> {
    let mut random = Random::new(0x57A7E + u64::from(number));
    let from = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 10 + number));
    let mut open = Vec::new();
    let count = messages(&connect(addr, from, &mut random)?, descriptor).len();
    for (state, at) in STATES.into_iter().flat_map(|state| (0..count).map(move |at| (state, at))) {
        std::thread::sleep(pause);
        // The limits for one address may refuse a stranger or drop it in any state.
        let Ok(mut all) = reach(state, addr, from, &mut random) else { continue };
        // A proof belongs to the session's first connection.
        let (name, bytes) = messages(&all[0], descriptor).swap_remove(at);
        let on = if state == State::Lane { all.len() - 1 } else { 0 };
        let raw = &mut all[on];
        for _ in 0..2 {
            // A write that blocks is a victim that neither reads nor closes.
            raw.send(&bytes).with_context(|| format!("{name} in state {state:?}"))?;
        }
        open.push((state, name, all));
    }
    // Twice the same message is wrong in every state, or nothing follows it.
    let silence = (PATIENT * world.profile.detect).max(world.options().connect);
    let until = Instant::now() + silence + world.profile.slack;
    for (state, name, all) in &mut open {
        for raw in all {
            let left = until.saturating_duration_since(Instant::now());
            ensure!(
                raw.is_hung_up(left.max(Duration::from_millis(5))),
                "the victim keeps a connection after {name} in state {state:?}"
            );
        }
    }
    Ok(open.len() as u64)
}

/// Connections up to a state: the first one of the session, and its lane.
fn reach(state: State, addr: SocketAddr, from: IpAddr, random: &mut Random) -> Result<Vec<Raw>> {
    let mut raw = connect(addr, from, random)?;
    let mut lanes = Vec::new();
    if state != State::Connected {
        raw.secure()?;
    }
    if !matches!(state, State::Connected | State::Secure) {
        raw.greet()?;
    }
    if matches!(state, State::HalfLane | State::Lane) {
        let mut lane = connect(addr, from, random)?;
        let answer = raw.ask_for_lane(&mut lane, 1)?;
        ensure!(matches!(answer, Control::LaneOpened { .. }), "the lane was not opened");
        lanes.push(lane);
    }
    if matches!(state, State::Open | State::Lane | State::Bye) {
        raw.finish()?;
    }
    if state == State::Bye {
        raw.send(&control(&Control::Bye))?;
    }
    lanes.insert(0, raw);
    Ok(lanes)
}

/// Every control message and every kind of frame, right and wrong, with its name.
fn messages(raw: &Raw, descriptor: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut all: Vec<(String, Vec<u8>)> = Vec::new();
    for message in controls(raw, descriptor) {
        let name = format!("{message:?}").chars().take(50).collect();
        all.push((name, control(&message)));
    }
    let parsed = Descriptor::from_bytes(descriptor).ok();
    let first = |head: &mut Header| {
        head.sequence = 1.into();
        if let Some(descriptor) = &parsed {
            head.token = descriptor.token;
            head.grant = descriptor.grant.index.into();
            head.generation = descriptor.grant.generation.into();
        }
    };
    let mut add = |name: &str, bytes: Vec<u8>| all.push((name.to_owned(), bytes));
    add("a write", frame(Kind::Write, first, &[], &[0xAB; 100]));
    add("a write behind the grant", frame(Kind::Write, first, &[(4000, 100)], &[0xAB; 100]));
    add("a write of the last byte and more", frame(Kind::Write, first, &[(u64::MAX, 2)], &[1; 2]));
    add("a read", frame(Kind::Read, first, &[(0, 4096)], &[]));
    add("a read behind the grant", frame(Kind::Read, first, &[(4095, 2)], &[]));
    add("a notification", frame(Kind::Notify, first, &[], b"hostile"));
    let long = frame(Kind::Notify, first, &[], &vec![1; MAX_NOTIFICATION]);
    add("half a notification", long[..1000].to_vec());
    let mut pull = frame(Kind::Pull, first, &[], &[0; 20]);
    pull[6] = 1;
    add("a pull", pull);
    for kind in
        [Kind::ReadData, Kind::Count, Kind::Ack, Kind::Nack, Kind::Pulled, Kind::Beat, Kind::Cancel]
    {
        add(&format!("{kind:?}"), frame(kind, first, &[], &[]));
    }
    add("half a header", frame(Kind::Beat, first, &[], &[])[..30].to_vec());
    add("random bytes", Random::new(7).bytes(300));
    add("a TLS hello", raw.client_hello().unwrap_or_default());
    all
}

fn controls(raw: &Raw, descriptor: &[u8]) -> Vec<Control> {
    let lane = |lane: u16| raw.proof(Side::Opener, "lane", &lane.to_le_bytes()).unwrap_or_default();
    let session = raw.session;
    let end = QueueEnd {
        port: 0,
        number: 1,
        first_packet: 1,
        key: 1,
        to: 1,
        reads: 1,
        receives: 1,
        flush_addr: 1,
        flush_key: 1,
    };
    let import = Import {
        access: Access::READ_WRITE,
        len: 4096,
        base: 0,
        gate: None,
        pass: 0,
        mapping: None,
        keys: Vec::new(),
        flush: false,
        kind: peerway_core::region::MemoryKind::Host,
        gpu: None,
    };
    let mut all = vec![
        raw.hello(),
        Control::OpenLane { session, lane: 1, proof: lane(1) },
        Control::OpenLane { session, lane: 1, proof: lane(2) },
        Control::OpenLane { session: [9; 16], lane: 1, proof: lane(1) },
        Control::OpenLane { session, lane: 0, proof: lane(0) },
        Control::OpenLane { session, lane: u16::MAX, proof: lane(u16::MAX) },
        Control::Welcome(Welcome {
            data: DataProtection::Off,
            detect_ms: 1,
            metadata: vec![0; 10],
            host: Vec::new(),
            local: String::new(),
            local_why: String::new(),
            rdma: Vec::new(),
            rdma_why: String::new(),
        }),
        Control::LaneOpened { proof: [0; 32] },
        Control::Ready(ready()),
        Control::Refuse(Refusal::Exists),
        Control::Refuse(Refusal::Limit("a long reason ".repeat(100))),
        Control::Import { request: 1, descriptor: descriptor.to_vec() },
        Control::Import { request: 1, descriptor: vec![0xFF; 64] },
        Control::Importing { request: 1 },
        Control::Imported { request: 1, result: Ok(import) },
        Control::LaneLost { lane: 0, generation: 0 },
        Control::LaneLost { lane: 1, generation: 0 },
        Control::LaneLost { lane: 999, generation: 0 },
        Control::LaneFenced {
            lane: 1,
            generation: 0,
            applied: u64::MAX,
            refused: vec![(1, 1)],
            immediates: 1,
        },
        Control::OpenQueues {
            queues: vec![QueueOffer { lane: 1, to_port: 0, latency: true, end }; 3],
        },
        Control::QueuesOpened { queues: vec![(1, Ok(end)), (2, Err("why".into()))] },
        Control::Bye,
        Control::Admit(Admission::Secret([1; 32])),
        Control::Keys { keys: vec![(1, 2); 100] },
    ];
    if let Control::Hello(hello) = raw.hello() {
        let of = raw.session;
        all.push(Control::Hello(Hello { incarnation: Incarnation([4; 16]), ..hello.clone() }));
        let sub_session = Some(SubSession { number: 1, of });
        all.push(Control::Hello(Hello { sub_session, ..hello.clone() }));
        all.push(Control::Hello(Hello { replaces: Some(of), lanes: u16::MAX, ..hello }));
    }
    all
}
