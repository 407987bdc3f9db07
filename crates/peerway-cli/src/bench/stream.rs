//! A stream of transfers: so many are under way at a time, as in perftest's tests of bandwidth.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use peerway::Prepared;

use super::clock::Stopwatch;
use super::measure::Times;

/// Keeps `depth` transfers under way for about `budget` and waits for the last; records the time of each
/// from its post to its end. Returns how many there were, and nanoseconds from the first post to the last end.
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
        // At least twice round, so that most of them were posted behind others.
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
