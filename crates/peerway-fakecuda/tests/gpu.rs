//! The tests that the engine has for GPUs, on this library: where copies are late, where ways to share memory are
//! missing, and where the driver fails.
//!
//! Every test runs in a process of its own, as a process reads its script once.

mod support;

#[path = "../../peerway/tests/gpu.rs"]
mod engine;

use std::process::Command;

/// Runs the engine's tests with this script; what they said.
fn pass(script: &str, which: &str) -> String {
    let output = Command::new(std::env::current_exe().expect("this program has a file"))
        .args([&format!("engine::{which}"), "--nocapture", "--test-threads=1"])
        .env("PEERWAY_CUDA_SO", support::library())
        .env("PEERWAY_FAKE_CUDA", script)
        .env("RUST_LOG", "peerway=debug")
        .env("NO_COLOR", "1")
        .output()
        .expect("this program runs again");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(output.status.success(), "`{script}`: {}\n{said}", output.status);
    assert!(!said.contains("skipped"), "`{script}`: {said}");
    said
}

#[test]
fn they_pass() {
    pass("", "");
}

#[test]
fn they_pass_where_copies_are_late() {
    pass("seed=3,jitter=400us,latency=100us", "");
}

#[test]
fn they_pass_with_two_gpus() {
    let said = pass("devices=2", "memories_of_two");
    assert!(!said.contains("nothing to tell apart"), "{said}");
}

#[test]
fn they_pass_with_a_fabric() {
    let said = pass("fabric=ok", "");
    assert!(said.contains("fabric"), "{said}");
}

#[test]
fn they_pass_with_plain_memory_alone() {
    let said = pass("vmm=no", "memory_is_allocated");
    assert!(said.contains("no virtual memory management"), "{said}");
    pass("vmm=no", "another_process");
}

#[test]
fn they_pass_where_memory_cannot_be_shared() {
    // Bytes go through pinned buffers then, also between processes of one host.
    let said = pass("vmm=no,ipc=no", "every_shape");
    assert!(!said.contains("panicked"), "{said}");
}
