//! Kernels compared with a plain reference, and modules.

mod support;

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use peerway_fakecuda::*;
use peerway_sys::cuda::ffi::*;

use support::*;

const PTX: &CStr = c".version 8.0
.target sm_80
.visible .entry peerway_copy_runs(.param .u64 runs, .param .u32 count) { ret; }
.visible .entry peerway_copy_blocks(.param .u64 src) { ret; }
.visible .entry peerway_copy_few(.param .align 8 .b8 few[1544]) { ret; }
.visible .entry unknown_here() { ret; }
";

#[repr(C)]
#[derive(Clone, Copy)]
struct Run {
    src: u64,
    dst: u64,
    len: u64,
}

#[repr(C)]
struct Few {
    count: u32,
    reserved: u32,
    runs: [Run; 64],
}

impl Few {
    fn empty(count: u32) -> Self {
        Self { count, reserved: 0, runs: [Run { src: 0, dst: 0, len: 0 }; 64] }
    }
}

/// Pseudo-random numbers that are the same in every run of the test.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

fn load() -> CUmodule {
    let mut module = ptr::null_mut();
    ok(cu!(cuModuleLoadData(&mut module, PTX.as_ptr().cast())));
    module
}

fn find(module: CUmodule, name: &CStr) -> Result<CUfunction, CUresult> {
    let mut function = ptr::null_mut();
    match cu!(cuModuleGetFunction(&mut function, module, name.as_ptr())) {
        CUDA_SUCCESS => Ok(function),
        code => Err(code),
    }
}

fn argument<T>(value: &T) -> *mut c_void {
    ptr::from_ref(value).cast_mut().cast()
}

fn launch(function: CUfunction, stream: CUstream, arguments: &mut [*mut c_void]) -> CUresult {
    let params = arguments.as_mut_ptr();
    let none = ptr::null_mut();
    cu!(cuLaunchKernel(function, 8, 1, 1, 256, 1, 1, 0, stream, params, none))
}

fn bytes_of<T: Copy>(values: &[T]) -> Vec<u8> {
    let len = size_of_val(values);
    // SAFETY: the values consist of integers without padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), len) }.to_vec()
}

const LEN: usize = 200_000;

/// Runs of odd lengths at odd addresses whose targets do not overlap. Writes the expected result to
/// `to`.
fn runs(numbers: &mut Numbers, count: usize, from: (u64, &[u8]), to: (u64, &mut [u8])) -> Vec<Run> {
    let mut at = 0;
    let mut made = Vec::new();
    for _ in 0..count {
        let len = numbers.below(3 * (LEN / count / 4) as u64) as usize;
        at += numbers.below((LEN / count / 4) as u64) as usize;
        let source = numbers.below((LEN - len) as u64) as usize;
        to.1[at..at + len].copy_from_slice(&from.1[source..source + len]);
        made.push(Run { src: from.0 + source as u64, dst: to.0 + at as u64, len: len as u64 });
        at += len;
    }
    made
}

#[test]
fn runs_are_copied() {
    if !scripted("runs_are_copied", "seed=3") {
        return;
    }
    start();
    let function = find(load(), c"peerway_copy_runs").expect("the kernel exists");
    let (stream, mut numbers) = (stream(), Numbers(1));
    let (from, to) = (allocate(LEN), allocate(LEN));
    let (host_from, host_to) = (Pinned::new(LEN), Pinned::new(LEN));
    let source = pattern(1, LEN);
    upload(from, &source);
    host_from.write(0, &source);
    for (round, count) in [1, 2, 7, 100, 3000, 0].into_iter().enumerate() {
        // The table, the source and the target alternate between device memory and host memory.
        let source_at = if round % 2 == 0 { from } else { host_from.address() };
        let target_at = if round % 3 == 0 { to } else { host_to.address() };
        let mut expected = vec![0; LEN];
        ok(cu!(cuMemsetD8_v2(to, 0, LEN)));
        host_to.fill(0);
        let runs = match count {
            0 => Vec::new(),
            _ => runs(&mut numbers, count, (source_at, &source), (target_at, &mut expected)),
        };
        let table = bytes_of(&runs);
        let device_table = allocate(table.len().max(1));
        let host_table = Pinned::new(table.len().max(1));
        let table_at = if round % 2 == 0 {
            host_table.write(0, &table);
            host_table.address()
        } else {
            upload(device_table, &table);
            device_table
        };
        let length = count as u32;
        let mut arguments = [argument(&table_at), argument(&length)];
        ok(launch(function, stream, &mut arguments));
        ok(cu!(cuStreamSynchronize(stream)));
        let found = if target_at == to { download(to, LEN) } else { host_to.read() };
        assert!(found == expected, "{count} runs");
        host_table.free();
        ok(cu!(cuMemFree_v2(device_table)));
    }
}

