//! Queries about pointers.

use std::ffi::{c_int, c_uint, c_void};

use peerway_sys::cuda::ffi::*;

use crate::calls::{Answer, call, call_in_context, put, valid};
use crate::machine::Machine;
use crate::space::{Kind, Space};
use crate::{context, lock};

// Attributes that only this file names.
const CONTEXT: c_uint = 1;
const DEVICE_POINTER: c_uint = 3;
const HOST_POINTER: c_uint = 4;
const MAPPED: c_uint = 13;
const IS_RDMA_CAPABLE: c_uint = 15;
const ACCESS_FLAGS: c_uint = 16;
const MAPPING_SIZE: c_uint = 18;
const MAPPING_BASE: c_uint = 19;

/// The device of an unknown pointer, according to CUDA.
const NO_DEVICE: c_int = -2;

/// The facts about a pointer. An unknown pointer has none.
#[derive(Debug)]
struct Facts {
    memory_type: c_uint,
    device: Option<u32>,
    id: u64,
    /// The allocation, or the reservation that the address is in.
    range: (u64, u64),
    /// The mapping that the address is in.
    mapping: (u64, u64),
    mapped: bool,
    legacy_ipc: bool,
    types: u32,
    rdma: bool,
    access: c_uint,
}

impl Facts {
    fn of(space: &Space, pointer: u64) -> Self {
        let mut facts = Self {
            memory_type: 0,
            device: None,
            id: 0,
            range: (0, 0),
            mapping: (0, 0),
            mapped: false,
            legacy_ipc: false,
            types: 0,
            rdma: false,
            access: 0,
        };
        if let Some((start, mapping)) = space.mapping_at(pointer) {
            let name = &mapping.physical.name;
            facts.memory_type = CU_MEMORYTYPE_DEVICE;
            facts.device = Some(name.device);
            facts.id = mapping.id;
            facts.mapping = (start, mapping.size);
            facts.range = facts.mapping;
            facts.mapped = true;
            facts.legacy_ipc = matches!(mapping.kind, Kind::Plain { .. });
            facts.rdma = name.rdma;
            let bit = 1 << name.device;
            let rights = [(mapping.readers, 1), (mapping.writers, 2)];
            facts.access =
                rights.iter().map(|(who, flag)| if who & bit != 0 { *flag } else { 0 }).sum();
            if matches!(mapping.kind, Kind::Mapped) {
                facts.types = name.types;
            }
        } else if let Some(pinned) = space.pinned_at(pointer, 1) {
            facts.memory_type = CU_MEMORYTYPE_HOST;
            facts.device = Some(pinned.device);
            facts.id = pinned.id;
            facts.range = (pinned.address(), pinned.len as u64);
            facts.mapping = facts.range;
            facts.mapped = true;
            facts.access = 3;
        }
        if let Some(reservation) = space.reservation_at(pointer) {
            facts.range = reservation;
        }
        facts
    }

    /// Writes an attribute, in its own type.
    ///
    /// # Safety
    ///
    /// `out` is null, or valid for a write of the attribute's type.
    unsafe fn put(
        &self,
        machine: &Machine,
        attribute: c_uint,
        pointer: u64,
        out: *mut c_void,
    ) -> Answer {
        let ordinal = self.device.map_or(NO_DEVICE, |device| device.cast_signed());
        let is_host = self.memory_type == CU_MEMORYTYPE_HOST;
        let context =
            self.device.map_or(std::ptr::null_mut(), |device| context::of_device(machine, device));
        let flag = |so: bool| c_int::from(so);
        // SAFETY: by this function's contract.
        unsafe {
            match attribute {
                CONTEXT => put(out.cast::<CUcontext>(), context),
                CU_POINTER_ATTRIBUTE_MEMORY_TYPE => put(out.cast(), self.memory_type),
                DEVICE_POINTER => put(out.cast(), if self.mapped { pointer } else { 0 }),
                HOST_POINTER => put(out.cast(), if is_host { pointer } else { 0 }),
                CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => put(out.cast(), flag(false)),
                CU_POINTER_ATTRIBUTE_BUFFER_ID => put(out.cast(), self.id),
                CU_POINTER_ATTRIBUTE_IS_MANAGED => put(out.cast(), flag(false)),
                CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => put(out.cast(), ordinal),
                CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => {
                    put(out.cast(), flag(self.legacy_ipc))
                }
                CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => put(out.cast(), self.range.0),
                CU_POINTER_ATTRIBUTE_RANGE_SIZE => put(out.cast(), self.range.1),
                MAPPED => put(out.cast(), flag(self.mapped)),
                CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => put(out.cast(), u64::from(self.types)),
                IS_RDMA_CAPABLE => put(out.cast(), flag(self.rdma)),
                ACCESS_FLAGS => put(out.cast(), self.access),
                MAPPING_SIZE => put(out.cast(), self.mapping.1),
                MAPPING_BASE => put(out.cast(), self.mapping.0),
                _ => Err(CUDA_ERROR_INVALID_VALUE),
            }
        }
    }
}

/// Works for any pointer: an unknown one has zeros, and the device -2. No context is needed.
///
/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    attributes: *mut c_uint,
    data: *mut *mut c_void,
    pointer: CUdeviceptr,
) -> CUresult {
    call("cuPointerGetAttributes", |machine| {
        valid(count > 0 && !attributes.is_null() && !data.is_null())?;
        let facts = Facts::of(&lock(&machine.space), pointer);
        for index in 0..count as usize {
            // SAFETY: by the pointers contract, both arrays have `count` entries, and each entry of
            // `data` has space for its attribute.
            unsafe {
                let (attribute, out) = (attributes.add(index).read(), data.add(index).read());
                facts.put(machine, attribute, pointer, out)?;
            }
        }
        Ok(())
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerSetAttribute(
    value: *const c_void,
    attribute: c_uint,
    pointer: CUdeviceptr,
) -> CUresult {
    call("cuPointerSetAttribute", |machine| {
        valid(!value.is_null() && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)?;
        valid(lock(&machine.space).mapping_at(pointer).is_some())
    })
}

/// The allocation that an address is in; for `cuMemCreate` memory, the mapping.
///
/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: *mut CUdeviceptr,
    size: *mut usize,
    pointer: CUdeviceptr,
) -> CUresult {
    call_in_context("cuMemGetAddressRange_v2", |machine, _| {
        let facts = Facts::of(&lock(&machine.space), pointer);
        if !facts.mapped {
            return Err(CUDA_ERROR_NOT_FOUND);
        }
        // SAFETY: by the pointers contract; each pointer may be null.
        unsafe {
            if !base.is_null() {
                put(base, facts.mapping.0)?;
            }
            if !size.is_null() {
                put(size, facts.mapping.1 as usize)?;
            }
        }
        Ok(())
    })
}
