//! The command line: subcommands, help texts, exit codes.

use clap::{Parser, Subcommand};

use crate::bench::{self, BenchArgs};
use crate::doctor::{self, DoctorArgs};

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

Settings come from PEERWAY_* variables; UCCL_P2P_* names are understood too.

Exit codes: 0 done; 1 failed, with one line on standard error that begins with `peerway:`;
2 the command line was not understood."
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
        }
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure transfers over every path that works here, against the limit of the machine.
    Bench(Box<BenchArgs>),
    /// Say what this machine offers, what is missing and why.
    Doctor(DoctorArgs),
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
    fn help_tells_the_exit_codes() {
        let help = Cli::command().render_help().to_string();
        assert!(help.contains("Exit codes: 0"));
    }
}
