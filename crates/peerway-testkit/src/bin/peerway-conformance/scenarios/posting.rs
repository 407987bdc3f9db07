//! Posting returns at once, whatever the size of the batch.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use peerway::Batch;

use crate::remote::Memory;
use crate::world::{Verdict, World, fine_with};

/// Processor time of a post. Generous: this scenario only checks that a post does not copy a
/// gigabyte first. Benchmarks check the 20 µs.
const GENEROUS: Duration = Duration::from_millis(50);
/// Posts of each batch.
const POSTS: u32 = 20;

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut options = world.calm();
    options.deadline = Duration::from_secs(30);
    let mut pair = world.pair_with(&options)?;
    let (len, part) = (1u64 << 30, 64 << 20);
    // Sparse on both sides: reading untouched pages of a memfd costs little memory. Devices pin the
    // whole region, so on them the batch writes the same part repeatedly.
    let theirs = if world.transport.is_device() { part } else { len };
    pair.b.region("r", theirs, Memory::Shareable)?;
    let remote = pair.peer.import(&pair.b.advertise("r", peerway::Access::READ_WRITE)?)?;
    let ours = pair.a.allocate(part as usize)?;
    // The first transfer on devices registers the memory, so do it before the measurement.
    pair.peer.write(&ours.all(), &remote.slice(0..part))?;
    let (mut longest, mut most) = (Duration::ZERO, Duration::ZERO);
    // Posts the batch several times. Returns how often the transfer was not over after the post.
    let mut post = |batch: &Batch| -> Result<u32> {
        let mut pending = 0;
        for _ in 0..POSTS {
            let (start, used) = (Instant::now(), thread_time());
            let transfer = pair.peer.post(batch)?;
            pending += u32::from(transfer.ended().is_none());
            longest = longest.max(start.elapsed());
            most = most.max(thread_time() - used);
            transfer.cancel();
            transfer.join();
        }
        Ok(pending)
    };
    // Sixteen times the same 64 MiB add up to a gigabyte without allocating one.
    let place = |i: u64| (i * part) % theirs;
    let pairs: Vec<_> =
        (0..16).map(|i| (ours.all(), remote.slice(place(i)..place(i) + part))).collect();
    let write = Batch::write_vector(&pairs)?;
    ensure!(write.total() == len, "the batch is not a gigabyte");
    let pending = post(&write)?;
    let indices: Vec<u32> = (0..100_000).map(|i| i % 16_000).collect();
    let blocks = Batch::write_blocks(
        ours.blocks(0, 4096, 4096, &indices),
        remote.blocks(0, 4096, 4096, &indices),
    )?;
    let pending = [pending, post(&blocks)?];
    // The processor time shows that no post copies, whatever else this machine does. A transfer
    // that is not over shows that its post did not wait for it. The scheduler may delay some posts
    // until other threads have carried out the transfer.
    let generous = GENEROUS * world.profile.slower;
    ensure!(most < generous, "posting took {most:?} of processor time");
    ensure!(!pending.contains(&0), "of {POSTS} posts each, {pending:?} did not wait");
    ensure!(longest < world.profile.slack, "the longest post took {longest:?}");
    fine_with(format!("{} µs of processor time at most", most.as_micros()))
}

/// Processor time that this thread has used.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec that outlives the call, which fills it.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
