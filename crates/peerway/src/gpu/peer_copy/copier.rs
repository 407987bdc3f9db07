//! Copiers for who is not the engine: tests, benchmarks, programs with lists of their own.

use std::fmt;
use std::time::Instant;

use super::{CopierKind, CopierOptions, PeerCopy, Ticket, copier, pause};
use crate::gpu::{GpuError, Run, gpus};

/// Copies lists of pieces between memories that a GPU reaches: its own, that of other GPUs and other processes which is
/// mapped here, and pinned host memory.
///
/// ```no_run
/// use peerway::gpu::{Copier, CopierKind, CopierOptions, PinnedMemory, Run};
///
/// # fn main() -> Result<(), peerway::gpu::GpuError> {
/// let (from, to) = (PinnedMemory::allocate(4096)?, PinnedMemory::allocate(4096)?);
/// let mut copier = Copier::new(0, CopierKind::Launched, &CopierOptions::default())?;
/// let runs = [Run { src: from.ptr() as u64, dst: to.ptr() as u64, len: 4096 }];
/// // SAFETY: both are there until the copy is done.
/// if let Some(ticket) = unsafe { copier.submit(&runs) }? {
///     copier.wait(ticket)?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// Tasks are done in any order, those of one list and of several that are under way. After an error the copier fails with
/// the same one from then on. Dropping it waits for what is under way.
pub struct Copier {
    inner: Box<dyn PeerCopy>,
    gpu: u32,
}

impl Copier {
    /// A copier on a GPU.
    ///
    /// # Errors
    ///
    /// [`GpuError`]: no driver, no such GPU, or what the driver says; [`GpuError::NoKernels`] where the GPU cannot run those
    /// of ours.
    pub fn new(gpu: u32, kind: CopierKind, options: &CopierOptions) -> Result<Self, GpuError> {
        Ok(Self { inner: copier(&gpus()?.device(gpu)?, kind, options)?, gpu })
    }

    /// Who copies.
    pub fn kind(&self) -> CopierKind {
        self.inner.kind()
    }

    /// Tasks that one submission may have.
    pub fn most(&self) -> usize {
        self.inner.most()
    }

    /// Tasks that fit now; more when [`Self::poll`] has found some done.
    pub fn room(&self) -> usize {
        self.inner.room()
    }

    /// Has all of the pieces copied; `None` where they do not fit now, and then none is taken.
    ///
    /// # Safety
    ///
    /// The GPU reaches all of the memory, which stays valid until the ticket is done or the copier is dropped, and nobody
    /// writes what is read, or touches what is written, before that.
    ///
    /// # Errors
    ///
    /// What the driver says; also what it said before. A resident copier refuses addresses that no process has; that
    /// alone changes nothing.
    pub unsafe fn submit(&mut self, runs: &[Run]) -> Result<Option<Ticket>, GpuError> {
        // SAFETY: the caller's promise.
        Ok(unsafe { self.inner.submit(runs) }?)
    }

    /// Up to which ticket all are done: their bytes are there for kernels, the host and other GPUs.
    ///
    /// # Errors
    ///
    /// As for [`Self::submit`]; what was under way may or may not have been copied.
    pub fn poll(&mut self) -> Result<Ticket, GpuError> {
        Ok(self.inner.poll()?)
    }

    /// Waits until a ticket is done, without giving the processor away for the first hundred microseconds. One that was
    /// not given out yet is not waited for.
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
