//! Runs the tests of the GPU-driven engine with GPU memory on this library, also with late copies.

mod support;

#[path = "../../peerway/tests/driven_gpu.rs"]
mod engine;

/// Tests that need kernels which this library does not run. They run only on a GPU.
const OF_KERNELS: [&str; 4] = [
    "a_kernel_puts_and_is_told_when_it_is_there",
    "quiet_waits_for_completions_that_are_late",
    "a_wait_for_what_never_comes_ends_in_time",
    "a_kernel_that_waits_for_a_peer_is_told_when_it_is_gone",
];

/// Runs the engine's tests with this script in its own process, because a process reads its script
/// once.
fn pass(script: &str) {
    support::pass(
        support::engine(script)
            .args(["engine::", "--ignored", "--nocapture", "--test-threads=1"])
            .args(OF_KERNELS.iter().flat_map(|test| ["--skip", test])),
    );
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
