//! Runs schedules, and plants bugs that they must find.

use std::ops::Range;
use std::time::{Duration, Instant};

use peerway_core::fuzz::{self, Mutator};

use super::hostile;
use super::plan::Plan;
use super::run::{Tally, run};
use crate::bugs::{self, Bug};

/// Schedules of a usual test run; `cargo xtask test --only simulation` runs more.
const RUNS: u64 = 2_000;

/// Runs schedules of these seeds until one fails.
fn explore(seeds: Range<u64>) -> Result<Tally, String> {
    let mut total = Tally::default();
    for seed in seeds {
        let plan = Plan::from_seed(seed);
        match run(plan, false) {
            Ok(tally) => total += tally,
            Err(_) => return Err(shrink(plan)),
        }
    }
    Ok(total)
}

/// The report of the shortest plan that fails like this one.
fn shrink(mut plan: Plan) -> String {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(30)
        && let Some(smaller) = plan.smaller().into_iter().find(|plan| run(*plan, false).is_err())
    {
        plan = smaller;
    }
    match run(plan, true) {
        Ok(_) => format!("{plan}: failed before and not again: the run is not deterministic"),
        Err(why) => format!(
            "{why}\nagain: PEERWAY_SIMULATION={plan} cargo test -p peerway --lib simulation"
        ),
    }
}

/// Runs schedules with a bug and expects a failure that names the broken promise.
fn finds(bug: Bug, promise: &str) {
    bugs::plant(Some(bug));
    let found = explore(0..RUNS);
    bugs::plant(None);
    let report = found.expect_err("no schedule shows the bug");
    assert!(report.contains(promise), "{report}");
}

#[test]
fn every_schedule_keeps_the_promises() {
    if let Ok(plan) = std::env::var("PEERWAY_SIMULATION") {
        let plan: Plan = plan.parse().unwrap();
        match run(plan, true) {
            Ok(tally) => println!("{plan}: {tally:?}"),
            Err(why) => panic!("{why}"),
        }
        return;
    }
    let number = |name, usual| std::env::var(name).map_or(usual, |number| number.parse().unwrap());
    let runs = number("PEERWAY_SIMULATION_RUNS", RUNS);
    let first = number("PEERWAY_SIMULATION_FIRST", 0);
    let began = Instant::now();
    let tally = explore(first..first + runs).unwrap_or_else(|report| panic!("{report}"));
    println!("{runs} schedules in {:.1} s: {tally:?}", began.elapsed().as_secs_f64());
    // The schedules reach what they are for.
    assert!(tally.done > 0 && tally.held > 0 && tally.open > 0, "{tally:?}");
    assert!(tally.lanes_reopened > 0, "{tally:?}");
    assert!(tally.lanes_lost > 0 && tally.revoked > 0 && tally.lease_over > 0, "{tally:?}");
}

#[test]
fn a_schedule_repeats_exactly() {
    for seed in 0..20 {
        let plan = Plan::from_seed(seed);
        assert_eq!(run(plan, false), run(plan, false), "{plan}");
        assert_eq!(plan.to_string().parse::<Plan>(), Ok(plan));
    }
}

#[test]
fn it_finds_a_frame_that_replanning_loses() {
    finds(Bug::ReplanLoses, "promise 3");
}

#[test]
fn it_finds_a_frame_that_replanning_repeats() {
    finds(Bug::ReplanRepeats, "promise");
}

#[test]
fn it_finds_bytes_that_are_applied_after_the_lease() {
    finds(Bug::LeaseIgnored, "promise 2");
}

#[test]
fn it_finds_a_signal_before_its_bytes() {
    finds(Bug::SignalEarly, "promise 3");
}

#[test]
fn it_finds_a_fence_that_is_held_without_proof() {
    finds(Bug::HeldAtOnce, "promise 2");
}

/// Inputs of a hostile peer in a usual test run; `cargo xtask fuzz` runs more.
const SEQUENCES: u64 = 4_000;
/// Inputs within which a planted bug must be found.
const FINDING: u64 = 20_000;
/// Bytes of an input at most: about a hundred operations.
const SEQUENCE: usize = 600;

