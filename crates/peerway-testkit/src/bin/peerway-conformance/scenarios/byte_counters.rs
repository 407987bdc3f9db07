//! Both sides count the bytes of every path, exactly.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway::{Access, Batch, PeerStats};

use crate::remote::Memory;
use crate::world::{Pair, Transport, Verdict, World, fine};

/// Small enough for an inline copy, for a push, and large enough for the copy pool and for pulls.
const SIZES: [u64; 5] = [1, 256, 48 << 10, (1 << 20) + 1, (5 << 20) + 13];

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    pair.b.accept()?;
    let kinds: &[Memory] = match world.transport {
        Transport::LocalMap => &[Memory::Shareable],
        _ => &[Memory::Shareable, Memory::Private],
    };
    let (mut moved, mut by_peer) = (0, 0);
    for &kind in kinds {
        for len in SIZES {
            let remote = pair.theirs("r", len, kind, 1)?;
            let ours = match kind {
                Memory::Shareable => pair.a.allocate(len as usize)?,
                Memory::Private => pair.a.register(vec![0u8; len as usize])?,
            };
            pair.peer.write(&ours.all(), &remote.all())?;
            pair.peer.read(&ours.all(), &remote.all())?;
            moved += len;
            // The peer transfers on the same session.
            pair.b.import("x", &ours.advertise(Access::READ_WRITE)?)?;
            for verb in ["write", "read"] {
                let ended = pair.b.ask(&format!("xfer p {verb} r 0 x 0 {len}"))?;
                ensure!(ended == "Done Held", "the peer's {verb}: {ended}");
            }
            by_peer += len;
            check(world, &mut pair, moved, by_peer).with_context(|| format!("{len} bytes"))?;
        }
    }
    a_signal_brings_them(world, &mut pair, moved, by_peer)
}

/// This side's own bytes count at once. The bytes that the peer moved count when it has told them.
fn check(world: &World, pair: &mut Pair, moved: u64, by_peer: u64) -> Result<()> {
    let own = pair.peer.stats();
    ensure!((own.bytes_written, own.bytes_read) == (moved, moved), "own bytes: {own:?}");
    let until = Instant::now() + world.profile.limit;
    loop {
        let stats = pair.peer.stats();
        let there = pair.b.ask("pstats p")?;
        let right = (stats.bytes_landed, stats.bytes_served) == (by_peer, by_peer)
            && there == format!("{moved} {moved} {by_peer} {by_peer} 0");
        if right {
            break;
        }
        ensure!(Instant::now() < until, "moved {moved} and {by_peer}: {stats:?}, there {there}");
        std::thread::sleep(Duration::from_millis(5));
    }
    let (all, one) = (pair.a.stats(), pair.peer.stats());
    ensure!(all.traffic == one && all.peers == 1, "the endpoint counts {all:?}, the peer {one:?}");
    Ok(())
}

/// The owner sees a notification together with the bytes that it speaks of. The totals of the
/// endpoint stay when the peer is gone.
fn a_signal_brings_them(
    world: &World,
    pair: &mut Pair,
    moved: u64,
    by_peer: u64,
) -> Result<Verdict> {
    let len = 4096;
    let remote = pair.theirs("r", len, Memory::Shareable, 1)?;
    let ours = pair.a.allocate(len as usize)?;
    let batch = Batch::write(&ours.all(), &remote.all())?.notify(b"done")?;
    pair.peer.run(&batch)?.ok()?;
    let limit = world.profile.limit.as_millis();
    ensure!(pair.b.ask(&format!("notification e {limit}"))? != "none", "no notification came");
    let there = pair.b.ask("pstats p")?;
    let expected = format!("{} {moved} {by_peer} {by_peer} 0", moved + len);
    ensure!(there == expected, "with the notification: {there}, expected {expected}");
    let before: PeerStats = pair.a.stats().traffic;
    pair.peer.remove();
    let until = Instant::now() + world.profile.limit;
    while pair.a.stats().peers > 0 {
        ensure!(Instant::now() < until, "the peer is not gone");
        std::thread::sleep(Duration::from_millis(5));
    }
    let after = pair.a.stats().traffic;
    ensure!(after == before, "before the peer went {before:?}, after {after:?}");
    fine()
}
