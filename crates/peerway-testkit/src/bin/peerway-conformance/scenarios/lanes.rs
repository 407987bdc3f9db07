//! Lanes that die: a TCP proxy in front of the peer kills connections at critical moments.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::{Access, Batch, Endpoint, Fence, Peer, Reason, TransferError};
use peerway_core::metadata::Metadata;
use peerway_testkit::proxy::Proxy;
use peerway_testkit::{hex, memory, procfs};

use crate::healthy::Healthy;
use crate::options::Options;
use crate::remote::Remote;
use crate::world::{GONE, SILENT, Verdict, World, allowed, fine_with};

/// Connections of a session, in the order in which it opens them. The first carries control and
/// small transfers, the others carry large ones.
const LATENCY: usize = 0;
const BULK: [usize; 3] = [1, 2, 3];

struct Proxied {
    a: Endpoint,
    b: Remote,
    proxy: Proxy,
    peer: Peer,
}

fn proxied(world: &World) -> Result<Proxied> {
    let options = Options { lanes: 3, ..world.options() };
    let a = options.build()?;
    let b = world.remote(&options)?;
    let proxy = Proxy::new(b.addr()?)?;
    let metadata = Metadata { addresses: vec![proxy.addr()], ..Metadata::from_bytes(&b.metadata)? };
    let peer = a.connect(&metadata.to_bytes()).context("connecting through the proxy")?;
    ensure!(proxy.connections() == 4, "{} connections for 3 bulk lanes", proxy.connections());
    Ok(Proxied { a, b, proxy, peer })
}

/// The proxy holds a lane's acknowledgements back until many bytes have gone out on it. Then the
/// lane dies.
pub(crate) fn lost(world: &World) -> Result<Verdict> {
    let Proxied { a, mut b, proxy, peer } = proxied(world)?;
    let healthy = Healthy::start(world, &a)?;
    let len = world.profile.big;
    b.region("r", len, world.memory())?;
    let remote = peer.import(&b.advertise("r", Access::READ_WRITE)?)?;
    let ours = world.region(&a, len)?;
    let mut lost = 0;
    // Two lanes die one after the other. The third lane takes over.
    for (round, lane) in BULK[..2].iter().copied().enumerate() {
        world.step(format!("lane {lane}"));
        let seed = 10 + round as u64;
        memory::fill_all(&ours, seed)?;
        proxy.hold_back(lane, true);
        let note = [round as u8; 8];
        let batch = Batch::write(&ours.all(), &remote.all())?.notify(&note)?.count(3);
        let before = proxy.forwarded(lane);
        let transfer = peer.post(&batch)?;
        let until = Instant::now() + world.profile.slack;
        while proxy.forwarded(lane) - before < 3 << 20 {
            ensure!(Instant::now() < until, "lane {lane} carries nothing");
            std::thread::sleep(Duration::from_millis(1));
        }
        // The peer has applied data, but its acknowledgement has not arrived.
        std::thread::sleep(Duration::from_millis(30));
        proxy.kill(lane);
        let ended = world.ends(&transfer, world.profile.deadline)?;
        allowed(ended, &[Reason::Done]).context("a lane died and others lived")?;
        b.ask(&format!("check r {seed} 0 0 {len}"))?;
        ensure!(b.ask("notification e 5000")? == hex::encode(&note), "the notification is missing");
        ensure!(b.ask("notification e 100")? == "none", "a notification was delivered twice");
        ensure!(
            b.number("counter e 3")? == round as u64 + 1,
            "the counter did not rise exactly once"
        );
        let now = peer.stats().lanes_lost;
        ensure!(now > lost, "the engine reports {now} lost lanes, no more than before");
        lost = now;
    }
    world.step("killed in the middle of a frame");
    memory::fill_all(&ours, 30)?;
    proxy.kill_after(BULK[2], (2 << 20) + 777);
    let transfer = peer.post(&Batch::write(&ours.all(), &remote.all())?)?;
    let ended = world.ends(&transfer, world.profile.deadline)?;
    allowed(ended, &[Reason::Done]).context("the latency lane takes over")?;
    b.ask(&format!("check r 30 0 0 {len}"))?;
    healthy.finish(world)?;
    fine_with(format!("{} lanes lost", peer.stats().lanes_lost))
}

