//! A byte stream through shared memory: one producer, one consumer, one direction, two processes.
//!
//! The memory is a header of [`HEADER`] bytes, then `capacity` bytes of data (a power of two):
//!
//! | offset | word | written by | meaning |
//! |---|---|---|---|
//! | 0 | head u64 | producer | bytes ever made visible |
//! | 64 | tail u64 | consumer | bytes ever freed |
//! | 128 | consumer armed u32 | both | not 0: the consumer blocks and must be woken |
//! | 192 | producer armed u32 | both | not 0: the producer blocks until that many bytes are free |
//!
//! Each word has its own cache line, so that the stores of one side do not slow the other.
//!
//! **The other process is not trusted.** Each side keeps its own position in private memory and
//! only publishes it. It checks the other side's position against the possible range, and reports
//! [`RingError::Corrupt`] for any other value. Offsets into the data come from the private position
//! alone, so no value in shared memory can lead out of range. The data may change while it is
//! copied. So it is copied out of the ring once, and only the copy is interpreted.
//!
//! **No wake-up is lost.** To block, a side does *set armed; fence; look for work*. To publish, a
//! side does *store position; fence; look for armed*. Both fences are SeqCst, so at least one side
//! sees the other. The loom tests below run this same code over loom's atomics.
//!
//! The caller, the local ring transport, sends the wake-ups themselves (event descriptors).

use std::cmp::min;
use std::sync::atomic::{self, AtomicU32, AtomicU64, Ordering};

use super::Piece;
use super::copy::{CopyKind, copy};

/// Bytes before the data.
pub(crate) const HEADER: usize = 256;

/// A large append becomes visible in steps of this many bytes, so that the consumer copies out
/// while the producer copies in. Smaller steps move the head's cache line more often without
/// benefit. With larger steps, both copies no longer fit in a 1.25 MiB L2.
const STEP: u64 = 256 << 10;

/// The consumer frees space without [`RingConsumer::publish`] whenever it has taken this fraction
/// of the ring. That is rare enough that small messages do not bounce the tail's cache line. It is
/// frequent enough that a streaming producer never runs out of space.
const FREE_EVERY: u64 = 8;

/// An error of a ring.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum RingError {
    /// The other side published an impossible position. It is broken or hostile, and the ring is
    /// unusable.
    #[error(
        "the peer published an impossible position in a shared-memory ring; the ring is unusable"
    )]
    Corrupt,
}

/// The writing side.
#[derive(Debug)]
pub(crate) struct RingProducer<S = RingMemory> {
    store: S,
    capacity: u64,
    /// Bytes ever appended.
    head: u64,
    /// Bytes ever made visible; at most `head`.
    visible: u64,
    /// The tail as last read: a lower bound of the consumer's tail.
    tail: u64,
    /// Bytes were appended since the last check whether the consumer is armed.
    unannounced: bool,
}

impl RingProducer {
    /// The producing side of the ring at `base`. The header must be all zeros: nothing was sent
    /// yet.
    ///
    /// # Safety
    ///
    /// `HEADER + capacity` bytes from `base` must stay mapped and writable while this value lives.
    /// In this process, only this value and one [`RingConsumer`] may access them. `base` must be
    /// 8-byte aligned.
    pub(crate) unsafe fn new(base: *mut u8, capacity: usize) -> Self {
        // SAFETY: the caller upholds the contract of `RingMemory::new`.
        Self::over(unsafe { RingMemory::new(base) }, capacity)
    }
}

impl<S: Store> RingProducer<S> {
    fn over(store: S, capacity: usize) -> Self {
        assert!(capacity.is_power_of_two(), "a ring's capacity must be a power of two");
        let capacity = capacity as u64;
        Self { store, capacity, head: 0, visible: 0, tail: 0, unannounced: false }
    }

    /// A lower bound of the number of bytes that can be appended now. It reads the consumer's
    /// position only if less than half of the ring is known to be free. See [`Self::free_for`].
    #[cfg(test)]
    pub(crate) fn free(&mut self) -> Result<usize, RingError> {
        self.free_for((self.capacity / 2) as usize)
    }

    /// The number of free bytes. It is exact unless it is at least `need`.
    #[inline]
    pub(crate) fn free_for(&mut self, need: usize) -> Result<usize, RingError> {
        if self.known_free() < need as u64 {
            self.read_tail()?;
        }
        Ok(self.known_free() as usize)
    }

