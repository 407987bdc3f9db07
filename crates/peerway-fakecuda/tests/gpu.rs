//! Runs the engine's tests for GPUs on this library: with late copies, without some ways to share
//! memory, and with a failing driver.
//!
//! Every test runs in its own process, because a process reads its script once.

mod support;

#[path = "../../peerway/tests/gpu.rs"]
mod engine;

use peerway::{Access, Batch, Endpoint, Pin, Reason, TransferError};

/// Set in the processes that a test of this file has started.
const INSIDE: &str = "PEERWAY_FAKECUDA_GPU";

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

/// A driver that fails during a transfer through staging buffers: the log names the peer.
#[test]
fn a_failed_copy_of_a_transfer_names_the_peer() {
    let test = "a_failed_copy_of_a_transfer_names_the_peer";
    if std::env::var_os(INSIDE).is_none() {
        for way in ["from-gpu", "to-gpu"] {
            // Enough calls that both endpoints are ready.
            let script = "fail=cuMemcpyAsync@40:719,fail=cuLaunchKernel@40:719";
            let mut command = support::engine(script);
            command.args(["--exact", test, "--nocapture"]).env(INSIDE, way);
            let said = support::pass(&mut command);
            let (_, peer) = said.lines().find_map(|line| line.split_once("the peer is ")).unwrap();
            let logged = said.lines().find(|line| line.contains("a GPU copy failed")).unwrap();
            assert!(logged.ends_with(&format!("peer={peer}")), "{peer} is not in: {logged}");
        }
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).init();
    let endpoint = || Endpoint::builder().transport(Pin::Tcp).build().unwrap();
    let (here, there) = (endpoint(), endpoint());
    let peer = here.connect(&there.metadata()).unwrap();
    let (gpu, host) = (1 << 20, vec![7; 1 << 20]);
    // The side with the GPU memory logs the failure, and names the other side.
    let (ours, theirs) = if std::env::var(INSIDE).unwrap() == "from-gpu" {
        println!("the peer is {}", peer.address());
        (here.allocate_gpu(0, gpu).unwrap(), there.register(host).unwrap())
    } else {
        println!("the peer is {}", there.accept(support::WATCHDOG).unwrap().address());
        (here.register(host).unwrap(), there.allocate_gpu(0, gpu).unwrap())
    };
    let remote = peer.import(&theirs.advertise(Access::WRITE).unwrap()).unwrap();
    let batch = Batch::write(&ours.all(), &remote.all()).unwrap();
    let ended = (0..1000).map(|_| peer.post(&batch).unwrap().join());
    let failed = ended.into_iter().find(|ended| ended.reason != Reason::Done);
    let reason = failed.expect("no copy failed").reason;
    assert_eq!(reason, Reason::Failed(TransferError::Device));
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
