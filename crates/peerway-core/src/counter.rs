//! Arrival counters and the high-water mark of a lane.
//!
//! A counter never rises early: the receiver raises it only after the bytes it reports. It never
//! rises twice: a lane numbers its frames and the receiver applies each number once. After a lane
//! is lost, the sender can ask for the last number that the receiver applied.

use std::collections::HashMap;

/// Counters with 32-bit ids. The number of counters is bounded.
#[derive(Debug)]
pub struct Counters {
    values: HashMap<u32, u64>,
    max_ids: usize,
}

impl Counters {
    /// Creates an empty set that holds at most `max_ids` counters at a time.
    pub fn new(max_ids: usize) -> Self {
        Self { values: HashMap::new(), max_ids }
    }

    /// Adds one arrival and returns the new value. Returns `None` if the id is new and the set is
    /// full.
    #[inline]
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

    /// The number of arrivals so far.
    pub fn value(&self, id: u32) -> u64 {
        self.values.get(&id).copied().unwrap_or(0)
    }

    /// Removes a counter and returns its value.
    pub fn reset(&mut self, id: u32) -> u64 {
        self.values.remove(&id).unwrap_or(0)
    }
}

/// The number of the last frame applied from a lane. Each number is accepted once, in order.
#[derive(Clone, Copy, Debug, Default)]
pub struct HighWater(u64);

impl HighWater {
    /// Accepts `sequence` if it is the next number.
    #[inline]
    pub fn take(&mut self, sequence: u64) -> bool {
        let next = self.0.checked_add(1) == Some(sequence);
        if next {
            self.0 = sequence;
        }
        next
    }

    /// The last accepted number, or 0 before the first.
    #[inline]
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
