//! Hooks that run between a copier's check and its copy. They slow the copy down, stop the process,
//! or park the copy until [`release`]. Another hook limits how much of a frame one receive call
//! lands.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

static SLOW_US: AtomicU64 = AtomicU64::new(0);
/// Copies until the process stops itself. 0 or less means never.
static STOP_IN: AtomicI64 = AtomicI64::new(0);
/// Copies until a copy parks. 0 or less means never.
static PARK_IN: AtomicI64 = AtomicI64::new(0);
static PARKED: AtomicBool = AtomicBool::new(false);
static RELEASED: AtomicBool = AtomicBool::new(false);
static COPIES: AtomicU64 = AtomicU64::new(0);

/// Makes every copy take `us` microseconds longer.
pub(crate) fn slow(us: u64) {
    SLOW_US.store(us, Ordering::SeqCst);
    install();
}

/// Makes one receive call land at most `bytes` of a frame.
pub(crate) fn land_at_most(bytes: u64) {
    peerway::hooks::landing_limit(Some(bytes));
}

/// The `n`th copy from now stops the process before it copies.
pub(crate) fn stop_in(n: i64) {
    STOP_IN.store(n, Ordering::SeqCst);
    install();
}

/// The `n`th copy from now waits for [`release`] before it copies.
pub(crate) fn park_in(n: i64) {
    RELEASED.store(false, Ordering::SeqCst);
    PARKED.store(false, Ordering::SeqCst);
    PARK_IN.store(n, Ordering::SeqCst);
    install();
}

/// Whether a copy is parked.
pub(crate) fn is_parked() -> bool {
    PARKED.load(Ordering::SeqCst)
}

/// Releases the parked copy.
pub(crate) fn release() {
    RELEASED.store(true, Ordering::SeqCst);
}

/// The number of copies since a hook was first set.
pub(crate) fn copies() -> u64 {
    COPIES.load(Ordering::SeqCst)
}

/// Removes all hooks.
pub(crate) fn off() {
    peerway::hooks::before_copy(None);
    peerway::hooks::landing_limit(None);
    SLOW_US.store(0, Ordering::SeqCst);
    STOP_IN.store(0, Ordering::SeqCst);
    PARK_IN.store(0, Ordering::SeqCst);
    release();
}

fn install() {
    peerway::hooks::before_copy(Some(before_copy));
}

fn before_copy() {
    COPIES.fetch_add(1, Ordering::SeqCst);
    let us = SLOW_US.load(Ordering::Relaxed);
    if us > 0 {
        std::thread::sleep(Duration::from_micros(us));
    }
    if STOP_IN.load(Ordering::Relaxed) > 0 && STOP_IN.fetch_sub(1, Ordering::SeqCst) == 1 {
        // SAFETY: raise takes no pointers. It stops this process until another process sends
        // SIGCONT.
        unsafe { libc::raise(libc::SIGSTOP) };
    }
    if PARK_IN.load(Ordering::Relaxed) > 0 && PARK_IN.fetch_sub(1, Ordering::SeqCst) == 1 {
        PARKED.store(true, Ordering::SeqCst);
        while !RELEASED.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        PARKED.store(false, Ordering::SeqCst);
    }
}
