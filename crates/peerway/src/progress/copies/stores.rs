//! How a large copy stores: past the caches, or into them.
//!
//! Non-temporal stores are faster while the memory is cold. Where the caches hold both sides of a
//! copy, as with a staging buffer that is refilled often, ordinary stores are two to three times
//! faster. Only ordinary stores keep the caches warm. Only measured time can tell which case holds,
//! because other processes share the last-level cache. So copies of one size keep a record of the
//! cost per byte of both kinds of store. They use the cheaper kind and from time to time try the
//! other.

use std::sync::Mutex;

use crate::os::copy::{CopyKind, NON_TEMPORAL_FROM};

/// Copies of one trial. The best of them counts, because each finds the caches warmer than the one
/// before.
const TRIAL: u32 = 6;
/// Copies from one trial to the next. The pause doubles after each trial that changed nothing, up
/// to [`LONGEST_PAUSE`].
const PAUSE: u32 = 64;
const LONGEST_PAUSE: u32 = 1024;

/// The choice changes when the other kind costs less than this fraction of the chosen one. A margin
/// is needed because each change costs a copy of cold memory.
const CHEAPER: f64 = 0.9;
/// The weight of a new cost in the record, and the limit of a new cost as a multiple of the record.
/// A copy whose thread lost its core says nothing about stores.
const SHARE: f64 = 0.25;
const DEAREST: f64 = 2.0;

/// Copies of 2 MiB, 4 MiB, 8 MiB and so on up to 128 MiB have a record each. Copies whose pieces
/// are smaller than `SCATTERED` on average have separate records.
const SIZES: usize = 7;
const SCATTERED: u64 = 64 << 10;

/// The measured costs of an endpoint's copies.
#[derive(Default)]
pub(crate) struct Experience([[Mutex<Record>; SIZES]; 2]);

impl Experience {
    /// Chooses how the next copy of `total` bytes in `pieces` pieces stores.
    pub(crate) fn choose(&self, total: u64, pieces: usize) -> Choice {
        self.of(total, pieces).lock().unwrap().choose()
    }

    /// Records that a complete copy took `nanos` nanoseconds, summed over all threads that worked
    /// on it.
    pub(crate) fn took(&self, choice: Choice, total: u64, pieces: usize, nanos: u64) {
        self.of(total, pieces).lock().unwrap().took(choice, nanos as f64 / total as f64);
    }

    fn of(&self, total: u64, pieces: usize) -> &Mutex<Record> {
        let scattered = total < SCATTERED * pieces as u64;
        let doublings = (total / NON_TEMPORAL_FROM).checked_ilog2().unwrap_or(0) as usize;
        &self.0[usize::from(scattered)][doublings.min(SIZES - 1)]
    }
}

/// How one copy stores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choice {
    pub(crate) kind: CopyKind,
    /// The caches are in the state that copies of this kind leave, so the time of this copy
    /// predicts the next.
    tells: bool,
}

/// The costs of copies of about one size.
#[derive(Debug)]
struct Record {
    /// Nanoseconds per byte, once known, of the chosen kind and of the other.
    cost: Option<f64>,
    other_cost: Option<f64>,
    chosen: CopyKind,
    last: Option<CopyKind>,
    /// Copies until the end of the next trial.
    left: u32,
    pause: u32,
}

impl Default for Record {
    fn default() -> Self {
        Self {
            cost: None,
            other_cost: None,
            chosen: CopyKind::NonTemporal,
            last: None,
            // Two copies to learn the cost of streaming, then the first trial.
            left: 2 + TRIAL,
            pause: PAUSE,
        }
    }
}

impl Record {
    fn choose(&mut self) -> Choice {
        let changes =
            self.cost.zip(self.other_cost).is_some_and(|(ours, its)| its < ours * CHEAPER);
        if changes {
            self.chosen = other(self.chosen);
            (self.cost, self.other_cost) = (self.other_cost, self.cost);
            (self.left, self.pause) = (PAUSE + TRIAL, PAUSE);
        } else if self.left == 0 {
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
            self.left = self.pause + TRIAL;
        }
        if self.left == TRIAL {
            // The cost found by the previous trial is out of date.
            self.other_cost = None;
        }
        let kind = if self.left <= TRIAL { other(self.chosen) } else { self.chosen };
        self.left -= 1;
        let tells = self.last == Some(kind);
        self.last = Some(kind);
        Choice { kind, tells }
    }

