//! Arrival counters and the high-water mark of a lane.
//!
//! A counter never rises early: the receiver raises it only after the bytes it reports. It never
//! rises twice: a lane numbers its frames and the receiver applies each number once. After a lane
//! is lost, the sender can ask for the last number that the receiver applied.

use std::collections::HashMap;

use crate::ids::Incarnation;

/// Counters with 32-bit ids. The number of counters is bounded, in all and for each peer.
#[derive(Debug)]
pub struct Counters {
    counters: HashMap<u32, Counter>,
    /// The number of counters that each peer has begun. A peer without one has no entry, so there
    /// are never more entries than counters.
    begun: HashMap<Incarnation, usize>,
    max_ids: usize,
    max_ids_of_peer: usize,
}

#[derive(Debug)]
struct Counter {
    value: u64,
    /// The peer whose arrival was the first.
    begun_by: Incarnation,
}

impl Counters {
    /// Creates an empty set that holds at most `max_ids` counters at a time, and of these at most
    /// `max_ids_of_peer` that one peer has begun.
    pub fn new(max_ids: usize, max_ids_of_peer: usize) -> Self {
        Self { counters: HashMap::new(), begun: HashMap::new(), max_ids, max_ids_of_peer }
    }

    /// Adds one arrival from a peer and returns the new value. Returns `None` if the id is new and
    /// either the set or the peer's share of it is full.
    #[inline]
    pub fn arrive(&mut self, id: u32, from: &Incarnation) -> Option<u64> {
        if let Some(counter) = self.counters.get_mut(&id) {
            counter.value += 1;
            return Some(counter.value);
        }
        self.begin(id, *from)
    }

    fn begin(&mut self, id: u32, from: Incarnation) -> Option<u64> {
        let begun = self.begun.get(&from).copied().unwrap_or(0);
        if self.counters.len() >= self.max_ids || begun >= self.max_ids_of_peer {
            return None;
        }
        self.begun.insert(from, begun + 1);
        self.counters.insert(id, Counter { value: 1, begun_by: from });
        Some(1)
    }

    /// The number of arrivals so far.
    pub fn value(&self, id: u32) -> u64 {
        self.counters.get(&id).map_or(0, |counter| counter.value)
    }

    /// Removes a counter and returns its value.
    pub fn reset(&mut self, id: u32) -> u64 {
        let Some(counter) = self.counters.remove(&id) else { return 0 };
        if let Some(begun) = self.begun.get_mut(&counter.begun_by) {
            *begun -= 1;
            if *begun == 0 {
                self.begun.remove(&counter.begun_by);
            }
        }
        counter.value
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

    const A: Incarnation = Incarnation([1; 16]);
    const B: Incarnation = Incarnation([2; 16]);

    #[test]
    fn ids_are_bounded() {
        let mut counters = Counters::new(2, 2);
        assert_eq!(counters.arrive(7, &A), Some(1));
        assert_eq!(counters.arrive(7, &A), Some(2));
        assert_eq!(counters.arrive(8, &A), Some(1));
        assert_eq!(counters.arrive(9, &B), None);
        assert_eq!(counters.reset(7), 2);
        assert_eq!(counters.arrive(9, &B), Some(1));
        assert_eq!(counters.value(7), 0);
    }

    #[test]
    fn one_peer_fills_only_its_share() {
        let mut counters = Counters::new(8, 2);
        assert_eq!(counters.arrive(1, &A), Some(1));
        assert_eq!(counters.arrive(2, &A), Some(1));
        assert_eq!(counters.arrive(3, &A), None, "the share is full");
        assert_eq!(counters.arrive(3, &B), Some(1), "another peer has its own share");
        assert_eq!(counters.arrive(3, &A), Some(2), "a counter that exists costs nothing");
        assert_eq!(counters.reset(1), 1);
        assert_eq!(counters.arrive(4, &A), Some(1), "a reset gives the place back");
        assert_eq!(counters.arrive(5, &A), None);
        for id in [2, 3, 4] {
            counters.reset(id);
        }
        assert!(counters.begun.is_empty(), "peers without counters are forgotten");
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
