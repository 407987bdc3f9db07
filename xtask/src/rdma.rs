//! `cargo xtask test --rdma`: verbs on soft-RoCE devices, in the guest of `testbed/rdma-vm.sh`.
//!
//! The guest has no cargo. This module builds the test programs, copies them with
//! `testbed/smoke.sh` into a directory, and shares only that directory with the guest. Tests that
//! need devices are ignored elsewhere and run here; each program must run at least one. Then the
//! conformance program runs over verbs: on intact wires, on wires that lose packets, and on wires
//! that reorder them.

use std::path::Path;
use std::process::{Command, Stdio};
use std::{env, fs};

use anyhow::{Context, bail};

use crate::programs::Programs;
use crate::{lock, setup, steps};

/// A package and one of its tests, for the guest.
const TESTS: &[(&str, &str)] = &[
    ("peerway-sys", "device"),
    ("peerway", "verbs"),
    ("peerway", "verbs_many"),
    ("peerway", "verbs_link"),
];

/// Not a test: another test starts it as its second process.
const OTHER_PROCESS: &str = "the_other_process";

/// The devices of the two sides on two wires, and the link of one wire.
const DEVICES: &str = "rxe0,rxe2/rxe1,rxe3";
const LINK: &str = "va1";

/// The time limit for the guest in seconds. A run takes one or two minutes; a hang must not take
/// ten.
const LIMIT: &str = "540";
/// The time limit for a soak, which runs everything on an emulated machine.
const SOAK_LIMIT: &str = "7200";

/// A run of the conformance program.
struct Conformance {
    devices: &'static str,
    /// The impairment of the wires, in the syntax of tc-netem(8).
    netem: Option<&'static str>,
    /// The scenarios. A soak runs all of them.
    only: &'static str,
}

/// The scenarios that differ on real devices. Time is short here. Reordering makes soft-RoCE return
/// to the first missing packet again and again, so few bytes are enough there.
const CONFORMANCE: &[Conformance] = &[
    Conformance {
        devices: DEVICES,
        netem: None,
        only: "notes-follow-bytes,kill-target,cancel-write,revoke-write,driven-puts,driven-kill",
    },
    Conformance { devices: "rxe0/rxe1", netem: None, only: "rights,kill-initiator" },
    Conformance { devices: DEVICES, netem: Some("loss 1%"), only: "notes-follow-bytes" },
    Conformance {
        devices: DEVICES,
        netem: Some("delay 1ms reorder 95% 50%"),
        only: "bad-work,connect",
    },
];

/// Builds the guest if it is missing.
pub(crate) fn fetch(workspace: &Path, target: &Path) -> anyhow::Result<()> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        bail!("the guest runs x86-64 Linux programs, so this part needs an x86-64 Linux host");
    }
    let _installing = lock::hold(setup::INSTALLING)?;
    let mut setup = vm(workspace, target);
    let status = setup.arg("--setup").status().context("cannot start testbed/rdma-vm.sh")?;
    if !status.success() {
        bail!("testbed/rdma-vm.sh --setup ended with {status}");
    }
    Ok(())
}

/// The script that runs guests, with its working directory.
fn vm(workspace: &Path, target: &Path) -> Command {
    let mut vm = Command::new(workspace.join("testbed/rdma-vm.sh"));
    if env::var_os("RDMA_VM_WORK").is_none() {
        vm.arg("-w").arg(target.join("rdma-vm"));
    }
    vm
}

