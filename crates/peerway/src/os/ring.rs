//! A stream of bytes through shared memory: one producer, one consumer, one direction, two processes.
//!
//! Memory is a header of [`HEADER`] bytes, then `capacity` bytes of data (a power of two):
//!
//! | offset | word | written by | says |
//! |---|---|---|---|
//! | 0 | head u64 | producer | bytes ever made visible |
//! | 64 | tail u64 | consumer | bytes ever freed |
//! | 128 | consumer armed u32 | both | not 0: the consumer sleeps and wants to be woken |
//! | 192 | producer armed u32 | both | not 0: the producer sleeps until that many bytes are free |
//!
//! Each word has its own cache line, so that neither side's stores slow the other's.
//!
//! **The other process is not trusted.** Each side keeps its own position in private memory and only
//! publishes it; what it reads of the other's is checked against what is possible, and nonsense is
//! [`RingError::Corrupt`]. Offsets into the data come from the private position alone, so no value in shared
//! memory can lead out of range. The data itself may change while it is copied: it is copied once, out of
//! the ring, and judged there.
//!
//! **No wake-up is lost.** Going to sleep is *set armed; fence; look for work*, publishing is *store position;
//! fence; look for armed*, with both fences SeqCst: at least one side sees the other. The loom tests below
//! run this very code over loom's atomics.
//!
//! Wake-ups themselves (event descriptors) are the caller's: the local ring transport.

use std::cmp::min;
use std::sync::atomic::{self, AtomicU32, AtomicU64, Ordering};

use super::Piece;
use super::copy::{CopyKind, copy};

/// Bytes before the data.
pub(crate) const HEADER: usize = 256;

/// A large append becomes visible in steps of this many bytes, so that the consumer copies out while the
/// producer copies in. Smaller steps move the head's line more often for nothing; larger ones no longer fit
/// both copies in a 1.25 MiB L2.
const STEP: u64 = 256 << 10;

/// The consumer frees space by itself whenever it has consumed this fraction of the ring: seldom enough that
/// small messages do not bounce the tail's line, often enough that a streaming producer never runs dry.
const FREE_EVERY: u64 = 8;

/// What a ring can report.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum RingError {
    /// The other side published a position it cannot have: it is broken or hostile, and the ring is useless.
    #[error("the peer published an impossible position in a shared ring")]
    Corrupt,
}

/// The side that writes.
#[derive(Debug)]
pub(crate) struct RingProducer<S = RingMemory> {
    store: S,
    capacity: u64,
    /// Bytes ever appended.
    head: u64,
    /// Bytes ever made visible, at most `head`.
    visible: u64,
    /// The tail as last read: a lower bound of the consumer's.
    tail: u64,
    /// Something became visible, or is about to, for which armed has not been looked at yet.
    unannounced: bool,
}

impl RingProducer {
    /// The producing end of the ring at `base`, whose header is all zeros: nothing was ever sent.
    ///
    /// # Safety
    ///
    /// `HEADER + capacity` bytes from `base` must stay mapped and writable as long as this value lives, and
    /// in this process only this value and one [`RingConsumer`] may touch them. `base` must be 8-byte aligned.
    pub(crate) unsafe fn new(base: *mut u8, capacity: usize) -> Self {
        // SAFETY: the caller's promise is that of `RingMemory::new`.
        Self::over(unsafe { RingMemory::new(base) }, capacity)
    }
}

impl<S: Store> RingProducer<S> {
    fn over(store: S, capacity: usize) -> Self {
        assert!(capacity.is_power_of_two(), "a ring's capacity must be a power of two");
        let capacity = capacity as u64;
        Self { store, capacity, head: 0, visible: 0, tail: 0, unannounced: false }
    }

    /// How many bytes could be appended now, or fewer: the consumer's position is read again only when less
    /// than half of the ring is known to be free. See [`Self::free_for`].
    #[cfg(test)]
    pub(crate) fn free(&mut self) -> Result<usize, RingError> {
        self.free_for((self.capacity / 2) as usize)
    }

    /// How many bytes are free, exact unless that is at least `need`.
    #[inline]
    pub(crate) fn free_for(&mut self, need: usize) -> Result<usize, RingError> {
        if self.known_free() < need as u64 {
            self.read_tail()?;
        }
        Ok(self.known_free() as usize)
    }

