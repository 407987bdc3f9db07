//! Connect, transfer, remove, many times: neither side leaks anything.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway::{Access, Endpoint};
use peerway_testkit::procfs::{self, Holdings};

use crate::remote::Remote;
use crate::world::{Verdict, World, fine_with};

/// Growth of resident memory that counts as noise: allocators keep some pages.
const NOISE_KIB: usize = 6 << 10;

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut options = world.calm();
    options.connect = world.profile.slack * 2;
    let a = options.build()?;
    let mut b = world.remote(&options)?;
    b.region("r", 4096, world.memory())?;
    world.step("warming up");
    let warm = (world.profile.rounds / 5).max(50);
    for i in 0..warm {
        round(world, &a, &mut b, i)?;
    }
    settle(&a);
    let before = (procfs::holdings(std::process::id())?, procfs::holdings(b.pid())?);
    world.step("rounds");
    let start = Instant::now();
    for i in 0..world.profile.rounds {
        round(world, &a, &mut b, i).with_context(|| format!("round {i}"))?;
    }
    let took = start.elapsed();
    let rounds = world.profile.rounds;
    comes_back(world, std::process::id(), before.0, rounds).context("the opener")?;
    comes_back(world, b.pid(), before.1, rounds).context("the acceptor")?;
    world.step("endpoints made and dropped");
    let make = || -> Result<()> {
        let endpoint = options.build()?;
        let peer = endpoint.connect(&a.metadata())?;
        let region = world.region(&endpoint, 100_000)?;
        let descriptor = region.advertise(Access::READ)?;
        let _ = (descriptor, region, peer);
        Ok(())
    };
    for _ in 0..30 {
        make()?;
    }
    settle(&a);
    let before = procfs::holdings(std::process::id())?;
    for _ in 0..world.profile.rounds / 5 {
        make()?;
    }
    comes_back(world, std::process::id(), before, rounds / 5).context("endpoints")?;
    let each = took.as_micros() / u128::from(world.profile.rounds);
    fine_with(format!("{} rounds, {each} µs each", world.profile.rounds))
}

fn round(world: &World, a: &Endpoint, b: &mut Remote, i: u32) -> Result<()> {
    let peer = world.connect(a, b)?;
    let remote = peer.import(&b.advertise("r", Access::READ_WRITE)?)?;
    let ours = world.region(a, 4096)?;
    ours.fill(0, 4096, i as u8)?;
    peer.write(&ours.all(), &remote.all())?;
    peer.read(&ours.all(), &remote.all())?;
    if i.is_multiple_of(2) {
        // Every second round also creates a grant on this side.
        ours.advertise(Access::READ)?;
    }
    peer.remove();
    Ok(())
}

/// Waits until a process holds no more than before: removed sessions go away with a delay.
pub(super) fn comes_back(world: &World, pid: u32, before: Holdings, rounds: u32) -> Result<()> {
    let until = Instant::now() + world.profile.slack;
    loop {
        match same(before, procfs::holdings(pid)?, rounds) {
            Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(50)),
            ended => return ended,
        }
    }
}

/// Gives both sides time to release removed sessions.
fn settle(a: &Endpoint) {
    let until = Instant::now() + Duration::from_secs(2);
    while !a.peers().is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_millis(300));
}

fn same(before: Holdings, after: Holdings, rounds: u32) -> Result<()> {
    // A few objects may still be closing.
    ensure!(after.fds <= before.fds + 4, "descriptors: {before:?} then {after:?}");
    ensure!(after.threads <= before.threads + 2, "threads: {before:?} then {after:?}");
    ensure!(after.maps <= before.maps + 16, "mappings: {before:?} then {after:?}");
    let grown = after.resident_kib.saturating_sub(before.resident_kib);
    ensure!(grown < NOISE_KIB, "memory grew by {grown} KiB in {rounds} rounds");
    Ok(())
}
