//! SIGSTOP and SIGCONT: of the target, of the initiator, for long and for short.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::{Access, Batch, Fence, Reason, TransferError};
use peerway_testkit::{memory, procfs};

use crate::healthy::Healthy;
use crate::hooks;
use crate::options::Options;
use crate::world::{GONE, SILENT, Transport, Verdict, World, allowed, fine, fine_with};

const SLOW_US: u64 = 1000;
/// Ends that a stopped peer may cause.
const STOPPED: [Reason; 4] =
    [SILENT, GONE, Reason::TimedOut, Reason::Failed(TransferError::PeerMisbehaved)];

/// Devices may be done before a peer that stands still is given up.
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
    // The source is ours again when the fence is held: what still came of it would show this.
    if ended.fence == Fence::Held {
        memory::fill_all(&ours, 3)?;
    }
    pair.b.child()?.go_on()?;
    std::thread::sleep(world.profile.watch.max(world.profile.detect));
    let after = procfs::memory_of(pair.b.pid(), addr, len as usize)?;
    let late = before.iter().zip(&after).filter(|(a, b)| a != b).count();
    if ended.fence == Fence::Held && late > 0 {
        bail!("{ended:?}, but {late} bytes changed after the target went on");
    }
    // The lease: a target that was given up applies nothing but the copy it stood in.
    if world.transport == Transport::Tcp && ended.reason == SILENT && late > 2 << 20 {
        bail!("the lease had run out, but {late} bytes were applied after the target went on");
    }
    let new = pair.b.ask("countnew r 1 2").context("bytes that are neither old nor new")?;
    pair.b.ask("hook off")?;
    world.step("an open fence closes");
    world.closes(&pair.peer, &transfer)?;
    world.step("afterwards");
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
        // A read that has ended never touches its buffer again, whatever the peer does.
        ensure!(ended.fence == Fence::Held, "a read ended with an open fence");
    }
    let hash = memory::hash(&ours, 0, len)?;
    pair.b.child()?.go_on()?;
    std::thread::sleep(world.profile.watch.max(world.profile.detect));
    ensure!(memory::hash(&ours, 0, len)? == hash, "a read that had ended changed its buffer");
    memory::count_new(&ours, 2, 1).context("bytes that are neither old nor new")?;
    hooks::off();
    world.step("afterwards");
    pair.works_again(world)?;
    healthy.finish(world)?;
    fine_with(format!("{:?} {:?}", ended.reason, ended.fence))
}

/// A pause that the detection time forgives: the transfer must simply go on.
pub(crate) fn short(world: &World) -> Result<Verdict> {
    let pause = world.profile.detect;
    // A quarter: the lease is three quarters, and what the last heartbeat echoed may be a quarter old.
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

/// The copier stands inside the gate, between check and copy, when the owner revokes.
pub(crate) fn initiator_revoke(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    pair.b.accept()?;
    let healthy = Healthy::start(world, &pair.a)?;
    let len = world.profile.big;
    let region = world.region(&pair.a, len)?;
    memory::fill_all(&region, 1)?;
    pair.b.import("x", &region.advertise(Access::READ_WRITE)?)?;
    pair.b.region("r", len, world.memory())?;
    pair.b.ask("fill r 2")?;
    let alone = world.transport.writes_alone() || world.transport.is_device();
    if alone {
        // It copies itself: after some quanta it stops before the next copy, slowly enough that it
        // has answered the order by then.
        pair.b.ask("hook slow 5000")?;
        pair.b.ask("hook stop 20")?;
        pair.b.ask(&format!("post t p write r 0 x 0 {len}"))?;
        pair.b.child()?.wait_stopped(Duration::from_secs(10))?;
    } else {
        // Slower still: a pull goes on while its source stands, and must not be over before the
        // revoke.
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
    // Where the owner copies it answers for every byte by itself, and devices obey their own side.
    if !alone || world.transport.is_device() {
        ensure!(fence == Fence::Held, "the owner copies, yet the fence is {fence:?}");
    }
    let new = memory::count_new(&region, 1, 2)?;
    ensure!(new > 0, "no byte was in flight");
    let hash = memory::hash(&region, 0, len)?;
    hooks::off();
    pair.b.child()?.go_on()?;
    world.step("goes on");
    std::thread::sleep(world.profile.watch.max(world.profile.detect));
    let changed = memory::hash(&region, 0, len)? != hash;
    ensure!(fence == Fence::Open || !changed, "Held, but memory changed after the copier went on");
    pair.b.ask("hook off")?;
    let ended = pair.b.ask("wait t 10000")?;
    ensure!(ended != "none" && !ended.starts_with("Done"), "the revoked write: {ended}");
    world.step("afterwards");
    // What was open closes once the copier has gone on.
    memory::stays(&region, world.profile.watch).context("long after the copier went on")?;
    pair.works_again(world)?;
    world.step("the third peer");
    healthy.finish(world)?;
    fine_with(format!(
        "{fence:?} after {} ms{}",
        took.as_millis(),
        if changed { ", landed late as said" } else { "" }
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
    // For longer than the detection time: the session must outlive the silence.
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
            // The session may have been given up by now.
            Err(peerway::PostError::PeerGone) => continue,
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

/// A reader that does not empty its socket cannot keep the owner from having its fence.
pub(crate) fn reader_revoke(world: &World) -> Result<Verdict> {
    // The session must outlive the revoke: a session that is given up releases its memory anyway.
    let detect = world.profile.limit;
    let mut pair = world.pair_with(&Options { detect, ..world.calm() })?;
    pair.b.accept()?;
    let len = world.profile.big;
    let region = world.region(&pair.a, len)?;
    memory::fill_all(&region, 1)?;
    pair.b.import("x", &region.advertise(Access::READ_WRITE)?)?;
    pair.b.region("r", len, world.memory())?;
    pair.b.ask("fill r 2")?;
    // Slowly, so that the reader stops in the middle.
    pair.b.ask("hook land 65536")?;
    pair.b.ask(&format!("post t p read r 0 x 0 {len}"))?;
    let until = Instant::now() + world.profile.limit / 2;
    while pair.peer.stats().bytes_served == 0 {
        ensure!(Instant::now() < until, "no byte was served");
        std::thread::yield_now();
    }
    pair.b.child()?.stop()?;
    // Until nothing more fits into what lies between the two.
    let mut served = 0;
    while served != pair.peer.stats().bytes_served {
        served = pair.peer.stats().bytes_served;
        std::thread::sleep(Duration::from_millis(100));
    }
    ensure!(served < len, "everything was served before the reader stopped");
    let fence = region.revoke();
    ensure!(fence == Fence::Held, "the owner sends, yet the fence is {fence:?}");
    // The owner may reuse the memory: nothing of what it becomes may be seen.
    memory::fill_all(&region, 7)?;
    pair.b.child()?.go_on()?;
    let ended = pair.b.ask("wait t 20000")?;
    ensure!(ended != "none" && !ended.starts_with("Done"), "the revoked read: {ended}");
    pair.b.ask("hook off")?;
    let new = pair.b.ask("countnew r 2 1").context("the reader saw bytes of after the revoke")?;
    fine_with(format!("{} of {} KiB arrived", new.parse::<u64>().unwrap_or(0) >> 10, len >> 10))
}
