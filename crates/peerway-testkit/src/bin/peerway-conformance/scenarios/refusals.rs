//! Strangers against every limit of an endpoint, beside an honest peer. Each refusal is counted
//! under its own reason and no other.

use std::io::Read;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::{Access, MAX_NOTIFICATION};
use peerway_core::wire::{Control, HEADER_LEN, Header, Kind, Refusal};
use peerway_testkit::procfs;
use peerway_testkit::random::Random;
use peerway_testkit::raw::{Raw, control, frame};
use zerocopy::FromBytes;

use super::garbage::Victim;
use super::leaks::nothing_is_left;
use super::limits::{connect, session};
use crate::options::Options;
use crate::remote::Remote;
use crate::world::{Verdict, World, fine_with};

/// The defaults of the settings, see SECURITY.md.
const SESSIONS_PER_ADDRESS: usize = 64;
const HANDSHAKES_PER_ADDRESS: usize = 16;
const LANES: u16 = 16;
/// The longest messages that one session may have half received.
const MESSAGES: u16 = 4;
/// One peer has an eighth of the 65,536 messages and of the counter ids.
const SHARE: u64 = 8192;
/// More than the share of one peer.
const OVER: u64 = 200;
/// An acceptor drops no handshake that is younger than this.
const GRACE: Duration = Duration::from_millis(250);
/// More answers than a peer may leave unread: 1 MiB, of 70 bytes and more.
const QUESTIONS: usize = 60_000;
/// Rounds of the usual profile have this many tries for each round here.
const TRIES_A_ROUND: u32 = 200;

/// The refusals of an endpoint, in the order of the servant's answer. `stranger-messages` has the
/// limit of slow messages, `stranger-limits` that of descriptors.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Refusals {
    handshakes: u64,
    sessions: u64,
    lanes: u64,
    pub(super) descriptors: u64,
    message_bytes: u64,
    pub(super) slow_messages: u64,
    notifications: u64,
    counters: u64,
    without_right: u64,
}

pub(crate) fn run(world: &World) -> Result<Verdict> {
    // No stranger is dropped for its age or its silence.
    let long = world.profile.limit;
    let patient = Options { connect: long, detect: long, ..world.options() };
    let mut victim = Victim::with(world, &patient)?;
    victim.b.region("bait", 4096, world.memory())?;
    let descriptor = victim.b.advertise("bait", Access::READ)?;
    let pid = victim.b.pid();
    let rounds = 1 + (world.profile.tries / TRIES_A_ROUND).max(1);
    let mut before = None;
    for round in 0..rounds {
        all_limits(world, &mut victim, &descriptor, u64::from(round))
            .with_context(|| format!("round {round}"))?;
        let drained = victim.b.ask("drain e")?;
        world.step(format!("{drained} messages waited"));
        // The first round fills the counters, which stay, and the allocator's pools.
        match before {
            None => {
                // The sessions of the round go with a delay.
                let any = procfs::Holdings { resident_kib: 1 << 30, ..victim.held };
                nothing_is_left(world, pid, any)?;
                before = Some(procfs::holdings(pid)?);
            }
            Some(before) => nothing_is_left(world, pid, before).context("the victim")?,
        }
    }
    victim.finish(world)?;
    fine_with(format!("{rounds} rounds"))
}

