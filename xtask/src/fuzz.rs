//! Long runs on the stable compiler: the fuzz targets, with the seeded mutator of
//! `peerway_core::fuzz`, and the schedules of the simulation. `fuzz/` has the wrappers for
//! libFuzzer.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context as _, bail, ensure};
use clap::Args;

use crate::programs::Programs;

/// Options of `cargo xtask fuzz`.
#[derive(Args)]
pub(crate) struct FuzzArgs {
    /// Cases of each target [default: 10,000,000 for a parser, 1,000,000 for `session` and
    /// `simulation`, 100,000 for `handshake`]
    #[arg(long, value_name = "N")]
    cases: Option<u64>,
    /// Run only this target
    #[arg(long, value_name = "NAME")]
    target: Option<String>,
    /// Processes among which the cases of a target are divided [default: one for each processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    jobs: Option<u64>,
}

/// A target, and the test that runs it.
struct Target {
    name: &'static str,
    package: &'static str,
    test: &'static str,
    cases: u64,
}

const PARSERS: &str = "fuzz::tests::every_parser_survives_mutations_of_good_inputs";
const PACKETS: &str = "connect::fuzz::tests::every_packet_of_a_local_peer_is_parsed_or_refused";

const TARGETS: [Target; 11] = [
    parser("descriptor", "peerway-core", PARSERS),
    parser("metadata", "peerway-core", PARSERS),
    parser("header", "peerway-core", PARSERS),
    parser("frame", "peerway-core", PARSERS),
    parser("control", "peerway-core", PARSERS),
    parser("record", "peerway-core", PARSERS),
    parser("attach", "peerway", PACKETS),
    parser("host", "peerway", PACKETS),
    Target {
        name: "session",
        package: "peerway",
        test: "simulation::tests::no_sequence_of_a_hostile_peer_breaks_a_promise",
        cases: 1_000_000,
    },
    Target {
        name: "handshake",
        package: "peerway",
        test: "connect::fuzz::tests::no_handshake_breaks_the_acceptor",
        cases: 100_000,
    },
    Target {
        name: "simulation",
        package: "peerway",
        test: "simulation::tests::every_schedule_keeps_the_promises",
        cases: 1_000_000,
    },
];

const fn parser(name: &'static str, package: &'static str, test: &'static str) -> Target {
    Target { name, package, test, cases: 10_000_000 }
}

/// Runs the targets one after another, each in several processes. Fails at the first target with an
/// input that breaks a property.
pub(crate) fn run(workspace: &Path, args: &FuzzArgs) -> anyhow::Result<()> {
    let chosen = |target: &&Target| args.target.as_deref().is_none_or(|name| name == target.name);
    let targets: Vec<&Target> = TARGETS.iter().filter(chosen).collect();
    if targets.is_empty() {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        bail!("there is no such target; there are {}", names.join(", "));
    }
    let build = "cargo test --release --package peerway --package peerway-core --lib --no-run";
    let programs = Programs::build_with(workspace, build, &[])?;
    let jobs = match args.jobs {
        Some(jobs) => jobs,
        None => thread::available_parallelism()?.get() as u64,
    };
    for target in targets {
        let library = target.package.replace('-', "_");
        let program = programs.find(target.package, &library)?;
        let cases = args.cases.unwrap_or(target.cases);
        target.run(&program, &workspace.join("crates").join(target.package), cases, jobs)?;
    }
    Ok(())
}

/// Runs the schedules of the simulation.
pub(crate) fn simulation(workspace: &Path) -> anyhow::Result<()> {
    let target = Some("simulation".to_owned());
    run(workspace, &FuzzArgs { cases: None, target, jobs: None })
}

impl Target {
    /// Runs the cases in this many processes, each with inputs of its own.
    fn run(&self, program: &Path, folder: &Path, cases: u64, jobs: u64) -> anyhow::Result<()> {
        let each = cases.div_ceil(jobs);
        println!("{}: {cases} cases in {jobs} processes", self.name);
        let start = |job: u64| {
            Command::new(program)
                .args(["--exact", self.test, "--nocapture"])
                .env("PEERWAY_FUZZ_TARGET", self.name)
                .env("PEERWAY_FUZZ_CASES", each.to_string())
                .env("PEERWAY_FUZZ_SEED", job.to_string())
                .env("PEERWAY_SIMULATION_RUNS", each.to_string())
                .env("PEERWAY_SIMULATION_FIRST", (job * each).to_string())
                .current_dir(folder)
                .stdout(Stdio::piped())
                .spawn()
                .with_context(|| program.display().to_string())
        };
        let started = (0..jobs).map(start).collect::<anyhow::Result<Vec<_>>>()?;
        let outputs: Vec<_> = started.into_iter().map(|child| child.wait_with_output()).collect();
        for (job, output) in outputs.into_iter().enumerate() {
            let output = output?;
            let text = String::from_utf8_lossy(&output.stdout);
            // A test that was renamed would run no case and pass.
            let passed = output.status.success() && text.contains("1 passed");
            if !passed || job == 0 {
                println!("{}", text.trim());
            }
            ensure!(passed, "the target {} fails (seed {job})", self.name);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_names_a_test() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("crates");
        for target in &TARGETS {
            let (module, test) = target.test.rsplit_once("::").unwrap();
            let path = module.trim_end_matches("::tests").replace("::", "/");
            let source = root.join(target.package).join("src").join(path);
            let files = [source.with_extension("rs"), source.join("tests.rs")];
            let text: String =
                files.iter().filter_map(|f| std::fs::read_to_string(f).ok()).collect();
            assert!(text.contains(&format!("fn {test}(")), "{}: {}", target.name, target.test);
        }
    }
}
