//! SIGSTOP and SIGCONT, of the target and of the initiator, for long and short times.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::{Access, Batch, Fence, Reason, TransferError};
use peerway_testkit::{memory, procfs};

use crate::healthy::Healthy;
use crate::hooks;
use crate::options::Options;
use crate::world::{GONE, SILENT, Verdict, World, allowed, fine, fine_with};

const SLOW_US: u64 = 1000;
/// Reasons with which a transfer to a stopped peer may end.
const STOPPED: [Reason; 4] =
    [SILENT, GONE, Reason::TimedOut, Reason::Failed(TransferError::PeerMisbehaved)];

/// Adds `Done` on devices, which may complete a transfer before the engine gives the stopped peer
/// up.
fn ends_of_a_stopped(world: &World) -> Vec<Reason> {
    let done = world.transport.is_device().then_some(Reason::Done);
    STOPPED.into_iter().chain(done).collect()
}

pub(crate) fn target_write(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    let healthy = Healthy::start(world, &pair.a)?;
    let len = world.profile.big;
    let addr = pair.b.region("r", len, world.memory())?;
    pair.b.ask("fill r 1")?;
    let remote = pair.peer.import(&pair.b.advertise("r", Access::READ_WRITE)?)?;
    let ours = world.region(&pair.a, len)?;
    memory::fill_all(&ours, 2)?;
    pair.b.ask(&format!("hook slow {SLOW_US}"))?;
    hooks::slow(SLOW_US);
    let start = Instant::now();
    let transfer = pair.peer.post(&Batch::write(&ours.all(), &remote.all())?)?;
    ensure!(world.in_flight(&transfer)?, "the write was over before the stop");
    pair.b.child()?.stop()?;
    world.step("stopped");
    let ended = world.ends(&transfer, world.profile.deadline)?;
    let took = start.elapsed();
    hooks::off();
    let stats = transfer.stats();
    ensure!(stats.bytes_done > 0, "no byte was in flight");
    if world.transport.writes_alone() {
        allowed(ended, &[Reason::Done])?;
    } else {
        allowed(ended, &ends_of_a_stopped(world))?;
    }
    let before = procfs::memory_of(pair.b.pid(), addr, len as usize)?;
    // With a held fence the source belongs to the caller again. A late copy would show this
    // pattern.
    if ended.fence == Fence::Held {
        memory::fill_all(&ours, 3)?;
    }
    pair.b.child()?.go_on()?;
    std::thread::sleep(world.profile.watch.max(world.profile.detect));
    let after = procfs::memory_of(pair.b.pid(), addr, len as usize)?;
    let late = before.iter().zip(&after).filter(|(a, b)| a != b).count();
    if ended.fence == Fence::Held && late > 0 {
        bail!("{ended:?}, but {late} bytes changed after the target resumed");
    }
    // The lease: once the initiator gives a target up, the target applies only the copy it was
    // stopped in.
    if world.transport.is_tcp() && ended.reason == SILENT && late > 2 << 20 {
        bail!("the lease had expired, but the target applied {late} bytes after it resumed");
    }
    let new = pair
        .b
        .ask("countnew r 1 2")
        .context("the target holds bytes that are neither old nor new")?;
    pair.b.ask("hook off")?;
    world.step("waiting for an open fence to close");
    world.closes(&pair.peer, &transfer)?;
    world.step("after the target resumed");
    pair.works_again(world)?;
    healthy.finish(world)?;
    fine_with(format!(
        "{:?} {:?} after {} ms, {} KiB late, {} of {} KiB arrived",
        ended.reason,
        ended.fence,
        took.as_millis(),
        late >> 10,
        new.parse::<u64>().unwrap_or(0) >> 10,
        len >> 10
    ))
}

pub(crate) fn target_read(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    let healthy = Healthy::start(world, &pair.a)?;
    let len = world.profile.big;
    let remote = pair.theirs("r", len, world.memory(), 1)?;
    let ours = world.region(&pair.a, len)?;
    memory::fill_all(&ours, 2)?;
    hooks::slow(SLOW_US);
    let transfer = pair.peer.post(&Batch::read(&ours.all(), &remote.all())?)?;
    ensure!(world.in_flight(&transfer)?, "the read was over before the stop");
    pair.b.child()?.stop()?;
    world.step("stopped");
    let ended = world.ends(&transfer, world.profile.deadline)?;
    if world.transport.reads_alone() {
        allowed(ended, &[Reason::Done])?;
    } else {
        allowed(ended, &ends_of_a_stopped(world))?;
        // A read that has ended must never touch its buffer again, whatever the peer does.
        ensure!(ended.fence == Fence::Held, "a read ended with an open fence");
    }
    let hash = memory::hash(&ours, 0, len)?;
    pair.b.child()?.go_on()?;
    std::thread::sleep(world.profile.watch.max(world.profile.detect));
    ensure!(memory::hash(&ours, 0, len)? == hash, "a read that had ended changed its buffer");
    memory::count_new(&ours, 2, 1)
        .context("the buffer holds bytes that are neither old nor new")?;
    hooks::off();
    world.step("after the target resumed");
    pair.works_again(world)?;
    healthy.finish(world)?;
    fine_with(format!("{:?} {:?}", ended.reason, ended.fence))
}

