//! The table of transfers in flight.
//!
//! A slot is named by index and generation, so a handle can never reach the slot's next owner. The
//! state word is a futex: the thread that ends a transfer wakes its waiters. A slot is reused only
//! when it has ended, its handle is gone, and no part of it can still touch memory.

mod free;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::task::Waker;
use std::time::Duration;

use peerway_core::ids::SlotId;
use peerway_core::outcome::{Ended, Fence};

use self::free::Free;
use crate::clock;
use crate::os::wake::{futex_wait, futex_wake};
use crate::path::PathKind;

const ENDED: u32 = 1;
/// A thread blocks on the word.
const WAITED: u32 = 2;
/// The user's handle is gone.
const DETACHED: u32 = 4;
/// Ended with an open fence: the engine still holds its memory.
const UNFENCED: u32 = 8;
/// A waker is registered, possibly for a previous generation of this slot.
const WAKER: u32 = 16;
/// The endpoint is closed: no thread blocks on the word any more.
const CLOSED: u32 = 32;

/// One transfer.
#[repr(align(128))]
pub(crate) struct Slot {
    word: AtomicU32,
    generation: AtomicU32,
    path: AtomicU8,
    ended: AtomicU64,
    pub(crate) done: AtomicU64,
    total: AtomicU64,
    posted_at: AtomicU64,
    pub(crate) sent_at: AtomicU64,
    ended_at: AtomicU64,
    waker: Mutex<Option<Waker>>,
}

/// Times and bytes of a transfer.
#[derive(Clone, Copy, Debug, Default)]
pub struct TransferStats {
    /// Bytes known to have arrived.
    pub bytes_done: u64,
    /// Bytes asked for.
    pub bytes_total: u64,
    /// From the post to the first byte handed to the path.
    pub until_sent: Option<Duration>,
    /// From the post to the end.
    pub until_ended: Option<Duration>,
}

/// The numbers of a slot, from which [`TransferStats`] are computed when a caller asks.
#[derive(Clone, Copy)]
pub(crate) struct SlotRecord {
    done: u64,
    pub(crate) total: u64,
    posted_at: u64,
    sent_at: u64,
    ended_at: u64,
}

impl SlotRecord {
    pub(crate) fn stats(&self) -> TransferStats {
        let since =
            |at: u64| (at != 0).then(|| Duration::from_nanos(at.saturating_sub(self.posted_at)));
        TransferStats {
            bytes_done: self.done,
            bytes_total: self.total,
            until_sent: since(self.sent_at),
            until_ended: since(self.ended_at),
        }
    }
}

/// All slots of an endpoint.
pub(crate) struct Slots {
    slots: Box<[Slot]>,
    free: Free,
}

impl Slots {
    pub(crate) fn new(count: usize) -> Self {
        let slot = || Slot {
            word: AtomicU32::new(ENDED | DETACHED),
            generation: AtomicU32::new(0),
            path: AtomicU8::new(0),
            ended: AtomicU64::new(0),
            done: AtomicU64::new(0),
            total: AtomicU64::new(0),
            posted_at: AtomicU64::new(0),
            sent_at: AtomicU64::new(0),
            ended_at: AtomicU64::new(0),
            waker: Mutex::new(None),
        };
        Self { slots: (0..count).map(|_| slot()).collect(), free: Free::new(count as u32) }
    }

    /// The number of slots.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Takes a slot, or `None` when all are in use.
    pub(crate) fn take(&self, total: u64, path: PathKind, now: u64) -> Option<SlotId> {
        let index = self.free.take()?;
        let slot = &self.slots[index as usize];
        let generation = slot.generation.load(Ordering::Relaxed);
        slot.path.store(path as u8, Ordering::Relaxed);
        slot.done.store(0, Ordering::Relaxed);
        slot.total.store(total, Ordering::Relaxed);
        slot.posted_at.store(now, Ordering::Relaxed);
        slot.sent_at.store(0, Ordering::Relaxed);
        slot.ended_at.store(0, Ordering::Relaxed);
        slot.word.store(0, Ordering::Release);
        Some(SlotId { index, generation })
    }

    pub(crate) fn slot(&self, id: SlotId) -> &Slot {
        &self.slots[id.index as usize]
    }

    /// How the transfer ended, if it has.
    #[inline]
    pub(crate) fn ended(&self, id: SlotId) -> Option<Ended> {
        let slot = self.slot(id);
        // Pairs with the release in `end`.
        let word = slot.word.load(Ordering::Acquire);
        (word & ENDED != 0).then(|| Ended::from_bits(slot.ended.load(Ordering::Relaxed)))
    }

    /// Whether the transfer has ended. Also true when another thread has seen the end and released
    /// the slot.
    #[inline]
    pub(crate) fn has_ended(&self, id: SlotId) -> bool {
        let slot = self.slot(id);
        slot.generation.load(Ordering::Relaxed) != id.generation
            || slot.word.load(Ordering::Relaxed) & ENDED != 0
    }

