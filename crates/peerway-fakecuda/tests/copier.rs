//! The tests that the engine has for copiers, on this library: where copies are late, where the driver has no lists, and
//! where it fails.
//!
//! Every test runs in a process of its own, as a process reads its script once.

mod support;

#[path = "../../peerway/tests/copier.rs"]
mod engine;

use std::process::Command;
use std::time::{Duration, Instant};

use peerway::gpu::{Copier, CopierKind, CopierOptions, GpuError, PinnedMemory, Run};

/// Set where a test of this file is the process that it has started.
const INSIDE: &str = "PEERWAY_FAKECUDA_COPIER";

/// Runs tests of this program with this script; what they said.
fn pass(script: &str, which: &str) -> String {
    let output = Command::new(std::env::current_exe().expect("this program has a file"))
        .args([which, "--include-ignored", "--nocapture", "--test-threads=1"])
        .env("PEERWAY_CUDA_SO", support::library())
        .env("PEERWAY_FAKE_CUDA", script)
        .env(INSIDE, which)
        .env("RUST_LOG", "peerway=debug")
        .env("NO_COLOR", "1")
        .output()
        .expect("this program runs again");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(output.status.success(), "`{script}`: {}\n{said}", output.status);
    assert!(!said.contains(" 0 passed"), "`{script}`: {which} names no test\n{said}");
    said
}

fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// How often the program has called a function of the library that the engine has opened.
fn calls(name: &std::ffi::CStr) -> u64 {
    // SAFETY: it is loaded already; loading it runs nothing.
    let library = unsafe { libloading::Library::new(support::library()) }.expect("it is there");
    type Calls = unsafe extern "C" fn(*const std::ffi::c_char) -> u64;
    // SAFETY: the function has this type.
    let calls = unsafe { library.get::<Calls>(b"fakecuda_calls\0") }.expect("it is exported");
    // SAFETY: a string.
    unsafe { calls(name.as_ptr()) }
}

#[test]
fn they_pass() {
    if is_inside() {
        return;
    }
    pass("jitter=5us", "engine::");
}

#[test]
fn they_pass_where_copies_are_late() {
    if is_inside() {
        return;
    }
    for which in ["one_source", "a_thousand_pauses", "two_copiers", "dropped", "not_stay"] {
        pass("seed=3,jitter=300us,latency=50us,gbps=20", which);
    }
}

#[test]
fn they_pass_where_the_driver_has_no_lists_or_refuses_them() {
    if is_inside() {
        return;
    }
    for script in ["version=12040", "fail=cuMemcpyBatchAsync_v2@1:801"] {
        let said = pass(&format!("jitter=5us,{script}"), "ten_thousand");
        assert_eq!(said.contains("copies go one by one"), script.starts_with("fail"), "{said}");
    }
    // As it was before CUDA 13.
    pass("jitter=5us,version=12080", "ten_thousand");
}

/// Pinned memory with something to copy, and a task for it.
fn task() -> (PinnedMemory, Run) {
    let memory = PinnedMemory::allocate(8192).expect("there is some");
    let src = memory.ptr() as u64;
    (memory, Run { src, dst: src + 4096, len: 4096 })
}

fn submit(copier: &mut Copier, run: Run) -> Result<u64, GpuError> {
    // SAFETY: the tests keep their memory for as long as the copier.
    unsafe { copier.submit(&[run]) }.map(|ticket| ticket.expect("there is room"))
}

/// The calls that a driver is asked for while the kernel stays, leaves and comes back.
#[test]
fn the_resident_kernel_stays_leaves_and_comes_back() {
    if !is_inside() {
        pass("", "the_resident_kernel_stays_leaves_and_comes_back");
        return;
    }
    let (_memory, run) = task();
    let mut options = CopierOptions::default();
    (options.idle, options.stay) = (Duration::from_millis(100), Duration::from_secs(100));
    let mut copier = Copier::new(0, CopierKind::Resident, &options).expect("it starts");
    let launched = calls(c"cuLaunchKernel");
    let begun = Instant::now();
    for _ in 0..50 {
        let ticket = submit(&mut copier, run).expect("it is taken");
        copier.wait(ticket).expect("it is copied");
    }
    // One launch for all of them, unless this machine was held up for longer than the kernel stays.
    let rounds = calls(c"cuLaunchKernel") - launched;
    assert!(rounds == 1 || begun.elapsed() > options.idle, "{rounds} launches");
    for round in 1..4 {
        let before = calls(c"cuLaunchKernel");
        std::thread::sleep(3 * options.idle);
        // It is gone: who waits for all work on the GPU need not wait.
        drop(PinnedMemory::allocate(4096).expect("there is some"));
        let ticket = submit(&mut copier, run).expect("it is taken");
        copier.wait(ticket).expect("it is copied");
        assert_eq!(calls(c"cuLaunchKernel") - before, 1, "round {round}");
    }
}

