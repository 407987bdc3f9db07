//! Runs the engine's tests for copiers on this library: with late copies, with a driver without
//! copy lists, and with a failing driver.
//!
//! Every test runs in its own process, because a process reads its script once.

mod support;

#[path = "../../peerway/tests/copier.rs"]
mod engine;

use std::time::{Duration, Instant};

use peerway::gpu::{Copier, CopierKind, CopierOptions, GpuError, PinnedMemory, Run};

/// Set in the processes that a test of this file has started.
const INSIDE: &str = "PEERWAY_FAKECUDA_COPIER";

/// Runs tests of this program with this script, and returns their output.
fn pass(script: &str, which: &str) -> String {
    run(script, which, which)
}

/// As [`pass`], and tells these tests a word.
fn run(script: &str, which: &str, inside: &str) -> String {
    let arguments = [which, "--include-ignored", "--nocapture", "--test-threads=1"];
    support::pass(support::engine(script).args(arguments).env(INSIDE, inside))
}

fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// How often the program has called a function of the library that the engine has opened.
fn calls(name: &std::ffi::CStr) -> u64 {
    // SAFETY: the library is already loaded, and loading it runs no code.
    let library =
        unsafe { libloading::Library::new(support::library()) }.expect("the library is loaded");
    type Calls = unsafe extern "C" fn(*const std::ffi::c_char) -> u64;
    // SAFETY: the function has this type.
    let calls =
        unsafe { library.get::<Calls>(b"fakecuda_calls\0") }.expect("the symbol is exported");
    // SAFETY: `name` is a zero-terminated string.
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
    // The signature before CUDA 13.
    pass("jitter=5us,version=12080", "ten_thousand");
}

/// Pinned memory with bytes to copy, and a task for it.
fn task() -> (PinnedMemory, Run) {
    let memory = PinnedMemory::allocate(8192).expect("pinned memory is available");
    let src = memory.ptr() as u64;
    (memory, Run { src, dst: src + 4096, len: 4096 })
}

fn submit(copier: &mut Copier, run: Run) -> Result<u64, GpuError> {
    // SAFETY: the tests keep their memory as long as the copier.
    unsafe { copier.submit(&[run]) }.map(|ticket| ticket.expect("there is room"))
}

/// Counts the driver calls while the resident kernel stays, leaves and comes back.
#[test]
fn the_resident_kernel_stays_leaves_and_comes_back() {
    if !is_inside() {
        pass("", "the_resident_kernel_stays_leaves_and_comes_back");
        return;
    }
    let (_memory, run) = task();
    let mut options = CopierOptions::default();
    (options.idle, options.stay) = (Duration::from_millis(100), Duration::from_secs(100));
    let mut copier = Copier::new(0, CopierKind::Resident, &options).expect("the copier starts");
    let launched = calls(c"cuLaunchKernel");
    let begun = Instant::now();
    for _ in 0..50 {
        let ticket = submit(&mut copier, run).expect("the task is accepted");
        copier.wait(ticket).expect("the task completes");
    }
    // One launch for all tasks, unless this machine was delayed for longer than the kernel stays.
    let rounds = calls(c"cuLaunchKernel") - launched;
    assert!(rounds == 1 || begun.elapsed() > options.idle, "{rounds} launches");
    for round in 1..4 {
        let before = calls(c"cuLaunchKernel");
        std::thread::sleep(3 * options.idle);
        // The kernel has left, so a call that waits for all work on the GPU does not block.
        drop(PinnedMemory::allocate(4096).expect("pinned memory is available"));
        let ticket = submit(&mut copier, run).expect("the task is accepted");
        copier.wait(ticket).expect("the task completes");
        assert_eq!(calls(c"cuLaunchKernel") - before, 1, "round {round}");
    }
}

