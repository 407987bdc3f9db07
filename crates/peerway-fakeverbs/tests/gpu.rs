//! The tests that the engine has for GPU memory and RDMA devices, on this library and on the fake driver: where devices
//! reach GPUs, where they do not, where the GPU does not order what they write, and where queue pairs fail.
//!
//! Every script has a process of its own, as a process reads them once.

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

/// Runs the engine's tests of this name with these scripts, for connections or for datagrams.
fn run(which: &str, pin: &str, verbs: &str, cuda_script: &str) -> (Output, String) {
    let fabric = format!("g{:x}-{pin}-{verbs}{cuda_script}{which}", std::process::id());
    let verbs = if pin == "efa" { format!("efa,{verbs}") } else { verbs.to_owned() };
    let output = Command::new(std::env::current_exe().expect("this program has a file"))
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
        .expect("this program runs again");
    let said = [&output.stdout[..], &output.stderr].concat();
    (output, String::from_utf8_lossy(&said).into_owned())
}

/// They pass, for both kinds of devices; what each said.
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
        // For the advertisement; a post of our own is refused before devices are asked, as the test itself checks.
        let freed = said.matches("was freed since it was registered").count();
        assert_eq!(freed, 1, "{said}");
    }
}

#[test]
fn they_pass_where_devices_take_no_dma_buf() {
    for said in pass("dmabuf=no", "") {
        // Then the address is tried, which is none for the processor.
        let both = "Operation not supported";
        assert!(said.contains(NOT_REACHED) && said.contains(both), "{said}");
        assert!(said.contains("Bad address") && !said.contains(DMA_BUF), "{said}");
        let told = said.lines().filter(|line| line.contains("WARN") && line.contains(NOT_REACHED));
        // Each of two endpoints, in each of the tests.
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
    // And do not where a GPU says that they need not be, and is wrong.
    let (output, said) = run("counts", "ib", "posted", "");
    assert!(!output.status.success() && said.contains("a count before its bytes"), "{said}");
}

#[test]
fn they_pass_while_queue_pairs_fail_and_are_replaced() {
    // A frame of 1 MiB is 256 requests: fewer would never let one through.
    for said in pass("seed=8,flush_after=400,reorder=2%,late=5%", "ordered=no,jitter=200us") {
        assert!(said.contains("queue pair replaced"), "{said}");
    }
}

#[test]
fn a_read_is_done_when_the_gpu_sees_it() {
    let test = "a_read_is_done_when_the_gpu_sees_it";
    // The first flush is the registration's question whether there are any.
    let script = "ordered=no,fail=cuFlushGPUDirectRDMAWrites@2:999";
    let cuda = cuda();
    let cuda = cuda.to_str().expect("it is text");
    let variables = [("PEERWAY_CUDA_SO", cuda), ("PEERWAY_FAKE_CUDA", script)];
    if !support::scripted_with(test, "", &variables) {
        return;
    }
    let endpoint = || Endpoint::builder().transport(Pin::Ib).build().expect("there are devices");
    let (a, b) = (endpoint(), endpoint());
    let peer = a.connect(&b.metadata()).expect("devices reach each other");
    let there = b.register(vec![3u8; 10_000]).expect("memory registers");
    let imported = peer.import(&there.advertise(Access::READ).unwrap()).unwrap();
    let here = a.allocate_gpu(0, 10_000).expect("there is memory");
    let read = Batch::read(&here.all(), &imported.all()).unwrap();
    assert_eq!(peer.run(&read).unwrap().reason, Reason::Failed(TransferError::Device));
    assert_eq!(peer.run(&read).unwrap().reason, Reason::Done);
    let mut bytes = vec![0; 10_000];
    here.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, [3; 10_000]);
}