    /// Appends what fits of the pieces, in order; how many bytes that was, 0 when the ring is full.
    ///
    /// The last bytes appended are not visible before [`Self::publish`]; of a long append, steps of 256 KiB
    /// are.
    ///
    /// # Safety
    ///
    /// Every piece must be readable for the length of the call and lie outside the ring.
    #[inline]
    pub(crate) unsafe fn append(&mut self, pieces: &[Piece]) -> Result<usize, RingError> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.append_from(pieces, 0) }
    }

    /// As [`Self::append`], leaving out the first `skip` bytes of the pieces: how an append that did not fit
    /// is taken up again.
    ///
    /// # Safety
    ///
    /// As [`Self::append`].
    pub(crate) unsafe fn append_from(
        &mut self,
        pieces: &[Piece],
        skip: usize,
    ) -> Result<usize, RingError> {
        let want = total(pieces).saturating_sub(skip as u64);
        let room = min(self.free_for(usize::try_from(want).unwrap_or(usize::MAX))? as u64, want);
        let (mut left, mut skip) = (room, skip as u64);
        for piece in pieces {
            let passed = min(skip, piece.len);
            skip -= passed;
            let mut at = piece.addr.wrapping_add(passed);
            let mut todo = min(piece.len - passed, left);
            left -= todo;
            while todo > 0 {
                let offset = self.head & (self.capacity - 1);
                // Up to the end of the ring, and of the step.
                let run = todo
                    .min(self.capacity - offset)
                    .min(STEP - self.head.wrapping_sub(self.visible));
                // SAFETY: `run` bytes at `at` lie in a piece the caller vouches for; `offset + run` is at
                // most the capacity; and those bytes are ours to write: the consumer has freed them
                // (`known_free`), and it does not read beyond `visible`.
                unsafe { self.store.write(offset as usize, at as *const u8, run as usize) };
                self.head = self.head.wrapping_add(run);
                at = at.wrapping_add(run);
                todo -= run;
                if self.head.wrapping_sub(self.visible) >= STEP {
                    self.show();
                }
            }
            if left == 0 {
                break;
            }
        }
        self.unannounced |= room > 0;
        Ok(room as usize)
    }

    /// Makes everything appended visible. True when the consumer sleeps: the caller must wake it.
    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        if !self.unannounced {
            return false;
        }
        self.unannounced = false;
        self.show();
        // pairs with the fence in `RingConsumer::arm`: it sees our head or we see it armed.
        self.store.fence();
        self.store.armed(Side::RingConsumer) != 0 && self.store.take_armed(Side::RingConsumer)
    }

    /// Asks to be woken once `need` bytes (at most the capacity) are free. True when they are already: do
    /// not sleep, and nothing is armed. Publish first, and need no more than the consumer can free with what
    /// it has by then: one that waits for the rest of a frame frees nothing.
    pub(crate) fn arm(&mut self, need: usize) -> Result<bool, RingError> {
        let need = (need as u64).clamp(1, self.capacity);
        // Not 0, which would be "not armed"; a capacity beyond 4 GiB would only be woken too early.
        self.store.set_armed(Side::RingProducer, u32::try_from(need).unwrap_or(u32::MAX));
        // pairs with the fence in `RingConsumer::publish`: it sees us armed or we see its tail.
        self.store.fence();
        let read = self.read_tail();
        if read.is_err() || self.known_free() >= need {
            self.disarm();
        }
        read?;
        Ok(self.known_free() >= need)
    }

    /// Takes back [`Self::arm`]; a wake-up may already be on its way.
    #[inline]
    pub(crate) fn disarm(&mut self) {
        self.store.set_armed(Side::RingProducer, 0);
    }

    #[inline]
    fn known_free(&self) -> u64 {
        self.capacity - self.head.wrapping_sub(self.tail)
    }

    #[inline]
    fn show(&mut self) {
        self.visible = self.head;
        self.store.publish(RingWord::Head, self.head);
    }

    #[inline]
    fn read_tail(&mut self) -> Result<(), RingError> {
        let tail = self.store.position(RingWord::Tail);
        // Not behind what it freed before, not ahead of what it could see.
        if tail.wrapping_sub(self.tail) > self.visible.wrapping_sub(self.tail) {
            return Err(RingError::Corrupt);
        }
        self.tail = tail;
        Ok(())
    }
}

/// The side that reads.
#[derive(Debug)]
pub(crate) struct RingConsumer<S = RingMemory> {
    store: S,
    capacity: u64,
    /// Bytes ever taken.
    tail: u64,
    /// Bytes ever freed to the producer, at most `tail`.
    freed: u64,
    /// The head as last read: a lower bound of the producer's.
    head: u64,
    /// Something was taken for which the producer's armed has not been looked at yet.
    unannounced: bool,
}

