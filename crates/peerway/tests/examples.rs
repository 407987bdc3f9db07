//! Runs every example as a user would, and checks its exit code and its last line.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const WATCHDOG: Duration = Duration::from_secs(180);

/// The program that `cargo test` built from an example.
fn program(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let built = tests.parent().unwrap().parent().unwrap().join("examples").join(name);
    assert!(built.is_file(), "no {}: run `cargo build -p peerway --examples`", built.display());
    built
}

/// Runs an example and returns the lines that it prints.
fn run(name: &str) -> Vec<String> {
    let mut command = Command::new(program(name));
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut example = command.spawn().unwrap();
    let start = Instant::now();
    let status = loop {
        if let Some(status) = example.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > WATCHDOG {
            // Ends its peers, too: they wait for the end of a pipe or of the session.
            example.kill().unwrap();
            panic!("{name} has run for {WATCHDOG:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let mut said = String::new();
    example.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(status.success(), "{name} ended with {status}: {said}");
    said.lines().map(str::to_owned).collect()
}

#[test]
fn blocks_are_handed_over() {
    let said = run("hand_over");
    assert_eq!(said.last().unwrap(), "request 7 is complete in blocks 9 2 33", "{said:?}");
}

#[test]
fn readers_pull_every_version() {
    let said = run("weight_sync");
    assert_eq!(said.last().unwrap(), "3 readers pulled 5 versions", "{said:?}");
}

#[test]
fn failures_are_told_and_survived() {
    let said = run("failure");
    let told = |what: &str| {
        let line = said.iter().find_map(|line| line.strip_prefix(&format!("{what}: ")));
        line.unwrap_or_else(|| panic!("no line about {what:?}: {said:?}"))
    };
    assert!(told("with a deadline").starts_with("the deadline passed (fence open"), "{said:?}");
    assert!(told("cancelled").starts_with("cancelled"), "{said:?}");
    assert_eq!(told("with a deadline, later"), "the deadline passed", "{said:?}");
    assert_eq!(told("cancelled, later"), "cancelled", "{said:?}");
    let gone = "the peer is gone: its process ended or every lane to it broke";
    assert_eq!(told("to a dead peer"), gone, "the fence holds, because the process has ended");
    let last = "the old peer is alive: false. To the new one: done";
    assert_eq!(said.last().unwrap(), last, "{said:?}");
}
