//! Parts of `cargo xtask test` that run side by side, each in a process of its own.
//!
//! A part mostly waits: for deadlines of its tests, for a guest, for a single long test. So several
//! at once end earlier. A child process runs one part (`--child`), with its output in a file; the
//! output is shown as a whole when the part has ended, so that lines of two parts never mix. The
//! exit status of the child is the outcome. The last lines of its output say why.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::test::{Outcome, Part, target_directory};

/// A part that has ended.
#[derive(Debug, PartialEq)]
pub(crate) struct Ended {
    pub(crate) part: &'static str,
    pub(crate) elapsed: Duration,
    pub(crate) outcome: Outcome,
}

impl Ended {
    pub(crate) fn is_failure(&self) -> bool {
        matches!(self.outcome, Outcome::Failed(_))
    }
}

/// The exit codes of a child. They differ from those of a panic and of a wrong argument.
const FAILED: u8 = 20;
const IGNORED: u8 = 21;

/// Separates the output of a part from the reason that the child reports.
const REASON: &str = "\n--- reason\n";

/// The program of this process, even if the part `build` has replaced its file.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// How often the run looks whether a child has ended. Parts take seconds to minutes.
const LOOK: Duration = Duration::from_millis(100);

/// Runs the part of a child process. Prints the reason and returns the outcome as the exit code.
pub(crate) fn child_exit(parts: &[&Part], soak: bool) -> ExitCode {
    let [part] = parts else {
        eprintln!("xtask: --child runs one part, not {}", parts.len());
        return ExitCode::FAILURE;
    };
    let (code, why) = match part.run_here(soak).outcome {
        Outcome::Passed => return ExitCode::SUCCESS,
        Outcome::Ignored(why) => (IGNORED, why),
        Outcome::Failed(why) => (FAILED, why),
    };
    print!("{REASON}{why}");
    code.into()
}

/// Runs parts in child processes, at most `jobs` at once. After a failure no other part starts, and
/// the parts under way run to their end: they clean up after themselves.
pub(crate) fn run(parts: &[&'static Part], jobs: usize, soak: bool) -> Vec<Ended> {
    let mut waiting = parts.to_vec();
    let (mut running, mut ended): (Vec<Running>, Vec<Ended>) = (Vec::new(), Vec::new());
    loop {
        while running.len() < jobs
            && !ended.iter().any(Ended::is_failure)
            && let Some(next) = next(&waiting, &running)
        {
            let part = waiting.remove(next);
            println!("started: {}", part.name);
            match Running::start(part, soak) {
                Ok(started) => running.push(started),
                Err(error) => ended.push(Ended {
                    part: part.name,
                    elapsed: Duration::ZERO,
                    outcome: Err(error).into(),
                }),
            }
        }
        if running.is_empty() {
            return ended;
        }
        std::thread::sleep(LOOK);
        running.retain_mut(|part| match part.ended() {
            Some(end) => {
                ended.push(end);
                false
            }
            None => true,
        });
    }
}

/// The first part that waits for no other: the part that it names has ended, or is not in this run.
fn next(waiting: &[&Part], running: &[Running]) -> Option<usize> {
    let is_unfinished = |name: &str| {
        waiting.iter().any(|part| part.name == name)
            || running.iter().any(|running| running.part.name == name)
    };
    waiting.iter().position(|part| !part.after.is_some_and(is_unfinished))
}

/// A part in a child process.
struct Running {
    part: &'static Part,
    began: Instant,
    child: Child,
    log: PathBuf,
}

impl Running {
    fn start(part: &'static Part, soak: bool) -> anyhow::Result<Self> {
        let logs = target_directory().join("tests");
        fs::create_dir_all(&logs).with_context(|| format!("cannot create {}", logs.display()))?;
        let log = logs.join(format!("{}.log", part.name));
        let file =
            File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let mut command = Command::new(THIS_PROGRAM);
        command.args(["test", "--child", "--only", part.name]);
        if soak {
            command.arg("--soak");
        }
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().context("cannot start a child process")?;
        Ok(Self { part, began: Instant::now(), child, log })
    }

    /// Shows the output of the part, if it has ended.
    fn ended(&mut self) -> Option<Ended> {
        let outcome = match self.child.try_wait() {
            Ok(None) => return None,
            Ok(Some(status)) => {
                let (output, outcome) = read(&self.log, status);
                println!("\n=== {}: {}\n{output}", self.part.name, self.part.about);
                outcome
            }
            Err(error) => Outcome::Failed(format!("cannot wait for its process: {error}")),
        };
        Some(Ended { part: self.part.name, elapsed: self.began.elapsed(), outcome })
    }
}

/// The output of a part without its reason, and the outcome.
fn read(log: &Path, status: ExitStatus) -> (String, Outcome) {
    let whole = match fs::read(log) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) => {
            let why = format!("cannot read {}: {error}", log.display());
            return (String::new(), Outcome::Failed(why));
        }
    };
    let (output, why) = match whole.rsplit_once(REASON) {
        Some((output, why)) => (output.to_owned(), why.to_owned()),
        None => (whole, String::new()),
    };
    let outcome = match status.code() {
        Some(0) => Outcome::Passed,
        Some(code) if code == i32::from(IGNORED) => Outcome::Ignored(why),
        Some(code) if code == i32::from(FAILED) => Outcome::Failed(why),
        _ => Outcome::Failed(format!("its process ended with {status}")),
    };
    (output, outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ends a real process with a code or a signal, after it wrote a log.
    fn end(script: &str, log: &str) -> (String, Outcome) {
        let directory = std::env::temp_dir();
        let file = directory.join(format!("side-by-side-{}-{}", std::process::id(), log.len()));
        fs::write(&file, log).unwrap();
        let status = Command::new("sh").args(["-c", script]).status().unwrap();
        let read = read(&file, status);
        fs::remove_file(&file).unwrap();
        read
    }

    #[test]
    fn the_outcome_is_the_exit_status_and_the_reason_the_end_of_the_output() {
        assert_eq!(end("exit 0", "fine\n"), ("fine\n".into(), Outcome::Passed));
        let log = format!("one\ntwo{REASON}test x: 1 != 2\nmore");
        let failed = Outcome::Failed("test x: 1 != 2\nmore".into());
        assert_eq!(end("exit 20", &log), ("one\ntwo".into(), failed));
        let log = format!("one{REASON}no guest here");
        assert_eq!(end("exit 21", &log).1, Outcome::Ignored("no guest here".into()));
    }

    #[test]
    fn a_process_that_dies_is_a_failure() {
        for script in ["kill -9 $$", "exit 101"] {
            let (output, outcome) = end(script, "half of the out");
            assert_eq!(output, "half of the out");
            assert!(matches!(outcome, Outcome::Failed(why) if why.contains("ended with")));
        }
    }
}
