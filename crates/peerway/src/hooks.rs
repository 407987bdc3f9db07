//! Test hooks that stop a copier between its check and its copy, and inside a frame.
//!
//! The promise that nothing lands late depends on those moments, so tests must be able to hold a
//! process there. An unset hook costs one relaxed load per quantum or receive call.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// A `fn()`, or null. It is a pointer because an integer would lose the provenance of the function.
static BEFORE_COPY: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());
static LANDING_LIMIT: AtomicU64 = AtomicU64::new(u64::MAX);

/// Makes every copying thread call `hook` after its check has passed and before it copies.
pub fn before_copy(hook: Option<fn()>) {
    BEFORE_COPY.store(hook.map_or(ptr::null_mut(), |hook| hook as *mut ()), Ordering::SeqCst);
}

/// Makes one receive call store at most this many bytes of a frame's payload, so that a frame takes
/// several calls. The least is 1: a call that stores nothing would look like an empty lane.
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
        // SAFETY: only `before_copy` stores here, and it stores null or a `fn()` cast to a pointer.
        // The pointer keeps its provenance in the atomic, has the size of a `fn()`, and refers to
        // code, which lives as long as the process.
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
        // Other tests of this process may copy meanwhile and call the hook too.
        assert_ne!(CALLS.load(Ordering::Relaxed), 0);
        assert!(BEFORE_COPY.load(Ordering::Relaxed).is_null());
        about_to_copy();
    }
}
