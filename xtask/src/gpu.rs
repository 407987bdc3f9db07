//! A bundle for a machine with a GPU and without Rust: test programs, the command, the wheel, and a
//! script that runs them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use serde_json::Value;

use crate::python::step;

/// Test programs and their names in the bundle.
const TESTS: &[(&str, &str)] =
    &[("gpu", "gpu-tests"), ("copier", "copier-tests"), ("driven_gpu", "driven-tests")];

/// Builds the bundle in `target/gpu` and prints how to run it.
pub(crate) fn bundle(workspace: &Path, target: &Path) -> anyhow::Result<()> {
    let bundle = target.join("gpu");
    if bundle.exists() {
        fs::remove_dir_all(&bundle)?;
    }
    fs::create_dir_all(&bundle)?;
    for (test, name) in TESTS {
        let tests = ["test", "--release", "--package", "peerway", "--test", test, "--no-run"];
        put(&built(workspace, &tests, test)?, &bundle.join(name))?;
    }
    let command = ["build", "--release", "--package", "peerway-cli"];
    put(&built(workspace, &command, "peerway")?, &bundle.join("peerway"))?;
    let shown = bundle.display().to_string();
    let python = target.join("gpu-pip");
    let environment = python.display().to_string();
    step(Path::new("python3"), workspace, &["-m", "venv", "--clear", &environment])?;
    let wheel = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", &shown];
    step(&python.join("bin/python"), workspace, &[&wheel[..], &[".", "./compat/uccl"]].concat())?;
    let script = bundle.join("run.sh");
    fs::copy(workspace.join("gpu/run.sh"), &script).context("cannot copy gpu/run.sh")?;
    println!(
        "the bundle is in {}; copy it to the machine with a GPU and run `run.sh` there:",
        bundle.display()
    );
    for entry in fs::read_dir(&bundle)? {
        let entry = entry?;
        println!("  {:>9} {}", entry.metadata()?.len(), entry.file_name().to_string_lossy());
    }
    Ok(())
}

/// Runs cargo and returns the path of the program with that name.
fn built(workspace: &Path, arguments: &[&str], name: &str) -> anyhow::Result<PathBuf> {
    println!("$ cargo {}", arguments.join(" "));
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(program)
        .args(arguments)
        .args(["--message-format", "json-render-diagnostics"])
        .current_dir(workspace)
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    if !output.status.success() {
        bail!("cargo {} ended with {}", arguments.join(" "), output.status);
    }
    let messages = String::from_utf8(output.stdout)?;
    let programs = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut found = programs
        .filter(|message| message["target"]["name"] == name)
        .filter_map(|message| message["executable"].as_str().map(PathBuf::from));
    let found = found.next_back();
    found.with_context(|| format!("cargo built no program {name}"))
}

/// Copies a program and strips its debugging information, which is most of its size.
fn put(program: &Path, to: &Path) -> anyhow::Result<()> {
    fs::copy(program, to).with_context(|| format!("cannot copy {}", program.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o755))?;
    // Without `strip` the program is only larger.
    let _ = Command::new("strip").arg(to).status();
    Ok(())
}
