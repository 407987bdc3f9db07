//! Arrival counters: words that peers raise and kernels wait for.
//!
//! They lie in shareable memory. A peer on this host adds to them by itself, through its mapping; for others the
//! endpoint does when a count arrives. Each counter is kept [`LINES`] times, so that many warps can poll it without their reads
//! waiting for each other; all copies rise by every count, so any of them is right.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use peerway_sys::cuda::PinnedRange;

use crate::gpu::GpuError;
use crate::gpu::device::Device;
use crate::memory::{Region, SharedMemory};
use peerway_core::abi::{LINE, LINES};

/// Ids from here on, 65,536 for each proxy, are counters of proxies while there are any; below are the endpoint's own.
pub(crate) const FIRST_ID: u32 = 0xc000_0000;

/// See the module.
pub(crate) struct Counters {
    /// Unpinned before the memory goes.
    _pinned: Option<PinnedRange>,
    pub(crate) region: Region,
    memory: SharedMemory,
    count: usize,
    /// Counts come by lanes, or go by them.
    by_lanes: AtomicBool,
}

impl Counters {
    pub(crate) fn bytes(count: usize) -> usize {
        (count * LINES * LINE).max(4096)
    }

    /// Counters in `memory`, which is zero and registered as `region`, within a GPU's reach where there is one.
    pub(crate) fn new(
        memory: SharedMemory,
        region: Region,
        count: usize,
        device: Option<&Arc<Device>>,
    ) -> Result<Self, GpuError> {
        let pin = |device: &Arc<Device>| {
            // SAFETY: the memory is kept by this struct, and dropped after the pin.
            unsafe { PinnedRange::pin(&device.gpu, memory.as_ptr(), memory.len() as usize) }
        };
        let pinned = device.map(pin).transpose()?;
        Ok(Self { _pinned: pinned, region, memory, count, by_lanes: AtomicBool::new(false) })
    }

    /// Where they are, for kernels.
    pub(crate) fn address(&self) -> u64 {
        self.memory.as_ptr() as u64
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    pub(crate) fn value(&self, counter: usize) -> u64 {
        if counter >= self.count {
            return 0;
        }
        // SAFETY: inside the memory, which is only used through atomics.
        unsafe { word(self.memory.as_ptr(), counter, 0) }.load(Ordering::Acquire)
    }

    /// Lanes have to do with them: workers look after these from now on.
    pub(crate) fn note_lanes(&self) {
        if !self.is_by_lanes() {
            self.by_lanes.store(true, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(crate) fn is_by_lanes(&self) -> bool {
        self.by_lanes.load(Ordering::Relaxed)
    }

    /// Adds to a counter; false where there is no such one.
    pub(crate) fn raise(&self, counter: usize, by: u64) -> bool {
        if counter >= self.count {
            return false;
        }
        // SAFETY: inside the memory.
        unsafe { raise(self.memory.as_ptr(), counter, by) };
        true
    }
}

/// Adds to a counter, in all its copies.
///
/// # Safety
///
/// `base` is where counters are mapped, and there are more than `counter` of them.
#[inline]
pub(crate) unsafe fn raise(base: *mut u8, counter: usize, by: u64) {
    for line in 0..LINES {
        // pairs with the loads of who waits: what came before the count is there
        // SAFETY: the caller's promise.
        unsafe { word(base, counter, line) }.fetch_add(by, Ordering::Release);
    }
}

/// # Safety
///
/// As for [`raise`].
#[inline]
unsafe fn word<'a>(base: *mut u8, counter: usize, line: usize) -> &'a AtomicU64 {
    // SAFETY: the caller's promise; lines are aligned because mappings are.
    unsafe { AtomicU64::from_ptr(base.add((counter * LINES + line) * LINE).cast()) }
}