pub(crate) fn lost_read(world: &World) -> Result<Verdict> {
    let Proxied { a, mut b, proxy, peer } = proxied(world)?;
    let len = world.profile.big;
    b.region("r", len, world.memory())?;
    b.ask("fill r 4")?;
    let remote = peer.import(&b.advertise("r", Access::READ)?)?;
    let ours = world.region(&a, len)?;
    proxy.hold_back(BULK[1], true);
    let transfer = peer.post(&Batch::read(&ours.all(), &remote.all())?)?;
    ensure!(world.in_flight(&transfer)?, "the read was over before the kill");
    std::thread::sleep(Duration::from_millis(20));
    proxy.kill(BULK[1]);
    let ended = world.ends(&transfer, world.profile.deadline)?;
    allowed(ended, &[Reason::Done]).context("a lane died and others lived")?;
    memory::check(&ours, 4, 0, 0, len)?;
    ensure!(peer.stats().lanes_lost > 0, "no lane was lost");
    fine_with(format!("{} lanes lost", peer.stats().lanes_lost))
}

/// The peer receives a notification, the proxy holds its acknowledgement back, and the lane dies.
/// The engine must not deliver the notification again, and may report it as done only if it was
/// delivered.
pub(crate) fn lost_note(world: &World) -> Result<Verdict> {
    let mut ends = Vec::new();
    for delivered in [true, false] {
        let Proxied { a, mut b, proxy, peer } = proxied(world)?;
        world.step(if delivered { "delivered" } else { "not delivered" });
        // A peer may count only after an import.
        b.region("c", 64, world.memory())?;
        peer.import(&b.advertise("c", Access::READ)?)?;
        if delivered {
            proxy.hold_back(LATENCY, true);
        } else {
            proxy.hold_forth(LATENCY, true);
        }
        let transfer = peer.notify(b"once")?;
        let counted = peer.count(8)?;
        let got = b.ask("notification e 200")?;
        ensure!((got != "none") == delivered, "the proxy did not hold the bytes: {got}");
        proxy.kill(LATENCY);
        let unknown = Reason::Failed(TransferError::DeliveryUnknown);
        for (what, transfer) in [("notification", &transfer), ("count", &counted)] {
            let ended = world.ends(transfer, world.profile.deadline)?;
            allowed(ended, &[Reason::Done, unknown]).context(what)?;
            if what == "notification" {
                let again = b.ask("notification e 200")?;
                let times = u32::from(delivered) + u32::from(again != "none");
                ensure!(times <= 1, "the notification was delivered twice");
                ensure!(
                    ended.reason != Reason::Done || times == 1,
                    "the notification ended as done, but was never delivered"
                );
                ends.push(format!("{:?}", ended.reason));
            } else {
                let times = b.number("counter e 8")?;
                ensure!(times <= 1, "a counter rose {times} times");
                ensure!(
                    ended.reason != Reason::Done || times == 1,
                    "the count ended as done, but was never counted"
                );
            }
        }
        world.step("the session continues without the lane");
        ensure!(peer.is_alive(), "one lane's death ended the session");
        peer.notify(b"more")?.join().ok()?;
        ensure!(
            b.ask("notification e 5000")? == hex::encode(b"more"),
            "no notification arrived on another lane"
        );
        drop(a);
    }
    fine_with(ends.join(", "))
}

/// Every connection dies while the target is stopped with bytes in its sockets. The bytes are still
/// there when it resumes, so the fence may be held only once the target can no longer apply them.
pub(crate) fn all_lost(world: &World) -> Result<Verdict> {
    let Proxied { a, mut b, proxy, peer } = proxied(world)?;
    let healthy = Healthy::start(world, &a)?;
    let len = world.profile.big;
    let addr = b.region("r", len, world.memory())?;
    b.ask("fill r 1")?;
    let remote = peer.import(&b.advertise("r", Access::READ_WRITE)?)?;
    let ours = world.region(&a, len)?;
    memory::fill_all(&ours, 2)?;
    b.ask("hook slow 1000")?;
    let transfer = peer.post(&Batch::write(&ours.all(), &remote.all())?)?;
    ensure!(world.in_flight(&transfer)?, "the write was over before the stop");
    b.child()?.stop()?;
    // By now the proxy has filled the target's sockets.
    std::thread::sleep(Duration::from_millis(100));
    proxy.bar(true);
    proxy.kill_all();
    let start = Instant::now();
    let ended = world.ends(&transfer, world.profile.deadline)?;
    let took = start.elapsed();
    allowed(ended, &[GONE, SILENT, Reason::TimedOut])?;
    let before = procfs::memory_of(b.pid(), addr, len as usize)?;
    b.child()?.go_on()?;
    std::thread::sleep(world.profile.watch.max(world.profile.detect));
    let after = procfs::memory_of(b.pid(), addr, len as usize)?;
    let changed = before.iter().zip(&after).filter(|(a, b)| a != b).count();
    if ended.fence == Fence::Held && changed > 0 {
        bail!("{ended:?} after {took:?}, but {changed} bytes changed when the target resumed");
    }
    healthy.finish(world)?;
    fine_with(format!("{:?} {:?} after {} ms", ended.reason, ended.fence, took.as_millis()))
}