impl RingConsumer {
    /// The consuming end of the ring at `base`, whose header is all zeros: nothing was ever sent.
    ///
    /// # Safety
    ///
    /// `HEADER + capacity` bytes from `base` must stay mapped and writable as long as this value lives, and
    /// in this process only this value and one [`RingProducer`] may touch them. `base` must be 8-byte aligned.
    pub(crate) unsafe fn new(base: *mut u8, capacity: usize) -> Self {
        // SAFETY: the caller's promise is that of `RingMemory::new`.
        Self::over(unsafe { RingMemory::new(base) }, capacity)
    }
}

impl<S: Store> RingConsumer<S> {
    fn over(store: S, capacity: usize) -> Self {
        assert!(capacity.is_power_of_two(), "a ring's capacity must be a power of two");
        let capacity = capacity as u64;
        Self { store, capacity, tail: 0, freed: 0, head: 0, unannounced: false }
    }

    /// How many bytes can be taken now: one load when nothing came.
    #[inline]
    pub(crate) fn available(&mut self) -> Result<usize, RingError> {
        self.read_head()?;
        Ok(self.known_available() as usize)
    }

    /// How many bytes can be taken, exact unless that is at least `need`: spares the load while a burst of
    /// small messages is worked off.
    #[inline]
    pub(crate) fn available_for(&mut self, need: usize) -> Result<usize, RingError> {
        if self.known_available() < need as u64 {
            self.read_head()?;
        }
        Ok(self.known_available() as usize)
    }

    /// Fills the pieces, in order, with what is there; how many bytes that was.
    ///
    /// The space is freed at once only after every eighth of the ring; [`Self::publish`] frees the rest, and
    /// must be called before going to sleep.
    ///
    /// # Safety
    ///
    /// Every piece must be writable memory outside the ring that nothing in this process holds a reference
    /// to during the call.
    pub(crate) unsafe fn take(&mut self, pieces: &[Piece]) -> Result<usize, RingError> {
        let want = total(pieces);
        let there = self.available_for(usize::try_from(want).unwrap_or(usize::MAX))? as u64;
        let taken = min(there, want);
        // A ring of less than 8 bytes frees every byte.
        let step = (self.capacity / FREE_EVERY).max(1);
        let mut left = taken;
        for piece in pieces {
            let mut at = piece.addr;
            let mut todo = min(piece.len, left);
            left -= todo;
            while todo > 0 {
                let offset = self.tail & (self.capacity - 1);
                // Up to the end of the ring, and of the step.
                let run =
                    todo.min(self.capacity - offset).min(step - self.tail.wrapping_sub(self.freed));
                // SAFETY: `run` bytes at `at` lie in a piece the caller vouches for; `offset + run` is at
                // most the capacity; an honest producer does not write there before we free it, and what a
                // hostile one writes is copied as bytes and nothing more.
                unsafe { self.store.read(offset as usize, at as *mut u8, run as usize) };
                self.tail = self.tail.wrapping_add(run);
                at = at.wrapping_add(run);
                todo -= run;
                if self.tail.wrapping_sub(self.freed) >= step {
                    self.free();
                }
            }
            if left == 0 {
                break;
            }
        }
        self.unannounced |= taken > 0;
        Ok(taken as usize)
    }

    /// Frees everything taken. True when the producer sleeps and has the space it wanted: the caller must
    /// wake it.
    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        if !self.unannounced {
            return false;
        }
        self.unannounced = false;
        self.free();
        // pairs with the fence in `RingProducer::arm`: it sees our tail or we see it armed.
        self.store.fence();
        let need = u64::from(self.store.armed(Side::RingProducer));
        // Our head lags behind the producer's, so it has at most this much free. With less than it needs
        // there still is something to take, and we come back here; with nothing to take, all is free.
        let free = self.capacity - self.head.wrapping_sub(self.freed);
        need != 0 && free >= min(need, self.capacity) && self.store.take_armed(Side::RingProducer)
    }

    /// Announces that we are going to sleep. True when data is already there: do not, and nothing is armed.
    pub(crate) fn arm(&mut self) -> Result<bool, RingError> {
        self.store.set_armed(Side::RingConsumer, 1);
        // pairs with the fence in `RingProducer::publish`: it sees us armed or we see its head.
        self.store.fence();
        let read = self.read_head();
        if read.is_err() || self.known_available() > 0 {
            self.disarm();
        }
        read?;
        Ok(self.known_available() > 0)
    }

    /// Takes back [`Self::arm`]; a wake-up may already be on its way.
    #[inline]
    pub(crate) fn disarm(&mut self) {
        self.store.set_armed(Side::RingConsumer, 0);
    }

    #[inline]
    fn known_available(&self) -> u64 {
        self.head.wrapping_sub(self.tail)
    }

    #[inline]
    fn free(&mut self) {
        self.freed = self.tail;
        self.store.publish(RingWord::Tail, self.tail);
    }

    #[inline]
    fn read_head(&mut self) -> Result<(), RingError> {
        let head = self.store.position(RingWord::Head);
        // Not behind what it showed before, not ahead of the space we freed.
        let most = self.freed.wrapping_add(self.capacity);
        if head.wrapping_sub(self.head) > most.wrapping_sub(self.head) {
            return Err(RingError::Corrupt);
        }
        self.head = head;
        Ok(())
    }
}

