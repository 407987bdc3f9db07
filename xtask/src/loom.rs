//! Runs the models that loom checks for every interleaving.
//!
//! Each model runs in its own process, two at once. Loom maps a stack for every thread of every
//! interleaving. In one process the models would mostly wait for each other's mappings.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, bail};

use crate::failures;
use crate::programs::Programs;
use crate::python::output;

/// The modelled code is compiled as for other tests. The code that searches for interleavings must
/// be fast.
const BUILD: &str = "cargo test --package peerway --lib --no-run --config profile.dev.debug=0 \
    --config profile.dev.package.loom.opt-level=3 --config profile.dev.package.generator.opt-level=3";

const AT_ONCE: usize = 2;

/// Builds and runs every test that has `loom` in its name.
pub(crate) fn run(workspace: &Path, target: &Path) -> anyhow::Result<()> {
    // A separate directory: otherwise the flag would rebuild everything, twice per run.
    let target = target.join("loom").display().to_string();
    let variables = [("RUSTFLAGS", "--cfg loom"), ("CARGO_TARGET_DIR", target.as_str())];
    let program = Programs::build_with(workspace, BUILD, &variables)?.find("peerway", "peerway")?;
    let listed = output(Command::new(&program).args(["--list", "loom"]))?;
    let models: Vec<&str> = listed.lines().filter_map(|line| line.strip_suffix(": test")).collect();
    if models.is_empty() {
        bail!("{} has no tests with `loom` in their names", program.display());
    }
    println!("running {} models", models.len());
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(model) = models.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = check(&program, model) {
                        failed.lock().unwrap_or_else(PoisonError::into_inner).push((*model, error));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("{} models passed, {} failed", models.len() - failed.len(), failed.len());
    match failed.into_iter().next() {
        Some((model, error)) => Err(error).with_context(|| format!("model {model}")),
        None => Ok(()),
    }
}

/// Runs one model and shows its output if it failed.
fn check(program: &Path, model: &str) -> anyhow::Result<()> {
    let began = Instant::now();
    let ran = Command::new(program).args(["--exact", model]).output();
    let ran = ran.with_context(|| format!("cannot start {}", program.display()))?;
    let seconds = began.elapsed().as_secs_f32();
    let said = String::from_utf8_lossy(&ran.stdout);
    if !ran.status.success() || !said.contains("1 passed") {
        let said = format!("{said}{}", String::from_utf8_lossy(&ran.stderr));
        println!("model {model} ... FAILED\n{said}");
        match failures::first(&said) {
            Some(failure) => bail!("{failure}"),
            None => bail!("the model ended with {}", ran.status),
        }
    }
    println!("model {model} ... ok, {seconds:.1} s");
    Ok(())
}
