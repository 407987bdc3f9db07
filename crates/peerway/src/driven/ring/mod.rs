//! The command ring: kernels push, a proxy drains. The kernels' side is `include/peerway_device.cuh`; what is here is
//! the same protocol in Rust, for the proxy and for processors that stand in for a GPU.
//!
//! | word | where | written by | says |
//! |---|---|---|---|
//! | claim | the producer's memory | producers | positions ever claimed |
//! | cached | the producer's memory | producers | credit as last read; its top bit: the ring is dead |
//! | credit | host memory | consumer | positions ever consumed |
//! | slots | host memory | producers | commands: 16 bytes, a phase bit in each half |
//!
//! **Claims.** A producer takes positions with one addition and writes their slots when the credit says that they are
//! free. Credit is read across PCIe only when what is cached is not enough.
//!
//! **Slots.** The phase bit alternates from lap to lap. A slot is there when both halves have the bit of this lap, so a
//! store that is torn between them is only late, and the consumer never writes a slot. Both halves are written
//! with everything before them visible (a fence on the GPU, release here).
//!
//! **Full.** Who waits for room longer than its bound takes its claim back, which works if nobody has claimed behind
//! it; those behind wait for the same room, so they give back first. A claim that cannot be taken back within the bound again is a hole that no
//! consumer passes: the ring is marked dead, and every later push is refused at once.
//!
//! Nothing that a producer writes can lead the consumer out of range: it indexes by its own position alone.

mod consumer;
mod producer;

pub(crate) use self::consumer::CommandConsumer;
pub(crate) use self::producer::CommandProducer;
pub use self::producer::PushError;

use std::sync::atomic::{AtomicU64, Ordering};

use peerway_core::abi::DEAD;

/// The words of one ring: what the protocol needs of memory, so that loom can stand in for it.
pub(crate) trait Words {
    /// The two halves of a slot (each Acquire).
    fn slot(&self, at: usize) -> [u64; 2];

    /// Writes them (each Release).
    fn set_slot(&self, at: usize, words: [u64; 2]);

    /// Positions consumed (Acquire).
    fn credit(&self) -> u64;

    /// Says how many were (Release).
    fn set_credit(&self, consumed: u64);
}

/// The words that only producers use.
pub(crate) trait ClaimWords: Words {
    /// Takes `count` positions; the first of them (Relaxed: positions order nothing).
    fn claim(&self, count: u64) -> u64;

    /// Takes the claim back if it is the last one.
    fn unclaim(&self, first: u64, count: u64) -> bool;

    /// The cached credit (Acquire).
    fn cached(&self) -> u64;

    /// Raises it (AcqRel).
    fn raise_cached(&self, credit: u64);

    /// Marks the ring dead.
    fn die(&self);
}

/// A ring in memory, by the addresses of its parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingWords {
    pub(crate) slots: *mut u64,
    pub(crate) credit: *mut u64,
}

// SAFETY: only addresses; every access is atomic, and whoever makes one promises that the memory lives.
unsafe impl Send for RingWords {}

impl RingWords {
    #[inline]
    fn half(&self, at: usize, half: usize) -> &AtomicU64 {
        // SAFETY: whoever made this keeps the memory while it is used, and nobody touches it but through
        // atomics (a GPU's stores are such); `at` is below the number of slots.
        unsafe { AtomicU64::from_ptr(self.slots.add(2 * at + half)) }
    }

    #[inline]
    fn credit_word(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.credit) }
    }
}

impl Words for RingWords {
    #[inline]
    fn slot(&self, at: usize) -> [u64; 2] {
        // pairs with `set_slot`, or with a kernel's fence before its store
        [0, 1].map(|half| self.half(at, half).load(Ordering::Acquire))
    }

    #[inline]
    fn set_slot(&self, at: usize, words: [u64; 2]) {
        // pairs with `slot`
        self.half(at, 0).store(words[0], Ordering::Release);
        self.half(at, 1).store(words[1], Ordering::Release);
    }

    #[inline]
    fn credit(&self) -> u64 {
        self.credit_word().load(Ordering::Acquire)
    }

    #[inline]
    fn set_credit(&self, consumed: u64) {
        // pairs with `credit`, here or in a kernel
        self.credit_word().store(consumed, Ordering::Release);
    }
}

/// A ring whose producers are in this process too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostMemory {
    pub(crate) ring: RingWords,
    pub(crate) claim: *mut u64,
    pub(crate) cached: *mut u64,
}

// SAFETY: as for `RingWords`.
unsafe impl Send for HostMemory {}
// SAFETY: every access is atomic.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    #[inline]
    fn claim_word(&self) -> &AtomicU64 {
        // SAFETY: as for `RingWords`.
        unsafe { AtomicU64::from_ptr(self.claim) }
    }

    #[inline]
    fn cached_word(&self) -> &AtomicU64 {
        // SAFETY: as for `RingWords`.
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
        // pairs with `cached`: what the consumer read of a slot comes before the next lap's store
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
