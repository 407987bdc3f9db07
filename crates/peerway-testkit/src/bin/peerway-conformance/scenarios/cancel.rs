//! Cancelling transfers in flight: each ends soon, and memory with a held fence does not change.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::{Access, Batch, Fence, Reason, TransferError};
use peerway_testkit::{memory, procfs};

use crate::hooks;
use crate::world::{Verdict, World, allowed, fine_with};

const SLOW_US: u64 = 1000;

pub(crate) fn write(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    let len = world.profile.big;
    let remote = pair.theirs("r", len, world.memory(), 1)?;
    let ours = world.region(&pair.a, len)?;
    let mut notes = Vec::new();
    for round in 0..3 {
        pair.b.ask("fill r 1")?;
        memory::fill_all(&ours, 2)?;
        pair.b.ask(&format!("hook slow {SLOW_US}"))?;
        hooks::slow(SLOW_US);
        let batch = Batch::write(&ours.all(), &remote.all())?.notify(b"never")?.count(5);
        let transfer = pair.peer.post(&batch)?;
        ensure!(world.in_flight(&transfer)?, "the write was over before the cancel");
        transfer.cancel();
        let start = Instant::now();
        let ended = world.ends_soon(&transfer)?;
        let took = start.elapsed();
        hooks::off();
        pair.b.ask("hook off")?;
        let stats = transfer.stats();
        ensure!(stats.bytes_done > 0, "no byte was in flight");
        allowed(ended, &[Reason::Cancelled])?;
        // With a held fence the source may be reused at once.
        if ended.fence == Fence::Held {
            memory::fill_all(&ours, 3)?;
            pair.b.ask(&format!("stays r {}", world.profile.watch.as_millis()))?;
            pair.b.ask("countnew r 1 2").context("the source was read after the fence")?;
        }
        ensure!(
            pair.b.ask("notification e 50")? == "none",
            "a cancelled write delivered its notification"
        );
        ensure!(pair.b.number("counter e 5")? == 0, "a cancelled write raised its counter");
        if round == 0 {
            let done = stats.bytes_done >> 10;
            notes.push(format!("{:?} in {} ms at {done} KiB", ended.fence, took.as_millis()));
        }
    }
    pair.works_again(world)?;
    fine_with(notes.join(", "))
}

pub(crate) fn read(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    let len = world.profile.big;
    let remote = pair.theirs("r", len, world.memory(), 1)?;
    let ours = world.region(&pair.a, len)?;
    let mut note = String::new();
    for _ in 0..3 {
        memory::fill_all(&ours, 2)?;
        hooks::slow(SLOW_US);
        let transfer = pair.peer.post(&Batch::read(&ours.all(), &remote.all())?)?;
        ensure!(world.in_flight(&transfer)?, "the read was over before the cancel");
        transfer.cancel();
        let start = Instant::now();
        let ended = world.ends_soon(&transfer)?;
        let took = start.elapsed();
        allowed(ended, &[Reason::Cancelled])?;
        ensure!(ended.fence == Fence::Held, "a cancelled read has an open fence");
        let stats = transfer.stats();
        ensure!(stats.bytes_done > 0 && stats.bytes_done < len, "{stats:?}: not in flight");
        // The buffer belongs to the caller again: after this fill, no byte of the read may appear.
        memory::fill_all(&ours, 3)?;
        hooks::off();
        std::thread::sleep(world.profile.watch);
        memory::check(&ours, 3, 0, 0, len).context("a cancelled read touched its buffer")?;
        note = format!("in {} ms at {} KiB", took.as_millis(), stats.bytes_done >> 10);
    }
    pair.works_again(world)?;
    fine_with(note)
}

