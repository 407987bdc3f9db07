//! A peer that reads slowly or not at all does not delay other peers.

use anyhow::{Result, ensure};
use peerway::Batch;
use peerway_testkit::memory;

use crate::healthy::Healthy;
use crate::world::{Verdict, World, fine_with};

pub(crate) fn slow(world: &World) -> Result<Verdict> {
    let options = crate::options::Options { detect: world.profile.slack * 4, ..world.calm() };
    let mut pair = world.pair_with(&options)?;
    let len = world.profile.big;
    let remote = pair.theirs("r", len, world.memory(), 1)?;
    let ours = world.region(&pair.a, len)?;
    memory::fill_all(&ours, 2)?;
    let healthy = Healthy::start(world, &pair.a)?;
    world.step("a slow reader");
    pair.b.ask("hook slow 3000")?;
    let transfers: Vec<_> = (0..4)
        .map(|_| pair.peer.post(&Batch::write(&ours.all(), &remote.all())?))
        .collect::<Result<_, _>>()?;
    std::thread::sleep(world.profile.detect / 2);
    world.step("a stopped reader");
    pair.b.child()?.stop()?;
    std::thread::sleep(world.profile.detect);
    let queued = pair.peer.post(&Batch::read(&ours.all(), &remote.all())?)?;
    std::thread::sleep(world.profile.detect / 2);
    queued.cancel();
    pair.b.child()?.go_on()?;
    pair.b.ask("hook off")?;
    world.step("all transfers still end");
    for transfer in &transfers {
        let ended = world.ends(transfer, world.profile.slack * 2)?;
        ensure!(ended.ok().is_ok(), "a slow reader's transfer: {ended:?}");
    }
    world.ends(&queued, world.profile.slack)?;
    healthy.finish(world)?;
    fine_with("")
}