#[test]
fn blocks_are_copied() {
    if !scripted("blocks_are_copied", "") {
        return;
    }
    start();
    let function = find(load(), c"peerway_copy_blocks").expect("the kernel exists");
    let mut numbers = Numbers(2);
    for (len, source_stride, target_stride) in
        [(1u64, 3u64, 1u64), (100, 101, 128), (1000, 1000, 1003)]
    {
        let count = 60usize;
        let (from, to) = (allocate(LEN), allocate(LEN));
        let source = pattern(7, LEN);
        upload(from, &source);
        ok(cu!(cuMemsetD8_v2(to, 0, LEN)));
        let mut expected = vec![0; LEN];
        let sources: Vec<u32> = (0..count).map(|_| numbers.below(190) as u32).collect();
        // Each target block once, in a scrambled order.
        let targets: Vec<u32> = (0..count as u32).map(|at| at * 7 % 61 + 3).collect();
        for (s, t) in sources.iter().zip(&targets) {
            let s = 5 + *s as usize * source_stride as usize;
            let t = 9 + *t as usize * target_stride as usize;
            expected[t..t + len as usize].copy_from_slice(&source[s..s + len as usize]);
        }
        let (source_index, target_index) = (allocate(count * 4), Pinned::new(count * 4));
        upload(source_index, &bytes_of(&sources));
        target_index.write(0, &bytes_of(&targets));
        let (src, dst, target_at) = (from + 5, to + 9, target_index.address());
        let blocks = count as u32;
        let mut arguments = [
            argument(&src),
            argument(&source_stride),
            argument(&source_index),
            argument(&dst),
            argument(&target_stride),
            argument(&target_at),
            argument(&len),
            argument(&blocks),
        ];
        ok(launch(function, ptr::null_mut(), &mut arguments));
        ok(cu!(cuCtxSynchronize()));
        assert!(download(to, LEN) == expected, "blocks of {len}");
    }
}

