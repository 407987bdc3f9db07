//! Revoking under traffic.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::{Access, Batch, Reason};
use peerway_testkit::memory;

use crate::healthy::Healthy;
use crate::hooks;
use crate::world::{REVOKED, Verdict, World, allowed, fine_with};

const SLOW_US: u64 = 1000;

pub(crate) fn write(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    let healthy = Healthy::start(world, &pair.a)?;
    let len = world.profile.big;
    let remote = pair.theirs("r", len, world.memory(), 1)?;
    let ours = world.region(&pair.a, len)?;
    memory::fill_all(&ours, 2)?;
    pair.b.ask(&format!("hook slow {SLOW_US}"))?;
    hooks::slow(SLOW_US);
    let transfer = pair.peer.post(&Batch::write(&ours.all(), &remote.all())?)?;
    ensure!(world.in_flight(&transfer)?, "the write was over before the revoke");
    let fence = pair.b.ask("revoke r")?;
    // No process is stopped, so the revoke must get a held fence.
    ensure!(fence.starts_with("Held"), "revoke under a write: {fence}");
    pair.b.ask(&format!("stays r {}", world.profile.watch.as_millis()))?;
    let ended = world.ends_soon(&transfer)?;
    hooks::off();
    pair.b.ask("hook off")?;
    allowed(ended, &[REVOKED])?;
    let new: u64 = pair.b.ask("countnew r 1 2")?.parse()?;
    ensure!(new > 0 && new < len, "{new} of {len} bytes arrived: not in flight");
    pair.works_again(world)?;
    healthy.finish(world)?;
    fine_with(format!("{fence} ms at {} KiB", new >> 10))
}

pub(crate) fn read(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    let len = world.profile.big;
    let remote = pair.theirs("r", len, world.memory(), 1)?;
    let ours = world.region(&pair.a, len)?;
    memory::fill_all(&ours, 2)?;
    hooks::slow(SLOW_US);
    let transfer = pair.peer.post(&Batch::read(&ours.all(), &remote.all())?)?;
    ensure!(world.in_flight(&transfer)?, "the read was over before the revoke");
    let fence = pair.b.ask("revoke r")?;
    ensure!(fence.starts_with("Held"), "revoke under a read: {fence}");
    // The owner may reuse the memory now. The reader must not see the new bytes.
    pair.b.ask("fill r 7")?;
    let ended = world.ends_soon(&transfer)?;
    hooks::off();
    allowed(ended, &[REVOKED])?;
    memory::count_new(&ours, 2, 1).context("bytes written after the revoke were read")?;
    pair.works_again(world)?;
    fine_with(format!("{fence} ms"))
}

pub(crate) fn many(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    pair.b.accept()?;
    // More than the initiator pushes itself over CMA.
    let len = 2 << 20;
    pair.b.region("r", len, world.memory())?;
    let ours = world.region(&pair.a, len)?;
    memory::fill_all(&ours, 2)?;
    let (mut done, mut revoked) = (0, 0);
    let until = Instant::now() + world.profile.detect * 2;
    // From shorter than a write to many times longer, on every device.
    for pause in [3, 6, 12, 24, 48].into_iter().cycle().map(Duration::from_millis) {
        let now = Instant::now();
        if now >= until && (done > 0 && revoked > 0 || now >= until + world.profile.slack) {
            break;
        }
        let descriptor = pair.b.advertise("r", Access::READ_WRITE)?;
        let remote = pair.peer.import(&descriptor)?;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| -> Result<()> {
            let writer = scope.spawn(|| -> Result<(u32, u32)> {
                let mut counts = (0, 0);
                while !stop.load(Ordering::SeqCst) {
                    let ended = pair.peer.run(&Batch::write(&ours.all(), &remote.all())?)?;
                    match ended.reason {
                        Reason::Done => counts.0 += 1,
                        REVOKED => {
                            counts.1 += 1;
                            return Ok(counts);
                        }
                        other => bail!("a write against a revoke ended as {other:?}"),
                    }
                }
                Ok(counts)
            });
            std::thread::sleep(pause);
            let fence = pair.b.ask("revoke r");
            let same = pair.b.ask("stays r 20");
            stop.store(true, Ordering::SeqCst);
            let joined = writer.join().map_err(|_| anyhow::anyhow!("the writer panicked"))?;
            let counts = joined?;
            (done, revoked) = (done + counts.0, revoked + counts.1);
            let fence = fence?;
            ensure!(fence.starts_with("Held"), "revoke under writes: {fence}");
            same.map(drop)
        })?;
    }
    ensure!(done > 0 && revoked > 0, "{done} done, {revoked} revoked: never in flight");
    fine_with(format!("{done} done, {revoked} revoked"))
}
