//! Graphs: captured work that every launch puts on a stream.

use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use peerway_sys::cuda::ffi::*;

use crate::calls::{call_in_context, call_to_give_back, put, valid};
use crate::work::Work;

/// Work in execution order.
#[derive(Debug)]
pub(crate) struct Graph {
    work: Vec<Work>,
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint) -> CUresult {
    call_in_context("cuStreamBeginCapture_v2", |machine, _| {
        valid(mode <= 2)?;
        // The NULL stream has no handle, so it is refused.
        machine.streams.get(stream)?.begin_capture()
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(stream: CUstream, graph: *mut *mut c_void) -> CUresult {
    call_in_context("cuStreamEndCapture", |machine, _| {
        // SAFETY: by the pointers contract.
        unsafe { put(graph, std::ptr::null_mut()) }?;
        let work = machine.streams.get(stream)?.end_capture()?;
        let made = machine.graphs.add(Arc::new(Graph { work }));
        // SAFETY: by the pointers contract.
        unsafe { put(graph, made) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    executable: *mut *mut c_void,
    graph: *mut c_void,
    _flags: u64,
) -> CUresult {
    call_in_context("cuGraphInstantiateWithFlags", |machine, _| {
        valid(!executable.is_null())?;
        let made = machine.executables.add(machine.graphs.get(graph)?);
        // SAFETY: by the pointers contract.
        unsafe { put(executable, made) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphLaunch(executable: *mut c_void, stream: CUstream) -> CUresult {
    call_in_context("cuGraphLaunch", |machine, device| {
        let graph = machine.executables.get(executable)?;
        machine.stream(device, stream)?.submit_all(graph.work.clone())
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphExecDestroy(executable: *mut c_void) -> CUresult {
    call_to_give_back("cuGraphExecDestroy", |machine| {
        machine.executables.remove(executable).map(drop)
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphDestroy(graph: *mut c_void) -> CUresult {
    call_to_give_back("cuGraphDestroy", |machine| machine.graphs.remove(graph).map(drop))
}
