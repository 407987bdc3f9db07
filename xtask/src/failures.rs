//! Finds the test that failed, and the reason, in the output of test programs.
//!
//! It knows the formats of cargo and Rust's test harness, of pytest, of `peerway-conformance` and
//! of rustfmt. [`first`] searches for them in this order.

use std::fmt;

/// A test that failed.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Failure {
    /// The name of the test and its location.
    test: String,
    /// The first line of its message. Empty if there is none.
    why: String,
    /// The number of other tests that failed.
    others: usize,
}

impl Failure {
    /// The message in one line.
    pub(crate) fn why(&self) -> &str {
        &self.why
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { test, why, others } = self;
        f.write_str(test)?;
        if !why.is_empty() {
            write!(f, ": {why}")?;
        }
        match others {
            0 => Ok(()),
            others => write!(f, " (and {others} more)"),
        }
    }
}

/// The first failure in the output.
pub(crate) fn first(output: &str) -> Option<Failure> {
    let output = plain(output);
    let lines: Vec<&str> = output.lines().collect();
    let found = [rust_tests, pytest, conformance, crashes, compiler, formatting];
    let mut failures = found.iter().map(|find| find(&lines)).find(|found| !found.is_empty())?;
    let others = failures.len() - 1;
    Some(Failure { others, ..failures.swap_remove(0) })
}

/// The last line that is not blank.
pub(crate) fn last_line(output: &str) -> Option<String> {
    plain(output).lines().map(str::trim).rfind(|line| !line.is_empty()).map(str::to_owned)
}

/// The text without colour sequences.
fn plain(output: &str) -> String {
    let output = output.replace("\x1b(B", "");
    let mut parts = output.split("\x1b[");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| c.is_ascii_alphabetic());
        plain.push_str(end.map_or(part, |end| &part[end + 1..]));
    }
    plain
}

fn failure(test: impl Into<String>, why: impl Into<String>) -> Failure {
    Failure { test: test.into(), why: why.into(), others: 0 }
}

/// Rust's harness lists the names of failed tests after a line `failures:`.
fn rust_tests(lines: &[&str]) -> Vec<Failure> {
    let (mut found, mut names, mut listing) = (Vec::new(), Vec::new(), false);
    for (at, line) in lines.iter().enumerate() {
        if *line == "failures:" {
            (listing, names) = (true, Vec::new());
        } else if line.starts_with("---- ") {
            // The output of a failed test follows. The list of names comes later.
            listing = false;
        } else if line.starts_with("test result: FAILED") {
            let rerun = lines[at..].iter().take(4).find_map(|line| rerun(line));
            found.extend(names.drain(..).map(|name: &str| (name, rerun)));
            listing = false;
        } else if listing && let Some(name) = line.strip_prefix("    ") {
            names.push(name);
        }
    }
    // A test that runs itself in another process first fails there, in a program that cargo does
    // not know.
    let is_told_again = |name, at: usize| found[at + 1..].iter().any(|(again, _)| *again == name);
    let mut failures = Vec::new();
    for (at, (name, rerun)) in found.iter().enumerate() {
        if rerun.is_some() || !is_told_again(*name, at) {
            let test = rerun.map_or_else(|| (*name).to_owned(), |of| format!("{name} ({of})"));
            failures.push(failure(test, reason(lines, name)));
        }
    }
    failures
}

/// The message of a failed test. A test that runs itself in another process first prints it there.
fn reason(lines: &[&str], test: &str) -> String {
    let by = format!("thread '{test}' ");
    let panicked =
        lines.iter().position(|line| line.starts_with(&by) && line.contains("panicked at "));
    if let Some(at) = panicked {
        let place = lines[at].split("panicked at ").nth(1).unwrap_or_default();
        let mut said = lines[at + 1..].iter().skip_while(|line| line.trim().is_empty());
        let mut why = said.next().map_or("", |line| line.trim()).to_owned();
        // The compared values.
        for line in said.take(2).map(|line| line.trim()) {
            if line.starts_with("left: ") || line.starts_with("right: ") {
                why.push_str(&format!(", {line}"));
            }
        }
        return format!("{why} ({})", place.trim_end_matches(':'));
    }
    let told = format!("---- {test} stdout ----");
    let own = lines.iter().skip_while(|line| **line != told).skip(1);
    let mut own = own.take_while(|line| !line.starts_with("---- ") && **line != "failures:");
    let error = own.find(|line| line.starts_with("Error: ") || line.starts_with("error"));
    error.map_or_else(String::new, |line| (*line).to_owned())
}

/// The arguments with which cargo reruns one test program.
fn rerun(line: &str) -> Option<&str> {
    line.strip_prefix("error: test failed, to rerun pass `")?.strip_suffix('`')
}

