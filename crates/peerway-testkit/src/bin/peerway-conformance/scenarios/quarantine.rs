//! Memory that a peer may still write after its owner has released it.
//!
//! The writer is stopped between the gate and its copy, so the owner cannot have a fence. Its
//! memory must stay allocated until the writer has left, whatever becomes of region and endpoint.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway::{Access, Batch, Endpoint, Fence, Region};
use peerway_testkit::memory;

use crate::remote::Remote;
use crate::world::{Pair, Verdict, World, fine, fine_with};

/// Small enough for a writer to copy it by itself on every path.
const LEN: u64 = 29_664;
/// Bytes that the heap is filled with after the region was released.
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

/// Lets the writer finish its copy.
fn go_on(writer: &mut Remote) -> Result<String> {
    writer.child()?.go_on()?;
    writer.answer()
}

/// Whether nothing is quarantined any more, soon.
fn is_released() -> Result<()> {
    let until = Instant::now() + Duration::from_secs(20);
    while peerway::quarantine().regions > 0 {
        ensure!(Instant::now() < until, "still quarantined: {:?}", peerway::quarantine());
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// The region and the endpoint are dropped while the writer stands; the heap is reused.
pub(crate) fn outlives_endpoint(world: &World) -> Result<Verdict> {
    let Stopped { endpoint, region, mut writer } = stopped_writer(world)?;
    ensure!(region.revoke() == Fence::Open, "the writer is inside, yet the fence is held");
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

/// A region that is simply dropped, with nobody asking for a fence, is kept all the same.
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

/// The source of a write that the owner pulls: the owner is stopped before it copies, and the
/// writer's endpoint is dropped. What the heap holds afterwards must not land.
pub(crate) fn source_outlives_endpoint(world: &World) -> Result<Verdict> {
    // More than this process would write by itself.
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
    ensure!(ended.fence == Fence::Open, "the owner is about to copy: {ended:?}");
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

/// Every revoke tells the truth: the second one, and one after the endpoint is gone.
pub(crate) fn revoke_again(world: &World) -> Result<Verdict> {
    let Stopped { endpoint, region, mut writer } = stopped_writer(world)?;
    for what in ["the first revoke", "the second revoke"] {
        ensure!(region.revoke() == Fence::Open, "{what} says Held, and the writer is inside");
    }
    drop(endpoint);
    ensure!(region.revoke() == Fence::Open, "without its endpoint, and the writer is inside");
    let before = memory::hash(&region, 0, LEN)?;
    go_on(&mut writer)?;
    let late = memory::hash(&region, 0, LEN)? != before;
    ensure!(region.revoke() == Fence::Held, "the writer has left, yet the fence is open");
    memory::stays(&region, world.profile.watch)?;
    fine_with(if late { "landed late as said" } else { "nothing landed" })
}
