//! Virtual memory management: physical memory, address ranges, and mappings of one to the other.

use std::collections::HashSet;
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use peerway_sys::cuda::ffi::*;

use crate::arena::GRANULE;
use crate::calls::{Answer, call, put, valid};
use crate::lock;
use crate::machine::Machine;
use crate::memfd::What;
use crate::physical::Physical;
use crate::space::{Held, Kind, Mapping, Space};

/// Fails if the machine has no virtual memory management.
pub(crate) fn supported(machine: &Machine) -> Answer {
    if machine.script.vmm { Ok(()) } else { Err(CUDA_ERROR_NOT_SUPPORTED) }
}

/// Checks the properties of an allocation against the machine's features, and returns them.
fn check(
    machine: &Machine,
    prop: *const CUmemAllocationProp,
) -> Result<CUmemAllocationProp, CUresult> {
    valid(!prop.is_null())?;
    // SAFETY: by the pointers contract.
    let prop = unsafe { prop.read() };
    let device_memory = prop.type_ == CU_MEM_ALLOCATION_TYPE_PINNED
        && prop.location.type_ == CU_MEM_LOCATION_TYPE_DEVICE;
    valid(device_memory && prop.allocFlags.compressionType == 0)?;
    machine.device(prop.location.id)?;
    let types = prop.requestedHandleTypes;
    let known = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC;
    if types & !known != 0 {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    Ok(prop)
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAllocationGranularity(
    granularity: *mut usize,
    prop: *const CUmemAllocationProp,
    option: c_uint,
) -> CUresult {
    call("cuMemGetAllocationGranularity", |machine| {
        supported(machine)?;
        valid(option <= CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)?;
        check(machine, prop)?;
        // SAFETY: by the pointers contract.
        unsafe { put(granularity, GRANULE as usize) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemCreate(
    handle: *mut CUmemGenericAllocationHandle,
    size: usize,
    prop: *const CUmemAllocationProp,
    flags: u64,
) -> CUresult {
    call("cuMemCreate", |machine| {
        supported(machine)?;
        let prop = check(machine, prop)?;
        let size = size as u64;
        valid(flags == 0 && size > 0 && size.is_multiple_of(GRANULE) && !handle.is_null())?;
        let types = prop.requestedHandleTypes;
        if types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0 {
            machine.script.fd.allowed()?;
        }
        if types & CU_MEM_HANDLE_TYPE_FABRIC != 0 {
            machine.script.fabric.allowed()?;
        }
        let rdma = prop.allocFlags.gpuDirectRDMACapable != 0;
        if rdma && !machine.script.rdma_vmm {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let device = prop.location.id.cast_unsigned();
        let name = Physical::name(What::Created, device, types, rdma)?;
        let physical = Physical::create(machine, name, size, size)?;
        let number = lock(&machine.space).hold(Arc::new(physical));
        // SAFETY: by the pointers contract.
        unsafe { put(handle, number) }
    })
}

impl Space {
    /// Gives the program a handle of memory, or counts one that it already has.
    pub(crate) fn hold(&mut self, physical: Arc<Physical>) -> CUmemGenericAllocationHandle {
        let id = physical.id;
        self.handles.entry(id).or_insert(Held { physical, count: 0 }).count += 1;
        id
    }

    /// The memory of a handle.
    pub(crate) fn held(
        &self,
        handle: CUmemGenericAllocationHandle,
    ) -> Result<&Arc<Physical>, CUresult> {
        let held = self.handles.get(&handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        Ok(&held.physical)
    }

    /// The number of `cuMemCreate` allocations that have a handle or are mapped.
    pub(crate) fn created(&self) -> usize {
        let mapped = self.mappings.values().filter(|mapping| matches!(mapping.kind, Kind::Mapped));
        let ids = mapped.map(|mapping| mapping.physical.id);
        ids.chain(self.handles.keys().copied()).collect::<HashSet<_>>().len()
    }

    /// The starts of the mappings that together form exactly this range.
    fn mapped_within(&self, address: u64, size: u64) -> Result<Vec<u64>, CUresult> {
        let wrong = CUDA_ERROR_INVALID_VALUE;
        let end = address.checked_add(size).filter(|_| size > 0).ok_or(wrong)?;
        let mut at = address;
        let mut starts = Vec::new();
        while at < end {
            let mapping = self.mappings.get(&at).ok_or(wrong)?;
            valid(matches!(mapping.kind, Kind::Mapped) && at + mapping.size <= end)?;
            starts.push(at);
            at += mapping.size;
        }
        Ok(starts)
    }
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemRelease(handle: CUmemGenericAllocationHandle) -> CUresult {
    call("cuMemRelease", |machine| {
        supported(machine)?;
        let mut space = lock(&machine.space);
        let held = space.handles.get_mut(&handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        held.count -= 1;
        if held.count == 0 {
            space.handles.remove(&handle);
        }
        Ok(())
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemRetainAllocationHandle(
    handle: *mut CUmemGenericAllocationHandle,
    address: *mut c_void,
) -> CUresult {
    call("cuMemRetainAllocationHandle", |machine| {
        supported(machine)?;
        valid(!handle.is_null())?;
        let mut space = lock(&machine.space);
        let found = space.mapping_at(address.addr() as u64);
        let mapped = found.filter(|(_, mapping)| matches!(mapping.kind, Kind::Mapped));
        let (_, mapping) = mapped.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let physical = Arc::clone(&mapping.physical);
        let number = space.hold(physical);
        // SAFETY: by the pointers contract.
        unsafe { put(handle, number) }
    })
}

/// The requested address is ignored, which CUDA allows.
///
/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAddressReserve(
    pointer: *mut CUdeviceptr,
    size: usize,
    alignment: usize,
    _address: CUdeviceptr,
    flags: u64,
) -> CUresult {
    call("cuMemAddressReserve", |machine| {
        supported(machine)?;
        let size = size as u64;
        valid(!pointer.is_null() && flags == 0 && size > 0 && size.is_multiple_of(GRANULE))?;
        valid(alignment == 0 || alignment.is_power_of_two())?;
        let mut space = lock(&machine.space);
        let start = space.arena.reserve(size, (alignment as u64).max(1));
        let start = start.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        space.reservations.insert(start, size);
        // SAFETY: by the pointers contract.
        unsafe { put(pointer, start) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAddressFree(pointer: CUdeviceptr, size: usize) -> CUresult {
    call("cuMemAddressFree", |machine| {
        supported(machine)?;
        let mut space = lock(&machine.space);
        let size = size as u64;
        valid(space.reservations.get(&pointer) == Some(&size))?;
        valid(space.mappings.range(pointer..pointer + size).next().is_none())?;
        space.reservations.remove(&pointer);
        space.arena.release(pointer, size);
        Ok(())
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemMap(
    pointer: CUdeviceptr,
    size: usize,
    offset: usize,
    handle: CUmemGenericAllocationHandle,
    flags: u64,
) -> CUresult {
    call("cuMemMap", |machine| {
        supported(machine)?;
        let mut space = lock(&machine.space);
        let physical = Arc::clone(space.held(handle)?);
        let size = size as u64;
        valid(size > 0 && size <= physical.size && offset == 0 && flags == 0)?;
        valid(size.is_multiple_of(GRANULE) && pointer.is_multiple_of(GRANULE))?;
        let found = space.reservation_at(pointer).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let end = pointer.checked_add(size).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let free = space.mapping_at(pointer).is_none()
            && space.mappings.range(pointer..end).next().is_none();
        valid(end <= found.0 + found.1 && free)?;
        let (id, kind) = (physical.id, Kind::Mapped);
        let mapping = Mapping { size, physical, offset: 0, id, readers: 0, writers: 0, kind };
        space.mappings.insert(pointer, mapping);
        Ok(())
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemUnmap(pointer: CUdeviceptr, size: usize) -> CUresult {
    call("cuMemUnmap", |machine| {
        supported(machine)?;
        let mut space = lock(&machine.space);
        for start in space.mapped_within(pointer, size as u64)? {
            space.remove(machine, start);
        }
        Ok(())
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemSetAccess(
    pointer: CUdeviceptr,
    size: usize,
    descs: *const CUmemAccessDesc,
    count: usize,
) -> CUresult {
    call("cuMemSetAccess", |machine| {
        supported(machine)?;
        valid(!descs.is_null() && count > 0)?;
        let mut space = lock(&machine.space);
        let starts = space.mapped_within(pointer, size as u64)?;
        for index in 0..count {
            // SAFETY: by the pointers contract, the array has `count` entries.
            let desc = unsafe { descs.add(index).read() };
            valid(desc.location.type_ == CU_MEM_LOCATION_TYPE_DEVICE)?;
            let bit = 1 << machine.device(desc.location.id)?.index;
            let (read, write) = match desc.flags {
                0 => (0, 0),
                1 => (bit, 0),
                CU_MEM_ACCESS_FLAGS_PROT_READWRITE => (bit, bit),
                _ => return Err(CUDA_ERROR_INVALID_VALUE),
            };
            for start in &starts {
                if let Some(mapping) = space.mappings.get_mut(start) {
                    mapping.readers = mapping.readers & !bit | read;
                    mapping.writers = mapping.writers & !bit | write;
                }
            }
        }
        Ok(())
    })
}
