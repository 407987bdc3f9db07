//! The reader closes the pipe: no command panics, and a command still completes its other work.

use std::fs;
use std::io::PipeWriter;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A generous limit: these tests do not measure speed.
const WATCHDOG: Duration = Duration::from_secs(120);

/// The writing end of a pipe whose reading end is closed.
fn closed() -> PipeWriter {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer
}

fn peerway(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_peerway"));
    command.args(line.split_whitespace()).stdin(Stdio::null());
    command
}

/// Runs a command with closed standard output and standard error.
fn run(mut command: Command) -> ExitStatus {
    let mut child = command.stdout(closed()).stderr(closed()).spawn().unwrap();
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if start.elapsed() > WATCHDOG {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{command:?} is still running after {WATCHDOG:?}");
        }
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn no_command_panics_when_its_output_is_closed() {
    for line in [
        "",
        "--help",
        "--version",
        "no-such-command",
        "doctor",
        "doctor --json",
        "doctor --config",
        "doctor --config --json",
        "bench --help",
        "bench serve 127.0.0.1:0",
        "bench --paths local-map --sizes 256 --seconds 0.01",
        "bench --paths local-map --sizes 256 --seconds 0.01 --json -",
        "bench gpu-local --simulate --threads 1 --warps 8 --rounds 10 --commands 64",
        "nixl-install --python no-such-python",
        "nixl-install --into /no-such-directory",
    ] {
        let status = run(peerway(line));
        // 101 means a panic. No code means a signal.
        assert!(matches!(status.code(), Some(0..=2)), "peerway {line}: {status}");
    }
}

#[test]
fn a_log_that_cannot_be_written_is_no_panic() {
    let mut command = peerway("doctor");
    command.env("PEERWAY_LOG_LEVEL", "debug");
    let status = run(command);
    assert!(status.success(), "{status}");
}

#[test]
fn a_closed_output_is_no_failure() {
    for line in ["doctor --config", "bench --paths local-map --sizes 256 --seconds 0.01"] {
        let status = run(peerway(line));
        assert!(status.success(), "peerway {line}: {status}");
    }
}

/// A plugin directory with a file that looks like Peerway's plugin.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        let place = std::env::temp_dir().join(format!("peerway-closed-{}", std::process::id()));
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join("ours"), "[PEERWAY] agent '").unwrap();
        Self(place)
    }

    /// The names of all files, in order.
    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn an_installation_with_closed_output_is_complete() {
    let place = Place::new();
    let install = |line| {
        let mut command = peerway(line);
        command.arg("--into").arg(&place.0);
        command
    };
    let mut put = install("nixl-install --name PEERWAY --name UCCL");
    put.arg("--plugin").arg(place.0.join("ours"));
    let status = run(put);
    assert!(status.success(), "{status}");
    assert_eq!(place.files(), ["libplugin_PEERWAY.so", "libplugin_UCCL.so", "ours"]);
    let status = run(install("nixl-install --remove --name PEERWAY --name UCCL"));
    assert!(status.success(), "{status}");
    assert_eq!(place.files(), ["ours"]);
}