/// A position in the header.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RingWord {
    /// Written by the producer.
    Head,
    /// Written by the consumer.
    Tail,
}

/// One end of the ring.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    /// The one that appends.
    RingProducer,
    /// The one that takes.
    RingConsumer,
}

/// The memory of a ring: what the algorithm above needs of it, so that loom can stand in for it.
pub(crate) trait Store {
    /// Reads the other side's position (Acquire).
    fn position(&self, word: RingWord) -> u64;

    /// Writes our own position (Release).
    fn publish(&self, word: RingWord, value: u64);

    /// Reads whether `side` is armed (Relaxed: ordered by the fence before it).
    fn armed(&self, side: Side) -> u32;

    /// Arms or disarms `side`, in one order with `take_armed` (AcqRel exchange).
    fn set_armed(&self, side: Side, value: u32);

    /// Disarms `side` for the other one (AcqRel exchange); whether it was armed still.
    fn take_armed(&self, side: Side) -> bool;

    /// A full fence: no load after it is done before a store preceding it.
    fn fence(&self);

    /// Copies `len` bytes from `src` to offset `at` of the data.
    ///
    /// # Safety
    ///
    /// `src` is readable for `len` bytes, `at + len` is at most the capacity, and the other side does not use
    /// that range of the data.
    unsafe fn write(&self, at: usize, src: *const u8, len: usize);

    /// Copies `len` bytes from offset `at` of the data to `dst`.
    ///
    /// # Safety
    ///
    /// `dst` is writable for `len` bytes, `at + len` is at most the capacity, and an honest other side does
    /// not write to that range of the data.
    unsafe fn read(&self, at: usize, dst: *mut u8, len: usize);
}

/// A ring in memory shared with another process.
#[derive(Debug)]
pub(crate) struct RingMemory {
    base: *mut u8,
}

impl RingMemory {
    const HEAD: usize = 0;
    const TAIL: usize = 64;
    const CONSUMER_ARMED: usize = 128;
    const PRODUCER_ARMED: usize = 192;

    /// # Safety
    ///
    /// As [`RingProducer::new`].
    unsafe fn new(base: *mut u8) -> Self {
        assert!(base.cast::<u64>().is_aligned(), "a ring must be aligned to its words");
        Self { base }
    }

    #[inline]
    fn word(&self, word: RingWord) -> &AtomicU64 {
        let at = match word {
            RingWord::Head => Self::HEAD,
            RingWord::Tail => Self::TAIL,
        };
        // SAFETY: inside the header, which `new`'s caller keeps mapped and which nobody in this process
        // touches but through these atomics; aligned because `base` is and the offsets are whole lines.
        unsafe { AtomicU64::from_ptr(self.base.add(at).cast()) }
    }

    #[inline]
    fn flag(&self, side: Side) -> &AtomicU32 {
        let at = match side {
            Side::RingConsumer => Self::CONSUMER_ARMED,
            Side::RingProducer => Self::PRODUCER_ARMED,
        };
        // SAFETY: as in `word`.
        unsafe { AtomicU32::from_ptr(self.base.add(at).cast()) }
    }
}

// SAFETY: the memory belongs to no thread, and all that one side writes and another reads is atomic.
unsafe impl Send for RingMemory {}

impl Store for RingMemory {
    #[inline]
    fn position(&self, word: RingWord) -> u64 {
        // pairs with `publish`: the bytes behind a position are seen with it.
        self.word(word).load(Ordering::Acquire)
    }

    #[inline]
    fn publish(&self, word: RingWord, value: u64) {
        // pairs with `position`.
        self.word(word).store(value, Ordering::Release);
    }

    #[inline]
    fn armed(&self, side: Side) -> u32 {
        self.flag(side).load(Ordering::Relaxed)
    }

    #[inline]
    fn set_armed(&self, side: Side, value: u32) {
        // pairs with `take_armed`, which it thereby comes after or before, also for later fences.
        self.flag(side).swap(value, Ordering::AcqRel);
    }

    #[inline]
    fn take_armed(&self, side: Side) -> bool {
        // pairs with `set_armed`.
        self.flag(side).swap(0, Ordering::AcqRel) != 0
    }

    #[inline]
    fn fence(&self) {
        atomic::fence(Ordering::SeqCst);
    }

