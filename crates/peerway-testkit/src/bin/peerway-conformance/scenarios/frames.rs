//! Revoke and cancel in the middle of a frame: little memory and very slow copies, so that what
//! lands after the fence has nowhere to hide.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway::{Access, Batch, Fence, Reason};
use peerway_testkit::memory;

use crate::hooks;
use crate::world::{REVOKED, Verdict, World, allowed, fine_with};

/// A few frames, looked over in a millisecond.
const LEN: u64 = 4 << 20;
/// Every copy waits this long, inside its gate; a fence must wait for one of them at most.
const SLOW_US: u64 = 40_000;
/// Longer than some copies take.
const LATER: Duration = Duration::from_millis(300);
/// Where a frame is cut is the network's choice: some tries find one half landed.
const TRIES: u32 = 5;

/// The owner is this process, so that it can look at its memory the moment the fence is held.
pub(crate) fn revoke(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    pair.b.accept()?;
    pair.b.region("r", LEN, world.memory())?;
    pair.b.ask("fill r 2")?;
    let mut arrived = Vec::new();
    for _ in 0..TRIES {
        let region = world.region(&pair.a, LEN)?;
        memory::fill_all(&region, 1)?;
        pair.b.import("x", &region.advertise(Access::READ_WRITE)?)?;
        hooks::slow(SLOW_US);
        pair.b.ask(&format!("hook slow {SLOW_US}"))?;
        pair.b.ask(&format!("post t p write r 0 x 0 {LEN}"))?;
        caught(world, || Ok(memory::count_new(&region, 1, 2)? > 0))?;
        let fence = region.revoke();
        ensure!(fence == Fence::Held, "nobody is stopped, yet the fence is {fence:?}");
        let hash = memory::hash(&region, 0, LEN)?;
        let new = memory::count_new(&region, 1, 2)?;
        std::thread::sleep(LATER);
        ensure!(memory::hash(&region, 0, LEN)? == hash, "Held, but bytes landed afterwards");
        ensure!(new > 0 && new < LEN, "{new} of {LEN} bytes had arrived: not in flight");
        arrived.push(format!("{} KiB", new >> 10));
        hooks::off();
        pair.b.ask("hook off")?;
        let ended = pair.b.ask("wait t 10000")?;
        ensure!(ended.starts_with(&format!("{REVOKED:?}")), "the revoked write: {ended}");
    }
    fine_with(format!("at {}", arrived.join(", ")))
}

pub(crate) fn cancel_read(world: &World) -> Result<Verdict> {
    // A driver takes what has arrived before it looks for a cancel: up to a window of 8 MiB.
    let (len, slow) = if world.transport.reads_alone() { (LEN, SLOW_US) } else { (8 * LEN, 5000) };
    let mut pair = world.pair()?;
    let remote = pair.theirs("r", len, world.memory(), 1)?;
    let ours = world.region(&pair.a, len)?;
    let mut arrived = Vec::new();
    for _ in 0..TRIES {
        memory::fill_all(&ours, 2)?;
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
        arrived.push(format!("{} KiB", new >> 10));
    }
    pair.works_again(world)?;
    fine_with(format!("at {}", arrived.join(", ")))
}

fn caught(world: &World, mut arrives: impl FnMut() -> Result<bool>) -> Result<()> {
    let until = Instant::now() + world.profile.deadline;
    while !arrives()? {
        ensure!(Instant::now() < until, "no byte arrived");
    }
    Ok(())
}
