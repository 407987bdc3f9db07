//! Device memory: a memfd, and the mapping through which this process accesses it.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use peerway_sys::cuda::ffi::*;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::machine::{Machine, machine_if_any};
use crate::memfd::{self, Name, What};

/// A piece of device memory. It lives as long as a handle, a mapping or a running copy holds it.
#[derive(Debug)]
pub(crate) struct Physical {
    /// A number that no other allocation of this process has or had.
    pub(crate) id: u64,
    pub(crate) name: Name,
    pub(crate) fd: OwnedFd,
    pub(crate) size: u64,
    /// The address of the bytes. Streams and other processes read and write them at any time, so
    /// they are accessed only through raw pointers.
    shadow: *mut u8,
    /// The number of bytes to return to the device's account on drop.
    taken: u64,
}

// SAFETY: the pointer refers to a mapping that belongs to no thread and lives as long as the value.
// Only raw copies access the bytes. As on a GPU, the program has to order them.
unsafe impl Send for Physical {}
// SAFETY: as for `Send`.
unsafe impl Sync for Physical {}

impl Physical {
    /// Creates memory of a device. `charged` bytes are taken from the device's account now. The
    /// caller accounts for the rest.
    pub(crate) fn create(
        machine: &Machine,
        name: Name,
        size: u64,
        charged: u64,
    ) -> Result<Self, CUresult> {
        let device = machine.device(name.device.cast_signed())?;
        device.take(charged, &machine.script)?;
        let made = memfd::create(name, size).and_then(|fd| Self::map(fd, name, size, charged));
        made.ok_or_else(|| {
            device.give_back(charged);
            CUDA_ERROR_OUT_OF_MEMORY
        })
    }

    /// Maps memory of another process, or of this one again.
    pub(crate) fn import(fd: OwnedFd, name: Name) -> Result<Self, CUresult> {
        let size = memfd::len(fd.as_fd()).filter(|size| *size > 0);
        size.and_then(|size| Self::map(fd, name, size, 0)).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    fn map(fd: OwnedFd, name: Name, size: u64, taken: u64) -> Option<Self> {
        let len = usize::try_from(size).ok()?;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without MAP_FIXED, mmap creates a new mapping and touches no existing one.
        let shadow =
            unsafe { mmap(ptr::null_mut(), len, rights, MapFlags::SHARED, &fd, 0) }.ok()?;
        Some(Self { id: next_id(), name, fd, size, shadow: shadow.cast(), taken })
    }

    /// The address of `len` bytes at `offset`.
    pub(crate) fn place(&self, offset: u64, len: u64) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.size));
        self.shadow.wrapping_add(offset as usize)
    }

    /// A name for new memory.
    pub(crate) fn name(what: What, device: u32, types: u32, rdma: bool) -> Result<Name, CUresult> {
        let nonce = memfd::nonce().ok_or(CUDA_ERROR_UNKNOWN)?;
        Ok(Name { what, device, types, rdma, nonce })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: `map` created the mapping. Every user of a pointer into it holds an `Arc` of this
        // value, so none is left.
        let _ = unsafe { munmap(self.shadow.cast(), self.size as usize) };
        if let Some(device) =
            machine_if_any().and_then(|machine| machine.devices.get(self.name.device as usize))
        {
            device.give_back(self.taken);
        }
    }
}

/// A unique number for an allocation.
pub(crate) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // The numbers order no other memory accesses.
    NEXT.fetch_add(1, Ordering::Relaxed)
}
