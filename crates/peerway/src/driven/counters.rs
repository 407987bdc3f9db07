//! Arrival counters: words that peers raise and kernels wait for.
//!
//! They lie in shareable memory. A peer on this host adds to them through its mapping. For other
//! peers the endpoint adds when a count arrives. Each counter has [`LINES`] copies, so that many
//! warps can poll it without waiting for each other's reads. Every count raises all copies, so a
//! reader may use any of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use peerway_sys::cuda::PinnedRange;

use crate::gpu::GpuError;
use crate::gpu::device::Device;
use crate::inbox::ProxyCounters;
use crate::memory::SharedMemory;
use crate::region::Region;
use peerway_core::abi::{LINE, LINES};

/// See the module.
pub(crate) struct Counters {
    /// Declared before `memory`, so it is unpinned first.
    _pinned: Option<PinnedRange>,
    pub(crate) region: Region,
    memory: SharedMemory,
    count: usize,
    /// Whether counts arrive or leave on lanes.
    by_lanes: AtomicBool,
}

impl Counters {
    pub(crate) fn bytes(count: usize) -> usize {
        (count * LINES * LINE).max(4096)
    }

    /// Creates counters in `memory`, which is zero and registered as `region`. If there is a GPU,
    /// the memory is pinned for it.
    pub(crate) fn new(
        memory: SharedMemory,
        region: Region,
        count: usize,
        device: Option<&Arc<Device>>,
    ) -> Result<Self, GpuError> {
        let pin = |device: &Arc<Device>| {
            // SAFETY: this struct keeps the memory and drops it after the pin.
            unsafe { PinnedRange::pin(&device.gpu, memory.as_ptr(), memory.len() as usize) }
        };
        let pinned = device.map(pin).transpose()?;
        Ok(Self { _pinned: pinned, region, memory, count, by_lanes: AtomicBool::new(false) })
    }

    /// The address that kernels use.
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
        // SAFETY: `counter` is below `count`, so the word lies inside the memory. All accesses are
        // atomic.
        unsafe { word(self.memory.as_ptr(), counter, 0) }.load(Ordering::Acquire)
    }

    /// Records that lanes carry counts. From now on the workers poll the lanes.
    pub(crate) fn note_lanes(&self) {
        if !self.is_by_lanes() {
            self.by_lanes.store(true, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(crate) fn is_by_lanes(&self) -> bool {
        self.by_lanes.load(Ordering::Relaxed)
    }

    /// Adds to a counter. Returns false if it does not exist.
    pub(crate) fn raise(&self, counter: usize, by: u64) -> bool {
        if counter >= self.count {
            return false;
        }
        // SAFETY: `counter` is below `count`, so the words lie inside the memory.
        unsafe { raise(self.memory.as_ptr(), counter, by) };
        true
    }
}

impl ProxyCounters for Counters {
    fn arrived(&self, counter: usize) -> bool {
        self.note_lanes();
        self.raise(counter, 1)
    }
}

/// Adds to all copies of a counter.
///
/// # Safety
///
/// `base` is the address of mapped counters, and `counter` is below their number.
#[inline]
pub(crate) unsafe fn raise(base: *mut u8, counter: usize, by: u64) {
    for line in 0..LINES {
        // Pairs with the acquire loads of waiting threads and kernels: they see everything before
        // the count.
        // SAFETY: the caller's promise.
        unsafe { word(base, counter, line) }.fetch_add(by, Ordering::Release);
    }
}

/// # Safety
///
/// As for [`raise`].
#[inline]
unsafe fn word<'a>(base: *mut u8, counter: usize, line: usize) -> &'a AtomicU64 {
    // SAFETY: the caller's promise. Mappings are page-aligned, so each word is aligned to its line.
    unsafe { AtomicU64::from_ptr(base.add((counter * LINES + line) * LINE).cast()) }
}
