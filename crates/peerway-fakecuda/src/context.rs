//! The primary contexts, and which of them is current in a thread.
//!
//! A context is there while it is held. With the last hold goes all that was made in it: streams,
//! events, modules, `cuMemAlloc` memory, pinned memory and what was opened by IPC.

use std::cell::RefCell;
use std::ffi::{c_int, c_uint};
use std::ptr;

use peerway_sys::cuda::ffi::*;

use crate::calls::{Answer, call, call_in_context, put, valid};
use crate::device::Device;
use crate::errors::CONTEXT_IS_DESTROYED;
use crate::machine::Machine;
use crate::{host, lock};

/// Contexts are numbers from here on; below all other handles.
const FIRST: usize = 0x1000;

fn handle(device: &Device) -> CUcontext {
    ptr::without_provenance_mut(FIRST + 16 * device.index as usize)
}

fn device_of(machine: &Machine, context: CUcontext) -> Option<&Device> {
    machine.devices.iter().find(|device| handle(device) == context)
}

thread_local! {
    /// The contexts that this thread made current, the current one last.
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
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(
    context: *mut CUcontext,
    device: CUdevice,
) -> CUresult {
    call("cuDevicePrimaryCtxRetain", |machine| {
        let device = machine.device(device)?;
        // SAFETY: the caller's, to be filled.
        unsafe { put(context, handle(device)) }?;
        *lock(&device.held) += 1;
        Ok(())
    })
}

/// # Safety
///
/// As CUDA documents it.
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
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxGetState(
    device: CUdevice,
    flags: *mut c_uint,
    active: *mut c_int,
) -> CUresult {
    call("cuDevicePrimaryCtxGetState", |machine| {
        let held = *lock(&machine.device(device)?.held);
        // SAFETY: the caller's, to be filled.
        unsafe {
            put(flags, 0)?;
            put(active, (held > 0).into())
        }
    })
}

/// # Safety
///
/// As CUDA documents it.
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
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut CUcontext) -> CUresult {
    call("cuCtxPopCurrent_v2", |machine| {
        let popped = STACK.with_borrow_mut(Vec::pop).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        let popped = of_device(machine, popped);
        if !context.is_null() {
            // SAFETY: the caller's, to be filled.
            unsafe { context.write(popped) };
        }
        Ok(())
    })
}

/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut CUcontext) -> CUresult {
    call("cuCtxGetCurrent", |machine| {
        let found = top().map_or(ptr::null_mut(), |index| of_device(machine, index));
        // SAFETY: the caller's, to be filled.
        unsafe { put(context, found) }
    })
}

/// # Safety
///
/// As CUDA documents it.
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
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSynchronize() -> CUresult {
    call_in_context("cuCtxSynchronize", |machine, device| {
        drain(machine, device)?;
        device.failed()
    })
}

/// Waits for everything in the streams of a device. Calls that a GPU's driver may wait in do so too, so that who makes one
/// of them while a stream waits for it hangs here as there.
pub(crate) fn drain(machine: &Machine, device: &Device) -> Answer {
    let mut streams = machine.streams.all();
    streams.retain(|stream| stream.device.index == device.index);
    streams.extend(lock(&device.null_stream).clone());
    // One that is captured into has nothing under way.
    streams.iter().try_for_each(|stream| match stream.synchronize() {
        Err(error) if (900..=907).contains(&error) => Ok(()),
        other => other,
    })
}

/// There is nothing to wait for: who writes into device memory does so at once.
///
/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFlushGPUDirectRDMAWrites(target: c_uint, scope: c_uint) -> CUresult {
    call_in_context("cuFlushGPUDirectRDMAWrites", |_, device| {
        valid(target == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX)?;
        valid(scope == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER || scope == TO_ALL_DEVICES)?;
        device.failed()
    })
}

const TO_ALL_DEVICES: c_uint = 200;

/// The answer where a call names something of another context than the current one.
pub(crate) fn same(device: &Device, other: u32) -> Answer {
    if device.index == other { Ok(()) } else { Err(crate::errors::INVALID_HANDLE) }
}