/// Test programs that ended before they could name the test.
fn crashes(lines: &[&str]) -> Vec<Failure> {
    let of = |at: usize| {
        let program = rerun(lines[at])?;
        let told = lines[at..].iter().take(5).find(|line| line.contains("(signal: "));
        let why = told.and_then(|line| line.rsplit_once('(')).map_or("", |(_, why)| why);
        Some(failure(format!("cargo test {program}"), why.trim_end_matches(')')))
    };
    (0..lines.len()).filter_map(of).collect()
}

/// pytest ends with one line for each failed test.
fn pytest(lines: &[&str]) -> Vec<Failure> {
    let of = |line: &&str| {
        let told = line.strip_prefix("FAILED ").or_else(|| line.strip_prefix("ERROR "))?;
        let (test, why) = told.split_once(" - ").unwrap_or((told, ""));
        if !test.contains(".py") {
            return None;
        }
        let name = test.rsplit("::").next().unwrap_or(test);
        let why = pytest_reason(lines, name).unwrap_or(why);
        Some(failure(test.trim_start_matches("../"), why))
    };
    lines.iter().filter_map(of).collect()
}

/// The first line of an error, which the final line may truncate.
fn pytest_reason<'a>(lines: &[&'a str], name: &str) -> Option<&'a str> {
    let is_heading = |line: &str| line.starts_with("__") && line.ends_with("__");
    let of_test = |line: &str| {
        let words = line.trim_matches('_').trim();
        // The heading of a test in a class is `Class.test`. A failed setup has `ERROR at setup of
        // test`, and a crashed worker `file::test`.
        let word = words.rsplit(' ').next().unwrap_or(words);
        word == name || word.ends_with(&format!(".{name}")) || word.ends_with(&format!("::{name}"))
    };
    let at = lines.iter().position(|line| is_heading(line) && of_test(line))?;
    let mut own = lines[at + 1..].iter().take_while(|line| !is_heading(line));
    own.find_map(|line| {
        let said = line.strip_prefix("E  ").map(str::trim).filter(|line| !line.is_empty());
        said.or_else(|| line.contains(" crashed while running ").then(|| line.trim()))
    })
}

/// `peerway-conformance` prints `TRANSPORT SCENARIO FAIL N ms WHY`, and repeats it at the end.
fn conformance(lines: &[&str]) -> Vec<Failure> {
    let mut found: Vec<Failure> = Vec::new();
    for line in lines {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let [transport, scenario, "FAIL", _, "ms", why @ ..] = &words[..] {
            let failed = failure(format!("conformance {transport} {scenario}"), why.join(" "));
            if !found.contains(&failed) {
                found.push(failed);
            }
        }
    }
    found
}

/// Compiler errors and lints.
fn compiler(lines: &[&str]) -> Vec<Failure> {
    let of = |(at, line): (usize, &&str)| {
        let (kind, why) = line.split_once(": ")?;
        if kind != "error" && !kind.starts_with("error[") {
            return None;
        }
        let place =
            lines[at + 1..].iter().take(3).find_map(|line| line.trim().strip_prefix("--> "));
        place.map(|place| failure(place, why))
    };
    lines.iter().enumerate().filter_map(of).collect()
}