#[test]
fn a_few_are_copied_and_then_a_flag_is_set() {
    if !scripted("a_few_are_copied_and_then_a_flag_is_set", "jitter=1ms") {
        return;
    }
    start();
    let function = find(load(), c"peerway_copy_few").expect("the kernel exists");
    let (stream, mut numbers) = (stream(), Numbers(3));
    let (from, to) = (allocate(LEN), Pinned::new(LEN));
    let source = pattern(4, LEN);
    upload(from, &source);
    let flag = Pinned::new(4);
    flag.fill(0);
    // SAFETY: the word is pinned, aligned, and lives until the end of the test.
    let seen = unsafe { AtomicU32::from_ptr(flag.start.cast()) };
    for (value, count) in [(1u32, 1usize), (2, 64), (3, 33)] {
        to.fill(0);
        let mut expected = vec![0; LEN];
        let some = runs(&mut numbers, count, (from, &source), (to.address(), &mut expected));
        let mut few = Box::new(Few::empty(count as u32));
        few.runs[..count].copy_from_slice(&some);
        let flag_at = flag.address();
        let mut arguments = [argument(&*few), argument(&flag_at), argument(&value)];
        ok(launch(function, stream, &mut arguments));
        // The argument is passed by value: the caller may free it at once.
        drop(few);
        let begun = std::time::Instant::now();
        while seen.load(Ordering::Acquire) != value {
            assert!(begun.elapsed() < WATCHDOG);
            std::thread::yield_now();
        }
        assert!(to.read() == expected, "{count} runs");
    }
    // A count beyond the array: the kernel would read beyond its argument.
    let few = Few::empty(65);
    let (flag_at, value) = (flag.address(), 9u32);
    let mut arguments = [argument(&few), argument(&flag_at), argument(&value)];
    ok(launch(function, stream, &mut arguments));
    assert_eq!(cu!(cuStreamSynchronize(stream)), CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_eq!(seen.load(Ordering::Acquire), 3);
}

/// Each case uses its own device, because each fails its context.
#[test]
fn kernels_reach_only_what_a_gpu_reaches() {
    if !scripted("kernels_reach_only_what_a_gpu_reaches", "devices=4") {
        return;
    }
    start();
    let of_another_device = allocate(64);
    let pageable = [0u8; 64];
    for case in 1..4 {
        enter(case);
        let function = find(load(), c"peerway_copy_runs").expect("the kernel exists");
        let (device, table) = (allocate(64), Pinned::new(24));
        let good = Run { src: device, dst: device + 32, len: 32 };
        let bad = match case {
            1 => Run { src: pageable.as_ptr() as u64, ..good },
            2 => Run { dst: of_another_device, ..good },
            _ => Run { len: 33, ..good },
        };
        let (table_at, count) = (table.address(), 1u32);
        for (run, answer) in [(good, CUDA_SUCCESS), (bad, CUDA_ERROR_ILLEGAL_ADDRESS)] {
            table.write(0, &bytes_of(&[run]));
            let mut arguments = [argument(&table_at), argument(&count)];
            ok(launch(function, ptr::null_mut(), &mut arguments));
            assert_eq!(cu!(cuStreamSynchronize(ptr::null_mut())), answer, "case {case}");
        }
    }
}

#[test]
fn modules_have_what_their_text_has() {
    if !scripted("modules_have_what_their_text_has", "devices=2") {
        return;
    }
    start();
    let mut module = ptr::null_mut();
    let not_ptx = c"\x7fELF";
    assert_eq!(cu!(cuModuleLoadData(&mut module, not_ptx.as_ptr().cast())), 218);
    let module = load();
    assert_eq!(find(module, c"unknown_here"), Err(CUDA_ERROR_NOT_FOUND));
    assert_eq!(find(module, c"peerway_copy"), Err(CUDA_ERROR_NOT_FOUND));
    let function = find(module, c"peerway_copy_runs").expect("the kernel exists");
    let (table, count) = (0u64, 0u32);
    let mut arguments = [argument(&table), argument(&count)];
    ok(launch(function, ptr::null_mut(), &mut arguments));
    let none = ptr::null_mut();
    let params = arguments.as_mut_ptr();
    let invalid = CUDA_ERROR_INVALID_VALUE;
    assert_eq!(
        cu!(cuLaunchKernel(function, 0, 1, 1, 1, 1, 1, 0, none, params, none.cast())),
        invalid
    );
    assert_eq!(
        cu!(cuLaunchKernel(function, 1, 1, 1, 1025, 1, 1, 0, none, params, none.cast())),
        invalid
    );
    assert_eq!(launch(function, ptr::null_mut(), &mut [none, none]), invalid);
    // Refused in the context of another device, and after the module is unloaded.
    enter(1);
    assert_eq!(launch(function, ptr::null_mut(), &mut arguments), 400);
    leave(1);
    assert_eq!(live()[8], 1);
    ok(cu!(cuModuleUnload(module)));
    assert_eq!(cu!(cuModuleUnload(module)), 400);
    assert_eq!(launch(function, ptr::null_mut(), &mut arguments), 400);
    assert_eq!(live()[8], 0);
}

#[test]
fn parameters_are_reported_one_by_one() {
    if !scripted("parameters_are_reported_one_by_one", "") {
        return;
    }
    start();
    let module = load();
    let told = |name: &CStr| {
        let function = find(module, name).expect("the kernel exists");
        let mut all = Vec::new();
        let (mut offset, mut size) = (0, 0);
        while cu!(cuFuncGetParamInfo(function, all.len(), &mut offset, &mut size)) == CUDA_SUCCESS {
            all.push((offset, size));
        }
        all
    };
    assert_eq!(told(c"peerway_copy_runs"), [(0, 8), (8, 4)]);
    assert_eq!(told(c"peerway_copy_few"), [(0, 1544), (1544, 8), (1552, 4)]);
    let blocks = told(c"peerway_copy_blocks");
    assert_eq!((blocks.len(), blocks[7]), (8, (56, 4)));
}
