//! Copiers for code outside the engine: tests, benchmarks, programs with their own lists.

use std::fmt;
use std::time::Instant;

use super::{CopierKind, CopierOptions, PeerCopy, Ticket, copier, pause};
use crate::gpu::{GpuError, Run, gpus};

/// Copies lists of pieces between memories that a GPU can access: its own memory, mapped memory of
/// other GPUs and processes, and pinned host memory.
///
/// ```no_run
/// use peerway::gpu::{Copier, CopierKind, CopierOptions, PinnedMemory, Run};
///
/// # fn main() -> Result<(), peerway::gpu::GpuError> {
/// let (from, to) = (PinnedMemory::allocate(4096)?, PinnedMemory::allocate(4096)?);
/// let mut copier = Copier::new(0, CopierKind::Launched, &CopierOptions::default())?;
/// let runs = [Run { src: from.ptr() as u64, dst: to.ptr() as u64, len: 4096 }];
/// // SAFETY: both buffers outlive the copy.
/// if let Some(ticket) = unsafe { copier.submit(&runs) }? {
///     copier.wait(ticket)?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// Tasks are done in any order, within a list and across lists in progress. After an error, every
/// call returns that error. Dropping the copier waits for copies in progress.
pub struct Copier {
    inner: Box<dyn PeerCopy>,
    gpu: u32,
}

impl Copier {
    /// Creates a copier on a GPU.
    ///
    /// # Errors
    ///
    /// [`GpuError`]: no driver, no such GPU, or a driver call failed. [`GpuError::NoKernels`] if
    /// the GPU cannot run the engine's kernels.
    pub fn new(gpu: u32, kind: CopierKind, options: &CopierOptions) -> Result<Self, GpuError> {
        Ok(Self { inner: copier(&gpus()?.device(gpu)?, kind, options)?, gpu })
    }

    /// The kind of this copier.
    pub fn kind(&self) -> CopierKind {
        self.inner.kind()
    }

    /// Maximum number of tasks per submission.
    pub fn most(&self) -> usize {
        self.inner.most()
    }

    /// Number of tasks that fit now. It grows when [`Self::poll`] finds tasks done.
    pub fn room(&self) -> usize {
        self.inner.room()
    }

    /// Submits all of the pieces. `None` if they do not fit now; then none is submitted.
    ///
    /// # Safety
    ///
    /// The GPU can access all of the memory. Until the ticket is done or the copier is dropped, the
    /// memory stays valid, nothing writes the sources, and nothing accesses the destinations.
    ///
    /// # Errors
    ///
    /// A driver call failed, now or earlier. A resident copier refuses addresses that no process
    /// has; that alone does not make the copier fail.
    pub unsafe fn submit(&mut self, runs: &[Run]) -> Result<Option<Ticket>, GpuError> {
        // SAFETY: the caller upholds the same contract.
        Ok(unsafe { self.inner.submit(runs) }?)
    }

    /// The newest ticket up to which all are done. Their bytes are visible to kernels, the host and
    /// other GPUs.
    ///
    /// # Errors
    ///
    /// As for [`Self::submit`]. Copies in progress may or may not have happened.
    pub fn poll(&mut self) -> Result<Ticket, GpuError> {
        Ok(self.inner.poll()?)
    }

    /// Waits until a ticket is done. It spins for the first hundred microseconds. It does not wait
    /// for a ticket that was not issued yet.
    ///
    /// # Errors
    ///
    /// As for [`Self::poll`].
    pub fn wait(&mut self, ticket: Ticket) -> Result<(), GpuError> {
        let begun = Instant::now();
        while self.inner.poll()? < ticket.min(self.inner.last()) {
            pause(begun);
        }
        Ok(())
    }
}

impl fmt::Debug for Copier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Copier({}, GPU {})", self.kind(), self.gpu)
    }
}
