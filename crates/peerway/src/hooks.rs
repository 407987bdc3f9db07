//! Test hooks: a way to stop a copier between its check and its copy, and inside a frame.
//!
//! Whether "nothing lands late" holds depends on those moments, so tests must be able to hold a
//! process there. Each costs one relaxed load per quantum or receive call when unset.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// A `fn()`, or null. A pointer and not a number: a number says which address, not that code is there.
static BEFORE_COPY: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());
static LANDING_LIMIT: AtomicU64 = AtomicU64::new(u64::MAX);

/// Has `hook` called by whoever is about to copy, after its check has passed.
pub fn before_copy(hook: Option<fn()>) {
    BEFORE_COPY.store(hook.map_or(ptr::null_mut(), |hook| hook as *mut ()), Ordering::SeqCst);
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
    if !hook.is_null() {
        // SAFETY: only `before_copy` stores here, and all that it stores besides null is a `fn()` that was
        // cast to a pointer. Such a pointer keeps its provenance in the atomic, has the size of a `fn()`, and
        // refers to code, which lives as long as the process.
        let hook = unsafe { std::mem::transmute::<*mut (), fn()>(hook) };
        hook();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    static CALLS: AtomicU32 = AtomicU32::new(0);

    fn count() {
        CALLS.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn a_hook_is_called_while_it_is_set() {
        before_copy(Some(count));
        about_to_copy();
        before_copy(None);
        // Other tests of this process may copy meanwhile, and count too.
        assert_ne!(CALLS.load(Ordering::Relaxed), 0);
        assert!(BEFORE_COPY.load(Ordering::Relaxed).is_null());
        about_to_copy();
    }
}
