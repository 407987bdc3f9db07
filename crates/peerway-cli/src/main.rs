//! `peerway`: measure what the engine does here, and say what this machine offers it.
//!
//! This file only joins the pieces: parse, run, one line for an error, an exit code. The command line
//! is in `cli`, each subcommand in a directory of its own.

mod bench;
mod cli;
mod doctor;
mod log;
mod nixl;

use std::io;
use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = cli::Cli::parse_from(cli::words(std::env::args_os()));
    log::start();
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads our output has seen enough (`peerway doctor | head`).
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("peerway: {}", one_line(&error));
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    })
}

/// The error and its causes on one line.
fn one_line(error: &anyhow::Error) -> String {
    format!("{error:#}").split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn errors_are_one_line_with_their_causes() {
        let error = Err::<(), _>(io::Error::other("disk\nfull")).context("cannot write x.json");
        assert_eq!(one_line(&error.unwrap_err()), "cannot write x.json: disk full");
    }

    #[test]
    fn a_closed_pipe_is_recognised_through_context() {
        let error = Err::<(), _>(io::Error::from(io::ErrorKind::BrokenPipe)).context("printing");
        assert!(is_broken_pipe(&error.unwrap_err()));
        assert!(!is_broken_pipe(&anyhow::anyhow!("other")));
    }
}
