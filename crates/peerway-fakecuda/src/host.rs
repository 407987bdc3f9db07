//! Host memory that a GPU reaches: made pinned, or pinned later.
//!
//! It stays for the copies that are under way: giving it back waits for those that have begun.

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
    /// The number of the allocation.
    pub(crate) id: u64,
    /// The device in whose context it was pinned.
    pub(crate) device: u32,
    pub(crate) start: *mut u8,
    pub(crate) len: usize,
    /// Whether it was made here, and not registered.
    made: bool,
}

// SAFETY: the memory is not tied to a thread, and touched by raw copies only.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn address(&self) -> u64 {
        self.start.addr() as u64
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.made {
            // SAFETY: mapped by `make`, and nobody has a hold on it any more.
            let _ = unsafe { munmap(self.start.cast(), self.len.next_multiple_of(PAGE)) };
        }
    }
}

/// Lets go of pinned memory that is out of the table: waits for copies that have begun. They end by
/// themselves, as nothing is waited for while memory is held.
pub(crate) fn give_back(pinned: Arc<Pinned>) {
    while Arc::strong_count(&pinned) > 1 {
        std::thread::sleep(Duration::from_micros(20));
    }
}

/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(
    pointer: *mut *mut c_void,
    len: usize,
    flags: c_uint,
) -> CUresult {
    call_in_context("cuMemHostAlloc", |machine, device| {
        // Portable, mapped, write-combined.
        valid(flags & !7 == 0)?;
        crate::context::drain(machine, device)?;
        make(machine, device, pointer, len)
    })
}

/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocHost_v2(pointer: *mut *mut c_void, len: usize) -> CUresult {
    call_in_context("cuMemAllocHost_v2", |machine, device| make(machine, device, pointer, len))
}

fn make(machine: &Machine, device: &Device, pointer: *mut *mut c_void, len: usize) -> Answer {
    valid(len > 0 && !pointer.is_null())?;
    let size = len.checked_next_multiple_of(PAGE).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, wherever there is room.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), size, rights, MapFlags::PRIVATE) };
    let start = start.map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    let (id, device) = (next_id(), device.index);
    let pinned = Pinned { id, device, start: start.cast(), len, made: true };
    lock(&machine.space).pinned.insert(pinned.address(), Arc::new(pinned));
    // SAFETY: the caller's, to be filled.
    unsafe { put(pointer, start) }
}

/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(pointer: *mut c_void) -> CUresult {
    call_to_give_back("cuMemFreeHost", |machine| {
        take(machine, pointer, true, CUDA_ERROR_INVALID_VALUE)
    })
}

/// # Safety
///
/// As CUDA documents it; the memory stays until it is unregistered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostRegister_v2(
    pointer: *mut c_void,
    len: usize,
    flags: c_uint,
) -> CUresult {
    call_in_context("cuMemHostRegister_v2", |machine, device| {
        // Portable, mapped, of a device, only to read.
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
/// As CUDA documents it.
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

/// Whether there is memory in all of a range.
fn is_mapped(pointer: *mut c_void, len: usize) -> bool {
    let within = pointer.addr() % PAGE;
    let start = pointer.wrapping_byte_sub(within);
    let size = len.saturating_add(within);
    let mut pages = vec![0u8; size.div_ceil(PAGE).min(1 << 16)];
    // In steps, so that the answer has room.
    (0..size).step_by(PAGE << 16).all(|at| {
        let count = (size - at).min(PAGE << 16);
        // SAFETY: writes a byte for each page into a place with room for that; a range that is not
        // mapped is an error.
        unsafe { libc::mincore(start.wrapping_byte_add(at), count, pages.as_mut_ptr()) == 0 }
    })
}
