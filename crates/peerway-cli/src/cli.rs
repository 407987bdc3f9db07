//! The command line: subcommands, help texts, exit codes.

use std::ffi::OsString;
use std::path::Path;

use clap::{Parser, Subcommand};
use peerway_core::config::LogLevel;

use crate::bench::driven::{LocalArgs, RemoteArgs, RemoteMeasure};
use crate::bench::text::WIDTH;
use crate::bench::{self, BenchArgs};
use crate::doctor::{self, DoctorArgs};
use crate::nixl::{self, InstallArgs};
use crate::shell::{self, CompletionsArgs, ManArgs};
use crate::version;

/// One-sided memory transfers between processes: measure them, and check this machine.
#[derive(Debug, Parser)]
#[command(
    name = "peerway",
    version = version::LONG,
    max_term_width = WIDTH,
    arg_required_else_help = true,
    after_help = "\
Examples:
  peerway doctor                   what this machine supports, what is missing
  peerway doctor --config          every setting, its value and its source
  peerway bench                    measure every path that works here
  peerway bench --json rows.json   the same, with the rows in a file
  peerway nixl-install             install the backend PEERWAY into NIXL

Settings come from PEERWAY_* environment variables. UCCL_P2P_* names are
accepted too.

Exit codes: 0 success, or the reader closed standard output; 1 failure, with one
line on standard error that begins with `peerway:`; 2 invalid command line; 130
stopped by Ctrl-C."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

impl Cli {
    /// The level of the engine's log where no environment variable sets one. The benchmarks report
    /// a failure in one line of their own, so the engine's warnings about it would repeat it.
    pub(crate) fn default_log_level(&self) -> LogLevel {
        match self.command {
            Command::Bench(_) | Command::BenchmarkLocal(_) | Command::BenchmarkRemote { .. } => {
                LogLevel::Error
            }
            Command::Doctor(_)
            | Command::NixlInstall(_)
            | Command::Completions(_)
            | Command::Man(_) => LogLevel::Warn,
        }
    }

    /// Runs the subcommand.
    pub(crate) fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::Bench(args) => bench::run(*args),
            Command::Doctor(args) => doctor::run(&args),
            Command::NixlInstall(args) => nixl::run(&args),
            Command::Completions(args) => shell::completions(&args),
            Command::Man(args) => shell::man(&args),
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
    /// Measure transfers over every path that works here, beside what the machine does without an
    /// engine.
    Bench(Box<BenchArgs>),
    /// Show what this machine supports, what is missing and why.
    Doctor(DoctorArgs),
    /// Install Peerway's backend into NIXL.
    NixlInstall(InstallArgs),
    /// Print the completions of a shell.
    Completions(CompletionsArgs),
    /// Print a page of the manual.
    Man(ManArgs),
    /// `bench gpu-local`, under the name that UCCL's prototype of the GPU-driven engine uses.
    #[command(name = "benchmark_local", hide = true)]
    BenchmarkLocal(Box<LocalArgs>),
    /// `bench gpu-remote`, under the name that UCCL's prototype of the GPU-driven engine uses.
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

/// The words of the command line. If the program was started through a link that has a name of
/// UCCL's prototype, that name is inserted as the subcommand.
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
    fn no_help_is_wider_than_a_window() {
        fn check(command: &mut clap::Command) {
            for help in [command.render_help(), command.render_long_help()] {
                let help = help.to_string();
                let wide = help.lines().find(|line| line.chars().count() > WIDTH);
                assert_eq!(wide, None, "{help}");
            }
            command.get_subcommands_mut().for_each(check);
        }
        let mut command = Cli::command();
        command.build();
        check(&mut command);
    }

    #[test]
    fn the_version_has_a_commit_and_features() {
        let version = Cli::command().render_version();
        let first = version.lines().next().unwrap();
        assert!(first.starts_with(&format!("peerway {} (commit ", env!("CARGO_PKG_VERSION"))));
        assert!(version.contains("features: ") && version.contains("local-map"), "{version}");
        assert!(version.contains("rustc ") && version.contains("linux"), "{version}");
    }

    #[test]
    fn help_tells_the_exit_codes() {
        let help = Cli::command().render_help().to_string();
        assert!(help.contains("Exit codes: 0"));
    }
}