fn formatting(lines: &[&str]) -> Vec<Failure> {
    let of = |line: &&str| {
        let place = line.strip_prefix("Diff in ")?.trim_end_matches(':');
        Some(failure(place, "is not formatted: run `cargo fmt --all`"))
    };
    lines.iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(output: &str) -> String {
        first(output).map(|failure| failure.to_string()).unwrap_or_default()
    }

    const RUST: &str = "\
     Running tests/errors.rs (target/debug/deps/errors-5f1a)

running 3 tests
test fine ... ok
test broken ... FAILED
test worse ... FAILED

failures:

---- broken stdout ----

thread 'broken' (4711) panicked at crates/peerway/tests/errors.rs:12:5:
assertion `left == right` failed: descriptors
  left: 22
 right: 20
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace

---- worse stdout ----
Error: Os { code: 2, kind: NotFound, message: \"No such file or directory\" }

failures:
    broken
    worse

test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s

error: test failed, to rerun pass `-p peerway --test errors`
";

    #[test]
    fn a_test_in_rust_is_named_with_its_message_and_how_to_run_it() {
        assert_eq!(
            shown(RUST),
            "broken (-p peerway --test errors): assertion `left == right` failed: descriptors, \
             left: 22, right: 20 (crates/peerway/tests/errors.rs:12:5) (and 1 more)"
        );
        let only = RUST.replace("    broken\n", "");
        assert!(
            shown(&only).starts_with("worse (-p peerway --test errors): Error: Os {"),
            "{only}"
        );
        let coloured = RUST.replace("FAILED", "\x1b[31mFAILED\x1b(B\x1b[m");
        assert_eq!(shown(&coloured), shown(RUST));
    }

    #[test]
    fn a_test_that_runs_itself_in_another_process_has_the_message_from_there() {
        let output = "\
thread 'quiet' (12) panicked at tests/quiet.rs:60:9:
a service thread woke 166 times
test quiet ... FAILED

failures:

---- quiet stdout ----

thread 'quiet' (7) panicked at tests/support/mod.rs:42:5:
quiet with ``: exit status: 101

failures:
    quiet

test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
        assert_eq!(shown(output), "quiet: a service thread woke 166 times (tests/quiet.rs:60:9)");
        let inner = "failures:\n    quiet\n\ntest result: FAILED. 0 passed; 1 failed\n";
        assert_eq!(shown(&format!("{inner}{output}")), shown(output), "reported once");
    }

    #[test]
    fn tests_of_every_program_are_counted() {
        let again = RUST.replace("broken", "other").replace("-p peerway", "-p peerway-sys");
        let both = format!("{RUST}{again}");
        assert!(shown(&both).starts_with("broken (-p peerway --test errors): "), "{both}");
        assert!(shown(&both).ends_with(" (and 3 more)"), "{}", shown(&both));
    }

    #[test]
    fn a_program_of_tests_that_crashed_is_named() {
        let output = "\
running 2 tests
error: test failed, to rerun pass `-p peerway --test gpu`

Caused by:
  process didn't exit successfully: `target/debug/deps/gpu-1` (signal: 11, SIGSEGV: invalid memory reference)
";
        assert_eq!(
            shown(output),
            "cargo test -p peerway --test gpu: signal: 11, SIGSEGV: invalid memory reference"
        );
    }

    #[test]
    fn a_test_in_python_is_named_with_the_whole_of_its_error() {
        let output = "\
....F
=================================== FAILURES ===================================
_________________________ test_descriptors_go[tcp-2] ___________________________
[gw0] linux -- Python 3.11.2

    def test_descriptors_go(path: str) -> None:
>       assert now == before
E       AssertionError: 22 descriptors, and 20 before
E       assert 22 == 20

../../python/tests/test_x.py:12: AssertionError
=========================== short test summary info ============================
SKIPPED [1] ../../python/tests/test_gpu.py:3: there is no GPU
FAILED ../../python/tests/test_x.py::test_descriptors_go[tcp-2] - AssertionErr...
1 failed, 4 passed, 1 skipped in 2.10s
";
        assert_eq!(
            shown(output),
            "python/tests/test_x.py::test_descriptors_go[tcp-2]: \
             AssertionError: 22 descriptors, and 20 before"
        );
        let short =
            "FAILED tests/test_x.py::test_y - assert 1 == 2\nERROR tests/test_z.py - no name";
        assert_eq!(shown(short), "tests/test_x.py::test_y: assert 1 == 2 (and 1 more)");
        let crashed = "\
__________________________ tests/test_x.py::test_y __________________________
[gw1] linux -- Python 3.11.2
worker 'gw1' crashed while running 'tests/test_x.py::test_y'
FAILED tests/test_x.py::test_y
";
        let why = "worker 'gw1' crashed while running 'tests/test_x.py::test_y'";
        assert_eq!(shown(crashed), format!("tests/test_x.py::test_y: {why}"));
    }

    #[test]
    fn a_scenario_is_named_with_its_transport_and_counted_once() {
        let output = "\
tcp           kill-target                  ok     120 ms  ended in 3 ms
tcp           stop-target                  FAIL  9120 ms  the write ended after 8.1 s
    posted
local-map     idle                         FAIL   100 ms  ended without a verdict: signal: 9

failed:
tcp           stop-target                  FAIL  9120 ms  the write ended after 8.1 s
    posted
local-map     idle                         FAIL   100 ms  ended without a verdict: signal: 9

1 passed, 2 failed
";
        assert_eq!(
            shown(output),
            "conformance tcp stop-target: the write ended after 8.1 s (and 1 more)"
        );
    }

    #[test]
    fn errors_of_the_compiler_and_of_formatting_are_named_by_their_place() {
        let output = "\
   Compiling peerway v0.1.0
error[E0308]: mismatched types
  --> crates/peerway/src/inner.rs:7:9
   |
error: could not compile `peerway` (lib) due to 1 previous error
";
        assert_eq!(shown(output), "crates/peerway/src/inner.rs:7:9: mismatched types");
        let output = "Diff in /w/crates/peerway/src/inner.rs:7:\n-a\n+b\n";
        let told = "/w/crates/peerway/src/inner.rs:7: is not formatted: run `cargo fmt --all`";
        assert_eq!(shown(output), told);
    }

    #[test]
    fn output_without_a_failure_has_none() {
        let output = "test a ... ok\n\ntest result: ok. 1 passed; 0 failed\n3 passed in 0.1s\n";
        assert_eq!(first(output), None);
        assert_eq!(last_line("a\n\x1b[31mb\x1b[0m \n\n"), Some("b".to_owned()));
        assert_eq!(last_line("\n"), None);
    }
}
