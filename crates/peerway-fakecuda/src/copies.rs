//! Copies and fills.
//!
//! Where CUDA documents a copy with pageable memory as synchronous for the host, it is. A call that
//! copies into such memory waits for the copy. A call that copies from it reads the bytes before it
//! returns. A call with pinned memory does not wait, and the stream reads the bytes when it reaches
//! the copy.

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
/// The caller keeps the contract of CUDA.
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

/// The signature of CUDA 12.8. It does all copies in the order of the list, although CUDA
/// guarantees no order.
///
/// # Safety
///
/// The caller keeps the contract of CUDA.
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
        // SAFETY: by the pointers contract. `usize::MAX` means that no particular copy failed.
        unsafe { failed.write(usize::MAX) };
        // SAFETY: by this function's contract.
        let batch = unsafe { Batch::read(to, from, sizes, count, attributes, firsts, sets) }?;
        batch.submit(machine, device, stream).map_err(|(at, code)| {
            // SAFETY: by the pointers contract.
            unsafe { failed.write(at) };
            code
        })
    })
}

/// The signature since CUDA 13.0.
///
/// # Safety
///
/// The caller keeps the contract of CUDA.
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
    /// The pointers are null, or point to lists of the given lengths.
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
        // Each set needs an access order for the sources. The sets start at the first copy, in
        // ascending order.
        valid(attributes.iter().all(|set| (1..=3).contains(&set.srcAccessOrder)))?;
        valid(firsts[0] == 0 && firsts.is_sorted_by(|one, next| one < next))?;
        // SAFETY: by this function's contract.
        unsafe {
            Ok(Self {
                to: std::slice::from_raw_parts(to, count),
                from: std::slice::from_raw_parts(from, count),
                sizes: std::slice::from_raw_parts(sizes, count),
            })
        }
    }

    /// Submits the copies. The error names the copy that failed, and the code.
    fn submit(
        &self,
        machine: &'static Machine,
        device: &'static Device,
        stream: CUstream,
    ) -> Result<(), (usize, CUresult)> {
        // CUDA refuses the default streams here.
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
/// The caller keeps the contract of CUDA.
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
/// The caller keeps the contract of CUDA.
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
/// The caller keeps the contract of CUDA.
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
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8_v2(at: CUdeviceptr, value: u8, len: usize) -> CUresult {
    call_in_context("cuMemsetD8_v2", |machine, device| {
        let stream = machine.stream(device, std::ptr::null_mut())?;
        let number = stream.submit(Work::Fill { at, value, len: len as u64 })?;
        stream.wait(number)
    })
}

/// Reads pageable memory. An address that is not mapped gives an invalid value instead of a crash.
fn read_host(address: u64, len: usize) -> Result<Arc<[u8]>, CUresult> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    bytes.resize(len, 0u8);
    valid(transfer(address as usize, bytes.as_mut_ptr(), len, Way::Read))?;
    Ok(bytes.into())
}

/// Writes to pageable memory. Returns false if it is not mapped.
pub(crate) fn write_host(address: usize, from: *mut u8, len: usize) -> bool {
    transfer(address, from, len, Way::Write)
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Way {
    Read,
    Write,
}

/// Copies between memory of this library and memory of the program, through the kernel, which
/// checks that the latter is mapped.
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
        // SAFETY: `ours` is valid memory of the caller. The kernel checks the other address.
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
        // A sandbox forbids the call. Trust the program instead.
        let (from, to) = match way {
            Way::Read => (theirs, ours),
            Way::Write => (ours, theirs),
        };
        // SAFETY: by the pointers contract, the program's memory is mapped.
        unsafe { std::ptr::copy(from.wrapping_add(done), to.wrapping_add(done), len - done) };
        return true;
    }
    true
}
