//! A stream of transfers with a fixed number in flight, as in perftest's bandwidth tests.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use peerway::Prepared;

use super::clock::Stopwatch;
use super::interrupt;
use super::measure::Times;

/// Keeps `depth` transfers in flight for about `budget`, and waits for the last one. Records the
/// time of each transfer from its post to its completion. Returns the number of transfers, and the
/// nanoseconds from the first post to the last completion.
pub(crate) fn run(
    prepared: &Prepared,
    depth: u32,
    budget: Duration,
    watch: &Stopwatch,
    times: &mut Times,
) -> anyhow::Result<(u64, u64)> {
    let mut under_way = VecDeque::with_capacity(depth as usize);
    let start = Instant::now();
    let mut count = 0;
    loop {
        interrupt::check()?;
        // At least `2 * depth` transfers, so that most of them are posted behind others.
        let more = start.elapsed() < budget || count < 2 * u64::from(depth);
        while more && under_way.len() < depth as usize {
            under_way.push_back((Instant::now(), prepared.begin()?));
            count += 1;
        }
        let Some((posted, transfer)) = under_way.pop_front() else { break };
        transfer.join().ok()?;
        times.record(watch.nanos(posted, Instant::now()));
    }
    Ok((count, watch.nanos(start, Instant::now())))
}
