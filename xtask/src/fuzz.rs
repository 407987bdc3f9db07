//! Long runs of the fuzz targets on the stable compiler, with the seeded mutator of
//! `peerway_core::fuzz`. `fuzz/` has the wrappers for libFuzzer.

use std::path::Path;
use std::process::Command;

use anyhow::{bail, ensure};
use clap::Args;

/// Options of `cargo xtask fuzz`.
#[derive(Args)]
pub(crate) struct FuzzArgs {
    /// Cases of each target [default: 10,000,000 for a parser, 1,000,000 for `session`, 100,000 for
    /// `handshake`]
    #[arg(long, value_name = "N")]
    cases: Option<u64>,
    /// Run only this target
    #[arg(long, value_name = "NAME")]
    target: Option<String>,
}

/// A fuzz target, and the test that runs it.
struct Target {
    name: &'static str,
    package: &'static str,
    test: &'static str,
    cases: u64,
}

const PARSERS: &str = "fuzz::tests::every_parser";
const PACKETS: &str = "connect::fuzz::tests::every_packet";

const TARGETS: [Target; 8] = [
    parser("descriptor", "peerway-core", PARSERS),
    parser("metadata", "peerway-core", PARSERS),
    parser("header", "peerway-core", PARSERS),
    parser("control", "peerway-core", PARSERS),
    parser("attach", "peerway", PACKETS),
    parser("host", "peerway", PACKETS),
    Target {
        name: "session",
        package: "peerway",
        test: "simulation::tests::no_sequence_of_a_hostile_peer",
        cases: 1_000_000,
    },
    Target {
        name: "handshake",
        package: "peerway",
        test: "connect::fuzz::tests::no_handshake",
        cases: 100_000,
    },
];

const fn parser(name: &'static str, package: &'static str, test: &'static str) -> Target {
    Target { name, package, test, cases: 10_000_000 }
}

/// Runs the targets one after another, and fails at the first input that breaks a property.
pub(crate) fn run(workspace: &Path, args: &FuzzArgs) -> anyhow::Result<()> {
    let chosen = |target: &&Target| args.target.as_deref().is_none_or(|name| name == target.name);
    let targets: Vec<&Target> = TARGETS.iter().filter(chosen).collect();
    if targets.is_empty() {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        bail!("there is no such target; there are {}", names.join(", "));
    }
    for target in targets {
        let cases = args.cases.unwrap_or(target.cases);
        let status = Command::new(env!("CARGO"))
            .args(["test", "--release", "--package", target.package, "--lib", target.test])
            .args(["--", "--nocapture"])
            .env("PEERWAY_FUZZ_TARGET", target.name)
            .env("PEERWAY_FUZZ_CASES", cases.to_string())
            .current_dir(workspace)
            .status()?;
        ensure!(status.success(), "the target {} fails", target.name);
    }
    Ok(())
}