    #[inline]
    unsafe fn write(&self, at: usize, src: *const u8, len: usize) {
        // SAFETY: the caller keeps `at + len` inside the data, which `new`'s caller keeps mapped, and vouches
        // for `src`; pieces lie outside the ring, so nothing overlaps.
        unsafe { copy(CopyKind::Plain, self.base.add(HEADER + at), src, len) }
    }

    #[inline]
    unsafe fn read(&self, at: usize, dst: *mut u8, len: usize) {
        // SAFETY: as in `write`, the other way round.
        unsafe { copy(CopyKind::Plain, dst, self.base.add(HEADER + at), len) }
    }
}

fn total(pieces: &[Piece]) -> u64 {
    pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.len))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// The memory of a ring, from where it really comes. Miri knows no shared files.
    #[cfg(not(miri))]
    struct Memory(super::super::shm::ShmMapping);
    #[cfg(miri)]
    struct Memory(super::super::pages::Pages);

    impl Memory {
        #[cfg(not(miri))]
        fn new(capacity: usize) -> Self {
            use std::os::fd::AsFd;

            use super::super::shm::{self, ShmMapping};
            let fd = shm::create_memfd("peerway-test", HEADER + capacity).unwrap();
            Self(ShmMapping::of_fd(fd.as_fd(), HEADER + capacity, true).unwrap())
        }

        #[cfg(miri)]
        fn new(capacity: usize) -> Self {
            Self(super::super::pages::Pages::new(HEADER + capacity, None))
        }

        /// Reads a word of the header.
        fn word(&self, offset: usize) -> u64 {
            // SAFETY: inside the header, aligned; the test's threads are not running.
            unsafe { self.0.ptr().add(offset).cast::<u64>().read_volatile() }
        }

        /// Overwrites a word of the header, as a hostile peer would.
        fn scribble(&self, offset: usize, value: u64) {
            // SAFETY: as in `word`.
            unsafe { self.0.ptr().add(offset).cast::<u64>().write_volatile(value) }
        }
    }

    /// Both ends of a ring in `memory`, which must outlive them.
    fn ends(memory: &Memory, capacity: usize) -> (RingProducer, RingConsumer) {
        let base = memory.0.ptr();
        // SAFETY: each test keeps the memory until after the last use of both ends.
        unsafe { (RingProducer::new(base, capacity), RingConsumer::new(base, capacity)) }
    }

    fn append(producer: &mut RingProducer, bytes: &[u8]) -> Result<usize, RingError> {
        // SAFETY: a slice outside the ring.
        unsafe { producer.append(&[Piece::of(bytes)]) }
    }

    fn take(consumer: &mut RingConsumer, max: usize) -> Result<Vec<u8>, RingError> {
        let mut bytes = vec![0; max];
        // SAFETY: a vector outside the ring, not otherwise used meanwhile.
        let n = unsafe { consumer.take(&[Piece::of_mut(&mut bytes)])? };
        bytes.truncate(n);
        Ok(bytes)
    }

    #[test]
    fn bytes_are_seen_only_once_published() {
        let memory = Memory::new(16);
        let (mut producer, mut consumer) = ends(&memory, 16);
        assert!(!producer.publish());
        assert_eq!(append(&mut producer, b"abc"), Ok(3));
        assert_eq!(consumer.available(), Ok(0));
        assert!(!producer.publish());
        assert_eq!(consumer.available(), Ok(3));
        assert_eq!(take(&mut consumer, 10).unwrap(), b"abc");
    }

    #[test]
    fn pieces_are_joined_cut_and_taken_up_again() {
        let memory = Memory::new(8);
        let (mut producer, mut consumer) = ends(&memory, 8);
        let pieces = [Piece::of(b"01"), Piece::of(b""), Piece::of(b"23456"), Piece::of(b"789")];
        let mut got = Vec::new();
        let mut sent = 0;
        while got.len() < 10 {
            // SAFETY: static strings.
            sent += unsafe { producer.append_from(&pieces, sent) }.unwrap();
            producer.publish();
            let (mut a, mut b) = ([0; 1], [0; 2]);
            let into = [Piece::of_mut(&mut a), Piece::of_mut(&mut b)];
            // SAFETY: two arrays not otherwise used meanwhile.
            let n = unsafe { consumer.take(&into) }.unwrap();
            consumer.publish();
            got.extend(a.into_iter().chain(b).take(n));
        }
        assert_eq!(sent, 10);
        assert_eq!(got, b"0123456789");
    }

    #[test]
    fn a_full_ring_takes_nothing_until_space_is_freed() {
        let memory = Memory::new(64);
        let (mut producer, mut consumer) = ends(&memory, 64);
        assert_eq!(append(&mut producer, &[1; 100]), Ok(64));
        assert_eq!(append(&mut producer, &[1; 1]), Ok(0));
        producer.publish();
        // Less than an eighth is not freed by taking alone.
        assert_eq!(take(&mut consumer, 7).unwrap().len(), 7);
        assert_eq!(producer.free(), Ok(0));
        consumer.publish();
        assert_eq!(producer.free(), Ok(7));
        assert_eq!(take(&mut consumer, 8).unwrap().len(), 8);
        assert_eq!(producer.free(), Ok(15));
    }

    #[test]
    fn a_sleeping_consumer_is_woken_once() {
        let memory = Memory::new(64);
        let (mut producer, mut consumer) = ends(&memory, 64);
        assert_eq!(consumer.arm(), Ok(false));
        append(&mut producer, b"x").unwrap();
        assert!(producer.publish());
        append(&mut producer, b"y").unwrap();
        assert!(!producer.publish());
        assert_eq!(consumer.arm(), Ok(true));
        append(&mut producer, b"z").unwrap();
        assert!(!producer.publish(), "nothing stays armed when there was data");
        take(&mut consumer, 3).unwrap();
        assert_eq!(consumer.arm(), Ok(false));
        consumer.disarm();
        append(&mut producer, b"!").unwrap();
        assert!(!producer.publish());
    }

    #[test]
    fn a_sleeping_producer_is_woken_when_its_need_is_met() {
        let memory = Memory::new(64);
        let (mut producer, mut consumer) = ends(&memory, 64);
        append(&mut producer, &[0; 60]).unwrap();
        producer.publish();
        assert_eq!(producer.arm(4), Ok(true));
        assert_eq!(producer.arm(20), Ok(false));
        take(&mut consumer, 10).unwrap();
        assert!(!consumer.publish(), "14 are free");
        take(&mut consumer, 6).unwrap();
        assert!(consumer.publish(), "20 are free");
        assert!(producer.free_for(20).unwrap() >= 20);
        assert_eq!(producer.arm(1000), Ok(false), "no more than the capacity is waited for");
        take(&mut consumer, 64).unwrap();
        assert!(consumer.publish());
    }

    #[test]
    fn steps_of_a_long_append_are_seen_and_announced() {
        let capacity = 1 << 20;
        let memory = Memory::new(capacity);
        let (mut producer, mut consumer) = ends(&memory, capacity);
        assert_eq!(consumer.arm(), Ok(false));
        let bytes = vec![9; 600_000];
        append(&mut producer, &bytes).unwrap();
        assert_eq!(consumer.available(), Ok(2 * STEP as usize));
        assert!(producer.publish());
        assert_eq!(consumer.available(), Ok(600_000));
        // Even when the last step ended with the append.
        take(&mut consumer, 600_000).unwrap();
        assert_eq!(consumer.arm(), Ok(false));
        append(&mut producer, &bytes[..STEP as usize]).unwrap();
        assert_eq!(consumer.available(), Ok(STEP as usize));
        assert!(producer.publish());
    }

    #[test]
    fn impossible_positions_are_corrupt_and_harmless() {
        let memory = Memory::new(64);
        let (mut producer, mut consumer) = ends(&memory, 64);
        append(&mut producer, &[1; 40]).unwrap();
        producer.publish();
        take(&mut consumer, 8).unwrap();
        consumer.publish();
        assert_eq!(producer.free(), Ok(32));

        // Tails ahead of the head, or behind what was freed.
        for tail in [41, 7, 0, u64::MAX, 40 + 64] {
            memory.scribble(RingMemory::TAIL, tail);
            assert_eq!(producer.free_for(64), Err(RingError::Corrupt), "{tail}");
            assert_eq!(append(&mut producer, &[0; 64]), Err(RingError::Corrupt), "{tail}");
            assert_eq!(producer.arm(64), Err(RingError::Corrupt), "{tail}");
        }
        // Heads behind what was shown, or with more than the capacity.
        for head in [39, 0, 8 + 64 + 1, u64::MAX, 1 << 63] {
            memory.scribble(RingMemory::HEAD, head);
            assert_eq!(consumer.available(), Err(RingError::Corrupt), "{head}");
            assert_eq!(take(&mut consumer, 64), Err(RingError::Corrupt), "{head}");
            assert_eq!(consumer.arm(), Err(RingError::Corrupt), "{head}");
        }
        // A failed arm leaves nothing armed.
        assert_eq!(memory.word(RingMemory::CONSUMER_ARMED), 0);
        assert_eq!(memory.word(RingMemory::PRODUCER_ARMED), 0);
    }

    #[test]
    fn a_hostile_peer_gets_no_further_than_errors() {
        let memory = Memory::new(32);
        let (mut producer, mut consumer) = ends(&memory, 32);
        let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
        let mut random = || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        for _ in 0..if cfg!(miri) { 500 } else { 100_000 } {
            let (offset, value) = ((random() % 4 * 64) as usize, random());
            // Both near misses and plain garbage.
            let now = memory.word(offset);
            let near = now.wrapping_add(value % 80).wrapping_sub(40);
            memory.scribble(offset, if value & 1 == 0 { near } else { value });
            let len = (random() % 40) as usize;
            assert!(append(&mut producer, &vec![1; len]).unwrap_or(0) <= 32);
            producer.publish();
            assert!(take(&mut consumer, len).map_or(0, |bytes| bytes.len()) <= 32);
            consumer.publish();
            let _ = (producer.arm(len), consumer.arm());
        }
    }

    #[test]
    fn two_threads_pass_a_long_stream() {
        const CAPACITY: usize = 1 << 12;
        const TOTAL: usize = if cfg!(miri) { 16 << 10 } else { 4 << 20 };
        let memory = Memory::new(CAPACITY);
        let (mut producer, mut consumer) = ends(&memory, CAPACITY);
        let byte = |i: usize| (i % 251) as u8;
        thread::scope(|scope| {
            scope.spawn(move || {
                let bytes: Vec<u8> = (0..TOTAL).map(byte).collect();
                let mut sent = 0;
                while sent < TOTAL {
                    let end = TOTAL.min(sent + 1 + sent % 700);
                    let n = append(&mut producer, &bytes[sent..end]).unwrap();
                    producer.publish();
                    sent += n;
                    if n == 0 {
                        thread::yield_now();
                    }
                }
            });
            let mut got = 0;
            while got < TOTAL {
                let bytes = take(&mut consumer, 1 + got % 900).unwrap();
                consumer.publish();
                assert!(bytes.iter().enumerate().all(|(i, b)| *b == byte(got + i)), "at {got}");
                got += bytes.len();
                if bytes.is_empty() {
                    thread::yield_now();
                }
            }
        });
    }

    #[test]
    fn positions_wrap() {
        let memory = Memory::new(8);
        let start = u64::MAX - 3;
        memory.scribble(RingMemory::HEAD, start);
        memory.scribble(RingMemory::TAIL, start);
        let (mut producer, mut consumer) = ends(&memory, 8);
        (producer.head, producer.visible, producer.tail) = (start, start, start);
        (consumer.head, consumer.freed, consumer.tail) = (start, start, start);
        for _ in 0..4 {
            assert_eq!(append(&mut producer, b"abcdef"), Ok(6));
            producer.publish();
            assert_eq!(take(&mut consumer, 6).unwrap(), b"abcdef");
            consumer.publish();
        }
    }
}

