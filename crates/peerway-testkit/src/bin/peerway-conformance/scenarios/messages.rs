//! Peers that begin messages and do not finish them. They hold a bounded amount of memory for a
//! bounded time, and an honest peer beside them succeeds.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::{Access, MAX_NOTIFICATION};
use peerway_core::wire::{Control, HEADER_LEN, Header, Kind};
use peerway_testkit::random::Random;
use peerway_testkit::raw::{Raw, frame};
use zerocopy::FromBytes;

use super::refusals::refusals;
use crate::options::Options;
use crate::remote::Remote;
use crate::world::{Verdict, World, fine_with};

/// The longest messages that one session, and all strangers together, may have half received: 4 and
/// 32 MiB.
const OF_SESSION: usize = 4;
const OF_STRANGERS: usize = 32;
/// An endpoint waits this many detection times for the rest of a message.
const MESSAGE_DETECTS: u32 = 16;
/// A peer can raise the detection time this many times.
const DETECT_TIMES: u32 = 4;

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut random = Random::new(0x3e55);
    budgets(world, &mut random)?;
    let mut b = world.remote(&world.options())?;
    let addr = b.addr()?;

    world.step("a peer sends single bytes");
    let mut slow = Lanes::open(addr, &mut random, 1)?;
    slow.begin_messages()?;
    let until = Instant::now() + world.profile.detect * MESSAGE_DETECTS + world.profile.slack;
    slow.streams[0].set_read_timeout(Some(Duration::from_millis(100)))?;
    while !is_hung_up(&mut slow.streams[0])? {
        ensure!(Instant::now() < until, "a message that never ends is waited for");
        let _ = slow.streams[0].write(&[0]);
        slow.raw.send(&frame(Kind::Beat, |head| head.sequence = 1.into(), &[], &[]))?;
    }
    // The other lane of the session has the reason.
    let why = slow.refusal(world)?;
    ensure!(why.contains("notification"), "the reason is {why:?}");
    let refused = refusals(&mut b)?.slow_messages;
    ensure!(refused == 1, "{refused} slow messages were counted");

    world.step("a silent peer that asks for a long detection time");
    let mut silent = Lanes::open(addr, &mut random, 1)?;
    let patience = world.profile.detect * DETECT_TIMES + world.profile.slack;
    ensure!(silent.raw.is_hung_up(patience), "a peer chose its own detection time");
    fine_with("")
}