/// The copier's process stops between check and copy. The initiator then cancels.
pub(crate) fn stopped_copier(world: &World) -> Result<Verdict> {
    if world.transport.writes_alone() || world.transport.is_device() {
        return Ok(Verdict::Skip("the initiator copies itself; see cancel-parked-copier".into()));
    }
    let mut pair = world.pair()?;
    let len = world.profile.big;
    let addr = pair.b.region("r", len, world.memory())?;
    pair.b.ask("fill r 1")?;
    let remote = pair.peer.import(&pair.b.advertise("r", Access::READ_WRITE)?)?;
    let ours = world.region(&pair.a, len)?;
    memory::fill_all(&ours, 2)?;
    pair.b.ask("hook stop 12")?;
    let posted = Instant::now();
    let transfer = pair.peer.post(&Batch::write(&ours.all(), &remote.all())?)?;
    pair.b.child()?.wait_stopped(Duration::from_secs(10))?;
    transfer.cancel();
    let start = Instant::now();
    let ended = world.ends_soon(&transfer)?;
    let took = start.elapsed();
    // On a busy machine the stopped peer may exceed the detection time before the cancel. Its last
    // heartbeat may predate the post by an eighth of that time.
    let silent = ended.reason == Reason::Failed(TransferError::PeerSilent)
        && start - posted >= world.profile.detect * 3 / 4;
    ensure!(ended.reason == Reason::Cancelled || silent, "{ended:?}");
    let before = procfs::memory_of(pair.b.pid(), addr, len as usize)?;
    let mut first = vec![0; len as usize];
    peerway_testkit::random::pattern(1, 0, &mut first);
    ensure!(before != first, "no byte was in flight");
    if ended.fence == Fence::Held {
        memory::fill_all(&ours, 3)?;
    }
    pair.b.child()?.go_on()?;
    std::thread::sleep(world.profile.watch.max(world.profile.detect));
    let after = procfs::memory_of(pair.b.pid(), addr, len as usize)?;
    let changed = before.iter().zip(&after).filter(|(a, b)| a != b).count();
    if ended.fence == Fence::Held && changed > 0 {
        bail!("the fence was Held, but {changed} bytes changed after the copier resumed");
    }
    pair.b.ask("hook off")?;
    pair.b.ask("countnew r 1 2").context("the target holds bytes that are neither old nor new")?;
    world.step("waiting for an open fence to close");
    world.closes(&pair.peer, &transfer)?;
    pair.b.ask(&format!("stays r {}", world.profile.watch.as_millis()))?;
    pair.works_again(world)?;
    fine_with(format!(
        "{:?} in {} ms, {} KiB landed later",
        ended.fence,
        took.as_millis(),
        changed >> 10
    ))
}

/// A copier of this process is parked between check and copy, and the initiator cancels. Memory
/// reported as held before the copier resumes must not change when it does.
pub(crate) fn parked_copier(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    pair.b.accept()?;
    let len = world.profile.big;
    let remote = pair.theirs("r", len, world.memory(), 1)?;
    let ours = world.region(&pair.a, len)?;
    memory::fill_all(&ours, 2)?;
    hooks::park_in(8);
    let transfer = pair.peer.post(&Batch::read(&ours.all(), &remote.all())?)?;
    let until = Instant::now() + world.profile.slack;
    while !hooks::is_parked() {
        ensure!(Instant::now() < until, "no copy reached the parking hook");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Release the copier after half the fence time, so that the transfer can still end in time.
    let parked = world.profile.fence / 2;
    let releaser = std::thread::spawn(move || {
        std::thread::sleep(parked);
        hooks::release();
    });
    transfer.cancel();
    let start = Instant::now();
    let ended = world.ends_soon(&transfer)?;
    let took = start.elapsed();
    let hash = memory::hash(&ours, 0, len)?;
    let _ = releaser.join();
    std::thread::sleep(world.profile.watch);
    hooks::off();
    allowed(ended, &[Reason::Cancelled])?;
    ensure!(ended.fence == Fence::Held, "a cancelled read has an open fence");
    ensure!(memory::hash(&ours, 0, len)? == hash, "a cancelled read touched its buffer");
    pair.works_again(world)?;
    fine_with(format!("ended after {} ms", took.as_millis()))
}
