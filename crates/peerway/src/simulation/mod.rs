//! The simulated wire: the real drivers of two endpoints, in one thread, under a seeded schedule.
//!
//! A [`Plan`] names a schedule. A run makes two nodes and a session of one or more lanes, and then
//! takes steps at random: bytes arrive, a driver takes a turn, time passes, a transfer is posted,
//! a lane breaks, a node stops for a while, a transfer is cancelled, a region is revoked, a session
//! is closed, a client lies about what it was granted. After the last step everything may arrive.
//! The run checks the four promises:
//!
//! 1. Every transfer ends.
//! 2. After a transfer has ended with a held fence, and after a revoke, the memory that it could
//!    write never changes again. A node that was stopped for longer than its lease applies nothing
//!    that waited for it.
//! 3. A transfer that is done has its bytes in place. Its count and its notification come after the
//!    bytes, and once.
//! 4. No byte outside a grant changes.
//!
//! A failure is shrunk to the shortest plan that still fails and printed with its last steps. Run
//! one plan with `PEERWAY_SIMULATION=PLAN`, and more schedules with `PEERWAY_SIMULATION_RUNS=N`.

mod node;
mod plan;
mod run;
mod wire;

use std::time::{Duration, Instant};

use plan::Plan;
use run::{Tally, run};

use crate::bugs::{self, Bug};

/// Schedules of a usual test run; `cargo xtask test --only simulation` runs more.
const RUNS: u64 = 2_000;

/// Runs schedules until one fails or the number is reached.
fn explore(runs: u64) -> Result<Tally, String> {
    let mut total = Tally::default();
    for seed in 0..runs {
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
    let found = explore(RUNS);
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
    let runs = std::env::var("PEERWAY_SIMULATION_RUNS").map_or(RUNS, |runs| runs.parse().unwrap());
    let began = Instant::now();
    let tally = explore(runs).unwrap_or_else(|report| panic!("{report}"));
    println!("{runs} schedules in {:.1} s: {tally:?}", began.elapsed().as_secs_f64());
    // The schedules reach what they are for.
    assert!(tally.done > 0 && tally.held > 0 && tally.open > 0, "{tally:?}");
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