/// A lane swallows sent bytes without dying, like a broken switch; other lanes live. The transfer
/// completes without it, and the swallowed bytes must not land later.
pub(crate) fn stalled(world: &World) -> Result<Verdict> {
    let Proxied { a, mut b, proxy, peer } = proxied(world)?;
    let healthy = Healthy::start(world, &a)?;
    let len = world.profile.big;
    b.region("r", len, world.memory())?;
    b.ask("fill r 1")?;
    let remote = peer.import(&b.advertise("r", Access::READ_WRITE)?)?;
    let ours = world.region(&a, len)?;
    memory::fill_all(&ours, 2)?;
    for held in [true, false] {
        proxy.hold_forth(BULK[0], held);
        proxy.hold_back(BULK[0], held);
        if !held {
            break;
        }
        world.step("the lane swallows bytes");
        let deadline = world.profile.detect * 4;
        let batch = Batch::write(&ours.all(), &remote.all())?.deadline(deadline);
        let ended = world.ends(&peer.post(&batch)?, deadline)?;
        allowed(ended, &[Reason::Done]).context("one lane was silent and others lived")?;
        b.ask(&format!("check r 2 0 0 {len}"))?;
        ensure!(peer.stats().lanes_lost > 0, "the silent lane was not given up");
        world.step("other bytes replace the swallowed ones");
        memory::fill_all(&ours, 3)?;
        peer.run(&batch)?.ok()?;
        b.ask(&format!("check r 3 0 0 {len}"))?;
    }
    world.step("the lane delivers the swallowed bytes");
    std::thread::sleep(world.profile.watch);
    b.ask(&format!("check r 3 0 0 {len}")).context("bytes of a lost lane landed late")?;
    ensure!(peer.is_alive(), "the session did not survive the stalled lane");
    healthy.finish(world)?;
    fine_with(format!("{} lanes lost", peer.stats().lanes_lost))
}

/// The cable is unplugged: no byte passes in either direction, and later all of them do.
pub(crate) fn unplugged(world: &World) -> Result<Verdict> {
    let Proxied { a, mut b, proxy, peer } = proxied(world)?;
    let healthy = Healthy::start(world, &a)?;
    let len = world.profile.big;
    let addr = b.region("r", len, world.memory())?;
    b.ask("fill r 1")?;
    let remote = peer.import(&b.advertise("r", Access::READ_WRITE)?)?;
    let (ours, back) = (world.region(&a, len)?, world.region(&a, len)?);
    memory::fill_all(&ours, 2)?;
    b.ask("hook slow 1000")?;
    let write = peer.post(&Batch::write(&ours.all(), &remote.all())?)?;
    ensure!(world.in_flight(&write)?, "the write was over before the cable was pulled");
    let read = peer.post(&Batch::read(&back.all(), &remote.all())?)?;
    let all = |held: bool| {
        for connection in 0..proxy.connections() {
            proxy.hold_forth(connection, held);
            proxy.hold_back(connection, held);
        }
    };
    all(true);
    let start = Instant::now();
    let reasons = [GONE, SILENT, Reason::TimedOut];
    let ended = world.ends(&write, world.profile.deadline)?;
    allowed(ended, &reasons)?;
    let took = start.elapsed();
    let read_ended = world.ends(&read, world.profile.deadline)?;
    allowed(read_ended, &reasons)?;
    ensure!(read_ended.fence == Fence::Held, "a read ended with an open fence");
    let snapshot = || procfs::memory_of(b.pid(), addr, len as usize);
    let before = snapshot()?;
    memory::fill_all(&back, 8)?;
    world.step("plugged in again");
    all(false);
    std::thread::sleep(world.profile.watch.max(world.profile.detect));
    let changed = before.iter().zip(&snapshot()?).filter(|(a, b)| a != b).count();
    if ended.fence == Fence::Held && changed > 0 {
        bail!("{ended:?} after {took:?}, but {changed} bytes changed afterwards");
    }
    memory::check(&back, 8, 0, 0, len).context("a read that had ended touched its buffer")?;
    b.ask("hook off")?;
    world.step("a new session");
    let again = a.connect(&b.metadata)?;
    again.notify(b"back")?.join().ok()?;
    healthy.finish(world)?;
    fine_with(format!("{:?} {:?} after {} ms", ended.reason, ended.fence, took.as_millis()))
}
