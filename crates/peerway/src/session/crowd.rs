//! Which half-open connection makes room for a new one.
//!
//! Strangers may open connections and say nothing. When there is no room for a new connection, the
//! oldest one of the busiest source goes: one source cannot keep the others out.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::Hash;

/// A half-open connection, as the acceptor counts it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Occupant<S> {
    pub(super) id: u64,
    /// Where it comes from: an address or a process.
    pub(super) source: S,
    /// When it was accepted.
    pub(super) since: u64,
    /// How many connections end with it, itself included.
    pub(super) weight: usize,
}

/// The oldest connection of the source that holds the most. Among sources that hold as many, the one
/// with the oldest connection counts as the busiest.
pub(super) fn oldest_of_busiest<S: Copy + Eq + Hash>(
    all: impl Iterator<Item = Occupant<S>>,
) -> Option<Occupant<S>> {
    let mut sources: HashMap<S, (usize, Occupant<S>)> = HashMap::new();
    for occupant in all {
        let (held, oldest) = sources.entry(occupant.source).or_insert((0, occupant));
        *held += occupant.weight;
        if age(&occupant) < age(oldest) {
            *oldest = occupant;
        }
    }
    let busiest = sources.into_values().max_by_key(|(held, oldest)| (*held, Reverse(age(oldest))));
    busiest.map(|(_, oldest)| oldest)
}

/// Orders by age, the oldest first. Connections of one moment are told apart by their ids.
fn age<S>(occupant: &Occupant<S>) -> (u64, u64) {
    (occupant.since, occupant.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn occupant(id: u64, source: &'static str, weight: usize) -> Occupant<&'static str> {
        Occupant { id, source, since: 100 + id / 2, weight }
    }

    fn chosen(all: &[Occupant<&'static str>]) -> Option<u64> {
        let forth = oldest_of_busiest(all.iter().copied()).map(|occupant| occupant.id);
        let back = oldest_of_busiest(all.iter().rev().copied()).map(|occupant| occupant.id);
        assert_eq!(forth, back, "the order decides");
        forth
    }

    #[test]
    fn the_oldest_of_the_busiest_source_goes() {
        let all = [occupant(1, "a", 1), occupant(2, "b", 1), occupant(3, "b", 1)];
        assert_eq!(chosen(&all), Some(2));
        assert_eq!(chosen(&all[..2]), Some(1), "as many of each: the oldest of all");
        assert_eq!(chosen(&[]), None);
    }

    #[test]
    fn what_ends_with_a_connection_counts() {
        let all = [occupant(4, "a", 9), occupant(2, "b", 1), occupant(3, "b", 1)];
        assert_eq!(chosen(&all), Some(4));
    }
}
