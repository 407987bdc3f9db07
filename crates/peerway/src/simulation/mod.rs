//! The simulated wire: the real drivers of two endpoints, in one thread, under a seeded schedule.
//!
//! A [`Plan`] names a schedule. A run makes two nodes and a session of one or more lanes, and then
//! takes steps at random: bytes arrive, a driver takes a turn, time passes, a transfer is posted,
//! a lane breaks and perhaps comes back, a node stops for a while, a transfer is cancelled, a
//! region is revoked, a session is closed, a client lies about what it was granted. After the last
//! step everything may arrive. The run checks the four promises:
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
//! one plan with `PEERWAY_SIMULATION=PLAN`, and more schedules with `PEERWAY_SIMULATION_RUNS=N` and
//! `PEERWAY_SIMULATION_FIRST=SEED`.

pub(crate) mod hostile;
mod node;
#[cfg(test)]
mod plan;
#[cfg(test)]
mod run;
#[cfg(test)]
mod tests;
mod wire;

/// A wire whose peer does nothing.
#[cfg(test)]
pub(crate) fn silent_wire() -> Box<dyn crate::transport::Wire> {
    Box::new(wire::SimulatedLane::new(1 << 20, 1 << 20, 0).wire(0))
}