    /// Appends as many bytes of the pieces as fit, in order. Returns their number, 0 if the ring is
    /// full.
    ///
    /// The last bytes become visible only by [`Self::publish`]. Of a long append, steps of 256 KiB
    /// become visible at once.
    ///
    /// # Safety
    ///
    /// Every piece must be readable during the call and lie outside the ring.
    #[inline]
    pub(crate) unsafe fn append(&mut self, pieces: &[Piece]) -> Result<usize, RingError> {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.append_from(pieces, 0) }
    }

    /// As [`Self::append`], but skips the first `skip` bytes of the pieces. Use it to continue an
    /// append that did not fit.
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
                // Stop at the end of the ring and at the end of the step.
                let run = todo
                    .min(self.capacity - offset)
                    .min(STEP - self.head.wrapping_sub(self.visible));
                // SAFETY: the `run` bytes at `at` lie in a piece, which the caller keeps readable.
                // `offset + run` is at most the capacity. The producer may write these bytes: the
                // consumer has freed them (`known_free`), and does not read beyond `visible`.
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

    /// Makes all appended bytes visible. Returns true if the consumer blocks; the caller must then
    /// wake it.
    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        if !self.unannounced {
            return false;
        }
        self.unannounced = false;
        self.show();
        // Pairs with the fence in `RingConsumer::arm`: it sees our head, or we see it armed.
        self.store.fence();
        self.store.armed(Side::RingConsumer) != 0 && self.store.take_armed(Side::RingConsumer)
    }

    /// Requests a wake-up once `need` bytes (at most the capacity) are free. Returns true if they
    /// already are: then nothing is armed, and the caller must not block.
    ///
    /// Publish first. Do not need more than the consumer can free with the bytes it has by then: a
    /// consumer that waits for the rest of a frame frees nothing.
    pub(crate) fn arm(&mut self, need: usize) -> Result<bool, RingError> {
        let need = (need as u64).clamp(1, self.capacity);
        // Never 0, which means "not armed". With a capacity beyond 4 GiB the wake-up would only
        // come too early.
        self.store.set_armed(Side::RingProducer, u32::try_from(need).unwrap_or(u32::MAX));
        // Pairs with the fence in `RingConsumer::publish`: it sees us armed, or we see its tail.
        self.store.fence();
        let read = self.read_tail();
        if read.is_err() || self.known_free() >= need {
            self.disarm();
        }
        read?;
        Ok(self.known_free() >= need)
    }

    /// Cancels [`Self::arm`]. A wake-up may already be on its way.
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
        // The tail never moves back, and never passes the bytes that the consumer could see.
        if tail.wrapping_sub(self.tail) > self.visible.wrapping_sub(self.tail) {
            return Err(RingError::Corrupt);
        }
        self.tail = tail;
        Ok(())
    }
}

/// The reading side.
#[derive(Debug)]
pub(crate) struct RingConsumer<S = RingMemory> {
    store: S,
    capacity: u64,
    /// Bytes ever taken.
    tail: u64,
    /// Bytes ever freed for the producer; at most `tail`.
    freed: u64,
    /// The head as last read: a lower bound of the producer's head.
    head: u64,
    /// Bytes were taken since the last check whether the producer is armed.
    unannounced: bool,
}

impl RingConsumer {
    /// The consuming side of the ring at `base`. The header must be all zeros: nothing was sent
    /// yet.
    ///
    /// # Safety
    ///
    /// `HEADER + capacity` bytes from `base` must stay mapped and writable while this value lives.
    /// In this process, only this value and one [`RingProducer`] may access them. `base` must be
    /// 8-byte aligned.
    pub(crate) unsafe fn new(base: *mut u8, capacity: usize) -> Self {
        // SAFETY: the caller upholds the contract of `RingMemory::new`.
        Self::over(unsafe { RingMemory::new(base) }, capacity)
    }
}

impl<S: Store> RingConsumer<S> {
    fn over(store: S, capacity: usize) -> Self {
        assert!(capacity.is_power_of_two(), "a ring's capacity must be a power of two");
        let capacity = capacity as u64;
        Self { store, capacity, tail: 0, freed: 0, head: 0, unannounced: false }
    }

    /// The number of bytes that can be taken now. Costs one load.
    #[inline]
    pub(crate) fn available(&mut self) -> Result<usize, RingError> {
        self.read_head()?;
        Ok(self.known_available() as usize)
    }

    /// The number of bytes that can be taken. It is exact unless it is at least `need`, which saves
    /// the load during a burst of small messages.
    #[inline]
    pub(crate) fn available_for(&mut self, need: usize) -> Result<usize, RingError> {
        if self.known_available() < need as u64 {
            self.read_head()?;
        }
        Ok(self.known_available() as usize)
    }

    /// Fills the pieces with the available bytes, in order. Returns their number.
    ///
    /// It frees space whenever it has taken an eighth of the ring. [`Self::publish`] frees the
    /// rest, and must be called before the caller blocks.
    ///
    /// # Safety
    ///
    /// Every piece must be writable memory outside the ring that no reference in this process
    /// covers during the call.
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
                // Stop at the end of the ring and at the end of the step.
                let run =
                    todo.min(self.capacity - offset).min(step - self.tail.wrapping_sub(self.freed));
                // SAFETY: the `run` bytes at `at` lie in a piece, which the caller keeps writable.
                // `offset + run` is at most the capacity. An honest producer does not write there
                // before we free it. A hostile one changes only the bytes that are copied.
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

