//! Clocks: wall time minus the cost of reading the clock, and the CPU time of this process.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Times short intervals, and subtracts the cost of reading the clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stopwatch {
    cost: Duration,
}

impl Stopwatch {
    /// Measures the cost of reading the clock on this machine.
    pub(crate) fn new() -> Self {
        let mut pairs: Vec<Duration> = (0..1001)
            .map(|_| {
                let start = Instant::now();
                start.elapsed()
            })
            .collect();
        pairs.sort_unstable();
        Self { cost: pairs[pairs.len() / 2] }
    }

    /// The cost that is subtracted from every time.
    pub(crate) fn cost(&self) -> Duration {
        self.cost
    }

    /// Nanoseconds from `start` to `end`, at least one.
    pub(crate) fn nanos(&self, start: Instant, end: Instant) -> u64 {
        let taken = (end - start).saturating_sub(self.cost);
        taken.as_nanos().clamp(1, u128::from(u64::MAX)) as u64
    }
}

/// CPU seconds of all threads of this process, in user and kernel mode. The same as `getrusage`,
/// but in nanoseconds.
pub(crate) fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_costs_cpu_time_and_sleep_does_not_pass_for_none() {
        let before = cpu_seconds();
        let start = Instant::now();
        while cpu_seconds() - before < 0.01 {
            assert!(start.elapsed() < Duration::from_secs(60), "the CPU time does not advance");
        }
    }

    #[test]
    fn times_are_never_zero() {
        let now = Instant::now();
        assert_eq!(Stopwatch::new().nanos(now, now), 1);
        assert!(Stopwatch::new().nanos(now, now + Duration::from_secs(1)) > 999_000_000);
    }
}
