//! Shared parts of the tests. Each test runs in its own process, because a process reads its script
//! once.
#![allow(dead_code, unreachable_pub, unused_imports)]

use std::ffi::{CString, c_uint, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::ptr;

use peerway_fakecuda::*;
pub use peerway_fakescript::testing::*;
use peerway_sys::cuda::ffi::*;

pub const GRANULE: usize = 2 << 20;

const SCRIPT: &str = "PEERWAY_FAKE_CUDA";

/// Runs the test of this name in a process with this script. Returns true in that process, and
/// false here once it has passed.
pub fn scripted(test: &str, script: &str) -> bool {
    is_child(|| child(test, script, "test"))
}

/// A process that runs a test in a role.
pub fn child(test: &str, script: &str, role: &str) -> Command {
    let mut command = peerway_fakescript::testing::child(test, role);
    command.env(SCRIPT, script);
    command
}

/// This program with an engine that opens this library, with this script.
pub fn engine(script: &str) -> Command {
    let mut command = program();
    command.env("PEERWAY_CUDA_SO", library()).env(SCRIPT, script);
    command.env("RUST_LOG", "peerway=debug").env("NO_COLOR", "1");
    command
}

/// The path of the library that was built with this test.
pub fn library() -> PathBuf {
    peerway_fakescript::testing::library("libpeerway_fakecuda.so")
}

#[track_caller]
pub fn ok(result: CUresult) {
    assert_eq!(result, CUDA_SUCCESS);
}

/// Calls a function of the library with arguments that are safe for it.
macro_rules! cu {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the pointers are valid for the function; invalid handles and addresses are only
        // numbers.
        unsafe { $function($($argument),*) }
    }};
}

pub(crate) use cu;

/// Initializes the driver and makes the context of the first device current.
pub fn start() {
    ok(cu!(cuInit(0)));
    enter(0);
}

/// Makes the context of a device current.
pub fn enter(device: i32) {
    let mut context = ptr::null_mut();
    ok(cu!(cuDevicePrimaryCtxRetain(&mut context, device)));
    ok(cu!(cuCtxPushCurrent_v2(context)));
}

/// The opposite of [`enter`].
pub fn leave(device: i32) {
    ok(cu!(cuCtxPopCurrent_v2(ptr::null_mut())));
    ok(cu!(cuDevicePrimaryCtxRelease_v2(device)));
}

pub fn attribute(which: c_uint) -> i32 {
    let mut value = -1;
    ok(cu!(cuDeviceGetAttribute(&mut value, which, 0)));
    value
}

pub fn allocate(len: usize) -> u64 {
    let mut address = 0;
    ok(cu!(cuMemAlloc_v2(&mut address, len)));
    address
}

pub fn upload(to: u64, bytes: &[u8]) {
    ok(cu!(cuMemcpyHtoD_v2(to, bytes.as_ptr().cast(), bytes.len())));
}

pub fn download(from: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    ok(cu!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), from, len)));
    bytes
}

pub fn stream() -> CUstream {
    let mut stream = ptr::null_mut();
    ok(cu!(cuStreamCreate(&mut stream, CU_STREAM_NON_BLOCKING)));
    stream
}

pub fn event() -> CUevent {
    let mut event = ptr::null_mut();
    ok(cu!(cuEventCreate(&mut event, CU_EVENT_DISABLE_TIMING)));
    event
}

/// Pinned memory. It is accessed only through pointers, and freed only by `free`.
#[derive(Clone, Copy)]
pub struct Pinned {
    pub start: *mut u8,
    pub len: usize,
}

impl Pinned {
    pub fn new(len: usize) -> Self {
        let mut start = ptr::null_mut();
        ok(cu!(cuMemHostAlloc(&mut start, len, CU_MEMHOSTALLOC_PORTABLE)));
        Self { start: start.cast(), len }
    }

    pub fn address(&self) -> u64 {
        self.start.expose_provenance() as u64
    }

    pub fn fill(&self, byte: u8) {
        // SAFETY: the range is the whole memory, and no stream uses it now.
        unsafe { self.start.write_bytes(byte, self.len) };
    }

    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: the range is inside the memory.
        unsafe { self.start.add(at).copy_from(bytes.as_ptr(), bytes.len()) };
    }

    pub fn read(&self) -> Vec<u8> {
        // SAFETY: `at` is inside the memory. The read is volatile, because a thread of the library
        // writes it.
        (0..self.len).map(|at| unsafe { self.start.add(at).read_volatile() }).collect()
    }

    pub fn free(self) {
        ok(cu!(cuMemFreeHost(self.start.cast())));
    }
}

/// Blocks a stream until it is opened, so that the work behind it is certainly not done before.
pub struct Gate(Pinned);

impl Gate {
    pub fn close(stream: CUstream) -> Self {
        let word = Pinned::new(8);
        word.fill(0);
        ok(cu!(cuStreamWaitValue64_v2(stream, word.address(), 1, CU_STREAM_WAIT_VALUE_GEQ)));
        Self(word)
    }

    pub fn open(&self) {
        self.0.write(0, &1u64.to_ne_bytes());
    }
}

/// Bytes that depend on their position.
pub fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| peerway_fakescript::testing::pattern(seed, at)).collect()
}

/// The properties of memory of a device.
pub fn prop(device: i32, types: c_uint) -> CUmemAllocationProp {
    let mut prop = CUmemAllocationProp::zeroed();
    prop.type_ = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = types;
    prop.location = CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: device };
    prop
}

pub fn try_create(len: usize, prop: &CUmemAllocationProp) -> Result<u64, CUresult> {
    let mut handle = 0;
    match cu!(cuMemCreate(&mut handle, len, prop, 0)) {
        CUDA_SUCCESS => Ok(handle),
        code => Err(code),
    }
}

pub fn create(len: usize, types: c_uint) -> u64 {
    try_create(len, &prop(0, types)).expect("there is memory")
}

/// Reserves a range and maps the memory to all of it, with access for the first device.
pub fn map(handle: u64, len: usize) -> u64 {
    let mut address = 0;
    ok(cu!(cuMemAddressReserve(&mut address, len, 0, 0, 0)));
    ok(cu!(cuMemMap(address, len, 0, handle, 0)));
    grant(address, len, 0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    address
}

pub fn grant(address: u64, len: usize, device: i32, flags: c_uint) {
    let location = CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: device };
    let desc = CUmemAccessDesc { location, flags };
    ok(cu!(cuMemSetAccess(address, len, &desc, 1)));
}

/// The opposite of [`map`].
pub fn unmap(address: u64, len: usize) {
    ok(cu!(cuMemUnmap(address, len)));
    ok(cu!(cuMemAddressFree(address, len)));
}

pub fn calls(name: &str) -> u64 {
    let name = CString::new(name).expect("a name");
    cu!(fakecuda_calls(name.as_ptr()))
}

/// The number of objects of every kind.
pub fn live() -> [u64; 9] {
    std::array::from_fn(|kind| fakecuda_live(kind as u32))
}

/// The error number with which the kernel refuses to read from an address.
pub fn read_by_kernel(address: u64) -> Option<i32> {
    let mut byte = 0u8;
    let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: address as *mut c_void, iov_len: 1 };
    let process = std::process::id() as i32;
    // SAFETY: `byte` has space for one byte, and the kernel checks the other address.
    let count = unsafe { libc::process_vm_readv(process, &local, 1, &remote, 1, 0) };
    (count != 1).then(|| std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
}