    /// Frees all taken bytes. Returns true if the producer blocks and has the space that it needs;
    /// the caller must then wake it.
    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        if !self.unannounced {
            return false;
        }
        self.unannounced = false;
        self.free();
        // Pairs with the fence in `RingProducer::arm`: it sees our tail, or we see it armed.
        self.store.fence();
        let need = u64::from(self.store.armed(Side::RingProducer));
        // Our head lags behind the producer's, so the producer has at most this much free space. If
        // that is less than it needs, there are still bytes to take, and we come back here. If
        // there are none to take, all space is free.
        let free = self.capacity - self.head.wrapping_sub(self.freed);
        need != 0 && free >= min(need, self.capacity) && self.store.take_armed(Side::RingProducer)
    }

    /// Requests a wake-up for new bytes. Returns true if bytes are already there: then nothing is
    /// armed, and the caller must not block.
    pub(crate) fn arm(&mut self) -> Result<bool, RingError> {
        self.store.set_armed(Side::RingConsumer, 1);
        // Pairs with the fence in `RingProducer::publish`: it sees us armed, or we see its head.
        self.store.fence();
        let read = self.read_head();
        if read.is_err() || self.known_available() > 0 {
            self.disarm();
        }
        read?;
        Ok(self.known_available() > 0)
    }

    /// Cancels [`Self::arm`]. A wake-up may already be on its way.
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
        // The head never moves back, and never passes the space that the consumer freed.
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
    /// The side that appends.
    RingProducer,
    /// The side that takes.
    RingConsumer,
}

/// The memory of a ring, as far as the algorithm above needs it. Loom tests use their own
/// implementation.
pub(crate) trait Store {
    /// Reads the other side's position (Acquire).
    fn position(&self, word: RingWord) -> u64;

    /// Writes this side's position (Release).
    fn publish(&self, word: RingWord, value: u64);

    /// Whether `side` is armed (Relaxed: the preceding fence orders the load).
    fn armed(&self, side: Side) -> u32;

    /// Arms or disarms `side`. Totally ordered with `take_armed` (AcqRel exchange).
    fn set_armed(&self, side: Side, value: u32);

    /// Disarms the other side `side` (AcqRel exchange). Returns whether it was still armed.
    fn take_armed(&self, side: Side) -> bool;

    /// A full fence: no later load happens before an earlier store.
    fn fence(&self);

    /// Copies `len` bytes from `src` to offset `at` of the data.
    ///
    /// # Safety
    ///
    /// `src` is readable for `len` bytes, `at + len` is at most the capacity, and the other side
    /// does not use that range of the data.
    unsafe fn write(&self, at: usize, src: *const u8, len: usize);

