//! Revoke and cancel in the middle of a frame: little memory and very slow copies, so that what
//! lands after the fence has nowhere to hide. Where payload travels in frames, a frame is made to
//! land in many calls, and what has landed at the fence must end inside one.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway::{Access, Batch, Fence, Reason};
use peerway_core::wire::MAX_PAYLOAD as FRAME;
use peerway_testkit::memory;

use crate::hooks;
use crate::world::{REVOKED, Verdict, World, allowed, fine_with};

/// A few frames, looked over in a millisecond.
const LEN: u64 = 4 << 20;
/// Every copy waits this long, inside its gate; a fence must wait for one of them at most.
const SLOW_US: u64 = 40_000;
/// What one call lands of a frame: a hundredth, so that the moment between two frames is hard to hit.
const LANDING: u64 = FRAME / 100;
/// A landing of a write waits this long: a frame takes half a second then, longer than the owner
/// takes to see its first bytes.
const LANDING_US: u64 = 5000;
/// And one of a read, so that a turn of the driver's, after which it looks for a cancel, takes less.
const TURN_LANDING_US: u64 = 1000;
/// Longer than some copies take.
const LATER: Duration = Duration::from_millis(300);
const TRIES: u32 = 5;

/// The owner is this process, so that it can look at its memory the moment the fence is held.
pub(crate) fn revoke(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    pair.b.accept()?;
    let len = some_frames(world);
    pair.b.region("r", len, world.memory())?;
    pair.b.ask("fill r 2")?;
    let framed = world.transport.is_framed();
    let slow = if framed { LANDING_US } else { SLOW_US };
    let mut arrived = Vec::new();
    for _ in 0..TRIES {
        let region = world.region(&pair.a, len)?;
        memory::fill_all(&region, 1)?;
        pair.b.import("x", &region.advertise(Access::READ_WRITE)?)?;
        hooks::land_at_most(LANDING);
        hooks::slow(slow);
        pair.b.ask(&format!("hook slow {slow}"))?;
        pair.b.ask(&format!("post t p write r 0 x 0 {len}"))?;
        // The beginning of every frame: to look at all of it takes an emulated machine too long.
        let frames = || (0..len / FRAME).map(|frame| frame * FRAME);
        caught(world, || Ok(frames().any(|at| memory::check(&region, 1, at, at, 64).is_err())))?;
        let fence = region.revoke();
        ensure!(fence == Fence::Held, "nobody is stopped, yet the fence is {fence:?}");
        let hash = memory::hash(&region, 0, len)?;
        let new = memory::count_new(&region, 1, 2)?;
        std::thread::sleep(LATER);
        ensure!(memory::hash(&region, 0, len)? == hash, "Held, but bytes landed afterwards");
        ensure!(new > 0 && new < len, "{new} of {len} bytes had arrived: not in flight");
        ensure!(!framed || new % FRAME != 0, "{new} bytes had arrived: whole frames");
        arrived.push(format!("{} KiB", new >> 10));
        hooks::off();
        pair.b.ask("hook off")?;
        let ended = pair.b.ask("wait t 10000")?;
        ensure!(ended.starts_with(&format!("{REVOKED:?}")), "the revoked write: {ended}");
    }
    fine_with(format!("at {}", arrived.join(", ")))
}

pub(crate) fn cancel_read(world: &World) -> Result<Verdict> {
    let framed = world.transport.is_framed();
    // A driver takes a turn's bytes before it looks for a cancel: there must be more than that.
    let (len, slow) =
        if framed { (2 * LEN, TURN_LANDING_US) } else { (some_frames(world), SLOW_US) };
    let mut pair = world.pair()?;
    let remote = pair.theirs("r", len, world.memory(), 1)?;
    let ours = world.region(&pair.a, len)?;
    let mut arrived = Vec::new();
    let mut inside = 0;
    for _ in 0..TRIES {
        memory::fill_all(&ours, 2)?;
        hooks::land_at_most(LANDING);
        hooks::slow(slow);
        let transfer = pair.peer.post(&Batch::read(&ours.all(), &remote.all())?)?;
        caught(world, || Ok(memory::check(&ours, 2, 0, 0, 64).is_err()))?;
        transfer.cancel();
        let ended = world.ends_soon(&transfer)?;
        allowed(ended, &[Reason::Cancelled])?;
        ensure!(ended.fence == Fence::Held, "a cancelled read has an open fence");
        let new = memory::count_new(&ours, 2, 1)?;
        memory::fill_all(&ours, 3)?;
        std::thread::sleep(LATER);
        hooks::off();
        memory::check(&ours, 3, 0, 0, len).context("a cancelled read touched its buffer")?;
        ensure!(new > 0 && new < len, "{new} of {len} bytes had arrived: not in flight");
        inside += u32::from(new % FRAME != 0);
        arrived.push(format!("{} KiB", new >> 10));
    }
    // Where the driver's turn is over is no choice of ours, so one of many may end with a frame.
    ensure!(!framed || inside > TRIES / 2, "{inside} of {TRIES} cancels came inside a frame");
    pair.works_again(world)?;
    fine_with(format!("at {}", arrived.join(", ")))
}

/// More than what a post hands to devices by itself.
fn some_frames(world: &World) -> u64 {
    if world.transport.is_device() { 4 * LEN } else { LEN }
}

fn caught(world: &World, mut arrives: impl FnMut() -> Result<bool>) -> Result<()> {
    let until = Instant::now() + world.profile.deadline;
    while !arrives()? {
        ensure!(Instant::now() < until, "no byte arrived");
    }
    Ok(())
}