/// The same code over loom's atomics: every order of events the memory model allows.
///
/// `RUSTFLAGS="--cfg loom" cargo test -p peerway --release ring::loom`
#[cfg(all(test, loom))]
mod loom {
    use ::loom::cell::UnsafeCell;
    use ::loom::model::Builder;
    use ::loom::sync::atomic::{self, AtomicU32, AtomicU64, Ordering};
    use ::loom::sync::{Arc, Notify};
    use ::loom::thread;

    use super::*;

    /// A ring whose bytes are watched for races, and the event descriptors of its two sides: a `Notify` keeps
    /// a signal until somebody waits, may wake for nothing, and orders no more than it must.
    struct Memory {
        head: AtomicU64,
        tail: AtomicU64,
        consumer_armed: AtomicU32,
        producer_armed: AtomicU32,
        data: Vec<UnsafeCell<u8>>,
        wake_consumer: Notify,
        wake_producer: Notify,
        fenced: bool,
    }

    impl Memory {
        /// Both ends of a new ring, which leaves out its fences when not `fenced`.
        fn ends(
            capacity: usize,
            fenced: bool,
        ) -> (RingProducer<Arc<Self>>, RingConsumer<Arc<Self>>) {
            let memory = Arc::new(Self {
                head: AtomicU64::new(0),
                tail: AtomicU64::new(0),
                consumer_armed: AtomicU32::new(0),
                producer_armed: AtomicU32::new(0),
                data: (0..capacity).map(|_| UnsafeCell::new(0)).collect(),
                wake_consumer: Notify::new(),
                wake_producer: Notify::new(),
                fenced,
            });
            (RingProducer::over(memory.clone(), capacity), RingConsumer::over(memory, capacity))
        }