    fn took(&mut self, choice: Choice, cost: f64) {
        if !choice.tells {
            return;
        }
        if choice.kind == self.chosen {
            let before = self.cost.unwrap_or(cost);
            self.cost = Some(before + (cost.min(before * DEAREST) - before) * SHARE);
        } else {
            self.other_cost = Some(self.other_cost.unwrap_or(cost).min(cost));
        }
    }
}

fn other(kind: CopyKind) -> CopyKind {
    match kind {
        CopyKind::NonTemporal => CopyKind::Cached,
        _ => CopyKind::NonTemporal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model of memory that is copied repeatedly, and of its cost per byte.
    struct Again {
        record: Record,
        /// The fraction of it that the caches hold, and the fraction of the rest that each cached
        /// copy brings in.
        warm: f64,
        gains: f64,
    }

    impl Again {
        fn new(gains: f64) -> Self {
            Self { record: Record::default(), warm: 0.0, gains }
        }

        /// Does one more copy, whose cost a disturbance multiplies by `disturbed`.
        fn copy(&mut self, disturbed: f64) -> CopyKind {
            let choice = self.record.choose();
            let cost = match choice.kind {
                CopyKind::Cached => 1.6 - self.warm * 1.3,
                _ => 1.0,
            };
            self.warm = match choice.kind {
                CopyKind::Cached => self.warm + (1.0 - self.warm) * self.gains,
                _ => 0.0,
            };
            self.record.took(choice, cost * disturbed);
            choice.kind
        }

        fn cached(&mut self, copies: u32) -> u32 {
            (0..copies).filter(|_| self.copy(1.0) == CopyKind::Cached).count() as u32
        }
    }

    #[test]
    fn cold_memory_is_streamed_and_tried_ever_less() {
        let mut cold = Again::new(0.0);
        let tried: Vec<u32> = (0..4).map(|_| cold.cached(1024)).collect();
        assert!(tried.is_sorted_by(|a, b| a >= b), "{tried:?}");
        assert!(tried[0] <= 5 * TRIAL && (1..=TRIAL).contains(&tried[3]), "{tried:?}");
    }

    #[test]
    fn what_the_caches_hold_is_copied_through_them() {
        for gains in [1.0, 0.5, 0.3] {
            let mut warm = Again::new(gains);
            warm.cached(2 + TRIAL);
            assert!(warm.cached(1000) >= 1000 - 4 * TRIAL, "{gains}");
        }
    }

    #[test]
    fn a_copy_that_was_disturbed_changes_nothing() {
        let mut warm = Again::new(1.0);
        warm.cached(20);
        assert_eq!(warm.copy(100.0), CopyKind::Cached);
        assert_eq!(warm.cached(20), 20);
    }

    #[test]
    fn caches_that_are_taken_away_and_given_back_are_noticed() {
        let mut memory = Again::new(1.0);
        memory.cached(20);
        (memory.gains, memory.warm) = (0.0, 0.0);
        memory.cached(40);
        // Only the trial that falls due uses the caches.
        assert!(memory.cached(PAUSE) <= TRIAL);
        memory.gains = 1.0;
        memory.cached(3 * PAUSE);
        assert!(memory.cached(PAUSE) >= PAUSE - TRIAL);
    }

    #[test]
    fn sizes_have_records_of_their_own() {
        let experience = Experience::default();
        let is_same = |a: u64, b: u64| std::ptr::eq(experience.of(a, 1), experience.of(b, 1));
        assert!(is_same(2 << 20, (4 << 20) - 1) && !is_same(2 << 20, 4 << 20));
        assert!(!is_same(64 << 20, 128 << 20) && is_same(128 << 20, 255 << 20));
        assert!(is_same(1 << 20, 2 << 20) && is_same(128 << 20, u64::MAX));
        let is_scattered =
            |pieces| !std::ptr::eq(experience.of(4 << 20, 1), experience.of(4 << 20, pieces));
        assert!(!is_scattered(64) && is_scattered(65) && is_scattered(1024));
    }
}
