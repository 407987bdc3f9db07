//! Runs programs, shows their output as it arrives, and keeps it to name the test that failed.

use std::ffi::OsStr;
use std::io::{IsTerminal as _, PipeReader, Read as _, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::failures;

/// How long the output of a program may stay open after its end. Processes that a program leaves
/// behind inherit its output and must not block the run.
const GRACE: Duration = Duration::from_secs(5);

/// Runs a program, requires success, and returns both output streams in order. `shown` names the
/// program in errors.
pub(crate) fn run(command: &mut Command, shown: &str) -> anyhow::Result<String> {
    run_and(true, command, shown)
}

fn run_and(show: bool, command: &mut Command, shown: &str) -> anyhow::Result<String> {
    let (ours, theirs) = std::io::pipe().context("cannot make a pipe")?;
    command.stdout(theirs.try_clone().context("cannot make a pipe")?).stderr(theirs);
    let mut child = start(command, shown)?;
    let output = collect(ours, show);
    finish(&mut child, shown, &output)
}

/// As [`run`], but returns only the standard output and does not show it.
pub(crate) fn capture(command: &mut Command, shown: &str) -> anyhow::Result<String> {
    let (ours, theirs) = std::io::pipe().context("cannot make a pipe")?;
    let (errors, their_errors) = std::io::pipe().context("cannot make a pipe")?;
    command.stdout(theirs).stderr(their_errors);
    let mut child = start(command, shown)?;
    let (output, errors) = (collect(ours, false), collect(errors, true));
    finish(&mut child, shown, &errors)?;
    Ok(text(&output))
}

fn start(command: &mut Command, shown: &str) -> anyhow::Result<Child> {
    if std::io::stdout().is_terminal() {
        // Programs see a pipe and would omit colours.
        let colours = OsStr::new("CARGO_TERM_COLOR");
        if std::env::var_os(colours).is_none()
            && command.get_envs().all(|(name, _)| name != colours)
        {
            command.env(colours, "always");
        }
    }
    // Show the output of Python programs immediately.
    command.env("PYTHONUNBUFFERED", "1");
    let child = command.spawn().with_context(|| format!("cannot start `{shown}`"));
    // The command owns the child's ends of the pipes. They must not stay open in this process.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    child
}

/// Reads all output on a thread. Also shows it if `show` is set.
fn collect(mut from: PipeReader, show: bool) -> Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if show {
                // The reader of standard output may have exited. The kept output still matters.
                let mut out = std::io::stdout().lock();
                let _ = out.write_all(&buffer[..count]).and_then(|()| out.flush());
            }
            if sender.send(buffer[..count].to_vec()).is_err() {
                break;
            }
        }
    });
    receiver
}

fn finish(child: &mut Child, shown: &str, output: &Receiver<Vec<u8>>) -> anyhow::Result<String> {
    let status = child.wait().with_context(|| format!("cannot wait for `{shown}`"))?;
    let output = text(output);
    if status.success() {
        return Ok(output);
    }
    match failures::first(&output) {
        Some(failure) => bail!("{failure}"),
        None => match failures::last_line(&output) {
            Some(line) => bail!("`{shown}` ended with {status}: {line}"),
            None => bail!("`{shown}` ended with {status}"),
        },
    }
}

/// The collected output. The program has ended.
fn text(output: &Receiver<Vec<u8>>) -> String {
    let (mut bytes, until) = (Vec::new(), Instant::now() + GRACE);
    while let Ok(more) = output.recv_timeout(until.saturating_duration_since(Instant::now())) {
        bytes.extend(more);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn both_streams_are_kept_in_their_order() {
        let output = run(&mut shell("echo one; echo two >&2; echo three"), "x").unwrap();
        assert_eq!(output, "one\ntwo\nthree\n");
        let output = capture(&mut shell("echo one; echo two >&2"), "x").unwrap();
        assert_eq!(output, "one\n");
    }

    #[test]
    fn a_program_that_fails_is_named_with_its_last_line() {
        let error = run(&mut shell("echo one; echo why >&2; exit 3"), "the step").unwrap_err();
        assert_eq!(error.to_string(), "`the step` ended with exit status: 3: why");
        let error = capture(&mut shell("echo one; echo why >&2; exit 3"), "it").unwrap_err();
        assert_eq!(error.to_string(), "`it` ended with exit status: 3: why");
        let error = run(&mut shell("exit 4"), "it").unwrap_err();
        assert_eq!(error.to_string(), "`it` ended with exit status: 4");
        let error = run(&mut Command::new("no such program"), "it").unwrap_err();
        assert!(error.to_string().contains("cannot start `it`"), "{error}");
    }

    #[test]
    fn a_test_that_fails_is_named_instead() {
        let script = "echo 'FAILED tests/test_x.py::test_y - assert 22 == 20'; exit 1";
        // Not shown: a search for failures in the output of these tests must find none.
        let error = run_and(false, &mut shell(script), "pytest").unwrap_err();
        assert_eq!(error.to_string(), "tests/test_x.py::test_y: assert 22 == 20");
    }

    #[test]
    fn a_process_that_was_left_behind_does_not_block_the_step() {
        let begun = Instant::now();
        // The process holds the pipe for ten minutes unless it is killed.
        let output = run(&mut shell("sleep 600 & echo $!"), "x").unwrap();
        let left = output.trim().to_owned();
        assert!(begun.elapsed() < Duration::from_secs(300));
        assert!(Command::new("kill").arg(left).status().unwrap().success());
    }
}