    /// Ends a transfer. With an open fence the slot stays taken until [`Self::fenced`].
    pub(crate) fn end(&self, id: SlotId, ended: Ended) {
        let slot = self.slot(id);
        debug_assert_eq!(slot.generation.load(Ordering::Relaxed), id.generation);
        slot.ended.store(ended.to_bits(), Ordering::Relaxed);
        slot.ended_at.store(clock::now(), Ordering::Relaxed);
        let open = if ended.fence == Fence::Open { UNFENCED } else { 0 };
        // Pairs with the acquire in `ended` and the read-modify-write in `sleep`: a waiter that set
        // WAITED before this is woken, and one that sets it later sees ENDED.
        let before = slot.word.fetch_or(ENDED | open, Ordering::AcqRel);
        if before & WAITED != 0 {
            futex_wake(&slot.word, u32::MAX);
        }
        if before & WAKER != 0 {
            self.wake(id);
        }
        if before & DETACHED != 0 && open == 0 {
            self.release(id, before);
        }
    }

    /// Closes an open fence: nothing of the transfer can touch memory any more.
    pub(crate) fn fenced(&self, id: SlotId) {
        let slot = self.slot(id);
        let ended = Ended::from_bits(slot.ended.load(Ordering::Relaxed));
        slot.ended.store(Ended { fence: Fence::Held, ..ended }.to_bits(), Ordering::Relaxed);
        let before = slot.word.fetch_and(!UNFENCED, Ordering::AcqRel);
        if before & DETACHED != 0 {
            self.release(id, before);
        }
    }

    /// Releases a slot whose open fence can never be closed. The reported fence stays open.
    pub(crate) fn unfenced_for_good(&self, id: SlotId) {
        let before = self.slot(id).word.fetch_and(!UNFENCED, Ordering::AcqRel);
        if before & DETACHED != 0 {
            self.release(id, before);
        }
    }

    /// Whether the transfer ended with an open fence that [`Self::fenced`] may still close.
    pub(crate) fn is_unfenced(&self, id: SlotId) -> bool {
        // Pairs with the releases in `end`, `fenced` and `unfenced_for_good`.
        self.slot(id).word.load(Ordering::Acquire) & UNFENCED != 0
    }

    /// The user's handle is gone.
    #[inline]
    pub(crate) fn detach(&self, id: SlotId) {
        let before = self.slot(id).word.fetch_or(DETACHED, Ordering::AcqRel);
        if before & (ENDED | UNFENCED) == ENDED {
            self.release(id, before);
        }
    }

    /// Blocks until the transfer ends or the timeout passes.
    pub(crate) fn sleep(&self, id: SlotId, timeout: Duration) {
        let slot = self.slot(id);
        let before = slot.word.fetch_or(WAITED, Ordering::AcqRel);
        // Another thread may have seen the end, and the slot may have a new owner, which does not
        // wake this thread.
        let its = slot.generation.load(Ordering::Relaxed) == id.generation;
        if before & (ENDED | CLOSED) == 0 && its {
            let _ = futex_wait(&slot.word, before | WAITED, Some(timeout));
        }
    }

    /// Wakes every thread that blocks on a slot, and lets none block again: the endpoint is closed.
    pub(crate) fn close(&self) {
        for slot in &self.slots {
            // Pairs with the read-modify-write in `sleep`: a waiter that set WAITED before this is
            // woken, and one that sets it later sees CLOSED.
            if slot.word.fetch_or(CLOSED, Ordering::AcqRel) & WAITED != 0 {
                futex_wake(&slot.word, u32::MAX);
            }
        }
    }

    /// Registers `waker` for the end of the transfer. Returns false when the transfer has ended
    /// already.
    pub(crate) fn wake_later(&self, id: SlotId, waker: &Waker) -> bool {
        let slot = self.slot(id);
        let mut place = slot.waker.lock().unwrap();
        // Pairs with the read-modify-writes in `end` and `detach`: a thread that ends the transfer
        // or releases the slot after this waits for the lock.
        let before = slot.word.fetch_or(WAKER, Ordering::AcqRel);
        // Another thread may have seen the end, and the slot may have a new owner. The new owner
        // then only gets a spurious wake-up.
        if before & ENDED != 0 || slot.generation.load(Ordering::Relaxed) != id.generation {
            return false;
        }
        *place = Some(waker.clone());
        true
    }

