//! Arrival counters and the high-water mark of a lane.
//!
//! A counter never fires early: it is raised only after the bytes it speaks of. It never fires
//! twice: a lane numbers its frames and applies each number once, and what was applied last can be
//! asked for when the lane is lost.

use std::collections::HashMap;

/// Counters named by 32-bit ids, bounded in number.
#[derive(Debug)]
pub struct Counters {
    values: HashMap<u32, u64>,
    max_ids: usize,
}

impl Counters {
    /// No counters yet; at most `max_ids` distinct ones ever.
    pub fn new(max_ids: usize) -> Self {
        Self { values: HashMap::new(), max_ids }
    }

    /// Adds one arrival. `None` when the id is new and there is no room.
    pub fn arrive(&mut self, id: u32) -> Option<u64> {
        if let Some(value) = self.values.get_mut(&id) {
            *value += 1;
            return Some(*value);
        }
        if self.values.len() >= self.max_ids {
            return None;
        }
        self.values.insert(id, 1);
        Some(1)
    }

    /// Arrivals so far.
    pub fn value(&self, id: u32) -> u64 {
        self.values.get(&id).copied().unwrap_or(0)
    }

    /// Forgets a counter and returns what it had.
    pub fn reset(&mut self, id: u32) -> u64 {
        self.values.remove(&id).unwrap_or(0)
    }
}

/// The last frame applied from a lane: each number is taken once, in order.
#[derive(Clone, Copy, Debug, Default)]
pub struct HighWater(u64);

impl HighWater {
    /// Takes `sequence` if it is the next one.
    pub fn take(&mut self, sequence: u64) -> bool {
        let next = self.0.checked_add(1) == Some(sequence);
        if next {
            self.0 = sequence;
        }
        next
    }

    /// The last one taken; 0 before the first.
    pub fn last(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_bounded() {
        let mut counters = Counters::new(2);
        assert_eq!(counters.arrive(7), Some(1));
        assert_eq!(counters.arrive(7), Some(2));
        assert_eq!(counters.arrive(8), Some(1));
        assert_eq!(counters.arrive(9), None);
        assert_eq!(counters.reset(7), 2);
        assert_eq!(counters.arrive(9), Some(1));
        assert_eq!(counters.value(7), 0);
    }

    #[test]
    fn no_number_is_taken_twice_or_skipped() {
        let mut mark = HighWater::default();
        assert!(mark.take(1));
        assert!(!mark.take(1));
        assert!(!mark.take(3));
        assert!(mark.take(2));
        assert_eq!(mark.last(), 2);
        let mut end = HighWater(u64::MAX);
        assert!(!end.take(0));
    }
}
