//! The tests of the GPU-driven engine on GPU memory, on this library: also where copies are late.

mod support;

#[path = "../../peerway/tests/driven_gpu.rs"]
mod engine;

use std::process::Command;

/// Runs the engine's tests with this script, in a process of its own, as a process reads its script once.
fn pass(script: &str) {
    let output = Command::new(std::env::current_exe().expect("this program has a file"))
        .args(["engine::", "--nocapture", "--test-threads=1"])
        .env("PEERWAY_CUDA_SO", support::library())
        .env("PEERWAY_FAKE_CUDA", script)
        .output()
        .expect("this program runs again");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(output.status.success(), "`{script}`: {}\n{said}", output.status);
    assert!(!said.contains("skipped"), "`{script}`: {said}");
}

#[test]
fn they_pass() {
    pass("");
}

#[test]
fn they_pass_where_copies_are_late() {
    pass("seed=5,jitter=300us,latency=100us");
}

#[test]
fn they_pass_where_memory_cannot_be_shared() {
    pass("vmm=no,ipc=no");
}
