//! Many threads on one endpoint: posting, waiting, cancelling, preparing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail, ensure};
use peerway::{Batch, Fence, PostError, Reason};
use peerway_testkit::memory;
use peerway_testkit::random::Random;

use crate::world::{Verdict, World, fine_with};

const THREADS: u64 = 8;
const PART: u64 = 300_000;

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut pair = world.pair_with(&world.calm())?;
    let remote = pair.theirs("r", PART * THREADS, world.memory(), 1)?;
    let (done, cancelled) = (AtomicU64::new(0), AtomicU64::new(0));
    let shared = world.region(&pair.a, PART)?;
    memory::fill_all(&shared, 50)?;
    let scratch = pair.theirs("s", PART, world.memory(), 1)?;
    // One prepared transfer that every thread posts.
    let prepared = pair.peer.prepare(Batch::write(&shared.all(), &scratch.all())?.count(4))?;
    let posted = AtomicU64::new(0);
    let until = Instant::now() + world.profile.detect * 2;
    std::thread::scope(|scope| -> Result<()> {
        let threads: Vec<_> = (0..THREADS)
            .map(|me| {
                let (peer, endpoint, remote) = (&pair.peer, &pair.a, &remote);
                let (done, cancelled, posted, prepared) = (&done, &cancelled, &posted, &prepared);
                scope.spawn(move || -> Result<()> {
                    let mut random = Random::new(me);
                    let ours = world.region(endpoint, PART)?;
                    let back = world.region(endpoint, PART)?;
                    let unwatched = world.region(endpoint, PART)?;
                    let mine = remote.slice(me * PART..(me + 1) * PART);
                    let mut round = 0;
                    while Instant::now() < until {
                        round += 1;
                        memory::fill_all(&ours, me * 1000 + round)?;
                        peer.write(&ours.all(), &mine)?;
                        let read = peer.post(&Batch::read(&back.all(), &mine)?)?;
                        while read.poll().is_none() {
                            std::thread::yield_now();
                        }
                        read.join().ok()?;
                        memory::check(&back, me * 1000 + round, 0, 0, PART)?;
                        done.fetch_add(2, Ordering::Relaxed);
                        let late = match prepared.post() {
                            Ok(late) => late,
                            Err(PostError::Busy { .. }) => continue,
                            Err(other) => return Err(other.into()),
                        };
                        posted.fetch_add(1, Ordering::Relaxed);
                        if random.one_in(3) {
                            late.cancel();
                        }
                        match late.join() {
                            e if e.reason == Reason::Done => done.fetch_add(1, Ordering::Relaxed),
                            e if e.reason == Reason::Cancelled && e.fence == Fence::Held => {
                                cancelled.fetch_add(1, Ordering::Relaxed)
                            }
                            other => bail!("a prepared transfer ended as {other:?}"),
                        };
                        // A transfer without a waiter: it may land at any time, so it has its own
                        // memory.
                        if random.one_in(4) {
                            drop(peer.post(&Batch::read(&unwatched.all(), &mine)?)?);
                            std::thread::sleep(Duration::from_millis(1));
                            peer.notify(b"")?.join().ok()?;
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        for thread in threads {
            thread.join().map_err(|_| anyhow!("a thread panicked"))??;
        }
        Ok(())
    })?;
    let (done, cancelled) = (done.into_inner(), cancelled.into_inner());
    let counted = pair.b.number("counter e 4")?;
    let posted = posted.into_inner();
    ensure!(counted <= posted, "{counted} counts of {posted} transfers");
    ensure!(counted + cancelled >= posted, "{counted} counted, {cancelled} cancelled of {posted}");
    pair.works_again(world)?;
    fine_with(format!("{done} done, {cancelled} cancelled"))
}