        fn flag(&self, side: Side) -> &AtomicU32 {
            match side {
                Side::RingConsumer => &self.consumer_armed,
                Side::RingProducer => &self.producer_armed,
            }
        }

        fn word(&self, word: RingWord) -> &AtomicU64 {
            match word {
                RingWord::Head => &self.head,
                RingWord::Tail => &self.tail,
            }
        }
    }

    impl Store for Arc<Memory> {
        fn position(&self, word: RingWord) -> u64 {
            self.word(word).load(Ordering::Acquire)
        }

        fn publish(&self, word: RingWord, value: u64) {
            self.word(word).store(value, Ordering::Release);
        }

        fn armed(&self, side: Side) -> u32 {
            self.flag(side).load(Ordering::Relaxed)
        }

        fn set_armed(&self, side: Side, value: u32) {
            self.flag(side).swap(value, Ordering::AcqRel);
        }

        fn take_armed(&self, side: Side) -> bool {
            self.flag(side).swap(0, Ordering::AcqRel) != 0
        }

        fn fence(&self) {
            if self.fenced {
                atomic::fence(Ordering::SeqCst);
            }
        }

        unsafe fn write(&self, at: usize, src: *const u8, len: usize) {
            for i in 0..len {
                // SAFETY: `src` is readable for `len` bytes by contract; loom checks the cell.
                self.data[at + i].with_mut(|cell| unsafe { *cell = *src.add(i) });
            }
        }

