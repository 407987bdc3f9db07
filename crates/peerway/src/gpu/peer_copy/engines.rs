//! The driver's copies: one call per list if the driver supports that, otherwise one call per task.
//!
//! An event marks the end of a list. Events come from the device's pool and return to it.

use std::collections::VecDeque;
use std::sync::Arc;

use peerway_sys::cuda::{CudaError, Stream};

use super::{CopierKind, Fault, PeerCopy, Ticket};
use crate::gpu::copy::Run;
use crate::gpu::device::{Device, Mark};

/// Maximum number of tasks in a list, which is one driver call.
const MOST: usize = 4096;
/// Maximum number of lists in progress: half of the events that a device keeps.
const UNDER_WAY: usize = 32;

pub(super) struct Engines {
    device: Arc<Device>,
    stream: Stream,
    /// Whether the driver accepts lists.
    batches: bool,
    /// The list in the driver's format.
    dst: Vec<u64>,
    src: Vec<u64>,
    len: Vec<usize>,
    /// Lists in progress, in order.
    marks: VecDeque<(Ticket, Mark)>,
    submitted: Ticket,
    done: Ticket,
    fault: Fault,
}

impl Engines {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        Ok(Self {
            device: device.clone(),
            stream: Stream::urgent(&device.gpu)?,
            batches: device.gpu.has_batches(),
            dst: Vec::with_capacity(MOST),
            src: Vec::with_capacity(MOST),
            len: Vec::with_capacity(MOST),
            marks: VecDeque::with_capacity(UNDER_WAY),
            submitted: 0,
            done: 0,
            fault: Fault::default(),
        })
    }

    /// Puts the list into the stream, followed by a mark.
    ///
    /// # Safety
    ///
    /// As for [`PeerCopy::submit`].
    unsafe fn start(&mut self) -> Result<Mark, CudaError> {
        let (gpu, stream) = (&self.device.gpu, self.stream.raw());
        let mut listed = false;
        if self.batches && self.len.len() > 1 {
            // SAFETY: the caller upholds this function's contract.
            let copied =
                unsafe { gpu.copy_batch(&mut self.dst, &mut self.src, &mut self.len, stream) };
            match copied {
                Ok(()) => listed = true,
                // Whatever the reason, single copies either work or fail with a specific error.
                Err(error) => {
                    tracing::warn!(%error, "the driver refused a batch copy; copies go one by one");
                    self.batches = false;
                }
            }
        }
        if !listed {
            for ((dst, src), len) in self.dst.iter().zip(&self.src).zip(&self.len) {
                // SAFETY: the caller upholds this function's contract.
                unsafe { gpu.copy(*dst, *src, *len, stream)? };
            }
        }
        // SAFETY: the copier owns the stream.
        unsafe { self.device.mark(stream) }
    }
}

impl PeerCopy for Engines {
    fn kind(&self) -> CopierKind {
        CopierKind::Engines
    }

    fn most(&self) -> usize {
        MOST
    }

    fn room(&self) -> usize {
        if self.marks.len() < UNDER_WAY { MOST } else { 0 }
    }

    fn last(&self) -> Ticket {
        self.submitted
    }

    unsafe fn submit(&mut self, runs: &[Run]) -> Result<Option<Ticket>, CudaError> {
        self.fault.check()?;
        if runs.len() > self.room() {
            return Ok(None);
        }
        self.dst.clear();
        self.src.clear();
        self.len.clear();
        for run in runs.iter().filter(|run| run.len > 0) {
            self.dst.push(run.dst);
            self.src.push(run.src);
            self.len.push(run.len as usize);
        }
        if !self.len.is_empty() {
            // SAFETY: the caller upholds the contract of `submit`.
            let started = unsafe { self.start() };
            let mark = self.fault.keep(started)?;
            self.submitted += 1;
            self.marks.push_back((self.submitted, mark));
        }
        Ok(Some(self.submitted))
    }

    fn poll(&mut self) -> Result<Ticket, CudaError> {
        self.fault.check()?;
        while let Some((ticket, mark)) = self.marks.front() {
            let done = mark.is_done();
            if !self.fault.keep(done)? {
                break;
            }
            self.done = *ticket;
            self.marks.pop_front();
        }
        Ok(self.done)
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        // The caller may free the memory after the drop.
        let _ = self.stream.synchronize();
    }
}
