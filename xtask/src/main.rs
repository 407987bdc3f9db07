//! `cargo xtask`: the project's maintenance tasks, written in Rust so that a clone needs no other
//! tool.

mod book;
mod c_header;
mod c_library;
mod checkers;
mod config_docs;
mod failures;
#[path = "../../crates/peerway-cli/src/file_set.rs"]
mod file_set;
mod fuzz;
mod gpu;
mod instructions;
mod kernels;
#[cfg(test)]
mod layers;
mod lock;
mod loom;
mod needs;
mod newcomer;
mod nixl;
mod nixl_upstream;
mod programs;
mod python;
mod rdma;
mod setup;
mod side_by_side;
mod steps;
mod test;
mod uccl_library;
mod wheels;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use file_set::FileSet;

/// Maintenance tasks of the Peerway workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run all checks, several at once, time each part, and start no more after a failure.
    Test(test::TestArgs),
    /// Write docs/configuration.md from the table of settings.
    ConfigDocs {
        /// Write nothing; fail if the file differs from the table.
        #[arg(long)]
        check: bool,
    },
    /// Build the book into target/book, if mdbook is installed, after checking the links of every
    /// Markdown file and the paths of the repository that it names.
    Docs,
    /// Write include/peerway_abi.h from its definition in Rust. A test of peerway-core compares the
    /// two.
    DeviceHeader,
    /// Write include/peerway.h from crates/peerway-c.
    CHeader {
        /// Write nothing; fail if the file differs from the sources.
        #[arg(long)]
        check: bool,
    },
    /// Build the release library for C and install it, its headers and its pkg-config file under a
    /// prefix.
    InstallC {
        /// The prefix: the command installs into DIR/include, DIR/lib and DIR/lib/pkgconfig.
        #[arg(long, value_name = "DIR")]
        prefix: PathBuf,
        /// Also install libuccl_p2p and its headers: UCCL's interface for C++, implemented by
        /// Peerway.
        #[arg(long)]
        uccl: bool,
    },
    /// Compile NIXL's UCCL plugin against libuccl_p2p and run two agents of the downloaded NIXL
    /// wheel over it.
    NixlUccl {
        /// A NIXL checkout.
        #[arg(long, value_name = "DIR")]
        nixl: PathBuf,
    },
    /// Run NIXL's tests, and UCCL's benchmark of NIXL, on Peerway's plugin for NIXL.
    NixlUpstream(nixl_upstream::Args),
    /// Count the instructions of hot operations and compare them with docs/instructions.txt.
    Instructions {
        /// Compare nothing; write the counts as the new baseline.
        #[arg(long)]
        bless: bool,
    },
    /// Compile the device code of crates/peerway/kernels to the PTX that the engine loads, and all
    /// device code with several compilers.
    Kernels {
        /// Write nothing; fail if a file differs from the compiled source.
        #[arg(long)]
        check: bool,
    },
    /// Run the fuzz targets for long, with the seeded mutator that `cargo test` uses for a moment.
    Fuzz(fuzz::FuzzArgs),
    /// Run Miri, if it is installed, on the tests of peerway-core, the rings, the slots and the
    /// proxy's memory.
    Miri,
    /// Run tests with AddressSanitizer, if its runtime is installed.
    Sanitize,
    /// Build target/gpu, the bundle that a machine with a GPU and without Rust needs for tests and
    /// measurements. gpu/run.sh runs it.
    GpuTest,
}

fn main() -> ExitCode {
    end_with_the_reader();
    let result = match Cli::parse().command {
        Command::Test(args) => return test::run(&args),
        Command::ConfigDocs { check: false } => config_docs::write(workspace()),
        Command::ConfigDocs { check: true } => config_docs::check(workspace()),
        Command::Docs => book::check(workspace()).and_then(|()| book::build(workspace())),
        Command::DeviceHeader => device_header(),
        Command::CHeader { check } => c_header::run(workspace(), check),
        Command::InstallC { prefix, uccl } => install_c(&prefix, uccl),
        Command::NixlUccl { nixl } => {
            uccl_library::run_nixl(workspace(), &test::target_directory(), &nixl)
        }
        Command::NixlUpstream(args) => {
            nixl_upstream::run(workspace(), &test::target_directory(), &args)
        }
        Command::Instructions { bless } => test::instructions(bless),
        Command::Kernels { check } => kernels::run(workspace(), &test::target_directory(), check),
        Command::Fuzz(args) => fuzz::run(workspace(), &args),
        Command::Miri => checkers::miri(workspace(), &test::target_directory()),
        Command::Sanitize => checkers::sanitize(workspace(), &test::target_directory()),
        Command::GpuTest => gpu::bundle(workspace(), &test::target_directory()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<test::Ignored>() => {
            println!("{error:#}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("xtask: {error:#}");
            match error.downcast_ref() {
                Some(checkers::NotInstalled { .. }) => checkers::NotInstalled::EXIT_CODE.into(),
                None => ExitCode::FAILURE,
            }
        }
    }
}

/// Lets SIGPIPE end this program when the reader of its output has exited (`cargo xtask test |
/// head`). Rust's start-up code ignores the signal, and printing panics instead.
fn end_with_the_reader() {
    // SAFETY: no other thread runs yet, and the default action runs no code of this process. This
    // program has no sockets whose peers could raise the signal.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

fn install_c(prefix: &Path, uccl: bool) -> anyhow::Result<()> {
    let (target, profile) = (test::target_directory(), c_library::Profile::Release);
    if !uccl {
        return c_library::install(workspace(), &target, prefix, profile);
    }
    let mut files = FileSet::default();
    c_library::stage(&mut files, workspace(), &target, prefix, profile)?;
    uccl_library::stage(&mut files, workspace(), &target, prefix, profile)?;
    files.commit()?;
    println!("libpeerway and libuccl_p2p are in {}", prefix.display());
    Ok(())
}

fn device_header() -> anyhow::Result<()> {
    std::fs::write(workspace().join("include/peerway_abi.h"), peerway_core::abi::header())
        .context("cannot write include/peerway_abi.h")
}

/// The root of the workspace, independent of the current directory.
fn workspace() -> &'static Path {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask)
}
