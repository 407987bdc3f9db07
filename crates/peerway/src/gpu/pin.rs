//! Pinning of host memory that GPUs copy again and again.
//!
//! The driver copies to and from ordinary memory through buffers of its own, at a fifth of the speed. Pinning takes
//! about as long as three such copies, so it is done when memory is used for the second time, and once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use peerway_sys::cuda::PinnedRange;

use super::device::Device;

/// A range of host memory that may be pinned.
#[derive(Default)]
pub(crate) struct Pin {
    used: AtomicBool,
    range: OnceLock<Option<PinnedRange>>,
}

impl Pin {
    /// The memory is used, and pinned if it was before. One that cannot be stays as it is: another part of the
    /// engine, or the user, may have pinned it.
    ///
    /// # Safety
    ///
    /// The memory stays mapped until this is dropped.
    pub(crate) unsafe fn used(&self, device: &Arc<Device>, ptr: *mut u8, len: usize) {
        if !self.used.swap(true, Ordering::Relaxed) {
            return;
        }
        self.range.get_or_init(|| {
            // SAFETY: the caller's promise.
            let pinned = unsafe { PinnedRange::pin(&device.gpu, ptr, len) };
            pinned.inspect_err(|error| tracing::debug!(%error, "host memory is not pinned")).ok()
        });
    }
}
