//! Host memory that GPUs access at full speed.

use std::fmt;

use peerway_sys::cuda::HostMemory;

use super::{GpuError, gpus};

/// Host memory locked for GPUs (`cuMemHostAlloc`). A GPU copies to and from it without staging.
/// Register it with [`crate::Endpoint::register`], like any host memory. Other processes cannot map
/// it.
pub struct PinnedMemory {
    memory: HostMemory,
    len: usize,
}

impl PinnedMemory {
    /// Allocates `len` zeroed bytes that every GPU of the process may use.
    ///
    /// # Errors
    ///
    /// [`GpuError`]: no driver, no GPU, or a driver call failed.
    pub fn allocate(len: usize) -> Result<Self, GpuError> {
        // Every GPU can use the memory. So use a GPU that already has a context, rather than create
        // one.
        let device = gpus()?.any()?;
        // The driver refuses to allocate zero bytes.
        let memory = HostMemory::allocate(&device.gpu, len.max(1))?;
        // SAFETY: covers the new allocation, which no other code knows yet.
        unsafe { memory.ptr().write_bytes(0, memory.len()) };
        Ok(Self { memory, len })
    }

    /// First byte, valid for the CPU and for GPUs.
    pub fn ptr(&self) -> *mut u8 {
        self.memory.ptr()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for PinnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedMemory({:p}, {} bytes)", self.ptr(), self.len())
    }
}
