//! `peerway doctor`: what this machine offers the engine, what is missing, and why.
//!
//! Every section is a function from the file system's root to a [`Section`]; those that only read
//! files take any root, so that tests give them a tree of their own. Nothing here changes the machine
//! or needs a privilege; what cannot be read is a row that says so. RDMA devices are opened to be asked, and
//! closed; GPUs are asked through the CUDA driver where there is one, and a little of their memory is allocated. Python
//! is asked where NIXL is.

mod configuration;
mod ffi;
mod gpus;
mod kernels;
mod libraries;
mod local;
mod machine;
mod network;
mod nixl;
mod rdma;
mod report;
mod self_path;
mod topology;
mod verbs;

use std::path::Path;

use clap::Args;

use report::{Report, Section};
use serde::Serialize;

use crate::output;

/// What to print.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  peerway doctor                     a table for people
  peerway doctor --json              the same for programs
  peerway doctor --config            every setting, its value and where it came from

Marks: `ok` is there, `-` is not there, `!` is worth a look.
Exit code 1 means that the configuration cannot be used; a missing device is no failure.")]
pub(crate) struct DoctorArgs {
    /// Print JSON instead of tables.
    #[arg(long)]
    json: bool,
    /// Print the settings instead of the machine.
    #[arg(long)]
    config: bool,
}

/// The sections of the report, in order.
const SECTIONS: &[fn(&Path) -> Section] = &[
    machine::section,
    local::section,
    self_path::section,
    network::section,
    rdma::section,
    gpus::section,
    libraries::section,
    nixl::section,
    configuration::section,
];

/// Looks at the machine and prints what it found.
pub(crate) fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    let text = if args.config {
        let settings = configuration::settings();
        if args.json { json(&settings)? } else { configuration::table(&settings).to_string() }
    } else {
        let root = Path::new("/");
        let report = Report::new(SECTIONS.iter().map(|section| section(root)).collect());
        if args.json { json(&report)? } else { report.to_string() }
    };
    output::print(text)?;
    configuration::check()
}

fn json(value: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}
