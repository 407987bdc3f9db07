//! A peer is killed in mid-transfer.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway::{Batch, Reason};
use peerway_testkit::memory;

use crate::healthy::Healthy;
use crate::hooks;
use crate::world::{GONE, Verdict, World, allowed, fine, fine_with};

/// Delay of every copy, so that the scenario can catch transfers in flight.
const SLOW_US: u64 = 1000;

pub(crate) fn target(world: &World) -> Result<Verdict> {
    let mut longest = Duration::ZERO;
    for direction in ["write", "read"] {
        world.step(direction);
        let mut pair = world.pair()?;
        let healthy = Healthy::start(world, &pair.a)?;
        let remote = pair.theirs("r", world.profile.big, world.memory(), 1)?;
        let ours = world.region(&pair.a, world.profile.big)?;
        pair.b.ask(&format!("hook slow {SLOW_US}"))?;
        hooks::slow(SLOW_US);
        let batch = match direction {
            "write" => Batch::write(&ours.all(), &remote.all())?,
            _ => Batch::read(&ours.all(), &remote.all())?,
        };
        let transfer = pair.peer.post(&batch)?;
        ensure!(world.in_flight(&transfer)?, "the {direction} was over before the kill");
        pair.b.child()?.kill_soon()?;
        let start = Instant::now();
        let ended = world.ends(&transfer, world.profile.deadline)?;
        let took = start.elapsed();
        hooks::off();
        // Mapped memory outlives its owner, so a write to it may still succeed.
        let done = [GONE, Reason::Done];
        let reasons = if world.transport.writes_alone() { &done[..] } else { &done[..1] };
        allowed(ended, reasons)?;
        ensure!(
            took < world.profile.detect + world.profile.slack,
            "the death of a peer was noticed after {took:?}"
        );
        longest = longest.max(took);
        if ended.reason == GONE {
            let again = pair.a.connect(&pair.b.metadata);
            ensure!(again.is_err(), "connecting to a dead peer succeeded");
        }
        world.step("posts to the dead peer fail");
        let until = Instant::now() + world.profile.slack;
        while pair.peer.is_alive() {
            ensure!(Instant::now() < until, "a dead peer is still reported as alive");
            std::thread::sleep(Duration::from_millis(5));
        }
        ensure!(pair.peer.post(&batch).is_err(), "a transfer to a dead peer was posted");
        ensure!(pair.peer.notify(b"x").is_err(), "a notification to a dead peer was posted");
        healthy.finish(world)?;
    }
    fine_with(format!("noticed within {} ms", longest.as_millis()))
}

pub(crate) fn initiator(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    pair.b.accept()?;
    let healthy = Healthy::start(world, &pair.a)?;
    let len = world.profile.big;
    let region = pair.lend(world, len)?;
    pair.b.ask(&format!("hook slow {SLOW_US}"))?;
    hooks::slow(SLOW_US);
    pair.b.ask(&format!("post t p write r 0 x 0 {len}"))?;
    let before = memory::hash(&region, 0, len)?;
    let until = Instant::now() + world.profile.deadline;
    while memory::hash(&region, 0, len)? == before {
        ensure!(Instant::now() < until, "no byte arrived");
    }
    pair.b.child()?.kill()?;
    hooks::off();
    world.step("revoke after the peer's death");
    let start = Instant::now();
    let fence = region.revoke();
    let took = start.elapsed();
    ensure!(took < world.profile.fence + world.profile.slack, "revoke took {took:?}");
    // The peer is dead, so no copy of it is still pending.
    ensure!(fence == peerway::Fence::Held, "revoke after the peer's death: {fence:?}");
    memory::stays(&region, world.profile.watch)?;
    let new = memory::count_new(&region, 1, 2)
        .context("the region holds bytes that are neither old nor new")?;
    healthy.finish(world)?;
    if new == 0 {
        return fine();
    }
    fine_with(format!("{} of {} KiB had arrived", new >> 10, len >> 10))
}
