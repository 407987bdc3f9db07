//! The watchdog: a run that hangs ends with one line, and takes the second process with it.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Longer than any transfer's own deadline (30 s) and the time until its fence: what takes longer
/// than this between two beats does not end by itself.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// How often it looks.
const LOOK: Duration = Duration::from_millis(500);

/// Watches until it is dropped.
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
    /// Calls `give_up` with a sentence when `patience` has passed without a beat, or when `trouble`
    /// has had the same thing to say twice in a row: whoever waits gets the time of one look to say
    /// it first.
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

    /// Things move along.
    pub(crate) fn beat(&self) {
        self.shared.lock().beat = Instant::now();
    }

    /// Something new begins.
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
            // If it has given up, the process ends in a moment.
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
                return Some(Verdict(format!("{what} did not end within {seconds} s: given up")));
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
