//! Posting returns at once, whatever the size.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use peerway::Batch;

use crate::remote::Memory;
use crate::world::{Verdict, World, fine_with};

/// No assertion about speed, only that nobody copies a gigabyte first; benchmarks hold the 20 µs.
const GENEROUS: Duration = Duration::from_millis(50);

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut options = world.calm();
    options.deadline = Duration::from_secs(30);
    let mut pair = world.pair_with(&options)?;
    let (len, part) = (1u64 << 30, 64 << 20);
    // Sparse on both sides: reading untouched pages of a memfd costs little memory. Devices want all of it
    // in place, so there the same part is written over and over.
    let theirs = if world.transport.is_device() { part } else { len };
    pair.b.region("r", theirs, Memory::Shareable)?;
    let remote = pair.peer.import(&pair.b.advertise("r", peerway::Access::READ_WRITE)?)?;
    let ours = pair.a.allocate(part as usize)?;
    // The first transfer of memory by devices registers it with them.
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
    // Sixteen times the same 64 MiB make a gigabyte without needing one.
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
    // No post copies, whatever else this machine does; and posts do not wait, though one may be held up.
    ensure!(most < generous, "posting took {most:?} of the processor's time");
    ensure!(median < generous, "posting took {median:?} by the median");
    ensure!(longest < world.profile.slack, "posting took {longest:?}");
    fine_with(format!("{} µs, at most {} µs", median.as_micros(), longest.as_micros()))
}

/// Time that this thread has had a processor.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills the structure.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
