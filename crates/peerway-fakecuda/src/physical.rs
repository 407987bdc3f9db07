//! Device memory itself: a memfd, and where this process has mapped it to work on it.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use peerway_sys::cuda::ffi::*;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::machine::{Machine, machine_if_any};
use crate::memfd::{self, Name, What};

/// A piece of device memory. It is there as long as a handle, a mapping or a running copy holds it.
#[derive(Debug)]
pub(crate) struct Physical {
    /// Which no other allocation of this process has or had.
    pub(crate) id: u64,
    pub(crate) name: Name,
    pub(crate) fd: OwnedFd,
    pub(crate) size: u64,
    /// Where the bytes are. Streams, and other processes, read and write them as they like, so they are
    /// touched by pointer only.
    shadow: *mut u8,
    /// What to give back to the device in the end.
    taken: u64,
}

// SAFETY: the pointer is to a mapping that is not tied to a thread and goes with the value; the bytes
// are touched by raw copies only, whose order is the program's business as on a GPU.
unsafe impl Send for Physical {}
// SAFETY: as above.
unsafe impl Sync for Physical {}

impl Physical {
    /// New memory of a device. `charged` is what of it the device has to find now; the rest is
    /// accounted for by who asks.
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

    /// Memory of another process, or of this one again.
    pub(crate) fn import(fd: OwnedFd, name: Name) -> Result<Self, CUresult> {
        let size = memfd::len(fd.as_fd()).filter(|size| *size > 0);
        size.and_then(|size| Self::map(fd, name, size, 0)).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    fn map(fd: OwnedFd, name: Name, size: u64, taken: u64) -> Option<Self> {
        let len = usize::try_from(size).ok()?;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, wherever there is room.
        let shadow =
            unsafe { mmap(ptr::null_mut(), len, rights, MapFlags::SHARED, &fd, 0) }.ok()?;
        Some(Self { id: next_id(), name, fd, size, shadow: shadow.cast(), taken })
    }

    /// Where `len` bytes from `offset` on are.
    pub(crate) fn place(&self, offset: u64, len: u64) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.size));
        self.shadow.wrapping_add(offset as usize)
    }

    /// The name for new memory.
    pub(crate) fn name(what: What, device: u32, types: u32, rdma: bool) -> Result<Name, CUresult> {
        let nonce = memfd::nonce().ok_or(CUDA_ERROR_UNKNOWN)?;
        Ok(Name { what, device, types, rdma, nonce })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nobody has a pointer any more, as all pointers come with a hold.
        let _ = unsafe { munmap(self.shadow.cast(), self.size as usize) };
        if let Some(device) =
            machine_if_any().and_then(|machine| machine.devices.get(self.name.device as usize))
        {
            device.give_back(self.taken);
        }
    }
}

/// A number for an allocation. Never used again.
pub(crate) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Numbers order nothing.
    NEXT.fetch_add(1, Ordering::Relaxed)
}
