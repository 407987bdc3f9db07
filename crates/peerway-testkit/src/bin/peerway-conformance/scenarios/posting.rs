//! Posting returns at once, whatever the size of the batch.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use peerway::Batch;

use crate::remote::Memory;
use crate::world::{Verdict, World, fine_with};

/// Generous: this scenario only checks that a post does not copy a gigabyte first. Benchmarks check
/// the 20 µs.
const GENEROUS: Duration = Duration::from_millis(50);

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
    let mut times = Vec::new();
    let mut most = Duration::ZERO;
    let mut time = |batch: &Batch| -> Result<()> {
        let (start, used) = (Instant::now(), thread_time());
        let transfer = pair.peer.post(batch)?;
        times.push(start.elapsed());
        most = most.max(thread_time() - used);
        transfer.cancel();
        transfer.join();
        Ok(())
    };
    // Sixteen times the same 64 MiB add up to a gigabyte without allocating one.
    let place = |i: u64| (i * part) % theirs;
    let pairs: Vec<_> =
        (0..16).map(|i| (ours.all(), remote.slice(place(i)..place(i) + part))).collect();
    let write = Batch::write_vector(&pairs)?;
    ensure!(write.total() == len, "the batch is not a gigabyte");
    for _ in 0..20 {
        time(&write)?;
    }
    let indices: Vec<u32> = (0..100_000).map(|i| i % 16_000).collect();
    let blocks = Batch::write_blocks(
        ours.blocks(0, 4096, 4096, &indices),
        remote.blocks(0, 4096, 4096, &indices),
    )?;
    for _ in 0..20 {
        time(&blocks)?;
    }
    times.sort();
    let (median, longest) = (times[times.len() / 2], times[times.len() - 1]);
    let generous = GENEROUS * world.profile.slower;
    // The processor time shows that no post copies, whatever else this machine does. The median
    // shows that posts do not wait, though the scheduler may delay one of them.
    ensure!(most < generous, "posting took {most:?} of processor time");
    ensure!(median < generous, "posting took {median:?} in the median");
    ensure!(longest < world.profile.slack, "the longest post took {longest:?}");
    fine_with(format!("{} µs, at most {} µs", median.as_micros(), longest.as_micros()))
}

/// Processor time that this thread has used.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec that outlives the call, which fills it.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
