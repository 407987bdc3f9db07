//! Tests the NIXL backend in the published NIXL wheels: the oldest supported one, one in between,
//! and the newest.

use std::env;
use std::path::Path;

use crate::python::{self, step_with};
use crate::test::{Built, debug_build};
use crate::wheels::{NIXL, Wheels};

/// Installs the plugin into each wheel with the users' command and runs the tests there.
pub(crate) fn run(
    workspace: &Path,
    target: &Path,
    built: &Built,
    soak: bool,
) -> anyhow::Result<()> {
    debug_build()?;
    let python = python::have(workspace, target)?;
    let program = target.join("debug/peerway");
    let plugin = built.plugin().display().to_string();
    let tests = workspace.join("plugins/nixl/tests").display().to_string();
    let interpreter = python.display().to_string();
    for (nth, set) in NIXL.iter().enumerate() {
        let wheel = Wheels::have(workspace, target, set)?.path().display().to_string();
        let newest = nth + 1 == NIXL.len();
        // Run every order of shutdown once, and 1000 rounds with the newest wheel.
        let rounds = if newest || soak { "1000" } else { "120" };
        let variables = [("PYTHONPATH", wheel.as_str()), ("PEERWAY_NIXL_ROUNDS", rounds)];
        let install = ["nixl-install", "--python", &interpreter, "--plugin", &plugin];
        step_with(&variables, &program, workspace, &install)?;
        let which = if newest || soak { "" } else { "not slow" };
        let pytest = [&python::PYTEST[..], &["--durations=3", "-p", "no:cacheprovider"]].concat();
        let shown = ["--show-capture=stderr", "-m", which, &tests];
        step_with(&variables, &python, &env::temp_dir(), &[&pytest[..], &shown].concat())?;
        if newest {
            // The tests with fake GPUs run separately. The tests above check the behaviour without
            // GPUs.
            let fake = built.fake_gpus().display().to_string();
            let variables = [("PYTHONPATH", wheel.as_str()), ("PEERWAY_CUDA_SO", &fake)];
            let of_gpus = format!("{tests}/test_gpu.py");
            step_with(&variables, &python, &env::temp_dir(), &[&pytest[..], &[&of_gpus]].concat())?;
        }
    }
    Ok(())
}