fn budgets(world: &World, random: &mut Random) -> Result<()> {
    // The strangers are silent, and must not be dropped for that.
    let patient = Options { detect: world.profile.limit, ..world.calm() };
    let mut b = world.remote(&patient)?;
    let addr = b.addr()?;
    let honest = patient.build()?;
    let peer = world.connect(&honest, &b)?;
    b.region("r", 4096, world.memory())?;
    peer.import(&b.advertise("r", Access::READ)?)?;
    let fds = descriptors(&mut b)?;

    for round in ["many sessions begin messages", "the budget has come back"] {
        world.step(round);
        let mut held = Vec::new();
        for _ in 0..OF_STRANGERS / OF_SESSION {
            let mut lanes = Lanes::open(addr, random, OF_SESSION as u16 + 2)?;
            lanes.begin_messages()?;
            lanes.wait_for_answers(world, 2).context("of one session")?;
            held.push(lanes);
        }
        let mut more = Lanes::open(addr, random, OF_SESSION as u16)?;
        more.begin_messages()?;
        more.wait_for_answers(world, OF_SESSION).context("of all strangers")?;
        let message = vec![7; MAX_NOTIFICATION];
        peer.notify(&message)?.join().ok().context("an honest message beside the strangers")?;
        for lanes in &mut held {
            lanes.wait_for_answers(world, 2).context("of one session, later")?;
        }
        drop((held, more));
        let until = Instant::now() + world.profile.slack;
        while descriptors(&mut b)? > fds {
            ensure!(Instant::now() < until, "the lanes of the strangers stay open");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

/// Open descriptors of the victim.
fn descriptors(b: &mut Remote) -> Result<u64> {
    let held = b.ask("holdings")?;
    Ok(held.split(' ').next().context("no holdings")?.parse()?)
}

/// A session with bulk lanes.
struct Lanes {
    raw: Raw,
    streams: Vec<TcpStream>,
    refused: Vec<bool>,
}

impl Lanes {
    fn open(addr: SocketAddr, random: &mut Random, lanes: u16) -> Result<Self> {
        let mut raw = Raw::connect(addr, random)?;
        match raw.ask(|hello| (hello.lanes, hello.detect_ms) = (lanes, u32::MAX))? {
            Control::Welcome(_) => {}
            other => bail!("a hello was answered with {other:?}"),
        }
        let mut streams = Vec::new();
        for lane in 1..=lanes {
            let mut more = Raw::connect(addr, random)?;
            let answer = raw.ask_for_lane(&mut more, lane)?;
            ensure!(matches!(answer, Control::LaneOpened { .. }), "lane {lane} was not opened");
            streams.push(more.stream);
        }
        raw.finish()?;
        let refused = vec![false; streams.len()];
        Ok(Self { raw, streams, refused })
    }

    /// Begins the longest message on each bulk lane.
    fn begin_messages(&mut self) -> Result<()> {
        let whole =
            frame(Kind::Notify, |head| head.sequence = 1.into(), &[], &vec![1; MAX_NOTIFICATION]);
        for stream in &mut self.streams {
            stream.write_all(&whole[..HEADER_LEN + 100])?;
        }
        Ok(())
    }

    /// The number of messages that the endpoint has refused so far.
    fn answered(&mut self) -> Result<usize> {
        for (stream, refused) in self.streams.iter_mut().zip(&mut self.refused) {
            stream.set_read_timeout(Some(Duration::from_millis(20)))?;
            let mut head = [0; HEADER_LEN];
            while !*refused && stream.peek(&mut head).is_ok_and(|n| n == HEADER_LEN) {
                stream.read_exact(&mut head)?;
                let head = Header::read_from_bytes(&head).ok().context("a header")?;
                *refused = head.check()?.kind == Kind::Nack;
            }
        }
        Ok(self.refused.iter().filter(|refused| **refused).count())
    }

    /// Waits until the endpoint has refused this many messages.
    fn wait_for_answers(&mut self, world: &World, wanted: usize) -> Result<()> {
        let until = Instant::now() + world.profile.slack;
        loop {
            let refused = self.answered()?;
            ensure!(refused <= wanted, "{refused} messages were refused, {wanted} should be");
            if refused == wanted {
                return Ok(());
            }
            ensure!(Instant::now() < until, "{refused} messages were refused, {wanted} should be");
        }
    }

    /// The reason that the endpoint gives on the first lane.
    fn refusal(&mut self, world: &World) -> Result<String> {
        let until = Instant::now() + world.profile.slack;
        while Instant::now() < until {
            let mut head = [0; HEADER_LEN];
            self.raw.stream.read_exact(&mut head).context("no reason on the first lane")?;
            let checked = Header::read_from_bytes(&head).ok().context("a header")?.check()?;
            let mut body = vec![0; checked.table + checked.payload];
            self.raw.stream.read_exact(&mut body)?;
            if checked.kind == Kind::Control
                && let Control::Refuse(why) = Control::from_bytes(&body)?
            {
                return Ok(format!("{why:?}"));
            }
        }
        bail!("the endpoint gives no reason")
    }
}

/// Whether the endpoint has closed the lane.
fn is_hung_up(stream: &mut TcpStream) -> Result<bool> {
    let mut buffer = [0; 4096];
    match stream.read(&mut buffer) {
        Ok(0) => Ok(true),
        Ok(_) => Ok(false),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(false),
        Err(_) => Ok(true),
    }
}
