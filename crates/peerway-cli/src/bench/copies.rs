//! The baseline of local paths: the fastest plain copy of the same pieces on this machine.
//!
//! The copies use plain and non-temporal stores, with one thread and with two, from the client's
//! buffer to another buffer of this process. They notify no peer, so no path can reach this
//! baseline at small sizes.
//!
//! The second thread lives as long as the run. It spins during a round of copies, and sleeps while
//! transfers are timed, because they need its core.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use peerway::copy::{CopyKind, copy, store_fence};

use super::clock::Stopwatch;
use super::layout::{Layout, Side};
use super::measure::{Baseline, Times, timed};

/// Copies shorter than this are timed several at once, because the clock is not fine enough.
const TIMED_BYTES: u64 = 64 << 10;

/// A kind of store is dropped if the other kind takes less than this fraction of its time. The
/// saved time goes to the faster kind.
const HOPELESS: f64 = 0.7;

/// The pieces to copy.
struct Pieces {
    size: usize,
    from: Vec<u32>,
    to: Vec<u32>,
    source: usize,
    target: usize,
}

impl Pieces {
    /// Copies all pieces, or one of two halves of them.
    fn copy(&self, kind: CopyKind, half: Option<usize>) {
        let (mut bytes, mut pieces) = (0..self.size, 0..self.from.len());
        if let Some(half) = half {
            // A single piece is split in the middle, at a cache line. Several pieces are divided
            // whole.
            match pieces.len() {
                1 => bytes = cut(self.size, (self.size / 2) & !63, half),
                count => pieces = cut(count, count / 2, half),
            }
        }
        for i in pieces {
            let source = self.source + self.from[i] as usize * self.size + bytes.start;
            let target = self.target + self.to[i] as usize * self.size + bytes.start;
            // SAFETY: the caller of `Copies::new` guarantees two separate buffers of at least the
            // layout's total, which outlive the `Copies`. Both index lists are permutations of the
            // pieces, so every range lies inside. `Awake::share` returns only after the second
            // thread is done.
            unsafe {
                copy(
                    kind,
                    std::ptr::with_exposed_provenance_mut(target),
                    std::ptr::with_exposed_provenance(source),
                    bytes.len(),
                );
            }
        }
        if kind == CopyKind::NonTemporal {
            store_fence();
        }
    }
}

fn cut(len: usize, middle: usize, half: usize) -> Range<usize> {
    if half == 0 { 0..middle } else { middle..len }
}

/// Work that two threads share.
pub(crate) trait Work: Send + Sync {
    /// Does the part of thread `who`, which is 0 or 1.
    fn part(&self, who: usize);
}

/// A copy of all pieces with one kind of store.
struct Copying {
    pieces: Arc<Pieces>,
    kind: CopyKind,
}

impl Work for Copying {
    fn part(&self, who: usize) {
        self.pieces.copy(self.kind, Some(who));
    }
}

/// One method of copying.
struct Variant {
    kind: CopyKind,
    /// The work for two threads. `None` if one thread copies.
    shared: Option<Arc<dyn Work>>,
    times: Times,
}

/// The baseline of one row.
pub(crate) struct Copies<'a> {
    mate: Option<&'a Mate>,
    pieces: Arc<Pieces>,
    total: u64,
    repeat: u64,
    variants: Vec<Variant>,
}

impl<'a> Copies<'a> {
    /// Prepares copies of the pieces of `layout` from `source` to `target`, also with the second
    /// thread if there is one.
    ///
    /// # Safety
    ///
    /// Until the value is dropped, both addresses must belong to separate memory of at least
    /// `layout.total()` bytes, readable and writable, with exposed provenance. No other code may
    /// use it during a round.
    pub(crate) unsafe fn new(
        mate: Option<&'a Mate>,
        layout: &Layout,
        source: usize,
        target: usize,
    ) -> Self {
        let pieces = Arc::new(Pieces {
            size: layout.size as usize,
            from: layout.indices(Side::Client),
            to: layout.indices(Side::Server),
            source,
            target,
        });
        let variant = |(kind, two): (CopyKind, bool)| {
            let copying = Copying { pieces: pieces.clone(), kind };
            let shared = two.then(|| Arc::new(copying) as Arc<dyn Work>);
            Variant { kind, shared, times: Times::new() }
        };
        let all = [
            (CopyKind::Plain, false),
            (CopyKind::NonTemporal, false),
            (CopyKind::Plain, true),
            (CopyKind::NonTemporal, true),
        ];
        let variants = all.into_iter().filter(|(_, two)| mate.is_some() || !two).map(variant);
        let variants = variants.collect();
        let total = layout.total();
        let repeat = (TIMED_BYTES / total.max(1)).max(1);
        Self { mate, pieces, total, repeat, variants }
    }
}

