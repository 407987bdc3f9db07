//! The second process of a run on one machine: this program again, told what to do over pipes.
//!
//! It ends when its standard input closes, whatever became of the first process, and the first one
//! kills and reaps it when it is done or gives up: neither leaves the other behind.

use std::io::{self, BufReader};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};

use super::control::Control;
use super::serve;

/// Both processes meet here.
pub(crate) const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// What the second process does.
pub(crate) fn main() -> anyhow::Result<()> {
    let served = serve::session(BufReader::new(io::stdin()), io::stdout(), HERE);
    // The first process speaks for both: a pipe that it closed is no news.
    if served.is_err() {
        std::process::exit(1);
    }
    Ok(())
}

/// A handle to the second process. Cheap to clone; the last one to go kills and reaps it.
#[derive(Clone)]
pub(crate) struct Second {
    child: Arc<Mutex<Guarded>>,
}

struct Guarded(Child);

impl Second {
    /// Starts it and greets it.
    pub(crate) fn start() -> anyhow::Result<(Self, Control)> {
        let program =
            std::env::current_exe().context("cannot find this program to start it again")?;
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

    /// How it ended, if it has.
    pub(crate) fn ended(&self) -> Option<ExitStatus> {
        self.lock().0.try_wait().ok().flatten()
    }

    /// Kills and reaps it; stopped or not, it cannot refuse.
    pub(crate) fn kill(&self) {
        let mut child = self.lock();
        // Already gone is as good.
        let _ = child.0.kill();
        let _ = child.0.wait();
    }

    /// The error, or that the second process is gone if that is behind it.
    pub(crate) fn blame(&self, error: anyhow::Error) -> anyhow::Error {
        // Its pipes close a moment before it can be reaped.
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(200) {
            match self.ended() {
                // It ends in order when we hang up, which is what we do on any error.
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
        // It would end by itself when its pipes close; killed, it cannot take its time.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