/// Runs inputs of a hostile peer. Each input decodes into a sequence of operations.
fn explore_hostile(name: &str, sequences: u64) -> Result<hostile::Tally, String> {
    let mut mutator = Mutator::new(0xB0B, Vec::new());
    let mut total = hostile::Tally::default();
    fuzz::explore(
        name,
        sequences,
        || mutator.random(SEQUENCE),
        |data| hostile::run(data).map(|tally| total += tally),
    )?;
    Ok(total)
}

/// Runs inputs with a bug and expects a failure that names the broken property.
fn hostile_finds(bug: Bug, property: &str) {
    bugs::plant(Some(bug));
    let found = explore_hostile("session", FINDING);
    bugs::plant(None);
    let report = found.expect_err("no input shows the bug");
    assert!(report.contains(property), "{report}");
}

#[test]
fn no_sequence_of_a_hostile_peer_breaks_a_promise() {
    let cases = fuzz::cases("session", SEQUENCES);
    if let Some(input) = fuzz::input() {
        hostile::trace(true);
        hostile::run(&input).map(|tally| println!("{tally:?}")).unwrap_or_else(|e| panic!("{e}"));
        return;
    }
    let tally = explore_hostile("session", cases).unwrap_or_else(|why| panic!("{why}"));
    println!("{tally:?}");
    // The sequences reach what they are for.
    let hostile::Tally { frames, landed, served, notified, counted, done, failed, revoked, open } =
        tally;
    let reached = [frames, landed, served, notified, counted, done, failed, revoked, open];
    assert!(cases == 0 || reached.iter().all(|number| *number > 0), "{tally:?}");
}

#[test]
fn a_hostile_peer_shows_bytes_outside_a_grant() {
    hostile_finds(Bug::BoundsIgnored, "memory changed");
}

#[test]
fn a_hostile_peer_shows_a_write_to_a_grant_for_reading() {
    hostile_finds(Bug::AccessIgnored, "memory changed");
}

#[test]
fn a_hostile_peer_shows_a_frame_that_is_applied_out_of_order() {
    hostile_finds(Bug::SequenceIgnored, "");
}

#[test]
fn a_hostile_peer_shows_bytes_that_land_after_a_revoke() {
    hostile_finds(Bug::GateIgnored, "memory changed");
}

#[test]
fn a_hostile_peer_shows_answers_that_a_peer_never_reads() {
    hostile_finds(Bug::OwedIgnored, "holds too much");
}

#[test]
fn a_hostile_peer_shows_a_flood_that_gets_a_growing_share() {
    hostile_finds(Bug::AgainTwice, "holds too much");
}

#[test]
fn a_hostile_peer_shows_a_count_without_a_right() {
    hostile_finds(Bug::RightIgnored, "counter");
}

#[test]
fn a_hostile_peer_shows_a_message_that_is_seen_twice() {
    hostile_finds(Bug::MessageTwice, "was seen 2 times");
}

#[test]
fn a_hostile_peer_shows_a_budget_that_does_not_come_back() {
    hostile_finds(Bug::BudgetLost, "budget is lost");
}

#[test]
fn a_hostile_peer_shows_a_transfer_without_an_end() {
    hostile_finds(Bug::DeadlineIgnored, "has not ended");
}

#[test]
fn a_hostile_peer_shows_a_lease_that_is_ignored() {
    hostile_finds(Bug::LeaseIgnored, "after the lease");
}

/// Two lanes: the peer asks about lost lanes on the second, and the answers leave on the first.
const LOST_LANES: [u8; 10] = [0xf9, 0x80, 0x9d, 0xb8, 0xc7, 0x7d, 0xb7, 0xc4, 0xff, 0x64];

#[test]
fn answers_about_lost_lanes_count_as_owed_on_the_lane_that_carries_them() {
    bugs::plant(Some(Bug::OwedIgnored));
    let found = hostile::run(&LOST_LANES);
    bugs::plant(None);
    assert!(found.is_err_and(|why| why.contains("holds too much")));
    hostile::run(&LOST_LANES).unwrap();
}
