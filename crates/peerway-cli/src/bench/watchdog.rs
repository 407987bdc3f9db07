//! The watchdog: ends a run that hangs with one line, and ends the second process too.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The longest time between two beats. It exceeds the deadline of any transfer (30 s) plus the time
/// until its fence, so a step that takes longer does not end by itself.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// How often the watchdog checks.
const LOOK: Duration = Duration::from_millis(500);

/// Watches a run until the value is dropped.
pub(crate) struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    over: Condvar,
}

struct State {
    beat: Instant,
    what: String,
    over: bool,
}

/// Why the watchdog gave up.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct Verdict(pub(crate) String);

impl Watchdog {
    /// Calls `give_up` with a message when `patience` has passed without a beat, or when `trouble`
    /// returns the same message in two consecutive checks. The first check is not enough: the run
    /// then has time to report the same problem with more detail.
    pub(crate) fn start(
        patience: Duration,
        trouble: impl Fn() -> Option<String> + Send + 'static,
        give_up: impl FnOnce(Verdict) + Send + 'static,
    ) -> Self {
        let state = State { beat: Instant::now(), what: "starting".to_owned(), over: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), over: Condvar::new() });
        let its = shared.clone();
        let thread = thread::Builder::new()
            .name("bench-watchdog".to_owned())
            .spawn(move || {
                if let Some(verdict) = its.watch(patience, trouble) {
                    give_up(verdict);
                }
            })
            .ok();
        Self { shared, thread }
    }

    /// Reports progress.
    pub(crate) fn beat(&self) {
        self.shared.lock().beat = Instant::now();
    }

    /// Reports the start of the step `what`.
    pub(crate) fn begin(&self, what: String) {
        let mut state = self.shared.lock();
        state.beat = Instant::now();
        state.what = what;
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.lock().over = true;
        self.shared.over.notify_all();
        if let Some(thread) = self.thread.take() {
            // If the watchdog has given up, its callback ends the process.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self, patience: Duration, trouble: impl Fn() -> Option<String>) -> Option<Verdict> {
        let mut before = None;
        let mut state = self.lock();
        while !state.over {
            if state.beat.elapsed() > patience {
                let (what, seconds) = (&state.what, patience.as_secs());
                return Some(Verdict(format!("{what} did not end within {seconds} s")));
            }
            let now = trouble();
            if now.is_some() && now == before {
                return now.map(|why| Verdict(format!("{why} during {}", state.what)));
            }
            before = now;
            let waited = self.over.wait_timeout(state, LOOK.min(patience));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn silence_is_called_out_with_what_was_under_way() {
        let (tell, told) = mpsc::channel();
        let dog = Watchdog::start(
            Duration::from_millis(30),
            || None,
            move |Verdict(why)| tell.send(why).unwrap(),
        );
        dog.begin("tcp write 4K".to_owned());
        let why = told.recv_timeout(Duration::from_secs(30)).unwrap();
        assert!(why.starts_with("tcp write 4K did not end within"), "{why}");
    }

    #[test]
    fn trouble_is_called_out() {
        let (tell, told) = mpsc::channel();
        let trouble = || Some("the second process ended".to_owned());
        let _dog = Watchdog::start(PATIENCE, trouble, move |why| tell.send(why).unwrap());
        let why = told.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(why, Verdict("the second process ended during starting".to_owned()));
    }

    #[test]
    fn a_run_that_ends_is_left_alone() {
        let dog = Watchdog::start(PATIENCE, || None, |why| panic!("{why:?}"));
        dog.beat();
        drop(dog);
    }
}
