//! Text on standard output and standard error.
//!
//! A reader may close its end at any time (`peerway doctor | head`). On standard output this gives
//! [`Closed`], which `main` turns into a quiet exit. On standard error the line is dropped, because
//! there is no other place to report the failure. The macros of the standard library panic in both
//! cases, so a lint forbids them in this program.

use std::fmt::{self, Display};
use std::io::{self, Write};

use anyhow::Context;

/// The reader has closed standard output.
#[derive(Debug)]
pub(crate) struct Closed;

impl Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output is closed")
    }
}

impl std::error::Error for Closed {}

/// Writes a text to standard output.
///
/// # Errors
///
/// [`Closed`] if the reader closed standard output, or the error of the failed write.
pub(crate) fn print(text: impl Display) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    let written = write!(out, "{text}").and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Closed.into()),
        written => written.context("cannot write to standard output"),
    }
}

/// Writes a line to standard output.
///
/// # Errors
///
/// As [`print`].
pub(crate) fn print_line(line: impl Display) -> anyhow::Result<()> {
    print(format_args!("{line}\n"))
}

/// Writes a text to standard error. Write errors are ignored.
pub(crate) fn report(text: impl Display) {
    // A single call, so that lines of several threads do not interleave.
    let _ = io::stderr().lock().write_all(text.to_string().as_bytes());
}

/// Writes a line to standard error. Write errors are ignored.
pub(crate) fn report_line(line: impl Display) {
    report(format_args!("{line}\n"));
}