impl Baseline for Copies<'_> {
    fn round(&mut self, budget: Duration, watch: &Stopwatch) -> anyhow::Result<f64> {
        let Self { mate, pieces, repeat, variants, total } = self;
        let budget = budget / variants.len() as u32;
        let awake = mate.map(|mate| mate.wake());
        let mut best = f64::INFINITY;
        for variant in variants.iter_mut() {
            let kind = variant.kind;
            let two = awake.as_ref().zip(variant.shared.as_ref());
            let mut round = Times::new();
            timed(budget, watch, *repeat, &mut round, || {
                for _ in 0..*repeat {
                    match two {
                        Some((mate, work)) => mate.share(work),
                        None => pieces.copy(kind, None),
                    }
                }
                Ok(())
            })?;
            variant.times.add(&round);
            best = best.min(round.p50());
        }
        drop(awake);
        // Keep the best variant with one thread and the best with two. Which of them wins depends
        // on the current load of the machine.
        let fastest =
            [false, true].map(|two| fastest(variants.iter().filter(|v| v.shared.is_some() == two)));
        variants.retain(|v| fastest[usize::from(v.shared.is_some())] >= v.times.p50() * HOPELESS);
        Ok(*total as f64 / best)
    }

    fn gbps(&self) -> f64 {
        self.total as f64 / fastest(self.variants.iter())
    }
}

/// The shortest median, in nanoseconds.
fn fastest<'a>(variants: impl Iterator<Item = &'a Variant>) -> f64 {
    variants.map(|variant| variant.times.p50()).fold(f64::INFINITY, f64::min)
}

/// The second thread.
pub(crate) struct Mate {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    mood: AtomicU32,
    /// The numbers of parts handed to the thread, and of parts that it has done.
    given: AtomicU64,
    taken: AtomicU64,
    work: Mutex<Option<Arc<dyn Work>>>,
}

const ASLEEP: u32 = 0;
const AWAKE: u32 = 1;
const OVER: u32 = 2;

impl Mate {
    /// Starts the thread if the machine has a second core.
    pub(crate) fn start() -> Option<Self> {
        thread::available_parallelism().ok().filter(|cores| cores.get() > 1)?;
        let shared = Arc::new(Shared::default());
        let its = shared.clone();
        let thread = thread::Builder::new().name("bench-mate".to_owned()).spawn(move || its.live());
        Some(Self { shared, thread: Some(thread.ok()?) })
    }

    /// Wakes the thread for a round.
    pub(crate) fn wake(&self) -> Awake<'_> {
        self.shared.mood.store(AWAKE, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
        Awake(self)
    }
}

impl Drop for Mate {
    fn drop(&mut self) {
        self.shared.mood.store(OVER, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The copies do not panic. If one did, the run is over anyway.
            let _ = thread.join();
        }
    }
}

/// The second thread spins until this value is dropped.
pub(crate) struct Awake<'a>(&'a Mate);

impl Awake<'_> {
    /// Does part 0 while the second thread does part 1. Returns when both are done.
    pub(crate) fn share(&self, work: &Arc<dyn Work>) {
        let shared = &self.0.shared;
        if let Ok(mut last) = shared.work.lock()
            && last.as_ref().is_none_or(|last| !Arc::ptr_eq(last, work))
        {
            *last = Some(work.clone());
        }
        // Pairs with the load of `given` in `live`.
        let ticket = shared.given.fetch_add(1, Ordering::Release) + 1;
        work.part(0);
        // Pairs with the store of `taken` in `live`.
        while shared.taken.load(Ordering::Acquire) != ticket {
            std::hint::spin_loop();
        }
    }
}

impl Drop for Awake<'_> {
    fn drop(&mut self) {
        self.0.shared.mood.store(ASLEEP, Ordering::Release);
    }
}

impl Shared {
    fn live(&self) {
        let mut done = 0;
        loop {
            match self.mood.load(Ordering::Acquire) {
                OVER => return,
                ASLEEP => thread::park(),
                _ => {}
            }
            // Pairs with the addition in `share`.
            if self.given.load(Ordering::Acquire) == done {
                std::hint::spin_loop();
                continue;
            }
            done += 1;
            if let Ok(work) = self.work.lock()
                && let Some(work) = &*work
            {
                work.part(1);
            }
            // Pairs with the load in `share`.
            self.taken.store(done, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_copies_every_piece() {
        let mate = Mate::start();
        for (size, iovs) in [(1, 1), (1000, 1), (300_000, 1), (64, 7), (4096, 101)] {
            let layout = Layout { size, iovs, seed: 5 };
            let total = layout.total() as usize;
            let source: Vec<u8> = (0..total).map(|i| (i * 7 % 251 + 1) as u8).collect();
            let mut target = vec![0u8; total];
            let from = source.as_ptr().expose_provenance();
            let to = target.as_mut_ptr().expose_provenance();
            // SAFETY: both vectors have `total` bytes, and no other code uses them during a round.
            let mut copies = unsafe { Copies::new(mate.as_ref(), &layout, from, to) };
            let variants = copies.variants.len();
            copies.round(Duration::from_micros(100), &Stopwatch::new()).unwrap();
            assert!(copies.gbps() > 0.0);
            for variant in 0..variants {
                target.fill(0);
                let kind = [CopyKind::Plain, CopyKind::NonTemporal][variant % 2];
                let pieces = copies.pieces.clone();
                match &mate {
                    Some(mate) if variant >= 2 => {
                        let work: Arc<dyn Work> = Arc::new(Copying { pieces, kind });
                        mate.wake().share(&work);
                    }
                    _ => pieces.copy(kind, None),
                }
                let order =
                    layout.indices(Side::Client).into_iter().zip(layout.indices(Side::Server));
                for (from, to) in order {
                    let range = |index: u32| {
                        index as usize * size as usize..(index as usize + 1) * size as usize
                    };
                    assert_eq!(
                        target[range(to)],
                        source[range(from)],
                        "{size} x {iovs}, {variant}"
                    );
                }
            }
        }
    }
}