    /// Copies `len` bytes from offset `at` of the data to `dst`.
    ///
    /// # Safety
    ///
    /// `dst` is writable for `len` bytes, `at + len` is at most the capacity, and an honest other
    /// side does not write to that range of the data.
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
        assert!(base.cast::<u64>().is_aligned(), "a ring must be 8-byte aligned");
        Self { base }
    }

    #[inline]
    fn word(&self, word: RingWord) -> &AtomicU64 {
        let at = match word {
            RingWord::Head => Self::HEAD,
            RingWord::Tail => Self::TAIL,
        };
        // SAFETY: the word lies in the header, which the caller of `new` keeps mapped. This process
        // accesses the header only through these atomics. The word is aligned, because `base` is
        // and the offsets are whole cache lines.
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

// SAFETY: the memory is tied to no thread, and all words that one side writes and the other reads
// are atomic.
unsafe impl Send for RingMemory {}

impl Store for RingMemory {
    #[inline]
    fn position(&self, word: RingWord) -> u64 {
        // Pairs with `publish`: the bytes before a position are visible with it.
        self.word(word).load(Ordering::Acquire)
    }

    #[inline]
    fn publish(&self, word: RingWord, value: u64) {
        // Pairs with `position`.
        self.word(word).store(value, Ordering::Release);
    }

    #[inline]
    fn armed(&self, side: Side) -> u32 {
        self.flag(side).load(Ordering::Relaxed)
    }

    #[inline]
    fn set_armed(&self, side: Side, value: u32) {
        // Pairs with `take_armed`. The exchanges are totally ordered, which also orders the fences
        // after them.
        self.flag(side).swap(value, Ordering::AcqRel);
    }

    #[inline]
    fn take_armed(&self, side: Side) -> bool {
        // Pairs with `set_armed`.
        self.flag(side).swap(0, Ordering::AcqRel) != 0
    }

    #[inline]
    fn fence(&self) {
        atomic::fence(Ordering::SeqCst);
    }

    #[inline]
    unsafe fn write(&self, at: usize, src: *const u8, len: usize) {
        // SAFETY: the caller keeps `at + len` inside the data, which the caller of `new` keeps
        // mapped, and keeps `src` readable. Pieces lie outside the ring, so the ranges do not
        // overlap.
        unsafe { copy(CopyKind::Plain, self.base.add(HEADER + at), src, len) }
    }

    #[inline]
    unsafe fn read(&self, at: usize, dst: *mut u8, len: usize) {
        // SAFETY: as in `write`, with `dst` writable.
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

    /// The memory of a ring, of the kind used in production. Miri does not support shared files.
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
            // SAFETY: the word lies in the header and is aligned; the test's threads do not run.
            unsafe { self.0.ptr().add(offset).cast::<u64>().read_volatile() }
        }

        /// Overwrites a word of the header, as a hostile peer would.
        fn scribble(&self, offset: usize, value: u64) {
            // SAFETY: as in `word`.
            unsafe { self.0.ptr().add(offset).cast::<u64>().write_volatile(value) }
        }
    }

    /// Both sides of a ring in `memory`, which must outlive them.
    fn ends(memory: &Memory, capacity: usize) -> (RingProducer, RingConsumer) {
        let base = memory.0.ptr();
        // SAFETY: each test keeps the memory until after the last use of both sides.
        unsafe { (RingProducer::new(base, capacity), RingConsumer::new(base, capacity)) }
    }

    fn append(producer: &mut RingProducer, bytes: &[u8]) -> Result<usize, RingError> {
        // SAFETY: the slice lies outside the ring.
        unsafe { producer.append(&[Piece::of(bytes)]) }
    }

    fn take(consumer: &mut RingConsumer, max: usize) -> Result<Vec<u8>, RingError> {
        let mut bytes = vec![0; max];
        // SAFETY: the vector lies outside the ring and is not used during the call.
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
            // SAFETY: the pieces are static strings.
            sent += unsafe { producer.append_from(&pieces, sent) }.unwrap();
            producer.publish();
            let (mut a, mut b) = ([0; 1], [0; 2]);
            let into = [Piece::of_mut(&mut a), Piece::of_mut(&mut b)];
            // SAFETY: the two arrays are not used during the call.
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
        // `take` alone does not free less than an eighth of the ring.
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
        assert!(!producer.publish(), "arm leaves nothing armed if data is available");
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
        assert_eq!(producer.arm(1000), Ok(false), "the need is capped at the capacity");
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
        // The same holds if the last step ends with the append.
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

        // Tails ahead of the head, or behind the freed position.
        for tail in [41, 7, 0, u64::MAX, 40 + 64] {
            memory.scribble(RingMemory::TAIL, tail);
            assert_eq!(producer.free_for(64), Err(RingError::Corrupt), "{tail}");
            assert_eq!(append(&mut producer, &[0; 64]), Err(RingError::Corrupt), "{tail}");
            assert_eq!(producer.arm(64), Err(RingError::Corrupt), "{tail}");
        }
        // Heads behind the visible position, or ahead of it by more than the capacity.
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
            // Values close to the valid ones, and random values.
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

/// The same code over loom's atomics, in every order of events that the memory model allows.
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

    /// A ring whose bytes loom checks for races, with a `Notify` for each side's event descriptor.
    /// A `Notify` keeps a signal until a thread waits, may wake spuriously, and imposes no more
    /// order than necessary.
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
        /// Both sides of a new ring. Without `fenced`, it omits the fences.
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

    /// Sends all of `bytes`; blocks while fewer than `need` bytes are free.
    fn send_all(producer: &mut RingProducer<Arc<Memory>>, bytes: &[u8], need: usize) {
        let mut sent = 0;
        while sent < bytes.len() {
            // SAFETY: the slice lies outside the ring.
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

    /// Takes `total` bytes, at most `most` at a time; blocks while there are none.
    fn receive_all(consumer: &mut RingConsumer<Arc<Memory>>, total: usize, most: usize) -> Vec<u8> {
        let mut got = Vec::new();
        while got.len() < total {
            let mut bytes = vec![0; most.min(total - got.len())];
            // SAFETY: the vector lies outside the ring and is not used during the call.
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

    /// Sends `bytes` through a ring of `capacity`. Loom reports a lost wake-up as a deadlock, and a
    /// byte that both sides access at once as a race. `preemptions` bounds the search; `None`
    /// searches exhaustively.
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

    /// Shows that the tests above detect a lost wake-up.
    #[test]
    #[should_panic]
    fn without_the_fences_a_wake_up_is_lost() {
        model((4, false), b"a", (1, 1), None);
    }
}
