//! `peerway bench`: what is measured, and the flags that choose it.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use peerway_core::config::parse_bytes;

/// What to measure and where to put the result.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  peerway bench                                     everything that works on this machine
  peerway bench --paths tcp --sizes 256,1M,100M     one path, three sizes
  peerway bench --mode pingpong --sizes 256         round trips
  peerway bench serve 192.0.2.7:7000                one machine of two ...
  peerway bench connect 192.0.2.7:7000 --op read    ... and the other"
)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) role: Option<Role>,
    #[command(flatten)]
    pub(crate) measure: Measure,
}

/// The side to take when the peer is on another machine.
#[derive(Debug, Subcommand)]
pub(crate) enum Role {
    /// Wait for `peerway bench connect` from another machine.
    Serve {
        /// Where to listen, for example 0.0.0.0:7000.
        #[arg(value_name = "ADDR")]
        address: Option<String>,
    },
    /// Measure against `peerway bench serve` on another machine.
    Connect {
        /// Where the other side listens.
        #[arg(value_name = "ADDR")]
        address: String,
        #[command(flatten)]
        measure: Measure,
    },
}

/// What is measured.
#[derive(Debug, Args)]
pub(crate) struct Measure {
    /// Write the rows to FILE as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Draw the rows to FILE as SVG.
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    /// Paths to measure [default: every one that works].
    #[arg(long, value_delimiter = ',', value_name = "PATH,...")]
    pub(crate) paths: Vec<String>,
    /// Sizes to measure, such as 256,4K,1M.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "SIZE,...",
        value_parser = size,
        default_value = "256,1K,4K,16K,64K,256K,1M,10M,16M,100M"
    )]
    pub(crate) sizes: Vec<u64>,
    /// Pieces that a transfer is made of.
    #[arg(long, value_delimiter = ',', value_name = "N,...", default_value = "1,128")]
    pub(crate) iovs: Vec<u32>,
    /// Operations to measure [default: both].
    #[arg(long, value_delimiter = ',', value_name = "OP,...")]
    pub(crate) op: Vec<Op>,
    /// Seconds for each row.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    pub(crate) seconds: f64,
    /// What to look at.
    #[arg(long, value_enum, default_value_t = Mode::Bandwidth)]
    pub(crate) mode: Mode,
}

/// A one-sided operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Op {
    /// Into the peer's memory.
    Write,
    /// Out of the peer's memory.
    Read,
}

/// What a run looks at.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Mode {
    /// Bytes per second, and the time of one transfer.
    Bandwidth,
    /// The time until an answer is back.
    Pingpong,
}

/// Runs the benchmark.
pub(crate) fn run(args: BenchArgs) -> anyhow::Result<()> {
    anyhow::bail!("bench is not in this build yet ({:?})", args.measure.mode)
}

fn size(text: &str) -> Result<u64, String> {
    parse_bytes(text)
        .filter(|size| *size > 0)
        .ok_or_else(|| "expected a size such as 4K".to_owned())
}
