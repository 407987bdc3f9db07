//! The command ring: kernels push commands, a proxy drains them. The kernels' side is
//! `include/peerway_device.cuh`. This module is the same protocol in Rust, for the proxy and for
//! CPU threads that push in place of a kernel.
//!
//! | word | where | written by | meaning |
//! |---|---|---|---|
//! | claim | the producer's memory | producers | positions claimed so far |
//! | cached | the producer's memory | producers | credit as last read; top bit: the ring is dead |
//! | credit | host memory | consumer | positions consumed so far |
//! | slots | host memory | producers | commands: 16 bytes, a phase bit in each half |
//!
//! **Claims.** A producer claims positions with one atomic addition. It writes their slots when the
//! credit shows that the slots are free. It reads the credit across PCIe only when the cached
//! credit is too low.
//!
//! **Slots.** The phase bit alternates from lap to lap. A slot is complete when both halves carry
//! the phase bit of the current lap. A store that is torn between the halves is therefore only
//! late, and the consumer never writes a slot. A producer makes everything before the command
//! visible before it writes either half (a fence on the GPU, release ordering here).
//!
//! **Full ring.** A producer that waits for room longer than its bound gives its claim back. This
//! works only if no other producer has claimed behind it. Producers behind it wait for the same
//! room, so they give back first. A claim that cannot be given back within a second bound is a hole
//! that the consumer cannot pass. The producer then marks the ring dead, and every later push fails
//! at once.
//!
//! **Bounds.** The consumer indexes slots by its own position alone, so nothing that a producer
//! writes can lead it out of range.
//!
//! **Ring memory contract** (named by SAFETY comments). [`RingWords`] and [`HostMemory`] hold
//! addresses of the caller's memory. Their creator keeps that memory allocated while they are used,
//! gives them aligned addresses, and lets all threads and kernels access it only atomically.
//! `ProxyMemory::ring` and `ProxyMemory::host_ring` create them.

mod consumer;
mod producer;

pub(crate) use self::consumer::CommandConsumer;
pub(crate) use self::producer::CommandProducer;
pub use self::producer::PushError;

use std::sync::atomic::{AtomicU64, Ordering};

use peerway_core::abi::DEAD;

/// The memory operations that the protocol needs on one ring, as a trait so that loom can replace
/// them.
pub(crate) trait Words {
    /// Loads the two halves of a slot (each Acquire).
    fn slot(&self, at: usize) -> [u64; 2];

    /// Stores the two halves of a slot (each Release).
    fn set_slot(&self, at: usize, words: [u64; 2]);

    /// Loads the number of consumed positions (Acquire).
    fn credit(&self) -> u64;

    /// Stores the number of consumed positions (Release).
    fn set_credit(&self, consumed: u64);
}

/// The operations that only producers use.
pub(crate) trait ClaimWords: Words {
    /// Claims `count` positions and returns the first (Relaxed: the claim orders no other memory).
    fn claim(&self, count: u64) -> u64;

    /// Gives the claim back if it is the last one, and returns whether it did.
    fn unclaim(&self, first: u64, count: u64) -> bool;

    /// Loads the cached credit (Acquire).
    fn cached(&self) -> u64;

    /// Raises the cached credit to at least `credit` (AcqRel).
    fn raise_cached(&self, credit: u64);

    /// Marks the ring dead.
    fn die(&self);
}

/// The addresses of one ring: its slots and its credit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingWords {
    pub(crate) slots: *mut u64,
    pub(crate) credit: *mut u64,
}

// SAFETY: holds addresses only. All accesses are atomic (ring memory contract).
unsafe impl Send for RingWords {}

impl RingWords {
    #[inline]
    fn half(&self, at: usize, half: usize) -> &AtomicU64 {
        // SAFETY: ring memory contract. `at` is below the number of slots: callers mask it.
        unsafe { AtomicU64::from_ptr(self.slots.add(2 * at + half)) }
    }

    #[inline]
    fn credit_word(&self) -> &AtomicU64 {
        // SAFETY: ring memory contract.
        unsafe { AtomicU64::from_ptr(self.credit) }
    }
}

impl Words for RingWords {
    #[inline]
    fn slot(&self, at: usize) -> [u64; 2] {
        // Pairs with `set_slot`, or with the fence that a kernel executes before its store.
        [0, 1].map(|half| self.half(at, half).load(Ordering::Acquire))
    }

    #[inline]
    fn set_slot(&self, at: usize, words: [u64; 2]) {
        // Pairs with `slot`.
        self.half(at, 0).store(words[0], Ordering::Release);
        self.half(at, 1).store(words[1], Ordering::Release);
    }

    #[inline]
    fn credit(&self) -> u64 {
        self.credit_word().load(Ordering::Acquire)
    }

    #[inline]
    fn set_credit(&self, consumed: u64) {
        // Pairs with `credit`, here or in a kernel.
        self.credit_word().store(consumed, Ordering::Release);
    }
}

/// A ring whose producers run in this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostMemory {
    pub(crate) ring: RingWords,
    pub(crate) claim: *mut u64,
    pub(crate) cached: *mut u64,
}

// SAFETY: holds addresses only. All accesses are atomic (ring memory contract).
unsafe impl Send for HostMemory {}
// SAFETY: all accesses are atomic (ring memory contract).
unsafe impl Sync for HostMemory {}

impl HostMemory {
    #[inline]
    fn claim_word(&self) -> &AtomicU64 {
        // SAFETY: ring memory contract.
        unsafe { AtomicU64::from_ptr(self.claim) }
    }

    #[inline]
    fn cached_word(&self) -> &AtomicU64 {
        // SAFETY: ring memory contract.
        unsafe { AtomicU64::from_ptr(self.cached) }
    }
}

impl Words for HostMemory {
    fn slot(&self, at: usize) -> [u64; 2] {
        self.ring.slot(at)
    }

    #[inline]
    fn set_slot(&self, at: usize, words: [u64; 2]) {
        self.ring.set_slot(at, words);
    }

    fn credit(&self) -> u64 {
        self.ring.credit()
    }

    fn set_credit(&self, consumed: u64) {
        self.ring.set_credit(consumed);
    }
}

impl ClaimWords for HostMemory {
    #[inline]
    fn claim(&self, count: u64) -> u64 {
        self.claim_word().fetch_add(count, Ordering::Relaxed)
    }

    fn unclaim(&self, first: u64, count: u64) -> bool {
        let claim = self.claim_word();
        claim.compare_exchange(first + count, first, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    #[inline]
    fn cached(&self) -> u64 {
        self.cached_word().load(Ordering::Acquire)
    }

    fn raise_cached(&self, credit: u64) {
        // Pairs with `cached`. The consumer's reads of a slot happen before the store of the next
        // lap.
        self.cached_word().fetch_max(credit, Ordering::AcqRel);
    }

    fn die(&self) {
        self.cached_word().fetch_or(DEAD, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests;

#[cfg(all(test, loom))]
mod loom;
