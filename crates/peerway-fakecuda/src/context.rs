//! The primary contexts, and the current context of each thread.
//!
//! A context exists while it is retained. The last release destroys everything that was created in
//! it: streams, events, modules, `cuMemAlloc` memory, pinned memory, and memory opened by IPC.

use std::cell::RefCell;
use std::ffi::{c_int, c_uint};
use std::ptr;

use peerway_sys::cuda::ffi::*;

use crate::calls::{Answer, call, call_in_context, put, valid};
use crate::device::Device;
use crate::errors::CONTEXT_IS_DESTROYED;
use crate::machine::Machine;
use crate::{host, lock};

/// The first number of a context handle. All other handles have larger numbers.
const FIRST: usize = 0x1000;

fn handle(device: &Device) -> CUcontext {
    ptr::without_provenance_mut(FIRST + 16 * device.index as usize)
}

fn device_of(machine: &Machine, context: CUcontext) -> Option<&Device> {
    machine.devices.iter().find(|device| handle(device) == context)
}

thread_local! {
    /// The contexts that this thread has pushed; the last one is current.
    static STACK: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

fn top() -> Option<u32> {
    STACK.with_borrow(|stack| stack.last().copied())
}

/// The device whose context is current in this thread.
pub(crate) fn current(machine: &Machine) -> Result<&Device, CUresult> {
    let index = top().ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    let device = machine.device(index.cast_signed())?;
    if *lock(&device.held) == 0 {
        return Err(CONTEXT_IS_DESTROYED);
    }
    Ok(device)
}

/// The context that pointers of a device belong to.
pub(crate) fn of_device(machine: &Machine, index: u32) -> CUcontext {
    machine.devices.get(index as usize).map_or(ptr::null_mut(), handle)
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(
    context: *mut CUcontext,
    device: CUdevice,
) -> CUresult {
    call("cuDevicePrimaryCtxRetain", |machine| {
        let device = machine.device(device)?;
        // SAFETY: by the pointers contract.
        unsafe { put(context, handle(device)) }?;
        *lock(&device.held) += 1;
        Ok(())
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> CUresult {
    call("cuDevicePrimaryCtxRelease_v2", |machine| {
        let device = machine.device(device)?;
        let mut held = lock(&device.held);
        *held = held.checked_sub(1).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        if *held == 0 {
            tear_down(machine, device);
        }
        Ok(())
    })
}

fn tear_down(machine: &'static Machine, device: &Device) {
    let mut streams = machine.streams.take(|stream| stream.device.index == device.index);
    streams.extend(lock(&device.null_stream).take());
    for stream in streams {
        stream.close();
    }
    machine.events.take(|event| event.device == device.index);
    machine.functions.take(|function| function.device == device.index);
    machine.modules.take(|module| module.device == device.index);
    let unpinned = lock(&machine.space).leave(machine, device.index);
    for pinned in unpinned {
        host::give_back(pinned);
    }
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxGetState(
    device: CUdevice,
    flags: *mut c_uint,
    active: *mut c_int,
) -> CUresult {
    call("cuDevicePrimaryCtxGetState", |machine| {
        let held = *lock(&machine.device(device)?.held);
        // SAFETY: by the pointers contract.
        unsafe {
            put(flags, 0)?;
            put(active, (held > 0).into())
        }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPushCurrent_v2(context: CUcontext) -> CUresult {
    call("cuCtxPushCurrent_v2", |machine| {
        let device = usable(machine, context)?;
        STACK.with_borrow_mut(|stack| stack.push(device));
        Ok(())
    })
}

fn usable(machine: &Machine, context: CUcontext) -> Result<u32, CUresult> {
    let device = device_of(machine, context).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    if *lock(&device.held) == 0 {
        return Err(CUDA_ERROR_INVALID_CONTEXT);
    }
    Ok(device.index)
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut CUcontext) -> CUresult {
    call("cuCtxPopCurrent_v2", |machine| {
        let popped = STACK.with_borrow_mut(Vec::pop).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        let popped = of_device(machine, popped);
        if !context.is_null() {
            // SAFETY: by the pointers contract.
            unsafe { context.write(popped) };
        }
        Ok(())
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut CUcontext) -> CUresult {
    call("cuCtxGetCurrent", |machine| {
        let found = top().map_or(ptr::null_mut(), |index| of_device(machine, index));
        // SAFETY: by the pointers contract.
        unsafe { put(context, found) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetCurrent(context: CUcontext) -> CUresult {
    call("cuCtxSetCurrent", |machine| {
        let device = if context.is_null() { None } else { Some(usable(machine, context)?) };
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            stack.extend(device);
        });
        Ok(())
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSynchronize() -> CUresult {
    call_in_context("cuCtxSynchronize", |machine, device| {
        drain(machine, device)?;
        device.failed()
    })
}

/// Waits for all work in the streams of a device. Calls in which a real driver may wait also wait
/// here. A program that makes such a call while a stream waits for the program hangs here as well.
pub(crate) fn drain(machine: &Machine, device: &Device) -> Answer {
    let mut streams = machine.streams.all();
    streams.retain(|stream| stream.device.index == device.index);
    streams.extend(lock(&device.null_stream).clone());
    // A capturing stream has no pending work.
    streams.iter().try_for_each(|stream| match stream.synchronize() {
        Err(error) if (900..=907).contains(&error) => Ok(()),
        other => other,
    })
}

/// There is nothing to flush: writes to device memory take effect at once.
///
/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFlushGPUDirectRDMAWrites(target: c_uint, scope: c_uint) -> CUresult {
    call_in_context("cuFlushGPUDirectRDMAWrites", |_, device| {
        valid(target == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX)?;
        valid(scope == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER || scope == TO_ALL_DEVICES)?;
        device.failed()
    })
}

const TO_ALL_DEVICES: c_uint = 200;

/// Fails if a call names an object of another context than the current one.
pub(crate) fn same(device: &Device, other: u32) -> Answer {
    if device.index == other { Ok(()) } else { Err(crate::errors::INVALID_HANDLE) }
}