/// A copier that is dropped ends its kernel, however long the kernel would stay.
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
        let mut copier = Copier::new(0, CopierKind::Resident, &options).expect("the copier starts");
        let ticket = submit(&mut copier, run).expect("the task is accepted");
        copier.wait(ticket).expect("the task completes");
    }
    assert!(begun.elapsed() < options.idle);
}

/// A refused launch or copy gives an error, at once and from then on.
#[test]
fn a_refused_call_is_an_error_and_no_hang() {
    if !is_inside() {
        // Four launches load the kernels, and a fifth tests the resident one.
        let cases = [
            ("launched", "cuLaunchKernel@6:719"),
            ("resident", "cuLaunchKernel@7:719"),
            ("engines", "cuMemcpyAsync@2:719"),
            ("engines", "cuEventRecord@2:719"),
        ];
        for (kind, call) in cases {
            let script = format!("jitter=5us,fail={call}");
            run(&script, "a_refused_call_is_an_error_and_no_hang", kind);
        }
        return;
    }
    let kind: CopierKind = std::env::var(INSIDE).unwrap_or_default().parse().expect("a kind");
    let (memory, run) = task();
    let mut copier = Copier::new(0, kind, &CopierOptions::default()).expect("the copier starts");
    let ticket = submit(&mut copier, run).expect("the first is taken");
    copier.wait(ticket).expect("the first is copied");
    // The resident kernel is launched again only after it has left.
    let begun = Instant::now();
    let error = loop {
        std::thread::sleep(Duration::from_millis(20));
        if let Err(error) = submit(&mut copier, run).and_then(|ticket| copier.wait(ticket)) {
            break error;
        }
        assert!(begun.elapsed() < support::WATCHDOG, "no call was refused");
    };
    assert!(matches!(&error, GpuError::Driver(error) if error.code == 719), "{error}");
    assert_eq!(copier.poll(), Err(error.clone()));
    assert_eq!(submit(&mut copier, run), Err(error.clone()));
    assert_eq!(copier.wait(u64::MAX), Err(error));
    drop((copier, memory));
}

/// A kernel that accesses an unmapped address fails its context, and waiters get the error.
#[test]
fn an_illegal_address_is_an_error_and_no_hang() {
    if !is_inside() {
        for kind in CopierKind::ALL {
            run("", "an_illegal_address_is_an_error_and_no_hang", &kind.to_string());
        }
        return;
    }
    let kind: CopierKind = std::env::var(INSIDE).unwrap_or_default().parse().expect("a kind");
    let (memory, run) = task();
    let mut copier = Copier::new(0, kind, &CopierOptions::default()).expect("the copier starts");
    // The range is longer than the registered memory.
    let wrong = Run { len: 1 << 40, ..run };
    let few = [run, wrong, run];
    // SAFETY: the driver refuses the task or fails the context. The library accesses no unmapped
    // memory.
    let submitted = unsafe { copier.submit(&few) };
    let error = match submitted {
        Ok(ticket) => {
            copier.wait(ticket.expect("there is room")).expect_err("the task cannot be copied")
        }
        Err(error) => error,
    };
    assert!(matches!(&error, GpuError::Driver(_)), "{error}");
    assert_eq!(copier.poll(), Err(error));
    drop((copier, memory));
}

/// Without kernels one copier remains, and the others report that.
#[test]
fn a_gpu_without_our_kernels_copies_by_engines() {
    if !is_inside() {
        pass("fail=cuModuleLoadData@1:218", "a_gpu_without_our_kernels_copies_by_engines");
        return;
    }
    let options = CopierOptions::default();
    for kind in [CopierKind::Launched, CopierKind::Resident] {
        let error = Copier::new(0, kind, &options).expect_err("the GPU has no kernels");
        assert_eq!(error, GpuError::NoKernels { gpu: 0 });
    }
    let (_memory, run) = task();
    let mut copier = Copier::new(0, CopierKind::Engines, &options).expect("the copier starts");
    let ticket = submit(&mut copier, run).expect("the task is accepted");
    copier.wait(ticket).expect("the task completes");
}
