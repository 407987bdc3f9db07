//! Pins host memory that GPUs copy repeatedly.
//!
//! The driver copies unpinned memory through its own buffers, at a fifth of the speed (measured: 11
//! against 54 GB/s). Pinning takes time that memory used only once would not recover. So the engine
//! pins memory once, at its second use.

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

/// A pinned range, listed in [`OURS`] until it is dropped.
struct Pinned {
    range: Option<PinnedRange>,
    start: usize,
}

/// Ranges that the engine pinned: first address, and first address after the end.
static OURS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Whether the engine pinned any of this memory. Such memory is pinned only while the value that
/// pinned it lives.
pub(crate) fn is_ours(ptr: *mut u8, len: usize) -> bool {
    let (from, to) = (ptr as usize, ptr as usize + len);
    OURS.lock().unwrap().iter().any(|(start, end)| *start < to && from < *end)
}

impl Pin {
    /// Notes a use of the memory, and pins it at the second one. If pinning fails, the memory stays
    /// unpinned: another part of the engine, or the user, may already have pinned it.
    ///
    /// # Safety
    ///
    /// The memory stays mapped until this value is dropped.
    pub(crate) unsafe fn used(&self, device: &Arc<Device>, ptr: *mut u8, len: usize) {
        if !self.used.swap(true, Ordering::Relaxed) {
            return;
        }
        self.range.get_or_init(|| {
            // List the range before it is pinned, so that no other thread takes it for memory that
            // the user pinned.
            let start = ptr as usize;
            OURS.lock().unwrap().push((start, start + len));
            // SAFETY: the caller upholds this function's contract.
            let pinned = unsafe { PinnedRange::pin(&device.gpu, ptr, len) };
            pinned
                .inspect_err(|error| {
                    tracing::debug!(%error, "cannot pin host memory; copies of it stay slower");
                    forget(start);
                })
                .ok()
                .map(|range| Pinned { range: Some(range), start })
        });
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Unpin before the range is removed from the list. Otherwise another thread could take it
        // for memory that the user pinned.
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
