//! Test hooks: a way to stop a copier between its check and its copy.
//!
//! Whether "nothing lands late" holds depends on that moment, so tests must be able to hold a
//! process there. Costs one relaxed load per quantum when unset.

use std::sync::atomic::{AtomicUsize, Ordering};

static BEFORE_COPY: AtomicUsize = AtomicUsize::new(0);

/// Has `hook` called by whoever is about to copy, after its check has passed.
pub fn before_copy(hook: Option<fn()>) {
    BEFORE_COPY.store(hook.map_or(0, |f| f as usize), Ordering::SeqCst);
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
