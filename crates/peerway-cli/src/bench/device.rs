//! The baseline of copies by a GPU: the driver's copy of the same number of bytes inside one
//! process.
//!
//! The baseline is one `cuMemcpyAsync` and a wait, between two buffers of the same memory as the
//! two sides have. For host memory, pinned or not, the buffer is pinned, which is the best case for
//! a GPU. Several pieces are compared with one copy of their total.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use peerway::gpu::{DeviceMemory, PinnedMemory};
use peerway_sys::Library;
use peerway_sys::cuda::{Cuda, Gpu, Stream};

use super::Op;
use super::clock::Stopwatch;
use super::measure::{Baseline, Times, timed};
use super::memory::{Place, once};

/// Two buffers, one per side, and a GPU that copies between them.
pub(crate) struct Driver {
    gpu: Arc<Gpu>,
    stream: Stream,
    buffers: [Buffer; 2],
    len: u64,
}

enum Buffer {
    Device(DeviceMemory),
    Pinned(PinnedMemory),
}

impl Buffer {
    fn new(place: Place, len: u64, copier: u32) -> anyhow::Result<Self> {
        Ok(if place.memory.is_gpu() {
            Self::Device(place.on_gpu(len, &[copier])?)
        } else {
            Self::Pinned(PinnedMemory::allocate(usize::try_from(len)?).map_err(once)?)
        })
    }

    fn address(&self) -> u64 {
        match self {
            Self::Device(memory) => memory.address(),
            Self::Pinned(memory) => memory.ptr().expose_provenance() as u64,
        }
    }
}

impl Driver {
    /// Allocates buffers of `len` bytes for the two sides, at least one of which must use GPU
    /// memory. A GPU of the other process is assumed to have the same number in this process.
    pub(crate) fn new(places: [Place; 2], len: u64) -> anyhow::Result<Self> {
        let place = places.into_iter().find(|place| place.memory.is_gpu());
        let ordinal = place.context("no side has GPU memory")?.gpu;
        let cuda = Cuda::load(Library::Cuda.named())?;
        let gpu = Gpu::open(&cuda, ordinal)?;
        let stream = Stream::new(&gpu)?;
        let [local, remote] = places;
        let buffers = [Buffer::new(local, len, ordinal)?, Buffer::new(remote, len, ordinal)?];
        Ok(Self { gpu, stream, buffers, len })
    }

    /// The baseline of a row. A read copies into this side's buffer, any other operation out of it.
    pub(crate) fn baseline(&self, op: Op, total: u64) -> Copying<'_> {
        Copying { driver: self, op, total, times: Times::new() }
    }

    /// Copies once and waits.
    pub(crate) fn copy(&self, op: Op, total: u64) -> anyhow::Result<()> {
        let [local, remote] = &self.buffers;
        let (to, from) = if op == Op::Read { (local, remote) } else { (remote, local) };
        ensure!(total <= self.len, "{total} bytes exceed the buffer of {}", self.len);
        // SAFETY: both buffers have at least `total` bytes, belong to this value and outlive the
        // wait below. The stream belongs to this GPU.
        unsafe { self.gpu.copy(to.address(), from.address(), total as usize, self.stream.raw())? };
        Ok(self.stream.synchronize()?)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // After a failed wait a copy may still run, so wait again before the buffers are freed. If
        // this wait fails too, the GPU runs no more work.
        let _ = self.stream.synchronize();
    }
}

/// The baseline of one row.
pub(crate) struct Copying<'a> {
    driver: &'a Driver,
    op: Op,
    total: u64,
    times: Times,
}

impl Baseline for Copying<'_> {
    fn round(&mut self, budget: Duration, watch: &Stopwatch) -> anyhow::Result<f64> {
        let Self { driver, op, total, times } = self;
        let mut round = Times::new();
        timed(budget, watch, 1, &mut round, || driver.copy(*op, *total))?;
        times.add(&round);
        Ok(*total as f64 / round.p50())
    }

    fn gbps(&self) -> f64 {
        self.total as f64 / self.times.p50()
    }
}
