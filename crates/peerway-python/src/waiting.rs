//! Waits that release the interpreter and still handle signals.

use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use peerway::threads::{self, Cpus};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::arguments::Time;
use crate::{arguments, errors};

/// The longest time until a signal is handled. Each return to the interpreter makes the engine
/// spend its spin budget again, so this must not be much shorter.
const LISTEN_EVERY: Duration = Duration::from_millis(20);

/// Calls `ready` again and again, with a short time limit, until it returns an answer. Returns
/// `None` after `timeout`, and an error when a signal handler raises.
pub(crate) fn until<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    mut ready: impl FnMut(Duration) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    // A timeout that overflows the clock means no limit.
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

/// Checks for signals during a wait inside the engine, without the interpreter.
#[derive(Default)]
pub(crate) struct Listener {
    last: Option<Instant>,
    heard: Option<PyErr>,
}

impl Listener {
    /// Whether a signal handler raised. However often this is called, it checks signals at most
    /// once per `LISTEN_EVERY`.
    pub(crate) fn hears(&mut self) -> bool {
        let now = Instant::now();
        let last = *self.last.get_or_insert(now);
        if self.heard.is_none() && now - last >= LISTEN_EVERY {
            self.last = Some(now);
            self.heard = Python::attach(|py| py.check_signals()).err();
        }
        self.heard.is_some()
    }

    /// Raises the exception of the signal handler, if any.
    pub(crate) fn raise(self) -> PyResult<()> {
        self.heard.map_or(Ok(()), Err)
    }
}

/// Runs `work`, which cannot be interrupted, on another thread and waits for it. After a signal,
/// `work` continues alone until its own time-out.
///
/// Returns `None` when `work` takes longer than `timeout`.
pub(crate) fn aside<T: Send + 'static>(
    py: Python<'_>,
    timeout: Option<Duration>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<Option<T>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    // The send fails when the caller has stopped waiting.
    threads::spawn("peerway-aside", &Cpus::of_process(), move || drop(sender.send(work())))?;
    let receiver = Mutex::new(receiver);
    // Wait a little longer, so that work with its own time limit can report what happened.
    let timeout = timeout.map(|timeout| timeout.saturating_add(Duration::from_millis(200)));
    let answer = until(py, timeout, |left| match receiver.lock().unwrap().recv_timeout(left) {
        Ok(answer) => Some(Some(answer)),
        Err(RecvTimeoutError::Timeout) => None,
        Err(RecvTimeoutError::Disconnected) => Some(None),
    })?;
    match answer {
        Some(None) => Err(PyRuntimeError::new_err("a helper thread of the engine panicked")),
        answer => Ok(answer.flatten()),
    }
}

/// Waits for a transfer that belongs to the calling thread. A signal cancels the transfer. The
/// signal's exception is raised after the transfer has ended, with the fence held or open.
pub(crate) fn finish(py: Python<'_>, transfer: &peerway::Transfer) -> PyResult<()> {
    // Most small transfers have ended already. This check costs less than releasing the
    // interpreter.
    let ended = match transfer.ended() {
        Some(ended) => ended,
        None => match until(py, None, |left| transfer.wait(left)) {
            Ok(Some(ended)) => ended,
            Ok(None) => {
                return Err(errors::raise(py, "WaitTimeout", "the transfer has not ended in time"));
            }
            Err(signal) => {
                py.detach(|| transfer.cancel());
                // A second signal ends this wait for the fence.
                until(py, None, |left| transfer.wait(left))?;
                return Err(signal);
            }
        },
    };
    errors::ended(py, ended, || transfer.failure()).map_or(Ok(()), Err)
}

/// A time-out argument: seconds, or no limit.
pub(crate) fn timeout(name: &str, time: Option<Time>) -> PyResult<Option<Duration>> {
    time.map(|time| arguments::time(name, &time)).transpose()
}
