//! The baseline of GPU memory on a path where no GPU copies: the same path with host memory, in the
//! same session.

use std::time::Duration;

use peerway::{Prepared, Region, RemoteRegion};

use super::clock::Stopwatch;
use super::measure::{Baseline, Times, timed};

/// Host buffers of both sides.
pub(crate) struct HostPair {
    pub(crate) local: Region,
    pub(crate) remote: RemoteRegion,
}

/// The baseline of one row: the same transfer with host memory.
pub(crate) struct SamePath {
    prepared: Prepared,
    total: u64,
    times: Times,
}

impl SamePath {
    pub(crate) fn new(prepared: Prepared, total: u64) -> Self {
        Self { prepared, total, times: Times::new() }
    }
}

impl Baseline for SamePath {
    fn round(&mut self, budget: Duration, watch: &Stopwatch) -> anyhow::Result<f64> {
        let mut round = Times::new();
        timed(budget, watch, 1, &mut round, || Ok(self.prepared.run()?.ok()?))?;
        self.times.add(&round);
        Ok(self.total as f64 / round.p50())
    }

    fn gbps(&self) -> f64 {
        self.total as f64 / self.times.p50()
    }
}
