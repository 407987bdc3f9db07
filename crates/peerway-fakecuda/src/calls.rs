//! The entry of every function: it counts the call, fails it if the script says so, and checks the
//! conditions that CUDA checks.
//!
//! Every function of the library is also in the list of this file. The first test that calls an
//! unlisted function fails.

use std::cell::Cell;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use peerway_sys::cuda::ffi::*;

use crate::context;
use crate::device::Device;
use crate::machine::{Machine, machine, script};

/// The result of a function: nothing, or an error number.
pub(crate) type Answer = Result<(), CUresult>;

/// A call that needs the driver but no context.
pub(crate) fn call(name: &'static str, body: impl FnOnce(&'static Machine) -> Answer) -> CUresult {
    guarded(name, || body(machine()?))
}

/// A call in the current context. It is refused once that context has failed.
pub(crate) fn call_in_context(
    name: &'static str,
    body: impl FnOnce(&'static Machine, &'static Device) -> Answer,
) -> CUresult {
    guarded(name, || {
        let machine = machine()?;
        let device = context::current(machine)?;
        device.failed()?;
        body(machine, device)
    })
}

/// A call that releases something. It also works in a failed context, but then returns that
/// context's error.
pub(crate) fn call_to_give_back(
    name: &'static str,
    body: impl FnOnce(&'static Machine) -> Answer,
) -> CUresult {
    guarded(name, || {
        let machine = machine()?;
        let device = context::current(machine)?;
        body(machine)?;
        device.failed()
    })
}

/// A call that is allowed before `cuInit` and in a forked child.
pub(crate) fn call_before_init(name: &'static str, body: impl FnOnce() -> Answer) -> CUresult {
    guarded(name, body)
}

fn guarded(name: &'static str, body: impl FnOnce() -> Answer) -> CUresult {
    let answer = catch_unwind(AssertUnwindSafe(|| {
        let (_, counter) = listed(name).ok_or(CUDA_ERROR_UNKNOWN)?;
        // The counters order no other memory accesses.
        let number = counter.fetch_add(1, Ordering::Relaxed) + 1;
        let failures = script().as_ref().map_or(&[][..], |script| &script.fail);
        if let Some(failure) = failures.iter().find(|one| one.call == name && one.at == number) {
            return Err(failure.code);
        }
        if IN_CALLBACK.get() {
            return Err(CUDA_ERROR_NOT_PERMITTED);
        }
        body()
    }));
    match answer {
        Ok(Ok(())) => CUDA_SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => CUDA_ERROR_UNKNOWN,
    }
}

thread_local! {
    /// Whether this thread is inside a function of the program that a stream called. CUDA permits
    /// no call there.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Runs a function that the program has put on a stream.
pub(crate) fn in_callback(body: impl FnOnce()) {
    IN_CALLBACK.set(true);
    body();
    IN_CALLBACK.set(false);
}

/// Writes a result to the caller's memory.
///
/// # Safety
///
/// `out` is null, or valid for a write of a `T`.
pub(crate) unsafe fn put<T>(out: *mut T, value: T) -> Answer {
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: by this function's contract. CUDA requires no alignment where it takes a `void *`.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Returns `CUDA_ERROR_INVALID_VALUE` unless `so` is true.
pub(crate) fn valid(so: bool) -> Answer {
    if so { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
}

/// How often the program has called a function of this library, including refused calls. The name
/// may omit the `_v2`. Zero for an unknown name.
///
/// # Safety
///
/// `name` is a zero-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakecuda_calls(name: *const c_char) -> u64 {
    // SAFETY: by this function's contract.
    let name = unsafe { CStr::from_ptr(name) };
    let found = name.to_str().ok().and_then(listed);
    found.map_or(0, |(_, counter)| counter.load(Ordering::Relaxed))
}

/// The full name of a function.
pub(crate) fn full_name(name: &str) -> Option<&'static str> {
    listed(name).map(|(full, _)| *full)
}

fn listed(name: &str) -> Option<&'static (&'static str, AtomicU64)> {
    CALLS.iter().find(|(full, _)| *full == name || full.strip_suffix("_v2") == Some(name))
}

macro_rules! calls {
    ($($name:ident)*) => {
        const COUNT: usize = [ $( stringify!($name), )* ].len();
        static CALLS: [(&str, AtomicU64); COUNT] =
            [ $( (stringify!($name), AtomicU64::new(0)), )* ];
    };
}

calls! {
    cuInit cuDriverGetVersion cuGetErrorName cuGetErrorString
    cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetUuid_v2 cuDeviceGetPCIBusId
    cuDeviceGetAttribute cuDeviceTotalMem_v2
    cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxGetState
    cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuCtxGetCurrent cuCtxSetCurrent cuCtxSynchronize
    cuFlushGPUDirectRDMAWrites
    cuPointerGetAttributes cuPointerSetAttribute cuMemGetAddressRange_v2 cuMemGetInfo_v2
    cuMemAlloc_v2 cuMemFree_v2
    cuMemCreate cuMemRelease cuMemAddressReserve cuMemAddressFree cuMemMap cuMemUnmap cuMemSetAccess
    cuMemGetAllocationGranularity cuMemRetainAllocationHandle
    cuMemExportToShareableHandle cuMemImportFromShareableHandle cuMemGetHandleForAddressRange
    cuIpcGetMemHandle cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle
    cuMemHostAlloc cuMemAllocHost_v2 cuMemFreeHost cuMemHostRegister_v2 cuMemHostUnregister
    cuMemcpyAsync cuMemcpyBatchAsync cuMemcpyBatchAsync_v2 cuMemcpyHtoD_v2 cuMemcpyDtoH_v2 cuMemsetD8Async cuMemsetD8_v2
    cuStreamCreate cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamSynchronize cuStreamQuery cuStreamWaitEvent
    cuStreamIsCapturing cuStreamWaitValue64_v2 cuStreamWriteValue64_v2 cuLaunchHostFunc
    cuEventCreate cuEventDestroy_v2 cuEventRecord cuEventQuery cuEventSynchronize
    cuModuleLoadData cuModuleUnload cuModuleGetFunction cuFuncLoad cuFuncGetParamInfo cuLaunchKernel
    cuStreamBeginCapture_v2 cuStreamEndCapture cuGraphInstantiateWithFlags cuGraphLaunch
    cuGraphExecDestroy cuGraphDestroy
}
