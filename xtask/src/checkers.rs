//! Miri and AddressSanitizer: tools that detect undefined behaviour, if they are installed.
//!
//! Neither is part of `cargo xtask test`, because both need a nightly compiler. If its tool is
//! missing, a command says so and exits with [`NotInstalled::EXIT_CODE`], so that the result does
//! not look like a pass.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

/// Modules of `peerway` whose tests Miri can run: they make only system calls that Miri supports.
const MIRI_MODULES: [&str; 6] =
    ["driven::proxy_memory", "driven::ring", "hooks", "os::pages", "os::ring", "slots"];

/// The tests that run with AddressSanitizer: all unit tests, transfers over every path, and the
/// simulated proxy.
const SANITIZED: [&[&str]; 2] = [
    &["--package", "peerway-core", "--lib", "--tests"],
    &["--package", "peerway", "--lib", "--test", "driven", "--test", "paths", "--test", "awaiting"],
];

/// An explicit target makes cargo leave build scripts and procedural macros alone.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// A tool that this machine lacks.
#[derive(Debug)]
pub(crate) struct NotInstalled(String);

impl NotInstalled {
    /// The exit code if the tool is missing: neither a pass nor a failed test.
    pub(crate) const EXIT_CODE: u8 = 2;
}

impl fmt::Display for NotInstalled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotInstalled {}

/// Runs Miri on `peerway-core` and on the memory that threads and processes share.
pub(crate) fn miri(workspace: &Path, target: &Path) -> anyhow::Result<()> {
    if !Toolchain::Nightly.succeeds(&["cargo", "miri", "--version"]) {
        return Err(NotInstalled(
            "nothing was checked: Miri is not installed for the nightly toolchain. Run `rustup toolchain \
             install nightly --component miri,rust-src`, then this command again."
                .to_owned(),
        )
        .into());
    }
    let cargo = |arguments: &[&str]| {
        let mut command = Toolchain::Nightly.command(&["cargo", "miri", "test"]);
        command
            .args(arguments)
            .current_dir(workspace)
            .env("CARGO_TARGET_DIR", target.join("miri"))
            // Tests read the clock and the environment. Tables store addresses as numbers.
            .env("MIRIFLAGS", "-Zmiri-disable-isolation -Zmiri-permissive-provenance")
            .env("PROPTEST_CASES", "8");
        run(&mut command)
    };
    cargo(&["--package", "peerway-core", "--lib"])?;
    let modules = ["--package", "peerway", "--lib", "--"];
    cargo(&modules.iter().chain(&MIRI_MODULES).copied().collect::<Vec<_>>())
}

/// Runs tests with AddressSanitizer, which also detects leaks.
pub(crate) fn sanitize(workspace: &Path, target: &Path) -> anyhow::Result<()> {
    let has_runtime = |toolchain: &Toolchain| toolchain.sanitizer().is_some();
    let Some(toolchain) = [Toolchain::Nightly, Toolchain::Pinned].into_iter().find(has_runtime)
    else {
        return Err(NotInstalled(format!(
            "nothing was checked: neither the nightly toolchain nor the one of this workspace has the \
             AddressSanitizer runtime for {TARGET}. Run `rustup toolchain install nightly`, then this \
             command again."
        ))
        .into());
    };
    for arguments in SANITIZED {
        let mut command = toolchain.command(&["cargo", "test", "--target", TARGET]);
        command
            .args(arguments)
            .current_dir(workspace)
            .env("CARGO_TARGET_DIR", target.join("asan"))
            .env("RUSTFLAGS", "-Zsanitizer=address");
        run(&mut command)?;
    }
    Ok(())
}

/// The source of a compiler with unstable options.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Toolchain {
    Nightly,
    /// The toolchain of the workspace, with unstable options enabled.
    Pinned,
}

impl Toolchain {
    fn command(self, words: &[&str]) -> Command {
        let mut command = match self {
            Self::Nightly => {
                let mut command = Command::new("rustup");
                command.args(["run", "nightly"]).args(words);
                command
            }
            Self::Pinned => {
                let mut command = Command::new(words[0]);
                command.args(&words[1..]).env("RUSTC_BOOTSTRAP", "1");
                command
            }
        };
        // The running cargo sets these variables for its own toolchain.
        command.env_remove("CARGO").env_remove("RUSTC");
        if self == Self::Nightly {
            command.env_remove("RUSTUP_TOOLCHAIN");
        }
        command
    }

    fn succeeds(self, words: &[&str]) -> bool {
        self.command(words).output().is_ok_and(|output| output.status.success())
    }

    /// The AddressSanitizer runtime, if the toolchain has it.
    fn sanitizer(self) -> Option<PathBuf> {
        let output = self.command(&["rustc", "--print", "sysroot"]).output().ok()?;
        let root = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
        let libraries = Path::new(root.trim()).join("lib/rustlib").join(TARGET).join("lib");
        let files = std::fs::read_dir(libraries).ok()?.filter_map(|file| Some(file.ok()?.path()));
        files.into_iter().find(|file| is_sanitizer(file))
    }
}

fn is_sanitizer(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with("librustc-") && name.ends_with("_rt.asan.a")
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let shown = format!("{command:?}");
    println!("$ {shown}");
    let status = command.status().with_context(|| format!("cannot start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` ended with {status}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_runtime_of_address_sanitizer_counts() {
        assert!(is_sanitizer(Path::new("/t/librustc-nightly_rt.asan.a")));
        assert!(is_sanitizer(Path::new("/t/librustc-stable_rt.asan.a")));
        assert!(!is_sanitizer(Path::new("/t/librustc-nightly_rt.tsan.a")));
        assert!(!is_sanitizer(Path::new("/t/libstd-0123.rlib")));
    }

    #[test]
    fn a_missing_tool_is_not_a_failed_test() {
        let error = anyhow::Error::from(NotInstalled("nothing was checked".to_owned()));
        assert!(error.is::<NotInstalled>());
        assert!(!anyhow::anyhow!("a test failed").is::<NotInstalled>());
    }
}
