//! The engine's only clock: monotonic nanoseconds, read at most once per burst of work.

use std::time::Duration;

/// Nanoseconds of the monotonic clock. It also runs while the process is stopped.
pub(crate) fn now() -> u64 {
    #[cfg(any(test, fuzzing))]
    if let Some(now) = SIMULATED.get() {
        return now;
    }
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

#[cfg(any(test, fuzzing))]
thread_local! {
    static SIMULATED: std::cell::Cell<Option<u64>> = const { std::cell::Cell::new(None) };
}

/// Gives this thread a clock of its own, which stands still until [`advance`], while the result
/// lives.
#[cfg(any(test, fuzzing))]
pub(crate) fn simulate(start: u64) -> impl Drop {
    struct Real;
    impl Drop for Real {
        fn drop(&mut self) {
            SIMULATED.set(None);
        }
    }
    SIMULATED.set(Some(start));
    Real
}

/// Moves the simulated clock of this thread.
#[cfg(any(test, fuzzing))]
pub(crate) fn advance(time: Duration) {
    SIMULATED.set(SIMULATED.get().map(|now| after(now, time)));
}
