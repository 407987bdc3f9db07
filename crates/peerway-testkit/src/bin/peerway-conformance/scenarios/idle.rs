//! An idle endpoint uses no processor.

use std::time::Duration;

use anyhow::{Result, ensure};
use peerway::Batch;
use peerway_testkit::procfs;

use crate::world::{Verdict, World, fine_with};

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
    let before = ticks()?;
    std::thread::sleep(Duration::from_secs(1));
    let used: Vec<u64> = ticks()?.iter().zip(before).map(|(now, then)| now - then).collect();
    ensure!(
        used.iter().all(|ticks| *ticks < allowed),
        "ticks of 10 ms used in an idle second: {used:?}"
    );
    world.step("while somebody waits for what does not come");
    let before = ticks()?;
    ensure!(pair.a.notification(Duration::from_secs(1)).is_none(), "a notification out of nowhere");
    let used: Vec<u64> = ticks()?.iter().zip(before).map(|(now, then)| now - then).collect();
    ensure!(
        used.iter().all(|ticks| *ticks < allowed + 1),
        "ticks used by waiting a second: {used:?}"
    );
    fine_with(format!("{used:?} ticks"))
}
