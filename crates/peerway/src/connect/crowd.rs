//! Chooses the half-open connection that the acceptor drops to make room for a new one.
//!
//! Any host may open connections and send nothing. When there is no room for a new connection, the
//! acceptor drops the oldest one of the busiest source. One source can therefore not keep the
//! others out.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::Hash;

/// A half-open connection, as the acceptor counts it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Occupant<S> {
    pub(super) id: u64,
    /// The source: an address or a process.
    pub(super) source: S,
    /// When it was accepted.
    pub(super) since: u64,
    /// How many connections end with this one, including itself.
    pub(super) weight: usize,
}

/// The oldest connection of the source that holds the most, and how many that source holds. If
/// several sources hold as many, the source with the oldest connection counts as the busiest.
pub(super) fn oldest_of_busiest<S: Copy + Eq + Hash>(
    all: impl Iterator<Item = Occupant<S>>,
) -> Option<(usize, Occupant<S>)> {
    let mut sources: HashMap<S, (usize, Occupant<S>)> = HashMap::new();
    for occupant in all {
        let (held, oldest) = sources.entry(occupant.source).or_insert((0, occupant));
        *held += occupant.weight;
        if age(&occupant) < age(oldest) {
            *oldest = occupant;
        }
    }
    sources.into_values().max_by_key(|(held, oldest)| (*held, Reverse(age(oldest))))
}

/// Orders by age, the oldest first. The id decides between connections of the same instant.
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
        let forth = oldest_of_busiest(all.iter().copied()).map(|(_, occupant)| occupant.id);
        let back = oldest_of_busiest(all.iter().rev().copied()).map(|(_, occupant)| occupant.id);
        assert_eq!(forth, back, "the result must not depend on the order");
        forth
    }

    #[test]
    fn the_oldest_of_the_busiest_source_goes() {
        let all = [occupant(1, "a", 1), occupant(2, "b", 1), occupant(3, "b", 1)];
        assert_eq!(chosen(&all), Some(2));
        assert_eq!(chosen(&all[..2]), Some(1), "sources hold as many: the oldest connection goes");
        assert_eq!(chosen(&[]), None);
    }

    #[test]
    fn connections_that_end_with_another_count() {
        let all = [occupant(4, "a", 9), occupant(2, "b", 1), occupant(3, "b", 1)];
        assert_eq!(chosen(&all), Some(4));
        assert_eq!(oldest_of_busiest(all.iter().copied()).map(|(held, _)| held), Some(9));
    }
}
