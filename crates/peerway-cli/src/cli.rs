//! The command line: subcommands, help texts, exit codes.

use std::ffi::OsString;
use std::path::Path;

use clap::{Parser, Subcommand};

use crate::bench::driven::{LocalArgs, RemoteArgs, RemoteMeasure};
use crate::bench::{self, BenchArgs};
use crate::doctor::{self, DoctorArgs};
use crate::nixl::{self, InstallArgs};

/// One-sided memory transfers between processes: measure them, and see what this machine offers.
#[derive(Debug, Parser)]
#[command(
    name = "peerway",
    version,
    max_term_width = 100,
    arg_required_else_help = true,
    after_help = "\
Examples:
  peerway doctor                        what this machine offers, and what is missing and why
  peerway doctor --config               every setting, its value and where it came from
  peerway bench                         measure every path that works here
  peerway bench --json rows.json        the same, also as rows for a program
  peerway nixl-install                  programs with NIXL can ask for the backend PEERWAY

Settings come from PEERWAY_* variables; UCCL_P2P_* names are understood too.

Exit codes: 0 done, or whoever read standard output closed it; 1 failed, with one line on standard
error that begins with `peerway:`; 2 the command line was not understood."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

impl Cli {
    /// Runs what was asked for.
    pub(crate) fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::Bench(args) => bench::run(*args),
            Command::Doctor(args) => doctor::run(&args),
            Command::NixlInstall(args) => nixl::run(&args),
            Command::BenchmarkLocal(args) => bench::driven::run_local(&args),
            Command::BenchmarkRemote { rank, peer, measure } => {
                let (rank, peer) = (Some(rank), Some(peer));
                bench::driven::run_remote(&RemoteArgs { rank, peer, measure: *measure })
            }
        }
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure transfers over every path that works here, against the limit of the machine.
    Bench(Box<BenchArgs>),
    /// Say what this machine offers, what is missing and why.
    Doctor(DoctorArgs),
    /// Put the backend for NIXL where a NIXL finds it.
    NixlInstall(InstallArgs),
    /// `bench gpu-local`, as UCCL's prototype of the GPU-driven engine calls it.
    #[command(name = "benchmark_local", hide = true)]
    BenchmarkLocal(Box<LocalArgs>),
    /// `bench gpu-remote`, as UCCL's prototype of the GPU-driven engine calls it.
    #[command(name = "benchmark_remote", hide = true)]
    BenchmarkRemote {
        /// 0 sends, 1 receives.
        rank: u8,
        /// The other rank's address.
        peer: String,
        #[command(flatten)]
        measure: Box<RemoteMeasure>,
    },
}

/// The words of the command line. A name of UCCL's prototype that this program was started by (through a link) is the subcommand.
pub(crate) fn words(words: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = words.into_iter().collect();
    let started_by = words.first().and_then(|word| Path::new(word).file_name().map(OsString::from));
    if let Some(name) =
        started_by.filter(|name| name == "benchmark_local" || name == "benchmark_remote")
    {
        words.insert(1, name);
    }
    words
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use clap::error::ErrorKind;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn unknown_words_are_usage_errors() {
        for line in [&["peerway", "bnech"][..], &["peerway", "doctor", "--jsn"]] {
            let error = Cli::try_parse_from(line).unwrap_err();
            assert_eq!(error.exit_code(), 2);
        }
        let error = Cli::try_parse_from(["peerway"]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand);
    }

    #[test]
    fn the_prototypes_names_are_understood() {
        for line in [
            &["peerway", "benchmark_remote", "1", "192.0.2.1"][..],
            &["some/where/benchmark_remote", "0", "192.0.2.2", "--simulate"],
            &["benchmark_local"],
        ] {
            let words = words(line.iter().map(OsString::from));
            assert!(Cli::try_parse_from(words).is_ok(), "{line:?}");
        }
        let bare = words(["benchmark_remote"].map(OsString::from));
        assert!(Cli::try_parse_from(bare).is_err());
        assert_eq!(words(["peerway", "doctor"].map(OsString::from)).len(), 2);
    }

    #[test]
    fn help_tells_the_exit_codes() {
        let help = Cli::command().render_help().to_string();
        assert!(help.contains("Exit codes: 0"));
    }
}