fn all_limits(world: &World, victim: &mut Victim, descriptor: &[u8], round: u64) -> Result<()> {
    let mut random = Random::new(0x4EF + round);
    let addr = victim.b.addr()?;
    // Each step has an address of its own, so that the sessions of one do not count for another.
    let mut next = 20 + (round as u8 % 20) * 10;
    let mut from = || {
        next += 1;
        IpAddr::V4(Ipv4Addr::new(127, 0, 0, next))
    };

    world.step("sessions of one address");
    let here = from();
    let before = refusals(&mut victim.b)?;
    let mut sessions = Vec::new();
    for _ in 0..SESSIONS_PER_ADDRESS {
        sessions.push(session(addr, here, &mut random, 0)?);
    }
    for _ in 0..3 {
        let answer = connect(addr, here, &mut random)?.ask(|_| ())?;
        ensure!(matches!(answer, Control::Refuse(Refusal::Limit(_))), "the answer is {answer:?}");
    }
    expect(world, victim, Refusals { sessions: before.sessions + 3, ..before })?;
    drop(sessions);

    world.step("lanes of one session");
    let before = refusals(&mut victim.b)?;
    let here = from();
    let mut raw = connect(addr, here, &mut random)?;
    raw.ask(|hello| hello.lanes = 64)?;
    for lane in [LANES + 1, u16::MAX] {
        let mut one = connect(addr, here, &mut random)?;
        let answer = raw.ask_for_lane(&mut one, lane)?;
        ensure!(matches!(answer, Control::Refuse(Refusal::Limit(_))), "the answer is {answer:?}");
    }
    // A lane without a proof learns nothing and is not a matter of limits.
    let mut one = connect(addr, here, &mut random)?;
    one.send(&control(&Control::OpenLane { session: raw.session, lane: 20, proof: [0; 32] }))?;
    let answer = one.control()?;
    ensure!(matches!(answer, Control::Refuse(Refusal::UnknownSession)), "{answer:?}");
    expect(world, victim, Refusals { lanes: before.lanes + 2, ..before })?;
    drop(raw);

    world.step("handshakes of one address");
    let before = refusals(&mut victim.b)?;
    let here = from();
    let crowd = |random: &mut Random| -> Result<Vec<Raw>> {
        (0..HANDSHAKES_PER_ADDRESS).map(|_| connect(addr, here, random)).collect()
    };
    let old = crowd(&mut random)?;
    std::thread::sleep(2 * GRACE);
    let new = crowd(&mut random)?;
    let dropped = HANDSHAKES_PER_ADDRESS as u64;
    expect(world, victim, Refusals { handshakes: before.handshakes + dropped, ..before })?;
    drop((old, new));

    world.step("half-received messages of one session");
    let before = refusals(&mut victim.b)?;
    let mut lanes = session(addr, from(), &mut random, MESSAGES + 2)?;
    let whole = frame(Kind::Notify, |h| h.sequence = 1.into(), &[], &vec![1; MAX_NOTIFICATION]);
    for lane in lanes.iter_mut().take(usize::from(MESSAGES) + 2) {
        lane.send(&whole[..HEADER_LEN + 100])?;
    }
    expect(world, victim, Refusals { message_bytes: before.message_bytes + 2, ..before })?;
    drop(lanes);

    world.step("counts without a right");
    let before = refusals(&mut victim.b)?;
    let mut stranger = open(victim, from(), &mut random)?;
    flood(world, &mut stranger, Kind::Count, OVER)?;
    expect(world, victim, Refusals { without_right: before.without_right + OVER, ..before })?;

    world.step("notifications of one peer");
    let before = refusals(&mut victim.b)?;
    flood(world, &mut stranger, Kind::Notify, SHARE + OVER)?;
    expect(world, victim, Refusals { notifications: before.notifications + OVER, ..before })?;
    drop(stranger);

    world.step("counters of one peer");
    let before = refusals(&mut victim.b)?;
    let mut guest = open(victim, from(), &mut random)?;
    guest.send(&control(&Control::Import { request: 1, descriptor: descriptor.to_vec() }))?;
    flood(world, &mut guest, Kind::Count, SHARE + OVER)?;
    // The ids of an earlier round count for the peer that began them, and rise without a limit.
    let refused = if round == 0 { OVER } else { 0 };
    expect(world, victim, Refusals { counters: before.counters + refused, ..before })?;
    drop(guest);

    world.step("a peer asks and does not read");
    let before = refusals(&mut victim.b)?;
    let mut lanes = session(addr, from(), &mut random, 1)?;
    let questions: Vec<u8> = (0..QUESTIONS)
        .flat_map(|at| {
            control(&Control::LaneLost { lane: 100 + (at % 60_000) as u16, generation: 0 })
        })
        .collect();
    // The questions go on the bulk lane. Their answers leave on the first connection.
    let until = Instant::now() + world.profile.slack;
    let _ = lanes[0].send(&questions);
    while !lanes[0].is_hung_up(Duration::from_millis(200)) {
        ensure!(Instant::now() < until, "a peer may leave any number of answers unread");
        let _ = lanes[0].send(&questions);
    }
    expect(world, victim, before)
}

fn open(victim: &Victim, from: IpAddr, random: &mut Random) -> Result<Raw> {
    let mut raw = connect(victim.b.addr()?, from, random)?;
    raw.open()?;
    Ok(raw)
}

/// Sends frames of one kind, and reads until all are answered.
fn flood(world: &World, raw: &mut Raw, kind: Kind, frames: u64) -> Result<()> {
    let until = Instant::now() + world.profile.limit;
    for at in 0..frames {
        raw.sequence += 1;
        let sequence = raw.sequence;
        let set = |head: &mut Header| {
            (head.sequence, head.immediate) = (sequence.into(), (at as u32).into());
        };
        raw.send(&frame(kind, set, &[], &[]))?;
        if at % 256 == 255 || at + 1 == frames {
            while acknowledged(raw)? < raw.sequence {
                ensure!(Instant::now() < until, "frame {sequence} was not answered");
            }
        }
    }
    Ok(())
}

/// Reads a frame. Returns the number that it acknowledges, or 0.
fn acknowledged(raw: &mut Raw) -> Result<u64> {
    let mut head = [0; HEADER_LEN];
    raw.stream.read_exact(&mut head).context("the endpoint closed the lane of a flood")?;
    let head = Header::read_from_bytes(&head).ok().context("a header")?;
    let checked = head.check()?;
    let mut body = vec![0; checked.table + checked.payload];
    raw.stream.read_exact(&mut body)?;
    match checked.kind {
        Kind::Ack => return Ok(head.sequence.get()),
        // A flood on a busy machine may take longer than the detection time.
        Kind::Beat => {
            raw.send(&frame(Kind::Beat, |beat| beat.transfer = head.sequence, &[], &[]))?;
        }
        _ => {}
    }
    Ok(0)
}

/// Waits until the victim has counted exactly these refusals.
fn expect(world: &World, victim: &mut Victim, expected: Refusals) -> Result<()> {
    let until = Instant::now() + world.profile.slack;
    loop {
        let found = refusals(&mut victim.b)?;
        // Handshakes that are cut off while another step waits are counted as such.
        let found = Refusals { handshakes: found.handshakes.min(expected.handshakes), ..found };
        if found == expected {
            return Ok(());
        }
        ensure!(Instant::now() < until, "the refusals are {found:?}, expected {expected:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(super) fn refusals(b: &mut Remote) -> Result<Refusals> {
    let answer = b.ask("refusals e")?;
    let numbers: Vec<u64> =
        answer.split(' ').map(str::parse).collect::<std::result::Result<_, _>>()?;
    let [
        handshakes,
        sessions,
        lanes,
        descriptors,
        message_bytes,
        slow_messages,
        notifications,
        counters,
        without_right,
    ] = numbers[..]
    else {
        bail!("the answer is {answer:?}");
    };
    Ok(Refusals {
        handshakes,
        sessions,
        lanes,
        descriptors,
        message_bytes,
        slow_messages,
        notifications,
        counters,
        without_right,
    })
}
