//! Revoke and cancel in the middle of a frame. Regions are small and copies very slow, so that any
//! byte that lands after the fence shows. On paths that send payload in frames, a frame lands in
//! many calls, and the fence must stop it inside a frame.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway::{Access, Batch, Fence, Reason};
use peerway_core::wire::MAX_PAYLOAD as FRAME;
use peerway_testkit::memory;

use crate::hooks;
use crate::world::{REVOKED, Verdict, World, allowed, fine_with};

/// A few frames. A check of this much memory takes a millisecond.
const LEN: u64 = 4 << 20;
/// Delay of every copy, inside its gate. A fence must wait for at most one such copy.
const SLOW_US: u64 = 40_000;
/// How much of a frame one call lands: a hundredth, so that the fence rarely falls between two
/// frames.
const LANDING: u64 = FRAME / 100;
/// Delay of one landing of a write. A frame then takes half a second, which is longer than the
/// owner
/// needs to see its first bytes.
const LANDING_US: u64 = 5000;
/// Delay of one landing of a read. It is shorter because the driver looks for a cancel only after a
/// whole turn of landings.
const TURN_LANDING_US: u64 = 1000;
/// Longer than a few copies take.
const LATER: Duration = Duration::from_millis(300);
const TRIES: u32 = 5;

/// This process is the owner, so that it can check its memory as soon as the fence is held.
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
        // Check only the beginning of every frame: an emulated machine takes too long to check all
        // bytes.
        let frames = || (0..len / FRAME).map(|frame| frame * FRAME);
        caught(world, || Ok(frames().any(|at| memory::check(&region, 1, at, at, 64).is_err())))?;
        let fence = region.revoke();
        ensure!(fence == Fence::Held, "no process is stopped, yet the fence is {fence:?}");
        let hash = memory::hash(&region, 0, len)?;
        let new = memory::count_new(&region, 1, 2)?;
        std::thread::sleep(LATER);
        ensure!(
            memory::hash(&region, 0, len)? == hash,
            "the fence was Held, but bytes landed afterwards"
        );
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
    // A driver lands a turn's worth of bytes before it looks for a cancel. The read must be larger.
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
    // The scenario does not control where the driver's turn ends, so a few cancels may fall between
    // frames.
    ensure!(!framed || inside > TRIES / 2, "{inside} of {TRIES} cancels came inside a frame");
    pair.works_again(world)?;
    fine_with(format!("at {}", arrived.join(", ")))
}

/// More than a post hands to devices by itself.
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