/// A pause within the detection time: the transfer must simply continue.
pub(crate) fn short(world: &World) -> Result<Verdict> {
    let pause = world.profile.detect;
    // A quarter of the detection time: the lease lasts three quarters, and the last heartbeat's
    // echo may be a quarter old.
    let mut pair = world.pair_with(&Options { detect: 4 * pause, ..world.calm() })?;
    let len = world.profile.big;
    let remote = pair.theirs("r", len, world.memory(), 1)?;
    let ours = world.region(&pair.a, len)?;
    memory::fill_all(&ours, 2)?;
    pair.b.ask(&format!("hook slow {SLOW_US}"))?;
    let transfer = pair.peer.post(&Batch::write(&ours.all(), &remote.all())?)?;
    if !world.transport.writes_alone() {
        ensure!(world.in_flight(&transfer)?, "the write was over before the stop");
    }
    pair.b.child()?.stop()?;
    std::thread::sleep(pause);
    pair.b.child()?.go_on()?;
    let ended = world.ends(&transfer, world.profile.deadline)?;
    allowed(ended, &[Reason::Done]).context("after a pause of a quarter of the detection time")?;
    pair.b.ask(&format!("check r 2 0 0 {len}"))?;
    fine()
}

/// The copier is stopped inside the gate, between check and copy, when the owner revokes.
pub(crate) fn initiator_revoke(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    pair.b.accept()?;
    let healthy = Healthy::start(world, &pair.a)?;
    let len = world.profile.big;
    let region = pair.lend(world, len)?;
    let alone = world.transport.writes_alone() || world.transport.is_device();
    if alone {
        // The initiator copies itself. It stops before a later copy, slowly enough that it has
        // answered the order by then.
        pair.b.ask("hook slow 5000")?;
        pair.b.ask("hook stop 20")?;
        pair.b.ask(&format!("post t p write r 0 x 0 {len}"))?;
        pair.b.child()?.wait_stopped(Duration::from_secs(10))?;
    } else {
        // Slower still: a pull continues while its source is stopped, and must not finish before
        // the revoke.
        hooks::slow(SLOW_US * 5);
        pair.b.ask(&format!("post t p write r 0 x 0 {len}"))?;
        let until = Instant::now() + world.profile.deadline;
        while memory::check(&region, 1, 0, 0, 64).is_ok() {
            ensure!(Instant::now() < until, "no byte arrived");
        }
        pair.b.child()?.stop()?;
    }
    world.step("stopped");
    let start = Instant::now();
    let fence = region.revoke();
    let took = start.elapsed();
    ensure!(took < world.profile.fence + world.profile.slack, "revoke took {took:?}");
    // Where the owner copies, it controls every byte. Devices obey the owner's side.
    if !alone || world.transport.is_device() {
        ensure!(fence == Fence::Held, "the owner copies, yet the fence is {fence:?}");
    }
    let new = memory::count_new(&region, 1, 2)?;
    ensure!(new > 0, "no byte was in flight");
    let hash = memory::hash(&region, 0, len)?;
    hooks::off();
    pair.b.child()?.go_on()?;
    world.step("resumed");
    std::thread::sleep(world.profile.watch.max(world.profile.detect));
    let changed = memory::hash(&region, 0, len)? != hash;
    ensure!(
        fence == Fence::Open || !changed,
        "the fence was Held, but memory changed after the copier resumed"
    );
    pair.b.ask("hook off")?;
    let ended = pair.b.ask("wait t 10000")?;
    ensure!(ended != "none" && !ended.starts_with("Done"), "the revoked write: {ended}");
    world.step("after the copier resumed");
    // An open fence closes once the copier has resumed.
    memory::stays(&region, world.profile.watch).context("long after the copier resumed")?;
    pair.works_again(world)?;
    world.step("the third peer");
    healthy.finish(world)?;
    fine_with(format!(
        "{fence:?} after {} ms{}",
        took.as_millis(),
        if changed { ", bytes landed late, as the open fence said" } else { "" }
    ))
}