        unsafe fn read(&self, at: usize, dst: *mut u8, len: usize) {
            for i in 0..len {
                // SAFETY: `dst` is writable for `len` bytes by contract; loom checks the cell.
                self.data[at + i].with(|cell| unsafe { *dst.add(i) = *cell });
            }
        }
    }

    /// Sends all of `bytes`, sleeping while not even `need` are free.
    fn send_all(producer: &mut RingProducer<Arc<Memory>>, bytes: &[u8], need: usize) {
        let mut sent = 0;
        while sent < bytes.len() {
            // SAFETY: a slice outside the ring.
            let n = unsafe { producer.append(&[Piece::of(&bytes[sent..])]) }.unwrap();
            sent += n;
            if producer.publish() {
                producer.store.wake_consumer.notify();
            }
            if n == 0 && !producer.arm(need).unwrap() {
                producer.store.wake_producer.wait();
            }
        }
    }

    /// Takes `total` bytes, `most` at a time, sleeping while there are none.
    fn receive_all(consumer: &mut RingConsumer<Arc<Memory>>, total: usize, most: usize) -> Vec<u8> {
        let mut got = Vec::new();
        while got.len() < total {
            let mut bytes = vec![0; most.min(total - got.len())];
            // SAFETY: a vector of our own, not otherwise used meanwhile.
            let n = unsafe { consumer.take(&[Piece::of_mut(&mut bytes)]) }.unwrap();
            got.extend_from_slice(&bytes[..n]);
            if consumer.publish() {
                consumer.store.wake_producer.notify();
            }
            if n == 0 && !consumer.arm().unwrap() {
                consumer.store.wake_consumer.wait();
            }
        }
        got
    }

    /// `bytes` through a ring of `capacity`; loom reports a sleeper that nobody wakes as a deadlock, and a
    /// byte touched by both sides as a race. `preemptions` bounds the search; `None` is all of it.
    fn model(
        (capacity, fenced): (usize, bool),
        bytes: &'static [u8],
        (need, most): (usize, usize),
        preemptions: Option<usize>,
    ) {
        let mut builder = Builder::new();
        builder.preemption_bound = preemptions;
        builder.check(move || {
            let (mut producer, mut consumer) = Memory::ends(capacity, fenced);
            let sender = thread::spawn(move || send_all(&mut producer, bytes, need));
            assert_eq!(receive_all(&mut consumer, bytes.len(), most), bytes);
            sender.join().unwrap();
        });
    }

    #[test]
    fn a_sleeping_consumer_is_always_woken() {
        model((4, true), b"a", (1, 1), None);
        model((4, true), b"ab", (1, 1), None);
    }

    #[test]
    fn a_sleeping_producer_is_always_woken() {
        model((1, true), b"ab", (1, 1), Some(4));
    }

    #[test]
    fn a_producer_that_needs_more_than_a_byte_is_always_woken() {
        model((4, true), b"abcdefg", (3, 2), Some(3));
    }

    #[test]
    fn a_stream_wraps_without_races() {
        model((2, true), b"abcd", (1, 2), Some(3));
        model((4, true), b"abcdefgh", (1, 3), Some(2));
    }

    /// Shows that the tests above would notice.
    #[test]
    #[should_panic]
    fn without_the_fences_a_wake_up_is_lost() {
        model((4, false), b"a", (1, 1), None);
    }
}
