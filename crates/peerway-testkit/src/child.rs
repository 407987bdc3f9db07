//! A child process under control of a test: it obeys lines, and the test stops, resumes and kills
//! it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::procfs;

/// A child process. Dropping it kills the process.
pub struct Child {
    process: std::process::Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Child {
    /// Starts this program with `args`. It must answer every line on standard input with a line on
    /// standard output.
    pub fn spawn(args: &[&str]) -> Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        // SAFETY: prctl is a plain system call that allocates nothing, so it may run between fork
        // and exec. It makes the child die with the thread that created it, so a killed test leaves
        // no process behind.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let mut process = command.spawn().context("starting the peer process")?;
        let stdin = process.stdin.take().context("no stdin")?;
        let stdout = process.stdout.take().context("no stdout")?;
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { process, stdin, lines })
    }

    /// The process number.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends a line without waiting for the answer.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        self.stdin.write_all(format!("{line}\n").as_bytes()).context("the peer process is gone")
    }

    /// Waits for the next answer.
    pub fn answer(&mut self, within: Duration) -> Result<String> {
        match self.lines.recv_timeout(within) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => {
                bail!("the peer process did not answer within {within:?}")
            }
            Err(RecvTimeoutError::Disconnected) => match self.process.wait() {
                Ok(status) => bail!("the peer process ended: {status}"),
                Err(error) => bail!("the peer process ended: {error}"),
            },
        }
    }

    /// Whether the process has ended, by itself or by a signal.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.process.try_wait(), Ok(None))
    }

    /// Stops the process and waits until it is stopped.
    pub fn stop(&self) -> Result<()> {
        self.signal(libc::SIGSTOP)?;
        self.wait_stopped(Duration::from_secs(5))
    }

    /// Waits until the process is stopped, by any cause.
    pub fn wait_stopped(&self, within: Duration) -> Result<()> {
        let until = Instant::now() + within;
        while procfs::state(self.pid()) != Some('T') {
            ensure!(Instant::now() < until, "the peer process was not stopped within {within:?}");
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// Resumes the process.
    pub fn go_on(&self) -> Result<()> {
        self.signal(libc::SIGCONT)
    }

    /// Kills the process and reaps it.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }

    /// Kills the process without waiting for its end.
    pub fn kill_soon(&self) -> Result<()> {
        self.signal(libc::SIGKILL)
    }

    fn signal(&self, signal: i32) -> Result<()> {
        // SAFETY: kill takes no pointers. The child is not reaped, so the number is still its own.
        let rc = unsafe { libc::kill(self.pid() as i32, signal) };
        ensure!(
            rc == 0,
            "cannot send signal {signal} to the peer process: {}",
            std::io::Error::last_os_error()
        );
        Ok(())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
