//! Timing: rounds of transfers alternate with rounds of the limit.
//!
//! The loop is closed: the next transfer starts when the previous one is complete. Rounds of
//! transfers and rounds of the limit alternate, so that a disturbance of the machine affects both.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::clock::Stopwatch;

/// Rounds per row. With few rounds, the initial state of the caches does not matter. With enough
/// rounds, a disturbance of a tenth of a second does not affect only one side.
const ROUNDS: u32 = 5;

/// The fraction of a row's time for transfers. The rest is for the limit.
const OURS: f64 = 0.6;

/// One part in this many of a round warms up caches, windows and the other side's poll loop.
const WARM_UP: u32 = 20;

/// The performance of the machine without an engine.
pub(crate) trait Limit {
    /// Measures for about `budget`.
    fn round(&mut self, budget: Duration, watch: &Stopwatch) -> anyhow::Result<()>;
    /// Bytes per nanosecond, that is GB/s, at the median time.
    fn gbps(&self) -> f64;
}

/// A histogram of times.
#[derive(Clone, Debug)]
pub(crate) struct Times(Histogram<u64>);

impl Times {
    /// An empty histogram.
    pub(crate) fn new() -> Self {
        // Three digits, from a nanosecond to ten minutes. The watchdog ends a run before that.
        let bounds = Histogram::new_with_bounds(1, 600_000_000_000, 3);
        Self(bounds.expect("the histogram accepts these constant bounds"))
    }

    /// Adds a time.
    pub(crate) fn record(&mut self, nanos: u64) {
        self.0.saturating_record(nanos);
    }

    /// Adds all times of another.
    pub(crate) fn add(&mut self, other: &Self) {
        self.0.add(&other.0).expect("both have the same bounds");
    }

    /// The median in nanoseconds.
    pub(crate) fn p50(&self) -> f64 {
        self.0.value_at_quantile(0.5).max(1) as f64
    }

    /// The mean in nanoseconds.
    pub(crate) fn mean(&self) -> f64 {
        self.0.mean().max(1.0)
    }

    /// The 99th percentile in nanoseconds.
    pub(crate) fn p99(&self) -> f64 {
        self.0.value_at_quantile(0.99).max(1) as f64
    }

    /// The maximum in nanoseconds.
    pub(crate) fn max(&self) -> f64 {
        self.0.max() as f64
    }
}

/// Runs `once` for about `budget`, at least twice. Records the times after the warm-up, divided by
/// `share`. Returns the number of runs.
pub(crate) fn timed(
    budget: Duration,
    watch: &Stopwatch,
    share: u64,
    times: &mut Times,
    mut once: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<u64> {
    let start = Instant::now();
    let mut count = 0;
    loop {
        once()?;
        count += 1;
        if start.elapsed() >= budget / WARM_UP {
            break;
        }
    }
    loop {
        let before = Instant::now();
        once()?;
        let after = Instant::now();
        times.record((watch.nanos(before, after) / share).max(1));
        count += 1;
        if after - start >= budget {
            return Ok(count);
        }
    }
}

/// The figures of a row.
#[derive(Debug)]
pub(crate) struct Figures {
    pub(crate) times: Times,
    pub(crate) limit_gbps: Option<f64>,
    /// The bound by the kernel's copy alone, if it is measured.
    pub(crate) kernel_gbps: Option<f64>,
    pub(crate) cpu_s_per_gb: f64,
}

/// The parameters for the timing of a row.
pub(crate) struct Rounds<'a> {
    pub(crate) watch: &'a Stopwatch,
    pub(crate) seconds: f64,
    /// Bytes of one run of `once`.
    pub(crate) bytes: u64,
    /// The divisor of each time: two for a round trip.
    pub(crate) share: u64,
}

impl Rounds<'_> {
    /// Times `once` in rounds that alternate with the limit and the kernel's bound, if they are
    /// given. `cpu` returns the CPU seconds of both sides so far. `beat` is called after each
    /// round.
    pub(crate) fn run(
        &self,
        mut limit: Option<&mut dyn Limit>,
        mut kernel: Option<&mut dyn Limit>,
        mut once: impl FnMut() -> anyhow::Result<()>,
        mut cpu: impl FnMut() -> anyhow::Result<f64>,
        mut beat: impl FnMut(),
    ) -> anyhow::Result<Figures> {
        let round = self.seconds / f64::from(ROUNDS);
        let ours = Duration::from_secs_f64(round * OURS);
        let theirs = Duration::from_secs_f64(round * (1.0 - OURS));
        let mut times = Times::new();
        let (mut count, mut seconds) = (0, 0.0);
        for _ in 0..ROUNDS {
            let before = cpu()?;
            count += timed(ours, self.watch, self.share, &mut times, &mut once)?;
            seconds += cpu()? - before;
            beat();
            if let Some(limit) = &mut limit {
                limit.round(theirs, self.watch)?;
                beat();
            }
            if let Some(kernel) = &mut kernel {
                kernel.round(theirs, self.watch)?;
                beat();
            }
        }
        let gigabytes = (count * self.bytes) as f64 / 1e9;
        Ok(Figures {
            times,
            limit_gbps: limit.map(|limit| limit.gbps()),
            kernel_gbps: kernel.map(|kernel| kernel.gbps()),
            cpu_s_per_gb: seconds / gigabytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Constant(u32);

    impl Limit for Constant {
        fn round(&mut self, _: Duration, _: &Stopwatch) -> anyhow::Result<()> {
            self.0 += 1;
            Ok(())
        }

        fn gbps(&self) -> f64 {
            f64::from(self.0)
        }
    }

    #[test]
    fn rounds_alternate_and_add_up() {
        let watch = Stopwatch::new();
        let rounds = Rounds { watch: &watch, seconds: 0.01, bytes: 1_000_000_000, share: 1 };
        let (mut calls, mut clock) = (0u32, 0.0);
        let once = || {
            calls += 1;
            std::thread::sleep(Duration::from_micros(200));
            Ok(())
        };
        let cpu = || {
            clock += 1.0;
            Ok(clock)
        };
        let mut kernel = Constant(10);
        let figures =
            rounds.run(Some(&mut Constant(0)), Some(&mut kernel), once, cpu, || ()).unwrap();
        assert_eq!(figures.limit_gbps, Some(f64::from(ROUNDS)));
        assert_eq!(figures.kernel_gbps, Some(f64::from(10 + ROUNDS)));
        assert!(calls >= 2 * ROUNDS);
        // By this clock a round takes one second. A call moves one gigabyte.
        assert!((figures.cpu_s_per_gb - f64::from(ROUNDS) / f64::from(calls)).abs() < 1e-9);
        assert!(figures.times.p50() >= 190_000.0 && figures.times.p99() >= figures.times.p50());
    }

    #[test]
    fn the_first_failure_ends_a_round() {
        let mut times = Times::new();
        let result = timed(Duration::from_secs(9), &Stopwatch::new(), 1, &mut times, || {
            anyhow::bail!("broken")
        });
        assert_eq!(result.unwrap_err().to_string(), "broken");
    }
}
