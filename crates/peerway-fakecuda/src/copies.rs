//! Copies and fills.
//!
//! Where CUDA says that a copy with pageable memory is synchronous for the host, it is: into such
//! memory the call waits for the copy, and out of it the bytes are taken at the call. With pinned
//! memory nothing is waited for, and the bytes are those that are there when the stream comes to it.

use std::ffi::c_void;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use peerway_sys::cuda::ffi::*;

use crate::calls::{Answer, call_in_context, valid};
use crate::errors::CAPTURE_UNSUPPORTED;
use crate::lock;
use crate::machine::Machine;
use crate::stream::Stream;
use crate::work::{Source, Target, Work};

/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyAsync(
    to: CUdeviceptr,
    from: CUdeviceptr,
    len: usize,
    stream: CUstream,
) -> CUresult {
    call_in_context("cuMemcpyAsync", |machine, device| {
        copy(machine, &machine.stream(device, stream)?, to, from, len, false)
    })
}

/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(
    to: CUdeviceptr,
    from: *const c_void,
    len: usize,
) -> CUresult {
    call_in_context("cuMemcpyHtoD_v2", |machine, device| {
        let stream = machine.stream(device, std::ptr::null_mut())?;
        copy(machine, &stream, to, from.addr() as u64, len, true)
    })
}

/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(
    to: *mut c_void,
    from: CUdeviceptr,
    len: usize,
) -> CUresult {
    call_in_context("cuMemcpyDtoH_v2", |machine, device| {
        let stream = machine.stream(device, std::ptr::null_mut())?;
        copy(machine, &stream, to.addr() as u64, from, len, true)
    })
}

fn copy(
    machine: &Machine,
    stream: &Arc<Stream>,
    to: u64,
    from: u64,
    len: usize,
    synchronous: bool,
) -> Answer {
    if len == 0 {
        return Ok(());
    }
    let (into_pageable, from_pageable) = {
        let space = lock(&machine.space);
        let pageable = |address: u64| {
            !space.arena.contains(address) && space.pinned_at(address, len as u64).is_none()
        };
        (pageable(to), pageable(from))
    };
    if (into_pageable || from_pageable) && stream.is_capturing() {
        return Err(CAPTURE_UNSUPPORTED);
    }
    let from = if from_pageable { Source::Bytes(read_host(from, len)?) } else { Source::Gpu(from) };
    let answer = Arc::new(AtomicI32::new(CUDA_SUCCESS));
    let to = if into_pageable {
        Target::Pageable(to as usize, Arc::clone(&answer))
    } else {
        Target::Gpu(to)
    };
    let number = stream.submit(Work::Copy { to, from, len: len as u64 })?;
    if synchronous || into_pageable {
        stream.wait(number)?;
    }
    match answer.load(Ordering::Relaxed) {
        CUDA_SUCCESS => Ok(()),
        code => Err(code),
    }
}

/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(
    at: CUdeviceptr,
    value: u8,
    len: usize,
    stream: CUstream,
) -> CUresult {
    call_in_context("cuMemsetD8Async", |machine, device| {
        let work = Work::Fill { at, value, len: len as u64 };
        machine.stream(device, stream)?.submit(work).map(drop)
    })
}

/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8_v2(at: CUdeviceptr, value: u8, len: usize) -> CUresult {
    call_in_context("cuMemsetD8_v2", |machine, device| {
        let stream = machine.stream(device, std::ptr::null_mut())?;
        let number = stream.submit(Work::Fill { at, value, len: len as u64 })?;
        stream.wait(number)
    })
}

/// What is in pageable memory. Memory that is not there is an invalid value and no crash.
fn read_host(address: u64, len: usize) -> Result<Arc<[u8]>, CUresult> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    bytes.resize(len, 0u8);
    valid(transfer(address as usize, bytes.as_mut_ptr(), len, Way::Read))?;
    Ok(bytes.into())
}

/// Writes into pageable memory. False where it is not there.
pub(crate) fn write_host(address: usize, from: *mut u8, len: usize) -> bool {
    transfer(address, from, len, Way::Write)
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Way {
    Read,
    Write,
}

/// Copies between memory of this library and memory of the program, through the kernel, which looks
/// whether the latter is there.
fn transfer(address: usize, ours: *mut u8, len: usize, way: Way) -> bool {
    let process = std::process::id().cast_signed();
    let theirs: *mut u8 = std::ptr::with_exposed_provenance_mut(address);
    let mut done = 0;
    while done < len {
        let part = |start: *mut u8| libc::iovec {
            iov_base: start.wrapping_add(done).cast(),
            iov_len: len - done,
        };
        let (local, remote) = (part(ours), part(theirs));
        // SAFETY: our side is memory of the caller of this function; the other may be anything.
        let count = unsafe {
            match way {
                Way::Read => libc::process_vm_readv(process, &local, 1, &remote, 1, 0),
                Way::Write => libc::process_vm_writev(process, &local, 1, &remote, 1, 0),
            }
        };
        if count > 0 {
            done += count.cast_unsigned();
            continue;
        }
        if io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT) {
            return false;
        }
        // A sandbox that does not allow the call: the program's word has to do.
        let (from, to) = match way {
            Way::Read => (theirs, ours),
            Way::Write => (ours, theirs),
        };
        // SAFETY: the program says that its memory is there.
        unsafe { std::ptr::copy(from.wrapping_add(done), to.wrapping_add(done), len - done) };
        return true;
    }
    true
}
