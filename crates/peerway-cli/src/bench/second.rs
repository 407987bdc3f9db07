//! The second process of a run on one machine: this program again, controlled over pipes.
//!
//! Neither process outlives the other. The second process ends when its standard input closes, even
//! if the first process was killed. The first process kills and reaps the second when it is done or
//! gives up.

use std::io::{self, BufReader};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};

use super::control::Control;
use super::serve;

/// The address that both processes use.
pub(crate) const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Runs the second process.
pub(crate) fn main() -> anyhow::Result<()> {
    let served = serve::session(BufReader::new(io::stdin()), io::stdout(), HERE);
    // Only the first process reports errors, so this one ends without a message.
    if served.is_err() {
        std::process::exit(1);
    }
    Ok(())
}

/// A handle to the second process. It is cheap to clone. Dropping the last clone kills and reaps
/// the process.
#[derive(Clone)]
pub(crate) struct Second {
    child: Arc<Mutex<Guarded>>,
}

struct Guarded(Child);

impl Second {
    /// Starts the process and opens the control connection.
    pub(crate) fn start() -> anyhow::Result<(Self, Control)> {
        let program = std::env::current_exe()
            .context("cannot find the path of this program to start it again")?;
        let mut child = Command::new(program)
            .args(["bench", "second"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the second process")?;
        let pipes = child.stdout.take().zip(child.stdin.take());
        let second = Self { child: Arc::new(Mutex::new(Guarded(child))) };
        let (reader, writer) = pipes.context("the second process has no pipes")?;
        let control = Control::new(BufReader::new(reader), writer);
        Ok((second.clone(), control.map_err(|error| second.blame(error))?))
    }

    /// The exit status of the process. `None` while it runs.
    pub(crate) fn ended(&self) -> Option<ExitStatus> {
        self.lock().0.try_wait().ok().flatten()
    }

    /// Kills and reaps the process. SIGKILL also ends a stopped process.
    pub(crate) fn kill(&self) {
        let mut child = self.lock();
        // The process may have ended already.
        let _ = child.0.kill();
        let _ = child.0.wait();
    }

    /// Returns `error`, or an error about the second process if that process has failed.
    pub(crate) fn blame(&self, error: anyhow::Error) -> anyhow::Error {
        // The pipes of a process close a moment before it can be reaped.
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(200) {
            match self.ended() {
                // On any error this process closes the pipes, and the second process then ends with
                // success.
                Some(status) if status.success() => break,
                Some(status) => {
                    return anyhow!("the second process ended in the middle of the run ({status})");
                }
                None => {}
            }
            thread::sleep(Duration::from_millis(5));
        }
        error
    }

    fn lock(&self) -> MutexGuard<'_, Guarded> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // The process would end by itself when its pipes close. Killing it avoids the wait.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
