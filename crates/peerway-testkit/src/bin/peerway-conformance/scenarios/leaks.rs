//! Connect, transfer, remove, many times: neither side leaks anything.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway::{Access, Endpoint};
use peerway_testkit::procfs::{self, Holdings};

use crate::remote::Remote;
use crate::world::{Verdict, World, fine_with};

/// Growth of resident memory that counts as noise: allocators keep some pages.
const NOISE_KIB: usize = 6 << 10;
/// Batches of rounds after which memory has stopped growing.
const BATCHES: u32 = 4;

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
    world.step("rounds");
    let rounds = world.profile.rounds;
    let start = Instant::now();
    let mut took = None;
    nothing_grows(world, &[("the opener", std::process::id()), ("the acceptor", b.pid())], || {
        for i in 0..rounds {
            round(world, &a, &mut b, i).with_context(|| format!("round {i}"))?;
        }
        took.get_or_insert_with(|| start.elapsed());
        Ok(rounds)
    })?;
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
    nothing_grows(world, &[("endpoints", std::process::id())], || {
        for _ in 0..rounds / 5 {
            make()?;
        }
        Ok(rounds / 5)
    })?;
    let each = took.unwrap_or_default().as_micros() / u128::from(rounds);
    fine_with(format!("{rounds} rounds, {each} µs each"))
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

/// Checks that a batch of rounds leaves nothing behind in these processes.
///
/// Memory has further tries: an allocator that serves new threads takes memory for a while and then
/// stops, but a leak grows in every batch.
fn nothing_grows(
    world: &World,
    processes: &[(&'static str, u32)],
    mut batch: impl FnMut() -> Result<u32>,
) -> Result<()> {
    for left in (0..BATCHES).rev() {
        let held = |(_, pid): &(_, u32)| procfs::holdings(*pid);
        let before: Vec<Holdings> = processes.iter().map(held).collect::<Result<_>>()?;
        let rounds = batch()?;
        let mut grown = 0;
        for ((name, pid), before) in processes.iter().zip(before) {
            grown = grown.max(comes_back(world, *pid, before).context(*name)?);
        }
        if grown < NOISE_KIB {
            break;
        }
        ensure!(left > 0, "memory grew in {BATCHES} batches; by {grown} KiB in the last {rounds}");
    }
    Ok(())
}

/// Waits until a process holds no more than before, and fails if its memory has grown.
pub(super) fn nothing_is_left(world: &World, pid: u32, before: Holdings) -> Result<()> {
    let grown = comes_back(world, pid, before)?;
    ensure!(grown < NOISE_KIB, "memory grew by {grown} KiB");
    Ok(())
}

/// Waits until a process holds no more than before: removed sessions go away with a delay. Returns
/// the KiB by which its memory has grown.
fn comes_back(world: &World, pid: u32, before: Holdings) -> Result<usize> {
    let until = Instant::now() + world.profile.slack;
    loop {
        let after = procfs::holdings(pid)?;
        let grown = after.resident_kib.saturating_sub(before.resident_kib);
        match same(before, after) {
            Ok(()) if grown < NOISE_KIB || Instant::now() >= until => return Ok(grown),
            Err(error) if Instant::now() >= until => return Err(error),
            _ => std::thread::sleep(Duration::from_millis(50)),
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

fn same(before: Holdings, after: Holdings) -> Result<()> {
    // A few objects may still be closing.
    ensure!(after.fds <= before.fds + 4, "descriptors: {before:?} then {after:?}");
    ensure!(after.threads <= before.threads + 2, "threads: {before:?} then {after:?}");
    ensure!(after.maps <= before.maps + 16, "mappings: {before:?} then {after:?}");
    Ok(())
}
