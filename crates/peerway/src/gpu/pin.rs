//! Pinning of host memory that GPUs copy again and again.
//!
//! The driver copies to and from ordinary memory through buffers of its own, at a fifth of the speed (measured: 11
//! against 54 GB/s). Pinning costs time too, which memory that is used once would not pay back: it is done when memory
//! is used for the second time, and once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use peerway_sys::cuda::PinnedRange;

use super::device::Device;

/// A range of host memory that may be pinned.
#[derive(Default)]
pub(crate) struct Pin {
    used: AtomicBool,
    range: OnceLock<Option<Pinned>>,
}

/// A range that is pinned, and known to be until it is dropped.
struct Pinned {
    range: Option<PinnedRange>,
    start: usize,
}

/// Ranges that are pinned by us: where they start, and where they end.
static OURS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Whether any of this memory is pinned by us, and so only for as long as whoever had it pinned is there.
pub(crate) fn is_ours(ptr: *mut u8, len: usize) -> bool {
    let (from, to) = (ptr as usize, ptr as usize + len);
    OURS.lock().unwrap().iter().any(|(start, end)| *start < to && from < *end)
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
            // Before it is, so that nobody takes it for the user's.
            let start = ptr as usize;
            OURS.lock().unwrap().push((start, start + len));
            // SAFETY: the caller's promise.
            let pinned = unsafe { PinnedRange::pin(&device.gpu, ptr, len) };
            pinned
                .inspect_err(|error| {
                    tracing::debug!(%error, "host memory is not pinned");
                    forget(start);
                })
                .ok()
                .map(|range| Pinned { range: Some(range), start })
        });
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // In this order: what is pinned and not known to be ours would be taken for the user's.
        drop(self.range.take());
        forget(self.start);
    }
}

fn forget(start: usize) {
    let mut ours = OURS.lock().unwrap();
    if let Some(at) = ours.iter().position(|(first, _)| *first == start) {
        ours.swap_remove(at);
    }
}
