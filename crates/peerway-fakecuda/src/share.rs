//! `cuMemCreate` memory for other processes, and memory for NICs.
//!
//! A descriptor handle is a descriptor of the memfd. A fabric handle names memory of another host
//! on real machines. Here it holds the process of this host that has the memfd, and the descriptor.

use std::ffi::{c_uint, c_void};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use peerway_sys::cuda::ffi::*;

use crate::calls::{call, put, valid};
use crate::machine::Machine;
use crate::memfd::{self, Name, What};
use crate::physical::Physical;
use crate::space::Kind;
use crate::{lock, vmm};

const FD: c_uint = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const FABRIC: c_uint = CU_MEM_HANDLE_TYPE_FABRIC;

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemExportToShareableHandle(
    shareable: *mut c_void,
    handle: CUmemGenericAllocationHandle,
    kind: c_uint,
    flags: u64,
) -> CUresult {
    call("cuMemExportToShareableHandle", |machine| {
        vmm::supported(machine)?;
        valid(!shareable.is_null() && flags == 0)?;
        let physical = Arc::clone(lock(&machine.space).held(handle)?);
        valid(physical.name.types & kind != 0)?;
        match kind {
            FD => {
                let fd = physical.fd.try_clone().map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
                // SAFETY: by the pointers contract, `shareable` has space for an int for this kind
                // of handle.
                unsafe { put(shareable.cast(), fd.into_raw_fd()) }
            }
            FABRIC => {
                let data = FabricHandle::of(&physical).encode();
                // SAFETY: by the pointers contract, `shareable` has space for the structure.
                unsafe { put(shareable.cast(), CUmemFabricHandle { data }) }
            }
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemImportFromShareableHandle(
    handle: *mut CUmemGenericAllocationHandle,
    shareable: *mut c_void,
    kind: c_uint,
) -> CUresult {
    call("cuMemImportFromShareableHandle", |machine| {
        vmm::supported(machine)?;
        valid(!handle.is_null())?;
        let (fd, name) = match kind {
            FD => {
                machine.script.fd.allowed()?;
                let number = RawFd::try_from(shareable.addr()).ok();
                number.and_then(memfd::adopt).ok_or(CUDA_ERROR_INVALID_VALUE)?
            }
            FABRIC => {
                machine.script.fabric.allowed()?;
                valid(!shareable.is_null())?;
                // SAFETY: by the pointers contract; any bytes are valid for the structure.
                let bytes = unsafe { shareable.cast::<CUmemFabricHandle>().read_unaligned() }.data;
                FabricHandle::decode(&bytes).and_then(open).ok_or(CUDA_ERROR_INVALID_VALUE)?
            }
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        import(machine, handle, fd, name, kind)
    })
}

fn open(handle: FabricHandle) -> Option<(OwnedFd, Name)> {
    memfd::open(handle.process, handle.fd, handle.nonce)
}

fn import(
    machine: &Machine,
    handle: *mut CUmemGenericAllocationHandle,
    fd: OwnedFd,
    name: Name,
    kind: c_uint,
) -> Result<(), CUresult> {
    valid(name.what == What::Created && name.types & kind != 0)?;
    machine.device(name.device.cast_signed())?;
    let physical = Physical::import(fd, name)?;
    let number = lock(&machine.space).hold(Arc::new(physical));
    // SAFETY: by the pointers contract.
    unsafe { put(handle, number) }
}

/// The contents of the 64 bytes of a fabric handle.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct FabricHandle {
    process: u32,
    fd: RawFd,
    nonce: u64,
}

impl FabricHandle {
    const MAGIC: [u8; 8] = *b"fakefabr";

    fn of(physical: &Physical) -> Self {
        let (process, fd) = (std::process::id(), physical.fd.as_raw_fd());
        Self { process, fd, nonce: physical.name.nonce }
    }

    fn encode(self) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&Self::MAGIC);
        bytes[8..12].copy_from_slice(&self.process.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.fd.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.nonce.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; 64]) -> Option<Self> {
        let rest = bytes.strip_prefix(&Self::MAGIC)?;
        let (process, rest) = rest.split_first_chunk()?;
        let (fd, rest) = rest.split_first_chunk()?;
        let (nonce, _) = rest.split_first_chunk()?;
        let (process, fd) = (u32::from_le_bytes(*process), RawFd::from_le_bytes(*fd));
        Some(Self { process, fd, nonce: u64::from_le_bytes(*nonce) })
    }
}

const PAGE: u64 = 4096;

/// Creates a dma-buf of a range: the memfd, opened again. Its position is the start of the range.
///
/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetHandleForAddressRange(
    handle: *mut c_void,
    pointer: CUdeviceptr,
    size: usize,
    kind: c_uint,
    flags: u64,
) -> CUresult {
    call("cuMemGetHandleForAddressRange", |machine| {
        if !machine.script.dmabuf {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        valid(kind == CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD && flags == 0 && !handle.is_null())?;
        let size = size as u64;
        valid(size > 0 && size.is_multiple_of(PAGE) && pointer.is_multiple_of(PAGE))?;
        let space = lock(&machine.space);
        // The first page of an allocation may start before the allocation does.
        let last = pointer.checked_add(size - 1).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let found = space.mapping_at(pointer).or_else(|| space.mapping_before(last));
        let (start, mapping) = found.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let offset = (mapping.offset + pointer).checked_sub(start);
        let offset = offset.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // Allocations share segments, and therefore also the pages at their ends.
        let end = match mapping.kind {
            Kind::Mapped => mapping.offset + mapping.size,
            _ => mapping.physical.size,
        };
        valid(offset + size <= end)?;
        let fd = memfd::at(&mapping.physical.fd, offset).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        // SAFETY: by the pointers contract, `handle` has space for an int for this kind of handle.
        unsafe { put(handle.cast(), fd.into_raw_fd()) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fabric_handle_is_read_as_it_was_written() {
        let handle = FabricHandle { process: 77, fd: 5, nonce: 0x0123_4567_89ab_cdef };
        assert_eq!(FabricHandle::decode(&handle.encode()), Some(handle));
        assert_eq!(FabricHandle::decode(&[0xff; 64]), None);
    }
}
