//! Waiting without the interpreter, but with an ear for signals.

use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use peerway::threads::{self, Cpus};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::{arguments, errors};

/// A signal is heard this late at most. Each return to the interpreter costs a spin budget of the engine's,
/// so it must not be much shorter.
const LISTEN_EVERY: Duration = Duration::from_millis(20);

/// Asks `ready` for at most so long at a time until it has an answer, the time is over (`None`), or a signal
/// handler raises.
pub(crate) fn until<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    mut ready: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    // A time too long to be added to a clock is no limit.
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = match deadline {
            Some(deadline) => deadline.saturating_duration_since(Instant::now()),
            None => timeout.map_or(LISTEN_EVERY, |timeout| timeout.min(LISTEN_EVERY)),
        };
        if let Some(answer) = py.detach(|| ready(left.min(LISTEN_EVERY))) {
            return Ok(Some(answer));
        }
        py.check_signals()?;
        if left == Duration::ZERO {
            return Ok(None);
        }
    }
}

/// Hears signals for a wait that the engine does, without the interpreter.
#[derive(Default)]
pub(crate) struct Listener {
    last: Option<Instant>,
    heard: Option<PyErr>,
}

impl Listener {
    /// Whether a signal handler raised; it is asked several times a second, however often this is called.
    pub(crate) fn hears(&mut self) -> bool {
        let now = Instant::now();
        let last = *self.last.get_or_insert(now);
        if self.heard.is_none() && now - last >= LISTEN_EVERY {
            self.last = Some(now);
            self.heard = Python::attach(|py| py.check_signals()).err();
        }
        self.heard.is_some()
    }

    /// Raises what a handler raised.
    pub(crate) fn raise(self) -> PyResult<()> {
        self.heard.map_or(Ok(()), Err)
    }
}

/// Has another thread do something that cannot be interrupted, and waits for it. A signal leaves it to
/// itself: it ends by its own time-out.
///
/// `None` when it takes longer than `timeout`.
pub(crate) fn aside<T: Send + 'static>(
    py: Python<'_>,
    timeout: Option<Duration>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<Option<T>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    // Nobody may be there any more to hear of it.
    threads::spawn("peerway-aside", &Cpus::of_process(), move || drop(sender.send(work())))?;
    let receiver = Mutex::new(receiver);
    // A little more, so that work which keeps the time itself can say what happened.
    let timeout = timeout.map(|timeout| timeout.saturating_add(Duration::from_millis(200)));
    let answer = until(py, timeout, |left| match receiver.lock().unwrap().recv_timeout(left) {
        Ok(answer) => Some(Some(answer)),
        Err(RecvTimeoutError::Timeout) => None,
        Err(RecvTimeoutError::Disconnected) => Some(None),
    })?;
    match answer {
        Some(None) => Err(PyRuntimeError::new_err("a thread of the engine's panicked")),
        answer => Ok(answer.flatten()),
    }
}

/// Waits for a transfer that belongs to the calling thread. A signal cancels it, and is raised when its
/// memory is quiet or cannot be made so.
pub(crate) fn finish(py: Python<'_>, transfer: &peerway::Transfer) -> PyResult<()> {
    // Most small ones are over already, and looking costs less than letting go of the interpreter.
    let ended = match transfer.ended() {
        Some(ended) => ended,
        None => match until(py, None, |left| transfer.wait(left)) {
            Ok(Some(ended)) => ended,
            Ok(None) => return Err(errors::raise(py, "WaitTimeout", "it has not ended in time")),
            Err(signal) => {
                py.detach(|| transfer.cancel());
                // A second signal does not wait for the fence.
                until(py, None, |left| transfer.wait(left))?;
                return Err(signal);
            }
        },
    };
    errors::ended(py, ended).map_or(Ok(()), Err)
}

/// A time-out argument: seconds, or none.
pub(crate) fn timeout(name: &str, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    seconds.map(|seconds| arguments::seconds(name, seconds)).transpose()
}
