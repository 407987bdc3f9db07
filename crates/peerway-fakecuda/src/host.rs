//! Host memory that a GPU can access: allocated as pinned, or registered later.
//!
//! Running copies keep it alive: releasing it waits for the copies that have begun.

use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use peerway_sys::cuda::ffi::*;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::calls::{Answer, call_in_context, call_to_give_back, put, valid};
use crate::device::Device;
use crate::errors::HOST_MEMORY_NOT_REGISTERED;
use crate::lock;
use crate::machine::Machine;
use crate::physical::next_id;

const PAGE: usize = 4096;

/// A range of pinned memory.
#[derive(Debug)]
pub(crate) struct Pinned {
    /// The allocation's identifier.
    pub(crate) id: u64,
    /// The device in whose context it was pinned.
    pub(crate) device: u32,
    pub(crate) start: *mut u8,
    pub(crate) len: usize,
    /// Whether this library allocated it; otherwise the program registered it.
    made: bool,
}

// SAFETY: the memory does not belong to a thread, and only raw copies access it.
unsafe impl Send for Pinned {}
// SAFETY: as for `Send`.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn address(&self) -> u64 {
        self.start.addr() as u64
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.made {
            // SAFETY: `make` created the mapping, and no `Arc` of this value is left.
            let _ = unsafe { munmap(self.start.cast(), self.len.next_multiple_of(PAGE)) };
        }
    }
}

/// Releases pinned memory that was removed from the table: waits for copies that have begun. They
/// always end, because no thread waits for anything while it holds memory.
pub(crate) fn give_back(pinned: Arc<Pinned>) {
    while Arc::strong_count(&pinned) > 1 {
        std::thread::sleep(Duration::from_micros(20));
    }
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(
    pointer: *mut *mut c_void,
    len: usize,
    flags: c_uint,
) -> CUresult {
    call_in_context("cuMemHostAlloc", |machine, device| {
        // The flags portable, mapped and write-combined.
        valid(flags & !7 == 0)?;
        crate::context::drain(machine, device)?;
        make(machine, device, pointer, len)
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocHost_v2(pointer: *mut *mut c_void, len: usize) -> CUresult {
    call_in_context("cuMemAllocHost_v2", |machine, device| make(machine, device, pointer, len))
}

fn make(machine: &Machine, device: &Device, pointer: *mut *mut c_void, len: usize) -> Answer {
    valid(len > 0 && !pointer.is_null())?;
    let size = len.checked_next_multiple_of(PAGE).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: without MAP_FIXED, mmap creates a new mapping and touches no existing one.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), size, rights, MapFlags::PRIVATE) };
    let start = start.map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    let (id, device) = (next_id(), device.index);
    let pinned = Pinned { id, device, start: start.cast(), len, made: true };
    lock(&machine.space).pinned.insert(pinned.address(), Arc::new(pinned));
    // SAFETY: by the pointers contract.
    unsafe { put(pointer, start) }
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(pointer: *mut c_void) -> CUresult {
    call_to_give_back("cuMemFreeHost", |machine| {
        take(machine, pointer, true, CUDA_ERROR_INVALID_VALUE)
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA, and keeps the memory mapped until it is unregistered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostRegister_v2(
    pointer: *mut c_void,
    len: usize,
    flags: c_uint,
) -> CUresult {
    call_in_context("cuMemHostRegister_v2", |machine, device| {
        // The flags portable, mapped, I/O memory and read-only.
        valid(len > 0 && flags & !15 == 0)?;
        crate::context::drain(machine, device)?;
        let (address, size) = (pointer.addr() as u64, len as u64);
        let end = address.checked_add(size).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let mut space = lock(&machine.space);
        valid(!space.arena.touches(address, size) && is_mapped(pointer, len))?;
        let before = space.pinned.range(..end).next_back();
        if before.is_some_and(|(start, pinned)| start + pinned.len as u64 > address) {
            return Err(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
        let start = pointer.cast::<u8>();
        let pinned = Pinned { id: next_id(), device: device.index, start, len, made: false };
        space.pinned.insert(address, Arc::new(pinned));
        Ok(())
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostUnregister(pointer: *mut c_void) -> CUresult {
    call_to_give_back("cuMemHostUnregister", |machine| {
        take(machine, pointer, false, HOST_MEMORY_NOT_REGISTERED)
    })
}

fn take(machine: &Machine, pointer: *mut c_void, made: bool, or: CUresult) -> Answer {
    let mut space = lock(&machine.space);
    let address = pointer.addr() as u64;
    if space.pinned.get(&address).is_none_or(|pinned| pinned.made != made) {
        return Err(or);
    }
    let pinned = space.pinned.remove(&address);
    drop(space);
    if let Some(pinned) = pinned {
        give_back(pinned);
    }
    Ok(())
}

/// Whether a whole range is mapped.
fn is_mapped(pointer: *mut c_void, len: usize) -> bool {
    let within = pointer.addr() % PAGE;
    let start = pointer.wrapping_byte_sub(within);
    let size = len.saturating_add(within);
    let mut pages = vec![0u8; size.div_ceil(PAGE).min(1 << 16)];
    // In steps, so that the result fits into `pages`.
    (0..size).step_by(PAGE << 16).all(|at| {
        let count = (size - at).min(PAGE << 16);
        // SAFETY: mincore writes one byte per page to `pages`, which has that much space. It fails
        // for a range that is not mapped.
        unsafe { libc::mincore(start.wrapping_byte_add(at), count, pages.as_mut_ptr()) == 0 }
    })
}
