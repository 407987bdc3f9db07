//! The engine's only clock: monotonic nanoseconds, read at most once per burst of work.

use std::time::Duration;

/// Nanoseconds of the monotonic clock. It also runs while the process is stopped.
pub(crate) fn now() -> u64 {
    let ts = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64
}

/// `now` plus a duration, without wrapping.
pub(crate) fn after(now: u64, wait: Duration) -> u64 {
    now.saturating_add(u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX))
}

/// The time left until `deadline`.
pub(crate) fn until(deadline: u64, now: u64) -> Duration {
    Duration::from_nanos(deadline.saturating_sub(now))
}
