//! Test hooks: a way to stop a copier between its check and its copy, and inside a frame.
//!
//! Whether "nothing lands late" holds depends on those moments, so tests must be able to hold a
//! process there. Each costs one relaxed load per quantum or receive call when unset.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

static BEFORE_COPY: AtomicUsize = AtomicUsize::new(0);
static LANDING_LIMIT: AtomicU64 = AtomicU64::new(u64::MAX);

/// Has `hook` called by whoever is about to copy, after its check has passed.
pub fn before_copy(hook: Option<fn()>) {
    BEFORE_COPY.store(hook.map_or(0, |f| f as usize), Ordering::SeqCst);
}

/// Has one receive call put at most this many bytes of a frame's payload in place, so that a frame
/// takes several. At least 1: a call that lands nothing would look like a lane that has nothing.
pub fn landing_limit(bytes: Option<u64>) {
    LANDING_LIMIT.store(bytes.map_or(u64::MAX, |bytes| bytes.max(1)), Ordering::SeqCst);
}

#[inline]
pub(crate) fn most_to_land() -> u64 {
    LANDING_LIMIT.load(Ordering::Relaxed)
}

#[inline]
pub(crate) fn about_to_copy() {
    let hook = BEFORE_COPY.load(Ordering::Relaxed);
    if hook != 0 {
        // SAFETY: only `before_copy` stores here, and it stores nothing but addresses of `fn()`.
        let hook = unsafe { std::mem::transmute::<usize, fn()>(hook) };
        hook();
    }
}
