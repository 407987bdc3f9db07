//! Memory that a peer may still write after its owner has released it.
//!
//! The writer is stopped between the gate and its copy, so the owner cannot get a held fence. The
//! memory must stay allocated until the writer leaves, even if region and endpoint are dropped.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway::{Access, Batch, Endpoint, Fence, Region};
use peerway_testkit::memory;

use crate::remote::Remote;
use crate::world::{Pair, Verdict, World, fine, fine_with};

/// Small enough that the writer copies it itself on every path.
const LEN: u64 = 29_664;
/// The byte that fills the heap after the region is released.
const CANARY: u8 = 0xC5;

/// The region, its endpoint, and a writer that is stopped inside the gate.
struct Stopped {
    endpoint: Endpoint,
    region: Region,
    writer: Remote,
}

fn stopped_writer(world: &World) -> Result<Stopped> {
    let Pair { a: endpoint, b: mut writer, peer: _ } = world.pair()?;
    writer.accept()?;
    let region = world.region(&endpoint, LEN)?;
    memory::fill_all(&region, 1)?;
    writer.import("x", &region.advertise(Access::READ_WRITE)?)?;
    writer.region("r", LEN, world.memory())?;
    writer.ask("fill r 2")?;
    writer.ask("hook stop 1")?;
    writer.tell(&format!("xfer p write r 0 x 0 {LEN}"))?;
    writer.child()?.wait_stopped(Duration::from_secs(20))?;
    Ok(Stopped { endpoint, region, writer })
}

/// Resumes the writer, which finishes its copy.
fn go_on(writer: &mut Remote) -> Result<String> {
    writer.child()?.go_on()?;
    writer.answer()
}

/// Waits until no memory is quarantined.
fn is_released() -> Result<()> {
    let until = Instant::now() + Duration::from_secs(20);
    while peerway::quarantine().regions > 0 {
        ensure!(Instant::now() < until, "still quarantined: {:?}", peerway::quarantine());
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// The region and the endpoint are dropped while the writer is stopped. The heap is then reused.
pub(crate) fn outlives_endpoint(world: &World) -> Result<Verdict> {
    let Stopped { endpoint, region, mut writer } = stopped_writer(world)?;
    ensure!(region.revoke() == Fence::Open, "the writer is inside the gate, yet the fence is held");
    drop(region);
    let held = peerway::quarantine();
    ensure!(held.regions == 1 && held.bytes == LEN, "after the region is dropped: {held:?}");
    drop(endpoint);
    let held = peerway::quarantine();
    ensure!(held.regions == 1 && held.bytes == LEN, "after the endpoint is dropped: {held:?}");
    let canaries: Vec<Vec<u8>> = (0..512).map(|_| vec![CANARY; LEN as usize]).collect();
    let ended = go_on(&mut writer)?;
    std::thread::sleep(world.profile.watch);
    let changed: usize =
        canaries.iter().map(|canary| canary.iter().filter(|byte| **byte != CANARY).count()).sum();
    ensure!(changed == 0, "{changed} bytes of unrelated vectors were overwritten");
    is_released()?;
    fine_with(format!("the write ended as {ended}"))
}

/// A region that is dropped without a revoke stays allocated too.
pub(crate) fn outlives_region(world: &World) -> Result<Verdict> {
    let Stopped { endpoint, region, mut writer } = stopped_writer(world)?;
    drop(endpoint);
    drop(region);
    let held = peerway::quarantine();
    ensure!(held.regions == 1 && held.bytes == LEN, "after both are dropped: {held:?}");
    let canaries: Vec<Vec<u8>> = (0..512).map(|_| vec![CANARY; LEN as usize]).collect();
    writer.child()?.kill()?;
    is_released()?;
    ensure!(canaries.iter().flatten().all(|byte| *byte == CANARY), "unrelated memory changed");
    fine()
}

/// The owner pulls a write and is stopped before it copies. The writer's endpoint is dropped. Bytes
/// that the heap holds afterwards must not land.
pub(crate) fn source_outlives_endpoint(world: &World) -> Result<Verdict> {
    // More than this process copies itself.
    const LEN: u64 = 2 << 20;
    let Pair { a: endpoint, b: mut owner, peer } = world.pair()?;
    owner.region("r", LEN, world.memory())?;
    owner.ask("fill r 1")?;
    let remote = peer.import(&owner.advertise("r", Access::READ_WRITE)?)?;
    let source = world.region(&endpoint, LEN)?;
    memory::fill_all(&source, 2)?;
    owner.ask("hook stop 1")?;
    let transfer = peer.post(&Batch::write(&source.all(), &remote.all())?)?;
    owner.child()?.wait_stopped(Duration::from_secs(20))?;
    transfer.cancel();
    let ended = world.ends_soon(&transfer)?;
    ensure!(
        ended.fence == Fence::Open,
        "the owner is about to copy, yet the fence is not open: {ended:?}"
    );
    drop((transfer, remote, peer, source, endpoint));
    let held = peerway::quarantine();
    ensure!(held.regions == 1 && held.bytes == LEN, "after the endpoint is dropped: {held:?}");
    let canaries: Vec<Vec<u8>> = (0..16).map(|_| vec![CANARY; LEN as usize]).collect();
    owner.child()?.go_on()?;
    is_released()?;
    owner.ask("hook off")?;
    let new = owner.ask("countnew r 1 2").context("bytes of unrelated memory landed")?;
    drop(canaries);
    fine_with(format!("{} of {} KiB landed", new.parse::<u64>()? >> 10, LEN >> 10))
}

/// Every revoke reports the true fence: the second one, and one after the endpoint is dropped.
pub(crate) fn revoke_again(world: &World) -> Result<Verdict> {
    let Stopped { endpoint, region, mut writer } = stopped_writer(world)?;
    for what in ["the first revoke", "the second revoke"] {
        ensure!(
            region.revoke() == Fence::Open,
            "{what} returns Held, but the writer is inside the gate"
        );
    }
    drop(endpoint);
    ensure!(
        region.revoke() == Fence::Open,
        "a revoke without the endpoint returns Held, but the writer is inside the gate"
    );
    let before = memory::hash(&region, 0, LEN)?;
    go_on(&mut writer)?;
    let late = memory::hash(&region, 0, LEN)? != before;
    ensure!(region.revoke() == Fence::Held, "the writer has left the gate, yet the fence is open");
    memory::stays(&region, world.profile.watch)?;
    fine_with(if late { "bytes landed late, as the open fence said" } else { "no byte landed" })
}
