//! Tells the program its commit, its target and its compiler, for `peerway --version`.
//!
//! The names do not begin with `PEERWAY_`: `cargo run` also sets them for the program, which would
//! take them for misspelt settings.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-env=BUILD_COMMIT={}", commit());
    for (name, variable) in [("BUILD_TARGET", "TARGET"), ("BUILD_PROFILE", "PROFILE")] {
        let value = std::env::var(variable).unwrap_or_default();
        println!("cargo::rustc-env={name}={value}");
    }
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let compiler = run(Command::new(rustc).arg("--version")).unwrap_or_default();
    println!("cargo::rustc-env=BUILD_COMPILER={compiler}");
}

/// The commit of the sources: from git, or from the file that `cargo package` writes.
fn commit() -> String {
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let packaged = here.join(".cargo_vcs_info.json");
    println!("cargo::rerun-if-changed={}", packaged.display());
    if let Ok(text) = std::fs::read_to_string(&packaged) {
        let sha = text.split_once("\"sha1\"").and_then(|(_, rest)| rest.split('"').nth(1));
        return sha.map_or_else(unknown, shortened);
    }
    // A packed crate inside of another repository is not of that repository's commit.
    if !here.join("../../rust-toolchain.toml").is_file() {
        return unknown();
    }
    watch(&here);
    git(&here, &["rev-parse", "HEAD"]).map_or_else(unknown, |sha| shortened(&sha))
}

/// Runs this script again when the current commit changes.
fn watch(here: &Path) {
    // The second is the file of the current branch, which `HEAD` only names.
    let branch = git(here, &["symbolic-ref", "--quiet", "HEAD"]);
    for name in ["HEAD".to_owned()].into_iter().chain(branch) {
        if let Some(file) = git(here, &["rev-parse", "--git-path", &name]) {
            let file = here.join(file);
            // A file that does not exist, such as a packed branch, would run the script every time.
            if file.exists() {
                println!("cargo::rerun-if-changed={}", file.display());
            }
        }
    }
}

fn git(here: &Path, arguments: &[&str]) -> Option<String> {
    run(Command::new("git").arg("-C").arg(here).args(arguments))
}

fn run(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

fn shortened(sha: &str) -> String {
    sha.chars().take(12).collect()
}

fn unknown() -> String {
    "unknown".to_owned()
}
