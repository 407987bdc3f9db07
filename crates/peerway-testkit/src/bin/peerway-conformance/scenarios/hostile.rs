//! A peer overwrites the shared segment with random data. The engine must neither crash nor hang,
//! and no memory may change except what the peer may write.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway::{Access, Batch};
use peerway_testkit::memory;

use crate::healthy::Healthy;
use crate::world::{Verdict, World, fine_with};

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let a = world.options().build()?;
    let healthy = Healthy::start(world, &a)?;
    let len = 4 << 20;
    // Never advertised: it must not change.
    let private = world.region(&a, len)?;
    memory::fill_all(&private, 9)?;
    let untouched = memory::hash(&private, 0, len)?;
    let mut ends = std::collections::BTreeMap::<String, u32>::new();
    let rounds = (world.profile.tries / 40).max(4);
    for round in 0..rounds {
        world.step(format!("round {round}"));
        let mut b = world.remote(&world.options())?;
        let peer = world.connect(&a, &b)?;
        b.accept()?;
        b.region("r", len, world.memory())?;
        b.ask("fill r 1")?;
        let remote = peer.import(&b.advertise("r", Access::READ_WRITE)?)?;
        let shared = world.region(&a, len)?;
        b.import("x", &shared.advertise(Access::READ_WRITE)?)?;
        let ours = world.region(&a, len)?;
        // Random data in the rings ends the session at once. Random data in the gates alone does
        // not.
        let what = if round % 2 == 0 { "gates" } else { "all" };
        b.tell(&format!("scribble {round} 400 {what}"))?;
        let until = Instant::now() + Duration::from_millis(400);
        while Instant::now() < until {
            let short = world.profile.fence;
            for batch in [
                Batch::write(&ours.all(), &remote.all())?.deadline(short),
                Batch::read(&ours.all(), &remote.all())?.deadline(short),
                Batch::write(&ours.slice(0..64), &remote.slice(0..64))?.count(1).deadline(short),
            ] {
                let Ok(transfer) = peer.post(&batch) else { break };
                let ended = world.ends(&transfer, short).context("with a hostile peer")?;
                *ends.entry(format!("{:?} {:?}", ended.reason, ended.fence)).or_default() += 1;
            }
            if !peer.is_alive() {
                break;
            }
        }
        let start = Instant::now();
        shared.revoke();
        let took = start.elapsed();
        ensure!(took < world.profile.fence + world.profile.slack, "revoke took {took:?}");
        peer.remove();
        b.child()?.kill()?;
        ensure!(
            memory::hash(&private, 0, len)? == untouched,
            "memory that was never shared changed"
        );
    }
    world.step("a new peer after the hostile ones");
    let mut b = world.remote(&world.options())?;
    let peer = world.connect(&a, &b)?;
    b.region("r", len, world.memory())?;
    let remote = peer.import(&b.advertise("r", Access::WRITE)?)?;
    peer.write(&private.all(), &remote.all())?;
    b.ask(&format!("check r 9 0 0 {len}"))?;
    healthy.finish(world)?;
    let ends: Vec<String> = ends.into_iter().map(|(end, n)| format!("{n} {end}")).collect();
    fine_with(ends.join(", "))
}
