//! Runs the engine's tests for GPU memory and RDMA devices on this library and the fake driver. The
//! scripts cover devices that reach GPUs, devices that do not, GPUs that do not order device
//! writes, and failing queue pairs.
//!
//! Every script runs in its own process, because a process reads its script once.

mod support;

#[path = "../../peerway/tests/verbs_gpu.rs"]
mod engine;

use std::path::PathBuf;
use std::process::{Command, Output};

use peerway::{Access, Batch, Endpoint, Pin, Reason, TransferError};

/// The fake driver, which was built for this test.
fn cuda() -> PathBuf {
    support::library().with_file_name("libpeerway_fakecuda.so")
}

/// Runs the engine's tests whose names start with `which` with these scripts, for connections or
/// for datagrams.
fn run(which: &str, pin: &str, verbs: &str, cuda_script: &str) -> (Output, String) {
    let fabric = format!("g{:x}-{pin}-{verbs}{cuda_script}{which}", std::process::id());
    let verbs = if pin == "efa" { format!("efa,{verbs}") } else { verbs.to_owned() };
    let output = Command::new(std::env::current_exe().expect("the test program has a path"))
        .args([&format!("engine::{which}"), "--ignored", "--nocapture", "--test-threads=1"])
        .env("PEERWAY_IBV_SO", support::library())
        .env("PEERWAY_EFA_SO", support::library())
        .env("PEERWAY_CUDA_SO", cuda())
        .env("PEERWAY_FAKE_VERBS", verbs)
        .env("PEERWAY_FAKE_VERBS_FABRIC", fabric.chars().take(30).collect::<String>())
        .env("PEERWAY_FAKE_CUDA", cuda_script)
        .env("PEERWAY_TEST_PIN", pin)
        .env("RUST_LOG", "peerway=debug")
        .env("NO_COLOR", "1")
        .output()
        .expect("the test program starts again");
    let said = [&output.stdout[..], &output.stderr].concat();
    (output, String::from_utf8_lossy(&said).into_owned())
}

/// Runs all tests, which must pass, for both kinds of devices. Returns their outputs.
fn pass(verbs: &str, cuda: &str) -> [String; 2] {
    ["ib", "efa"].map(|pin| {
        let (output, said) = run("", pin, verbs, cuda);
        assert!(output.status.success(), "{pin}, `{verbs}`, `{cuda}`: {}\n{said}", output.status);
        assert!(!said.contains(" 0 passed"), "{said}");
        said
    })
}

const DMA_BUF: &str = "how=DmaBuf";
const NOT_REACHED: &str = "do not reach memory of GPU 0: not as a dma-buf";

#[test]
fn they_pass_where_devices_reach_gpus() {
    for said in pass("", "") {
        assert!(said.contains(DMA_BUF) && !said.contains(NOT_REACHED), "{said}");
        // The advertisement causes it. The engine refuses its own post before it asks the devices,
        // as the test itself checks.
        let freed = said.matches("was freed since it was registered").count();
        assert_eq!(freed, 1, "{said}");
    }
}

#[test]
fn they_pass_where_devices_take_no_dma_buf() {
    for said in pass("dmabuf=no", "") {
        // The engine then tries to register the address, which is not valid for the processor.
        let both = "Operation not supported";
        assert!(said.contains(NOT_REACHED) && said.contains(both), "{said}");
        assert!(said.contains("Bad address") && !said.contains(DMA_BUF), "{said}");
        let told = said.lines().filter(|line| line.contains("WARN") && line.contains(NOT_REACHED));
        // One warning of each of two endpoints, in each of the tests.
        assert!(told.count() <= 2 * 6, "{said}");
    }
}

#[test]
fn they_pass_where_the_gpu_gives_no_dma_buf() {
    for said in pass("", "dmabuf=no") {
        assert!(said.contains("the GPU says that it has none"), "{said}");
        assert!(!said.contains(DMA_BUF), "{said}");
    }
    let (output, said) = run("counts", "ib", "", "fail=cuMemGetHandleForAddressRange@1:801");
    assert!(output.status.success(), "{said}");
    assert!(said.contains("cuMemGetHandleForAddressRange on GPU 0"), "{said}");
}

#[test]
fn they_pass_where_writes_must_be_flushed() {
    for said in pass("posted", "ordered=no") {
        assert!(said.contains(DMA_BUF), "{said}");
        assert!(said.contains("it is advertised for writing only"), "{said}");
    }
    // The tests fail if a GPU falsely claims that it orders writes.
    let (output, said) = run("counts", "ib", "posted", "");
    assert!(!output.status.success() && said.contains("count before its bytes"), "{said}");
}

#[test]
fn they_pass_while_queue_pairs_fail_and_are_replaced() {
    // A frame of 1 MiB has 256 requests; with a smaller number no frame would ever complete.
    for said in pass("seed=8,flush_after=400,reorder=2%,late=5%", "ordered=no,jitter=200us") {
        assert!(said.contains("queue pair replaced"), "{said}");
    }
}

#[test]
fn a_read_is_done_when_the_gpu_sees_it() {
    let test = "a_read_is_done_when_the_gpu_sees_it";
    // The first flush is part of the registration, which checks whether flushes work.
    let script = "ordered=no,fail=cuFlushGPUDirectRDMAWrites@2:999";
    let cuda = cuda();
    let cuda = cuda.to_str().expect("the path is valid UTF-8");
    let variables = [("PEERWAY_CUDA_SO", cuda), ("PEERWAY_FAKE_CUDA", script)];
    if !support::scripted_with(test, "", &variables) {
        return;
    }
    let endpoint = || Endpoint::builder().transport(Pin::Ib).build().expect("there are devices");
    let (a, b) = (endpoint(), endpoint());
    let peer = a.connect(&b.metadata()).expect("devices reach each other");
    let there = b.register(vec![3u8; 10_000]).expect("memory registers");
    let imported = peer.import(&there.advertise(Access::READ).unwrap()).unwrap();
    let here = a.allocate_gpu(0, 10_000).expect("GPU memory is available");
    let read = Batch::read(&here.all(), &imported.all()).unwrap();
    assert_eq!(peer.run(&read).unwrap().reason, Reason::Failed(TransferError::Device));
    assert_eq!(peer.run(&read).unwrap().reason, Reason::Done);
    let mut bytes = vec![0; 10_000];
    here.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, [3; 10_000]);
}
