//! The `peerway` program: measures transfers on this machine and reports what the machine supports.
//!
//! `main` parses the command line, runs the subcommand, prints an error as one line and sets the
//! exit code. The command line is defined in `cli`. Each subcommand has its own directory.

// These macros panic when the reader has closed the pipe: see `output`.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod bench;
mod cli;
mod doctor;
mod file_set;
mod log;
mod nixl;
mod output;
mod shell;
mod version;

use std::process::ExitCode;

use bench::interrupt::{self, Interrupted};
use clap::Parser;

fn main() -> ExitCode {
    let cli = cli::Cli::parse_from(cli::words(std::env::args_os()));
    log::start(cli.default_log_level());
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        // The reader closed the pipe before the end (`peerway doctor | head`).
        Err(error) if error.is::<output::Closed>() => ExitCode::SUCCESS,
        Err(error) => {
            output::report_line(format_args!("peerway: {}", one_line(&error)));
            if error.is::<Interrupted>() {
                return ExitCode::from(interrupt::EXIT_CODE);
            }
            ExitCode::FAILURE
        }
    }
}

/// The error and its causes on one line.
fn one_line(error: &anyhow::Error) -> String {
    format!("{error:#}").split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::io;

    use anyhow::Context;

    use super::*;

    #[test]
    fn errors_are_one_line_with_their_causes() {
        let error = Err::<(), _>(io::Error::other("disk\nfull")).context("cannot write x.json");
        assert_eq!(one_line(&error.unwrap_err()), "cannot write x.json: disk full");
    }

    #[test]
    fn a_closed_output_is_recognised_through_context_and_other_broken_pipes_are_not() {
        let error = Err::<(), _>(output::Closed).context("printing").unwrap_err();
        assert!(error.is::<output::Closed>());
        let error = anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe));
        assert!(!error.is::<output::Closed>());
    }
}
