//! A restarted peer is another peer, even on the same port.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::{Access, ConnectError, ImportError};
use peerway_testkit::memory;

use crate::options::Options;
use crate::world::{Verdict, World, fine};

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let a = world.options().build()?;
    let mut b = world.remote(&world.options())?;
    let peer = world.connect(&a, &b)?;
    b.region("r", 100_000, world.memory())?;
    let old = b.advertise("r", Access::READ_WRITE)?;
    let old_metadata = b.metadata.clone();
    let remote = peer.import(&old)?;
    let ours = world.region(&a, 100_000)?;
    peer.write(&ours.all(), &remote.all())?;
    let bind = b.addr()?;
    b.child()?.kill()?;
    world.step("restarted");
    let mut b = world.remote(&Options { bind, ..world.options() })?;
    ensure!(b.addr()? == bind, "the restarted peer has another port");
    b.region("r", 100_000, world.memory())?;
    b.ask("fill r 1")?;
    let start = Instant::now();
    match a.connect(&old_metadata) {
        Err(ConnectError::OtherIncarnation { .. }) => {}
        // The engine may not have noticed the death of the old session. It then returns the old
        // peer.
        Ok(same) if same == peer => {
            let until = start + world.profile.detect + world.profile.slack;
            while peer.is_alive() {
                ensure!(Instant::now() < until, "the dead peer is still reported as alive");
                std::thread::sleep(Duration::from_millis(5));
            }
            match a.connect(&old_metadata) {
                Err(ConnectError::OtherIncarnation { .. }) => {}
                other => bail!("old metadata: {other:?}"),
            }
        }
        other => bail!("old metadata: {other:?}"),
    }
    ensure!(
        peer.run(&peerway::Batch::write(&ours.all(), &remote.all())?).is_err(),
        "a write to the old peer succeeded"
    );
    world.step("the restarted peer");
    let new = world.connect(&a, &b)?;
    ensure!(new != peer && new.incarnation() != peer.incarnation(), "the same peer as before");
    match new.import(&old) {
        Err(ImportError::OtherIncarnation) => {}
        other => bail!("an old descriptor in the new session: {other:?}"),
    }
    if let Ok(batch) = peerway::Batch::write(&ours.all(), &remote.all()) {
        ensure!(new.post(&batch).is_err(), "an old region was accepted in the new session");
    }
    b.ask("check r 1 0 0 100000").context("a write to the old peer changed the new one")?;
    let remote = new.import(&b.advertise("r", Access::READ_WRITE)?)?;
    memory::fill_all(&ours, 6)?;
    new.write(&ours.all(), &remote.all())?;
    b.ask("check r 6 0 0 100000")?;
    fine()
}