/// Builds the tests and runs them in the guest after a check of the guest itself. Then runs the
/// conformance program.
pub(crate) fn run(
    workspace: &Path,
    target: &Path,
    program: &Path,
    soak: bool,
) -> anyhow::Result<()> {
    fetch(workspace, target)?;
    let shared = target.join("rdma");
    fs::create_dir_all(&shared).with_context(|| format!("cannot create {}", shared.display()))?;
    copy(&workspace.join("testbed/smoke.sh"), &shared.join("smoke.sh"))?;
    let programs = Programs::build(workspace)?;
    let built = TESTS.iter().map(|(package, test)| {
        copy(&programs.find(package, test)?, &shared.join(test))?;
        Ok(*test)
    });
    let built: Vec<&str> = built.collect::<anyhow::Result<_>>()?;
    copy(program, &shared.join("peerway-conformance"))?;

    let guest = Guest { workspace, target, shared: &shared, soak };
    let variables =
        [format!("PEERWAY_TEST_DEVICES={DEVICES}"), format!("PEERWAY_TEST_LINK={LINK}")];
    let lines = guest.run(&variables, None, &script(&built))?;
    let passed = passed(lines.iter().map(String::as_str));
    println!("in the guest: {} tests passed", passed.iter().sum::<usize>());
    verdict(&passed, built.len())?;
    for Conformance { devices, netem, only } in CONFORMANCE {
        let only = if soak && netem.is_none() { String::new() } else { format!(" --only {only}") };
        let script = format!("./peerway-conformance --transport verbs --profile guest{only} 2>&1");
        guest.run(&[format!("CONFORMANCE_DEVICES={devices}")], *netem, &script)?;
    }
    Ok(())
}

/// How guests run.
struct Guest<'a> {
    workspace: &'a Path,
    target: &'a Path,
    /// The directory of this machine that the guest sees.
    shared: &'a Path,
    soak: bool,
}

impl Guest<'_> {
    /// Boots a guest, runs a script in it, and returns its output.
    fn run(
        &self,
        variables: &[String],
        netem: Option<&str>,
        script: &str,
    ) -> anyhow::Result<Vec<String>> {
        let mut guest = vm(self.workspace, self.target);
        guest.args(["-t", if self.soak { SOAK_LIMIT } else { LIMIT }]);
        for variable in variables {
            guest.args(["-e", variable]);
        }
        if let Some(netem) = netem {
            guest.args(["-n", netem]);
        }
        guest.arg("-d").arg(self.shared).args(["--", "bash", "-c", script]);
        println!("$ {guest:?}");
        let said = steps::run(guest.stdin(Stdio::null()), "testbed/rdma-vm.sh")?;
        Ok(said.lines().map(str::to_owned).collect())
    }
}

/// The script for the guest. It uses one thread, so that the output of a test follows its name.
fn script(tests: &[&str]) -> String {
    let options = format!("--ignored --skip {OTHER_PROCESS} --test-threads=1 --nocapture");
    let tests = tests.iter().map(|test| format!(" && ./{test} {options} 2>&1"));
    format!("./smoke.sh{}", tests.collect::<String>())
}

fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::copy(from, to)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// The number of tests that passed in each program.
fn passed<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<usize> {
    let results = lines.filter_map(|line| line.strip_prefix("test result: "));
    let count = |result: &str| {
        let before = result.split(" passed").next()?;
        before.rsplit(' ').next()?.parse().ok()
    };
    results.map(|result| count(result).unwrap_or(0)).collect()
}

/// Fails if a program ran no test. A failed test has already failed its program.
fn verdict(passed: &[usize], programs: usize) -> anyhow::Result<()> {
    if passed.len() != programs {
        bail!("{} of {programs} test programs reported a result", passed.len());
    }
    if passed.contains(&0) {
        bail!("a test program ran none of its tests; mark tests that need devices with #[ignore]");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_that_passed_are_counted_for_each_program() {
        let output = "\
smoke: test of the wire ... fine

running 4 tests
test plain ... ok
test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.10s
running 12 tests
test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s
";
        let counted = passed(output.lines());
        assert_eq!(counted, [3, 12]);
        verdict(&counted, 2).unwrap();
        assert!(verdict(&counted, 3).unwrap_err().to_string().starts_with("2 of 3"));
    }

    #[test]
    fn a_program_without_tests_is_a_failure() {
        let none = "running 0 tests\n\ntest result: ok. 0 passed; 0 failed; 1 ignored";
        let error = verdict(&passed(none.lines()), 1).unwrap_err();
        assert!(error.to_string().contains("none of its tests"), "{error}");
        assert!(verdict(&passed("".lines()), 1).unwrap_err().to_string().contains("0 of 1"));
    }

    #[test]
    fn programs_run_after_the_check_of_the_guest() {
        let both = script(&["a", "b"]);
        assert!(both.starts_with("./smoke.sh && ./a --ignored "), "{both}");
        assert!(both.contains("2>&1 && ./b "), "{both}");
    }
}
