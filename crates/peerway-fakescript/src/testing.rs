//! Tests that run in processes of their own, because a process reads its script once.
//!
//! A mistake is a panic, as in every test.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Longer than a busy machine needs, shorter than an endless hang.
pub const WATCHDOG: Duration = Duration::from_secs(180);

const ROLE: &str = "PEERWAY_FAKE_TEST_ROLE";

/// The path of a library that was built with this test.
pub fn library(name: &str) -> PathBuf {
    let exe = std::env::current_exe().expect("the test program has a path");
    let deps = exe.parent().expect("the program is in a directory");
    let found = [deps, deps.parent().expect("the directory has a parent")]
        .map(|directory| directory.join(name));
    found.into_iter().find(|path| path.is_file()).expect("the library was built with this test")
}

/// This test program, to be started again.
pub fn program() -> Command {
    Command::new(std::env::current_exe().expect("the test program has a path"))
}

/// This test program, to run one test in a role.
pub fn child(test: &str, role: &str) -> Command {
    let mut command = program();
    command
        .args(["--exact", test, "--include-ignored", "--nocapture"])
        .env(ROLE, role)
        .stdin(Stdio::piped());
    command
}

/// The role of this process; empty unless [`child`] made it.
pub fn role() -> String {
    std::env::var(ROLE).unwrap_or_default()
}

/// Returns true in a process that [`child`] made. Elsewhere it runs this one and returns false once
/// that has passed.
pub fn is_child(command: impl FnOnce() -> Command) -> bool {
    if !role().is_empty() {
        return true;
    }
    let mut command = command();
    let mut child = Killed(command.spawn().expect("the test program starts again"));
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.0.try_wait().expect("the child can be waited for") {
            break status;
        }
        assert!(begun.elapsed() < WATCHDOG, "{command:?} hangs");
        std::thread::sleep(Duration::from_millis(2));
    };
    assert!(status.success(), "{command:?}: {status}");
    false
}

/// Runs a command, and returns its standard output, then its standard error.
pub fn run(command: &mut Command) -> (ExitStatus, String) {
    let output = command.output().expect("the test program starts again");
    let said = [output.stdout, output.stderr].concat();
    (output.status, String::from_utf8_lossy(&said).into_owned())
}

/// Runs tests of this program, which must exist and pass. Returns their output.
pub fn pass(command: &mut Command) -> String {
    let (status, said) = run(command);
    assert!(status.success(), "{command:?}: {status}\n{said}");
    assert!(!said.contains(" 0 passed"), "{command:?} names no test\n{said}");
    said
}

/// A child process that is killed on drop.
#[derive(Debug)]
pub struct Killed(pub Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Another process, which exchanges lines with this one.
#[derive(Debug)]
pub struct Far {
    /// The process.
    pub process: Killed,
    output: BufReader<ChildStdout>,
}

impl Far {
    /// Starts a [`child`].
    pub fn start(mut command: Command) -> Self {
        let process = command.stdout(Stdio::piped()).spawn();
        let mut process = Killed(process.expect("the test program starts again"));
        let output = BufReader::new(process.0.stdout.take().expect("the child has a pipe"));
        Self { process, output }
    }

    /// Sends a line, which [`hear`] returns there.
    pub fn say(&mut self, words: &str) {
        let input = self.process.0.stdin.as_mut().expect("the child has a pipe");
        input.write_all(format!("{words}\n").as_bytes()).expect("the other side reads");
    }

    /// The next line that [`say`] sent there. Test harnesses also print other lines.
    pub fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let read = self.output.read_line(&mut line).expect("the output can be read");
            assert!(read > 0, "no answer came");
            if let Some(at) = line.find("@ ") {
                return line[at + 2..].trim().to_owned();
            }
        }
    }

    /// Sends a line and waits for the answer.
    pub fn ask(&mut self, words: &str) -> String {
        self.say(words);
        self.hear()
    }
}

/// In the other process: the next line.
pub fn hear() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("the other side writes");
    line.trim().to_owned()
}

/// In the other process: sends a line.
pub fn say(words: &str) {
    println!("@ {words}");
    std::io::stdout().flush().expect("the other side reads");
}

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The opposite of [`hex`].
pub fn unhex(text: &str) -> Vec<u8> {
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("two digits");
    (0..text.len()).step_by(2).map(byte).collect()
}

/// A byte that depends on its position.
pub fn pattern(seed: u8, at: usize) -> u8 {
    ((at ^ (at >> 8) ^ (at >> 16)) as u8).wrapping_add(seed)
}
