//! Timing: rounds of transfers alternate with rounds of the baseline.
//!
//! The loop is closed: the next transfer starts when the previous one is complete. Rounds of
//! transfers and rounds of the baseline alternate, so that a disturbance of the machine affects
//! both. Each pair of rounds gives one ratio; the row has their median, the lowest and the highest.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::clock::Stopwatch;
use super::interrupt;

/// Rounds per row. With few rounds, the initial state of the caches does not matter. With enough
/// rounds, a disturbance of a tenth of a second does not affect only one side.
const ROUNDS: u32 = 5;

/// The fraction of a row's time for transfers. The rest is for the baseline.
const OURS: f64 = 0.6;

/// One part in this many of a round warms up caches, windows and the other side's poll loop.
const WARM_UP: u32 = 20;

/// The performance of the machine without an engine.
pub(crate) trait Baseline {
    /// Measures for about `budget`. Returns the bytes per nanosecond, that is GB/s, at the median
    /// time of this round.
    fn round(&mut self, budget: Duration, watch: &Stopwatch) -> anyhow::Result<f64>;
    /// GB/s at the median time of all rounds.
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
        interrupt::check()?;
        once()?;
        count += 1;
        if start.elapsed() >= budget / WARM_UP {
            break;
        }
    }
    loop {
        interrupt::check()?;
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
    pub(crate) baseline: Option<Beside>,
    /// The bound by the kernel's copy alone, if it is measured.
    pub(crate) kernel: Option<Beside>,
    pub(crate) cpu_s_per_gb: f64,
}

/// What a row is compared with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beside {
    /// GB/s of the baseline, at its median time.
    pub(crate) gbps: f64,
    pub(crate) ratio: Ratio,
}

/// The row's GB/s divided by those of the baseline: the median of the pairs of rounds, the lowest
/// and the highest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ratio {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Ratio {
    /// Of the ratios of all pairs. All three are NaN if there is none.
    pub(crate) fn of(mut ratios: Vec<f64>) -> Self {
        ratios.sort_unstable_by(f64::total_cmp);
        let at = |index: usize| ratios.get(index).copied().unwrap_or(f64::NAN);
        Self { median: at(ratios.len() / 2), low: at(0), high: at(ratios.len().saturating_sub(1)) }
    }
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
    /// Times `once` in rounds that alternate with the baseline and the kernel's bound, if they are
    /// given. `cpu` returns the CPU seconds of both sides so far. `beat` is called after each
    /// round.
    pub(crate) fn run(
        &self,
        mut baseline: Option<&mut dyn Baseline>,
        mut kernel: Option<&mut dyn Baseline>,
        mut once: impl FnMut() -> anyhow::Result<()>,
        mut cpu: impl FnMut() -> anyhow::Result<f64>,
        mut beat: impl FnMut(),
    ) -> anyhow::Result<Figures> {
        let round = self.seconds / f64::from(ROUNDS);
        let ours = Duration::from_secs_f64(round * OURS);
        let theirs = Duration::from_secs_f64(round * (1.0 - OURS));
        let mut times = Times::new();
        let (mut count, mut seconds) = (0, 0.0);
        let [mut to_baseline, mut to_kernel] = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            let before = cpu()?;
            let mut round = Times::new();
            count += timed(ours, self.watch, self.share, &mut round, &mut once)?;
            seconds += cpu()? - before;
            times.add(&round);
            let gbps = (self.bytes / self.share) as f64 / round.p50();
            beat();
            if let Some(baseline) = &mut baseline {
                to_baseline.push(gbps / baseline.round(theirs, self.watch)?);
                beat();
            }
            if let Some(kernel) = &mut kernel {
                to_kernel.push(gbps / kernel.round(theirs, self.watch)?);
                beat();
            }
        }
        let gigabytes = (count * self.bytes) as f64 / 1e9;
        let beside = |baseline: &mut dyn Baseline, ratios| Beside {
            gbps: baseline.gbps(),
            ratio: Ratio::of(ratios),
        };
        Ok(Figures {
            times,
            baseline: baseline.map(|baseline| beside(baseline, to_baseline)),
            kernel: kernel.map(|kernel| beside(kernel, to_kernel)),
            cpu_s_per_gb: seconds / gigabytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Constant(u32);

    impl Baseline for Constant {
        fn round(&mut self, _: Duration, _: &Stopwatch) -> anyhow::Result<f64> {
            self.0 += 1;
            Ok(f64::from(self.0))
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
        let [baseline, kernel] = [figures.baseline.unwrap(), figures.kernel.unwrap()];
        assert_eq!(baseline.gbps, f64::from(ROUNDS));
        assert_eq!(kernel.gbps, f64::from(10 + ROUNDS));
        // The baseline's rounds have 1, 2, 3, 4 and 5 GB/s, and ours about the same each.
        let Ratio { median, low, high } = baseline.ratio;
        assert!(low < median && median < high, "{:?}", baseline.ratio);
        assert!(kernel.ratio.high < median, "{:?}", kernel.ratio);
        assert!(calls >= 2 * ROUNDS);
        // By this clock a round takes one second. A call moves one gigabyte.
        assert!((figures.cpu_s_per_gb - f64::from(ROUNDS) / f64::from(calls)).abs() < 1e-9);
        assert!(figures.times.p50() >= 190_000.0 && figures.times.p99() >= figures.times.p50());
    }

    #[test]
    fn a_ratio_has_its_spread() {
        let ratio = Ratio::of(vec![1.1, 0.9, 1.0, 7.0, 0.2]);
        assert_eq!(ratio, Ratio { median: 1.0, low: 0.2, high: 7.0 });
        assert!(Ratio::of(Vec::new()).median.is_nan());
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
