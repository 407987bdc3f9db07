//! Limits of handshakes, sessions, lanes and descriptors, for each address and for all.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use peerway_core::wire::{Control, Refusal};
use peerway_testkit::random::Random;
use peerway_testkit::raw::Raw;
use rustix::net::{AddressFamily, SocketType};

use super::refusals::refusals;
use crate::options::Options;
use crate::world::{Verdict, World, fine_with};

/// The defaults of the settings.
const SESSIONS_PER_ADDRESS: usize = 64;
const HANDSHAKES_PER_ADDRESS: usize = 16;
const LANES: u16 = 16;
/// The descriptor limit of a victim with few descriptors, and how many of them stay free.
const FEW: u64 = 320;
const KEPT_FREE: u64 = FEW / 16;
/// An acceptor drops no handshake that is younger than this.
const GRACE: Duration = Duration::from_millis(250);

const NEAR: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const ELSEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut random = Random::new(0x11417);
    // Nothing of this scenario ends because of its age or its silence.
    let long = world.profile.limit;
    let patient = Options { connect: long, detect: long, ..world.options() };

    world.step("sessions of one address");
    let b = world.remote(&patient)?;
    let mut sessions = Vec::new();
    for _ in 0..SESSIONS_PER_ADDRESS {
        sessions.push(session(b.addr()?, NEAR, &mut random, 0)?);
    }
    let mut more = connect(b.addr()?, NEAR, &mut random)?;
    let why = limit(more.ask(|_| ())?).context("a session over the limit")?;
    ensure!(why.contains("PEERWAY_MAX_SESSIONS_PER_ADDRESS"), "the reason is {why:?}");
    session(b.addr()?, ELSEWHERE, &mut random, 0).context("a session from another address")?;

    world.step("lanes of one session");
    let lanes = session(b.addr()?, ELSEWHERE, &mut random, LANES)?;
    let mut raw = connect(b.addr()?, ELSEWHERE, &mut random)?;
    greet(&mut raw, 64)?;
    let mut one = connect(b.addr()?, ELSEWHERE, &mut random)?;
    let answer = raw.ask_for_lane(&mut one, LANES + 1)?;
    let why = limit(answer).context("a lane over the limit")?;
    ensure!(why.contains("PEERWAY_MAX_LANES"), "the reason is {why:?}");
    drop((sessions, lanes));

    world.step("handshakes of one address");
    let b = world.remote(&patient)?;
    let mut neighbour = connect(b.addr()?, NEAR, &mut random)?;
    greet(&mut neighbour, 1)?;
    let crowd = |random: &mut Random| {
        let all = (0..HANDSHAKES_PER_ADDRESS).map(|_| connect(b.addr()?, ELSEWHERE, random));
        all.collect::<Result<Vec<_>>>()
    };
    let mut old = crowd(&mut random)?;
    std::thread::sleep(2 * GRACE);
    let mut new = crowd(&mut random)?;
    for raw in &mut old {
        ensure!(raw.is_hung_up(world.profile.slack), "an address keeps more than its share");
    }
    for raw in &mut new {
        ensure!(!raw.is_hung_up(Duration::from_millis(1)), "a young handshake was dropped");
    }
    neighbour.finish().context("a neighbour was dropped")?;
    drop((old, new));

    world.step("descriptors of the process");
    let mut b = world.remote(&patient)?;
    b.ask(&format!("descriptors {FEW}"))?;
    let mut sessions = Vec::new();
    while let Ok(session) = session(b.addr()?, NEAR, &mut random, LANES) {
        sessions.push(session);
        ensure!(sessions.len() < SESSIONS_PER_ADDRESS, "the victim has too many descriptors");
    }
    // The answer itself takes a descriptor, and an acceptor may go one too far.
    let held = b.ask("holdings")?;
    let fds: u64 = held.split(' ').next().context("no holdings")?.parse()?;
    let refused = refusals(&mut b)?.descriptors;
    ensure!(refused > 0, "no shortage of descriptors was counted");
    ensure!(fds <= FEW - KEPT_FREE + 2, "{fds} of {FEW} descriptors are in use");
    fine_with(format!("{} sessions with {FEW} descriptors", sessions.len()))
}

/// Connects from an address.
pub(super) fn connect(to: SocketAddr, from: IpAddr, random: &mut Random) -> Result<Raw> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
    rustix::net::bind(&socket, &SocketAddr::new(from, 0))?;
    rustix::net::connect(&socket, &to)?;
    Raw::over(TcpStream::from(socket), random)
}

/// Sends a hello that announces bulk lanes.
fn greet(raw: &mut Raw, lanes: u16) -> Result<()> {
    match raw.ask(|hello| hello.lanes = lanes)? {
        Control::Welcome(_) => Ok(()),
        other => bail!("a hello was answered with {other:?}"),
    }
}

/// Opens a session with bulk lanes.
pub(super) fn session(
    to: SocketAddr,
    from: IpAddr,
    random: &mut Random,
    lanes: u16,
) -> Result<Vec<Raw>> {
    let mut raw = connect(to, from, random)?;
    greet(&mut raw, lanes)?;
    let mut all = Vec::new();
    for lane in 1..=lanes {
        let mut one = connect(to, from, random)?;
        let answer = raw.ask_for_lane(&mut one, lane)?;
        ensure!(matches!(answer, Control::LaneOpened { .. }), "lane {lane} was not opened");
        all.push(one);
    }
    raw.finish()?;
    all.push(raw);
    Ok(all)
}

/// The sentence of a refusal.
fn limit(answer: Control) -> Result<String> {
    match answer {
        Control::Refuse(Refusal::Limit(why)) => Ok(why),
        other => bail!("the answer is {other:?}"),
    }
}