pub(crate) fn reached(world: &World) -> Result<Verdict> {
    if !world.transport.reads_alone() {
        return Ok(Verdict::Skip("this path needs the peer's processor".into()));
    }
    let mut pair = world.pair()?;
    let len = world.profile.big;
    let remote = pair.theirs("r", len, world.memory(), 1)?;
    let ours = world.region(&pair.a, len)?;
    pair.b.child()?.stop()?;
    // Longer than the detection time: the session must survive the silence.
    let until = Instant::now() + world.profile.detect * 2;
    while Instant::now() < until {
        ours.fill(0, len, 0)?;
        pair.peer.read(&ours.all(), &remote.all()).context("reading a stopped peer's memory")?;
        memory::check(&ours, 1, 0, 0, len)?;
        if world.transport.writes_alone() {
            pair.peer.write(&ours.all(), &remote.all()).context("writing to a stopped peer")?;
        }
    }
    pair.b.child()?.go_on()?;
    pair.works_again(world)?;
    fine()
}

pub(crate) fn deadline(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    let healthy = Healthy::start(world, &pair.a)?;
    let len = world.profile.big;
    let remote = pair.theirs("r", len, world.memory(), 1)?;
    let ours = world.region(&pair.a, len)?;
    pair.b.child()?.stop()?;
    let given = Duration::from_millis(100);
    let mut notes = Vec::new();
    for (what, batch) in [
        ("write", Batch::write(&ours.all(), &remote.all())?),
        ("read", Batch::read(&ours.all(), &remote.all())?),
        ("small", Batch::write(&ours.slice(0..100), &remote.slice(0..100))?.count(1)),
    ] {
        let start = Instant::now();
        let transfer = match pair.peer.post(&batch.deadline(given)) {
            Ok(transfer) => transfer,
            // The engine may have given the session up by now.
            Err(peerway::PostError::PeerGone { .. }) => continue,
            Err(other) => bail!("{what}: {other:?}"),
        };
        let ended = world.ends(&transfer, given).context(what)?;
        let took = start.elapsed();
        let done = [&STOPPED[..], &[Reason::Done]].concat();
        allowed(ended, &done).context(what)?;
        notes.push(format!("{what} {:?} {:?} {} ms", ended.reason, ended.fence, took.as_millis()));
    }
    pair.b.child()?.go_on()?;
    pair.works_again(world)?;
    healthy.finish(world)?;
    if notes.is_empty() { fine() } else { fine_with(notes.join(", ")) }
}

/// A reader that does not empty its socket cannot delay the owner's fence.
pub(crate) fn reader_revoke(world: &World) -> Result<Verdict> {
    // The session must outlive the revoke, because a session that is given up releases its memory.
    let detect = world.profile.limit;
    let mut pair = world.pair_with(&Options { detect, ..world.calm() })?;
    pair.b.accept()?;
    let len = world.profile.big;
    let region = pair.lend(world, len)?;
    // Slowly, so that the reader stops in the middle of the read.
    pair.b.ask("hook land 65536")?;
    pair.b.ask(&format!("post t p read r 0 x 0 {len}"))?;
    let until = Instant::now() + world.profile.limit / 2;
    while pair.peer.stats().bytes_served == 0 {
        ensure!(Instant::now() < until, "no byte was served");
        std::thread::yield_now();
    }
    pair.b.child()?.stop()?;
    // Wait until the socket buffers between the two are full.
    let mut served = 0;
    while served != pair.peer.stats().bytes_served {
        served = pair.peer.stats().bytes_served;
        std::thread::sleep(Duration::from_millis(100));
    }
    ensure!(served < len, "everything was served before the reader stopped");
    let fence = region.revoke();
    ensure!(fence == Fence::Held, "the owner sends, yet the fence is {fence:?}");
    // The owner may reuse the memory. The reader must not see the new bytes.
    memory::fill_all(&region, 7)?;
    pair.b.child()?.go_on()?;
    let ended = pair.b.ask("wait t 20000")?;
    ensure!(ended != "none" && !ended.starts_with("Done"), "the revoked read: {ended}");
    pair.b.ask("hook off")?;
    let new = pair
        .b
        .ask("countnew r 2 1")
        .context("the reader received bytes written after the revoke")?;
    fine_with(format!("{} of {} KiB arrived", new.parse::<u64>().unwrap_or(0) >> 10, len >> 10))
}
