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
use crate::device::Device;
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

/// As it was in CUDA 12.8. All of its copies are done in the order of the list, where CUDA promises none.
///
/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyBatchAsync(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    firsts: *mut usize,
    sets: usize,
    failed: *mut usize,
    stream: CUstream,
) -> CUresult {
    call_in_context("cuMemcpyBatchAsync", |machine, device| {
        valid(!failed.is_null())?;
        // SAFETY: the caller's, to be filled: of no copy in particular.
        unsafe { failed.write(usize::MAX) };
        // SAFETY: by this function's contract.
        let batch = unsafe { Batch::read(to, from, sizes, count, attributes, firsts, sets) }?;
        batch.submit(machine, device, stream).map_err(|(at, code)| {
            // SAFETY: as above.
            unsafe { failed.write(at) };
            code
        })
    })
}

/// As it is since CUDA 13.0.
///
/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyBatchAsync_v2(
    to: *const CUdeviceptr,
    from: *const CUdeviceptr,
    sizes: *const usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    firsts: *mut usize,
    sets: usize,
    stream: CUstream,
) -> CUresult {
    call_in_context("cuMemcpyBatchAsync_v2", |machine, device| {
        // SAFETY: by this function's contract.
        let batch = unsafe { Batch::read(to, from, sizes, count, attributes, firsts, sets) }?;
        batch.submit(machine, device, stream).map_err(|(_, code)| code)
    })
}

/// The lists of a batch.
struct Batch<'a> {
    to: &'a [CUdeviceptr],
    from: &'a [CUdeviceptr],
    sizes: &'a [usize],
}

impl Batch<'_> {
    /// # Safety
    ///
    /// The pointers are null, or to lists of so many entries.
    unsafe fn read(
        to: *const CUdeviceptr,
        from: *const CUdeviceptr,
        sizes: *const usize,
        count: usize,
        attributes: *const CUmemcpyAttributes,
        firsts: *const usize,
        sets: usize,
    ) -> Result<Self, CUresult> {
        let lists = !to.is_null() && !from.is_null() && !sizes.is_null();
        valid(lists && !attributes.is_null() && !firsts.is_null())?;
        valid(count > 0 && sets > 0 && sets <= count)?;
        // SAFETY: by this function's contract.
        let (attributes, firsts) = unsafe {
            (std::slice::from_raw_parts(attributes, sets), std::slice::from_raw_parts(firsts, sets))
        };
        // An order for the sources has to be chosen, and the sets begin with the first copy and rise.
        valid(attributes.iter().all(|set| (1..=3).contains(&set.srcAccessOrder)))?;
        valid(firsts[0] == 0 && firsts.is_sorted_by(|one, next| one < next))?;
        // SAFETY: as above.
        unsafe {
            Ok(Self {
                to: std::slice::from_raw_parts(to, count),
                from: std::slice::from_raw_parts(from, count),
                sizes: std::slice::from_raw_parts(sizes, count),
            })
        }
    }

    /// Which copy it failed at, and with what.
    fn submit(
        &self,
        machine: &'static Machine,
        device: &'static Device,
        stream: CUstream,
    ) -> Result<(), (usize, CUresult)> {
        // Not for the default streams.
        let named = valid(stream.addr() > 2).and_then(|()| machine.stream(device, stream));
        let stream = named.map_err(|code| (usize::MAX, code))?;
        if let Some(nothing) = self.sizes.iter().position(|size| *size == 0) {
            return Err((nothing, CUDA_ERROR_INVALID_VALUE));
        }
        let copies = self.to.iter().zip(self.from).zip(self.sizes).enumerate();
        for (at, ((to, from), size)) in copies {
            copy(machine, &stream, *to, *from, *size, false).map_err(|code| (at, code))?;
        }
        Ok(())
    }
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