    /// Wakes the registered waker, unless the slot has been released: `release` has woken it then.
    #[cold]
    fn wake(&self, id: SlotId) {
        let slot = self.slot(id);
        let mut place = slot.waker.lock().unwrap();
        let its = slot.generation.load(Ordering::Relaxed) == id.generation;
        let waker = if its { place.take() } else { None };
        // Unlock first: the woken task may poll at once, and polling takes the lock.
        drop(place);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn set_path(&self, id: SlotId, path: PathKind) {
        self.slot(id).path.store(path as u8, Ordering::Relaxed);
    }

    pub(crate) fn path(&self, id: SlotId) -> PathKind {
        PathKind::from_code(self.slot(id).path.load(Ordering::Relaxed))
    }

    #[inline]
    pub(crate) fn record(&self, id: SlotId) -> SlotRecord {
        let slot = self.slot(id);
        SlotRecord {
            done: slot.done.load(Ordering::Relaxed),
            total: slot.total.load(Ordering::Relaxed),
            posted_at: slot.posted_at.load(Ordering::Relaxed),
            sent_at: slot.sent_at.load(Ordering::Relaxed),
            ended_at: slot.ended_at.load(Ordering::Relaxed),
        }
    }

    /// Releases the slot. `before` is the word as it was when the transfer ended, or later.
    #[inline]
    fn release(&self, id: SlotId, before: u32) {
        let next = id.generation.wrapping_add(1);
        let slot = self.slot(id);
        if before & WAKER == 0 {
            slot.generation.store(next, Ordering::Relaxed);
        } else {
            // Leave no waker to the slot's next owner: `end` may not have woken this one yet,
            // because another thread can see the end first.
            self.wake(id);
            let _place = slot.waker.lock().unwrap();
            slot.generation.store(next, Ordering::Relaxed);
        }
        self.free.give_back(id.index);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use peerway_core::outcome::{Reason, TransferError};

    use super::*;

    #[test]
    fn a_slot_is_reused_only_when_nothing_refers_to_it() {
        let slots = Slots::new(1);
        let first = slots.take(1, PathKind::Tcp, 1).unwrap();
        assert!(slots.take(1, PathKind::Tcp, 1).is_none(), "full");
        let open = Ended { reason: Reason::Failed(TransferError::PeerSilent), fence: Fence::Open };
        slots.end(first, open);
        assert_eq!(slots.ended(first), Some(open));
        assert!(slots.is_unfenced(first));
        slots.detach(first);
        assert!(slots.take(1, PathKind::Tcp, 1).is_none(), "the fence is open");
        slots.fenced(first);
        let second = slots.take(1, PathKind::Tcp, 1).unwrap();
        assert_eq!(second.index, first.index);
        assert_ne!(second.generation, first.generation);
    }

    #[test]
    fn an_open_fence_is_pending_until_it_holds_or_nothing_more_is_learned() {
        let slots = Slots::new(2);
        let open = Ended { reason: Reason::Failed(TransferError::PeerSilent), fence: Fence::Open };
        let [held, lost] = [(); 2].map(|()| slots.take(1, PathKind::Tcp, 1).unwrap());
        assert!(!slots.is_unfenced(held), "it has not ended");
        slots.end(held, open);
        slots.end(lost, open);
        assert!(slots.is_unfenced(held) && slots.is_unfenced(lost));
        slots.fenced(held);
        slots.unfenced_for_good(lost);
        assert!(!slots.is_unfenced(held) && !slots.is_unfenced(lost));
        assert_eq!(slots.ended(held), Some(Ended { fence: Fence::Held, ..open }));
        assert_eq!(slots.ended(lost), Some(open));
    }

    #[test]
    fn no_slot_has_two_tenants() {
        let slots = Slots::new(3);
        let tenants: Vec<AtomicU32> = (0..3).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..if cfg!(miri) { 50 } else { 20_000 } {
                        let Some(id) = slots.take(1, PathKind::Tcp, 1) else { continue };
                        let others = tenants[id.index as usize].fetch_add(1, Ordering::Relaxed);
                        assert_eq!(others, 0);
                        tenants[id.index as usize].fetch_sub(1, Ordering::Relaxed);
                        slots.end(id, Ended::DONE);
                        slots.detach(id);
                    }
                });
            }
        });
        let all: Vec<_> = (0..4).map(|_| slots.take(1, PathKind::Tcp, 1)).collect();
        assert!(all[..3].iter().all(Option::is_some), "one was lost");
        assert!(all[3].is_none(), "there is one too many");
    }

    /// Lets a thread sleep for a transfer, and fails if it sleeps until its time-out in any round.
    fn wakes_a_sleeper(wake: impl Fn(&Slots, SlotId)) {
        const WATCHDOG: Duration = Duration::from_secs(60);
        for round in 0..if cfg!(miri) { 3 } else { 20 } {
            let slots = Slots::new(1);
            let id = slots.take(1, PathKind::Tcp, 1).unwrap();
            std::thread::scope(|scope| {
                let sleeper = scope.spawn(|| {
                    let start = Instant::now();
                    slots.sleep(id, WATCHDOG);
                    start.elapsed()
                });
                while slots.slot(id).word.load(Ordering::Relaxed) & WAITED == 0 {
                    std::thread::yield_now();
                }
                // Time to block. A thread that does not block yet sees the word change and returns,
                // so a round on a busy machine only proves less.
                std::thread::sleep(Duration::from_millis(1));
                wake(&slots, id);
                let slept = sleeper.join().unwrap();
                assert!(slept < WATCHDOG, "round {round}: the sleeper was not woken");
            });
        }
    }

    #[test]
    fn the_end_of_a_transfer_wakes_its_sleeper() {
        wakes_a_sleeper(|slots, id| slots.end(id, Ended::DONE));
    }

    #[test]
    fn closing_wakes_sleepers_and_lets_none_sleep_again() {
        wakes_a_sleeper(|slots, id| {
            slots.close();
            slots.sleep(id, Duration::MAX);
        });
    }
}