/// However long the kernel would stay, it is told to go when its copier is dropped.
#[test]
fn a_dropped_copier_takes_its_kernel_with_it() {
    if !is_inside() {
        pass("", "a_dropped_copier_takes_its_kernel_with_it");
        return;
    }
    let (_memory, run) = task();
    let mut options = CopierOptions::default();
    (options.idle, options.stay) = (Duration::from_secs(600), Duration::from_secs(600));
    let begun = Instant::now();
    for _ in 0..3 {
        let mut copier = Copier::new(0, CopierKind::Resident, &options).expect("it starts");
        let ticket = submit(&mut copier, run).expect("it is taken");
        copier.wait(ticket).expect("it is copied");
    }
    assert!(begun.elapsed() < options.idle);
}

/// A launch or a copy that is refused is an error, at once and from then on.
#[test]
fn a_refused_call_is_an_error_and_no_hang() {
    if !is_inside() {
        // Four launches load the kernels, and the resident one is tried out with a fifth.
        let cases = [
            ("launched", "cuLaunchKernel@6:719"),
            ("resident", "cuLaunchKernel@7:719"),
            ("engines", "cuMemcpyAsync@2:719"),
            ("engines", "cuEventRecord@2:719"),
        ];
        for (kind, call) in cases {
            let script = format!("jitter=5us,fail={call}");
            let output = Command::new(std::env::current_exe().expect("this program has a file"))
                .args(["a_refused_call_is_an_error_and_no_hang", "--nocapture"])
                .env("PEERWAY_CUDA_SO", support::library())
                .env("PEERWAY_FAKE_CUDA", &script)
                .env(INSIDE, kind)
                .output()
                .expect("this program runs again");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{kind} with `{script}`: {said}");
        }
        return;
    }
    let kind: CopierKind = std::env::var(INSIDE).unwrap_or_default().parse().expect("a kind");
    let (memory, run) = task();
    let mut copier = Copier::new(0, kind, &CopierOptions::default()).expect("it starts");
    let ticket = submit(&mut copier, run).expect("the first is taken");
    copier.wait(ticket).expect("the first is copied");
    // The resident kernel is launched again only when it was gone.
    let begun = Instant::now();
    let error = loop {
        std::thread::sleep(Duration::from_millis(20));
        if let Err(error) = submit(&mut copier, run).and_then(|ticket| copier.wait(ticket)) {
            break error;
        }
        assert!(begun.elapsed() < support::WATCHDOG, "nothing was refused");
    };
    assert!(matches!(&error, GpuError::Driver(error) if error.code == 719), "{error}");
    assert_eq!(copier.poll(), Err(error.clone()));
    assert_eq!(submit(&mut copier, run), Err(error.clone()));
    assert_eq!(copier.wait(u64::MAX), Err(error));
    drop((copier, memory));
}

/// A kernel that touches what is not there takes the context with it; who waits learns it.
#[test]
fn an_illegal_address_is_an_error_and_no_hang() {
    if !is_inside() {
        for kind in CopierKind::ALL {
            let output = Command::new(std::env::current_exe().expect("this program has a file"))
                .args(["an_illegal_address_is_an_error_and_no_hang", "--nocapture"])
                .env("PEERWAY_CUDA_SO", support::library())
                .env("PEERWAY_FAKE_CUDA", "")
                .env(INSIDE, kind.to_string())
                .output()
                .expect("this program runs again");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{kind}: {said}");
        }
        return;
    }
    let kind: CopierKind = std::env::var(INSIDE).unwrap_or_default().parse().expect("a kind");
    let (memory, run) = task();
    let mut copier = Copier::new(0, kind, &CopierOptions::default()).expect("it starts");
    // The driver does not know the page behind it.
    let wrong = Run { len: 1 << 40, ..run };
    let few = [run, wrong, run];
    // SAFETY: refused, or ended with the context; the library reaches nothing that is not there.
    let submitted = unsafe { copier.submit(&few) };
    let error = match submitted {
        Ok(ticket) => copier.wait(ticket.expect("there is room")).expect_err("it cannot be copied"),
        Err(error) => error,
    };
    assert!(matches!(&error, GpuError::Driver(_)), "{error}");
    assert_eq!(copier.poll(), Err(error));
    drop((copier, memory));
}

/// Without kernels there is one copier left, and the others say so.
#[test]
fn a_gpu_without_our_kernels_copies_by_engines() {
    if !is_inside() {
        pass("fail=cuModuleLoadData@1:218", "a_gpu_without_our_kernels_copies_by_engines");
        return;
    }
    let options = CopierOptions::default();
    for kind in [CopierKind::Launched, CopierKind::Resident] {
        let error = Copier::new(0, kind, &options).expect_err("it has no kernels");
        assert_eq!(error, GpuError::NoKernels { gpu: 0 });
    }
    let (_memory, run) = task();
    let mut copier = Copier::new(0, CopierKind::Engines, &options).expect("it starts");
    let ticket = submit(&mut copier, run).expect("it is taken");
    copier.wait(ticket).expect("it is copied");
}
