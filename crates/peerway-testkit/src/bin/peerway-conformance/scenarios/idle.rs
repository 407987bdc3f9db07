//! An idle endpoint uses no processor.

use std::time::Duration;

use anyhow::{Result, ensure};
use peerway::Batch;
use peerway_testkit::procfs;

use crate::world::{Verdict, World, fine_with};

/// How many seconds the scenario waits for one quiet second.
const SECONDS: usize = 20;

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut options = world.calm();
    // The default detection time: heartbeats are part of idling.
    options.detect = Duration::from_secs(2);
    let mut pair = world.pair_with(&options)?;
    let remote = pair.theirs("r", 8 << 20, world.memory(), 1)?;
    let ours = world.region(&pair.a, 8 << 20)?;
    for _ in 0..5 {
        pair.peer.write(&ours.all(), &remote.all())?;
        pair.peer.post(&Batch::read(&ours.all(), &remote.all())?)?.join().ok()?;
    }
    std::thread::sleep(Duration::from_secs(1));
    let pids = [std::process::id(), pair.b.pid()];
    let ticks = || -> Result<Vec<u64>> { pids.iter().map(|pid| procfs::ticks(*pid)).collect() };
    let allowed = 2 * u64::from(world.profile.slower);
    let used = quietest(&ticks, allowed, || {
        std::thread::sleep(Duration::from_secs(1));
        Ok(())
    })?;
    ensure!(
        used.iter().all(|ticks| *ticks < allowed),
        "ticks of 10 ms used in the quietest of {SECONDS} idle seconds: {used:?}"
    );
    world.step("while a thread waits for a notification that never comes");
    let used = quietest(&ticks, allowed, || {
        let note = pair.a.notification(Duration::from_secs(1));
        ensure!(note.is_none(), "an unexpected notification arrived");
        Ok(())
    })?;
    ensure!(
        used.iter().all(|ticks| *ticks < allowed),
        "ticks used by waiting in the quietest of {SECONDS} seconds: {used:?}"
    );
    fine_with(format!("{used:?} ticks"))
}

/// The ticks that each process used in the first quiet second, or in the last second if none was
/// quiet. The kernel charges a whole tick to the thread that runs at its end, so one busy second
/// proves little. A thread that polls uses every tick.
fn quietest(
    ticks: &dyn Fn() -> Result<Vec<u64>>,
    allowed: u64,
    mut second: impl FnMut() -> Result<()>,
) -> Result<Vec<u64>> {
    let mut used = Vec::new();
    for _ in 0..SECONDS {
        let before = ticks()?;
        second()?;
        used = ticks()?.iter().zip(before).map(|(now, then)| now - then).collect();
        if used.iter().all(|ticks| *ticks < allowed) {
            break;
        }
    }
    Ok(used)
}
