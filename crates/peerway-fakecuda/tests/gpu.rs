//! Runs the engine's tests for GPUs on this library: with late copies, without some ways to share
//! memory, and with a failing driver.
//!
//! Every test runs in its own process, because a process reads its script once.

mod support;

#[path = "../../peerway/tests/gpu.rs"]
mod engine;

/// Tests that need a second process, a second GPU or a compiler. Tests that have these name them
/// explicitly.
const NEEDY: [&str; 3] = ["owner", "memories_of_two_gpus", "a_kernel_that_is_compiled_now"];

/// Runs the engine's tests of this name with this script, or all except the needy ones. Returns
/// their output.
fn pass(script: &str, which: &str) -> String {
    let mut command = support::engine(script);
    if let Some(nvrtc) = std::env::var_os("PEERWAY_TEST_NVRTC") {
        command.env("PEERWAY_NVRTC_SO", nvrtc);
    }
    command
        .args([&format!("engine::{which}"), "--ignored", "--nocapture", "--test-threads=1"])
        .args(NEEDY.iter().filter(|_| which.is_empty()).flat_map(|test| ["--skip", test]))
        .env("PEERWAY_KERNEL_CACHE", "off");
    support::pass(&mut command)
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
    pass("devices=2", "memories_of_two");
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
    // Bytes then go through pinned buffers, also between processes of one host.
    let said = pass("vmm=no,ipc=no", "every_shape");
    assert!(!said.contains("panicked"), "{said}");
}

mod needs_nvrtc {
    use super::*;

    #[test]
    #[ignore = "tells whether PEERWAY_TEST_NVRTC names NVRTC"]
    fn probe() {
        std::env::var_os("PEERWAY_TEST_NVRTC").expect("PEERWAY_TEST_NVRTC names no NVRTC");
    }

    #[test]
    #[ignore = "needs NVRTC, named by PEERWAY_TEST_NVRTC: cargo xtask test --only test"]
    fn they_compile_kernels() {
        pass("", "a_kernel_that_is_compiled_now");
    }

    #[test]
    #[ignore = "needs NVRTC, named by PEERWAY_TEST_NVRTC: cargo xtask test --only test"]
    fn a_driver_that_cannot_load_a_kernel_says_so() {
        // The engine's own kernels do not use this call, so the first call is for the compiled
        // kernel.
        let said = pass("fail=cuFuncLoad@1:209", "a_kernel_that_is_compiled_now");
        assert!(said.contains("cuFuncLoad"), "{said}");
    }
}
