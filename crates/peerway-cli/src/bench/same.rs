//! The limit of GPU memory on a path where no GPU copies: the same path with host memory, in the
//! same session.

use std::time::Duration;

use peerway::{Prepared, Region, RemoteRegion};

use super::clock::Stopwatch;
use super::measure::{Limit, Times, timed};

/// Host buffers of both sides.
pub(crate) struct HostPair {
    pub(crate) local: Region,
    pub(crate) remote: RemoteRegion,
}

/// The limit of one row: the same transfer with host memory.
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

impl Limit for SamePath {
    fn round(&mut self, budget: Duration, watch: &Stopwatch) -> anyhow::Result<()> {
        let Self { prepared, times, .. } = self;
        timed(budget, watch, 1, times, || Ok(prepared.run()?.ok()?)).map(drop)
    }

    fn gbps(&self) -> f64 {
        self.total as f64 / self.times.p50()
    }
}
