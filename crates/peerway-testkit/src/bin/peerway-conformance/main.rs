//! `peerway-conformance` checks that an engine keeps Peerway's contract on every path, whatever its
//! peers do.
//!
//! It asserts properties, not outcomes: every transfer ends in bounded time, fenced memory does not
//! change, and other peers are served meanwhile. Each scenario runs in its own process under a
//! watchdog. It starts its peers by running this program again, so it needs no other program.

mod args;
mod healthy;
mod hooks;
mod options;
mod profile;
mod remote;
mod scenarios;
mod servant;
mod supervisor;
mod world;

use std::process::ExitCode;

use args::Role;

fn main() -> ExitCode {
    let args = match args::parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(error) => {
            eprintln!("peerway-conformance: {error:#}\n{}", args::USAGE);
            return ExitCode::from(2);
        }
    };
    log();
    if matches!(args.role, Role::Supervise | Role::List) {
        end_with_the_reader();
    }
    match args.role {
        Role::Supervise => supervisor::run(&args),
        Role::List => {
            for scenario in scenarios::ALL {
                println!("{:<28} {}", scenario.name, scenario.about);
            }
            ExitCode::SUCCESS
        }
        Role::Run => world::run(&args),
        Role::ServeApart => servant::namespaces::serve_apart(&args.only),
        Role::Serve => servant::serve_lines(),
    }
}

/// Restores the default action of SIGPIPE, so that this process ends when the reader of its output
/// is gone. Rust's start-up code ignores the signal, and printing would panic instead. The
/// scenarios end with this process.
fn end_with_the_reader() {
    // SAFETY: no other thread runs yet, and the default action runs no code of this process. A
    // process that supervises or lists has no sockets that could raise the signal.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Writes the engine's log to a file of this process in the directory that `CONFORMANCE_LOG` names.
fn log() {
    let Some(directory) = std::env::var_os("CONFORMANCE_LOG") else { return };
    let path = std::path::Path::new(&directory).join(format!("{}.log", std::process::id()));
    match std::fs::File::create(&path) {
        Ok(file) => tracing_subscriber::fmt()
            .with_max_level(tracing::Level::DEBUG)
            .with_ansi(false)
            .with_writer(std::sync::Mutex::new(file))
            .init(),
        Err(error) => eprintln!("peerway-conformance: {}: {error}", path.display()),
    }
}
