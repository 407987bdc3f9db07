//! A process under control: asked by lines, stopped, let go on, killed.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::procfs;

/// See the module. Killed when dropped.
pub struct Child {
    process: std::process::Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Child {
    /// Starts this very program with `args`; it answers a line on standard output for each line on
    /// standard input.
    pub fn spawn(args: &[&str]) -> Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        // SAFETY: prctl is a plain system call, allowed between fork and exec. The child dies with
        // the thread that made it, so a killed test leaves nobody behind.
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

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends a line without waiting for the answer.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        self.stdin.write_all(format!("{line}\n").as_bytes()).context("the peer process is gone")
    }

    /// The next answer.
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

    /// Whether it has ended by itself or by a signal.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.process.try_wait(), Ok(None))
    }

    /// Stops it and waits until it stands.
    pub fn stop(&self) -> Result<()> {
        self.signal(libc::SIGSTOP)?;
        self.wait_stopped(Duration::from_secs(5))
    }

    /// Waits until something has stopped it.
    pub fn wait_stopped(&self, within: Duration) -> Result<()> {
        let until = Instant::now() + within;
        while procfs::state(self.pid()) != Some('T') {
            ensure!(Instant::now() < until, "the peer process was not stopped within {within:?}");
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// Lets it go on.
    pub fn go_on(&self) -> Result<()> {
        self.signal(libc::SIGCONT)
    }

    /// Kills it, and returns when it is gone.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }

    /// Kills it without waiting.
    pub fn kill_soon(&self) -> Result<()> {
        self.signal(libc::SIGKILL)
    }

    fn signal(&self, signal: i32) -> Result<()> {
        // SAFETY: sends a signal to our own child, which is not reaped yet.
        let rc = unsafe { libc::kill(self.pid() as i32, signal) };
        ensure!(rc == 0, "signal {signal}: {}", std::io::Error::last_os_error());
        Ok(())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
