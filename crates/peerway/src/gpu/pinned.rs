//! Host memory that GPUs reach at full speed.

use std::fmt;

use peerway_sys::cuda::HostMemory;

use super::{GpuError, gpus};
use crate::memory::OwnedMemory;

/// Host memory that is locked in place for GPUs (`cuMemHostAlloc`): a GPU's copies to and from it need no
/// staging. Registered with [`crate::Endpoint::register`], like any host memory; other processes cannot map it.
pub struct PinnedMemory {
    memory: HostMemory,
    len: usize,
}

impl PinnedMemory {
    /// Allocates `len` bytes, zeroed, that every GPU of the process may use.
    ///
    /// # Errors
    ///
    /// [`GpuError`]: no driver, no GPU, or what the driver says.
    pub fn allocate(len: usize) -> Result<Self, GpuError> {
        // It belongs to all GPUs alike, so that none gets a context for its sake where one has it.
        let device = gpus()?.any()?;
        // The driver refuses to allocate nothing.
        let memory = HostMemory::allocate(&device.gpu, len.max(1))?;
        // SAFETY: all of what was just allocated, which nobody else knows.
        unsafe { memory.ptr().write_bytes(0, memory.len()) };
        Ok(Self { memory, len })
    }

    /// First byte, for the processor and for GPUs alike.
    pub fn ptr(&self) -> *mut u8 {
        self.memory.ptr()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

// SAFETY: the allocation does not move, and the region that owns it never hands out a reference to it.
unsafe impl OwnedMemory for PinnedMemory {
    fn bytes(&mut self) -> (*mut u8, usize) {
        (self.memory.ptr(), self.len)
    }
}

impl fmt::Debug for PinnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedMemory({:p}, {} bytes)", self.ptr(), self.len())
    }
}
