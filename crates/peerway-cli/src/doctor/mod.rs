//! `peerway doctor`: reports what this machine supports, what is missing, and why.
//!
//! Every section is a function from the file system's root to a [`Section`]. Sections that only
//! read files accept any root, so that tests can pass a tree of files. No section changes the
//! machine or needs a privilege. A file that cannot be read becomes a row with the reason.
//!
//! The RDMA section opens each device, queries it and closes it. The GPU section queries the CUDA
//! driver, if there is one, and allocates a little GPU memory. The NIXL section runs `python3`.

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
  peerway doctor                     print tables
  peerway doctor --json              print the same as JSON
  peerway doctor --config            print every setting, its value and its source

Marks: `ok` present, `-` missing, `!` needs attention.
Exit code 1 means that the configuration is invalid. A missing device is not a failure.")]
pub(crate) struct DoctorArgs {
    /// Print JSON instead of tables.
    #[arg(long)]
    json: bool,
    /// Print the settings instead of the report on the machine.
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

/// Examines the machine and prints the report.
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
