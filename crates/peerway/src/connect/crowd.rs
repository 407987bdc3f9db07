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
    /// Whether it has sent a hello. A silent connection goes first.
    pub(super) has_spoken: bool,
    /// How many connections end with this one, including itself.
    pub(super) weight: usize,
}

/// The first connection to drop of the source that holds the most. If several sources hold as many,
/// the source with the oldest connection counts as the busiest. `may_go` gets the number that the
/// source holds and one of its connections.
pub(super) fn oldest_of_busiest<S: Copy + Eq + Hash>(
    all: &[Occupant<S>],
    may_go: impl Fn(usize, &Occupant<S>) -> bool,
) -> Option<Occupant<S>> {
    let mut sources: HashMap<S, (usize, (u64, u64))> = HashMap::new();
    for occupant in all {
        let age = (occupant.since, occupant.id);
        let (held, oldest) = sources.entry(occupant.source).or_insert((0, age));
        *held += occupant.weight;
        *oldest = age.min(*oldest);
    }
    let of_busiest = |(_, (held, oldest)): &(S, (usize, (u64, u64)))| (*held, Reverse(*oldest));
    let (busiest, (held, _)) = sources.into_iter().max_by_key(of_busiest)?;
    let of_busiest = all.iter().filter(|occupant| occupant.source == busiest);
    of_busiest
        .filter(|occupant| may_go(held, occupant))
        .min_by_key(|occupant| age(occupant))
        .copied()
}

/// Orders by age, the oldest first, and silent connections before the others. The id decides between
/// connections of the same instant.
fn age<S>(occupant: &Occupant<S>) -> (bool, u64, u64) {
    (occupant.has_spoken, occupant.since, occupant.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn occupant(id: u64, source: &'static str, weight: usize) -> Occupant<&'static str> {
        Occupant { id, source, since: 100 + id / 2, has_spoken: false, weight }
    }

    fn chosen(all: &[Occupant<&'static str>]) -> Option<u64> {
        let back: Vec<_> = all.iter().rev().copied().collect();
        let forth = oldest_of_busiest(all, |_, _| true).map(|occupant| occupant.id);
        let back = oldest_of_busiest(&back, |_, _| true).map(|occupant| occupant.id);
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
    fn a_silent_connection_goes_before_one_that_has_spoken() {
        let mut all = [occupant(1, "a", 1), occupant(3, "a", 1), occupant(5, "a", 1)];
        all[0].has_spoken = true;
        assert_eq!(chosen(&all), Some(3));
        let is_old = |_, occupant: &Occupant<_>| occupant.since < 101;
        let chosen_old = oldest_of_busiest(&all, is_old).map(|occupant| occupant.id);
        assert_eq!(chosen_old, Some(1), "young silent connections do not protect it");
        all.iter_mut().for_each(|occupant| occupant.has_spoken = true);
        assert_eq!(chosen(&all), Some(1));
    }

    #[test]
    fn connections_that_end_with_another_count() {
        let all = [occupant(4, "a", 9), occupant(2, "b", 1), occupant(3, "b", 1)];
        assert_eq!(chosen(&all), Some(4));
        assert_eq!(oldest_of_busiest(&all, |held, _| held == 9).map(|one| one.id), Some(4));
    }
}
