//! Compares rows of RDMA devices with perftest, the usual benchmark of such devices.
//!
//! A row is measured in pairs: a round of Peerway, and a run of `ib_write_bw`, `ib_read_bw` or
//! `ib_write_lat`. Both use the same two devices, with the same number of requests in flight and
//! the same number of queue pairs. The medians of the pairs are compared.
//!
//! The serving process starts perftest's server (`child`), and this process starts its client.
//! `parse` reads the client's output. If a run fails or prints invalid figures, its pair is
//! measured again. This happens occasionally on machines with emulated clocks.

pub(crate) mod child;
pub(crate) mod parse;
pub(crate) mod port;

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use super::Op;
use super::layout::Layout;
use super::measure::{Ratio, Times};
use parse::Found;

/// Pairs per row. A median of fewer pairs is not reliable.
pub(crate) const PAIRS: usize = 7;

/// Transfers in flight in a bandwidth row. perftest calls it `--tx-depth`.
pub(crate) const DEPTH: u32 = 16;

/// The smallest size of a bandwidth row. Smaller sizes measure the rate of requests instead.
const FROM: u64 = 64 << 10;
/// The largest size of a latency row.
const TO: u64 = 64 << 10;

/// How many pairs may be repeated before the row fails.
pub(crate) const SPARE_PAIRS: usize = 10;

/// The parameters of a perftest run.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Ask {
    pub(crate) op: Op,
    pub(crate) size: u64,
    /// Iterations per queue pair.
    pub(crate) iterations: u64,
    pub(crate) depth: u32,
    pub(crate) queue_pairs: u16,
}

impl Ask {
    /// Whether perftest can measure such a row.
    pub(crate) fn has(op: Op, layout: &Layout) -> bool {
        layout.iovs == 1
            && match op {
                Op::Write | Op::Read => layout.size >= FROM,
                Op::Pingpong => (2..=TO).contains(&layout.size),
            }
    }

    /// The name of the perftest program.
    pub(crate) fn tool(&self) -> &'static str {
        match self.op {
            Op::Write => "ib_write_bw",
            Op::Read => "ib_read_bw",
            Op::Pingpong => "ib_write_lat",
        }
    }

    /// Checks the parameters, which come from another process, against the range of a benchmark.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        ensure!((1..=1 << 32).contains(&self.size), "size {} is out of range", self.size);
        ensure!(
            (5..=1 << 24).contains(&self.iterations),
            "number of iterations {} is out of range",
            self.iterations
        );
        ensure!((1..=1024).contains(&self.depth), "depth {} is out of range", self.depth);
        ensure!(
            (1..=64).contains(&self.queue_pairs),
            "number of queue pairs {} is out of range",
            self.queue_pairs
        );
        Ok(())
    }

    /// Sets the iterations so that a run takes about `seconds` at this speed, but not fewer than a
    /// useful minimum.
    pub(crate) fn last(&mut self, seconds: f64, nanos_each: f64) {
        let fit = seconds * 1e9 / nanos_each / f64::from(self.queue_pairs);
        let twice = 2 * u64::from(self.depth) / u64::from(self.queue_pairs);
        let least = if self.op == Op::Pingpong { 100 } else { twice.max(5) };
        self.iterations = (fit as u64).clamp(least, 1 << 20);
    }
}

/// The figures of the pairs of one row.
#[derive(Debug)]
pub(crate) struct Pairs {
    pub(crate) depth: u32,
    pub(crate) queue_pairs: u16,
    /// Peerway's figures: GB/s, or half a round trip in microseconds.
    pub(crate) ours: Vec<f64>,
    pub(crate) theirs: Vec<Found>,
    /// The times of Peerway's single transfers.
    pub(crate) times: Times,
    /// How many pairs were repeated.
    pub(crate) again: usize,
}

impl Pairs {
    /// The median of Peerway's rounds.
    pub(crate) fn our_median(&self) -> f64 {
        median(self.ours.iter().copied())
    }

    /// The median of perftest's runs.
    pub(crate) fn their_median(&self) -> f64 {
        median(self.theirs.iter().map(|found| found.value))
    }

    /// The ratio of the rates: ours to perftest's. A shorter time is a higher rate.
    pub(crate) fn ratio(&self, op: Op) -> Ratio {
        let pairs = self.ours.iter().zip(&self.theirs);
        Ratio::of(match op {
            Op::Pingpong => pairs.map(|(ours, theirs)| theirs.value / ours).collect(),
            Op::Write | Op::Read => pairs.map(|(ours, theirs)| ours / theirs.value).collect(),
        })
    }

    /// The median of perftest's 99th percentiles. `None` if perftest does not print them.
    pub(crate) fn their_p99(&self) -> Option<f64> {
        let all: Option<Vec<f64>> = self.theirs.iter().map(|found| found.p99).collect();
        all.map(|all| median(all.into_iter()))
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rows_that_perftest_has_are_compared() {
        let layout = |size, iovs| Layout { size, iovs, seed: 0 };
        assert!(Ask::has(Op::Write, &layout(64 << 10, 1)));
        assert!(!Ask::has(Op::Read, &layout(4096, 1)));
        assert!(!Ask::has(Op::Read, &layout(1 << 20, 128)));
        assert!(Ask::has(Op::Pingpong, &layout(256, 1)));
        assert!(!Ask::has(Op::Pingpong, &layout(1, 1)), "ib_write_lat needs at least two bytes");
    }

    #[test]
    fn runs_last_as_long_as_asked_but_not_too_few() {
        let mut ask =
            Ask { op: Op::Write, size: 1 << 20, iterations: 5, depth: 32, queue_pairs: 2 };
        ask.last(1.0, 1e6);
        assert_eq!(ask.iterations, 500);
        ask.last(0.001, 1e9);
        assert_eq!(ask.iterations, 32);
        ask.check().unwrap();
        assert!(Ask { iterations: u64::MAX, ..ask }.check().is_err());
        assert!(Ask { size: 0, ..ask }.check().is_err());
    }

    #[test]
    fn medians_are_of_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert!(median([].into_iter()).is_nan());
    }
}
