//! The devices, and the queries about them.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use peerway_sys::cuda::ffi::*;

use crate::calls::{Answer, call, call_in_context, put, valid};
use crate::machine::Machine;
use crate::script::{Mode, Script};
use crate::stream::Stream;

/// One GPU, with its primary context.
pub(crate) struct Device {
    pub(crate) index: u32,
    /// How often its context is retained. The context exists while this is not zero.
    pub(crate) held: Mutex<u32>,
    /// The NULL stream of the context, once it has been used.
    pub(crate) null_stream: Mutex<Option<Arc<Stream>>>,
    /// The error that its context failed with. It stays until the process ends, as on a GPU.
    failed: AtomicI32,
    /// Bytes of its memory that are allocated.
    used: AtomicU64,
}

impl Device {
    pub(crate) fn new(index: u32) -> Self {
        Self {
            index,
            held: Mutex::new(0),
            null_stream: Mutex::new(None),
            failed: AtomicI32::new(CUDA_SUCCESS),
            used: AtomicU64::new(0),
        }
    }

    pub(crate) fn ordinal(&self) -> CUdevice {
        self.index.cast_signed()
    }

    /// Fails if the context has failed, with that error.
    pub(crate) fn failed(&self) -> Answer {
        // Pairs with the store in `fail`: a thread that sees the error also sees what was done
        // before it.
        match self.failed.load(Ordering::Acquire) {
            CUDA_SUCCESS => Ok(()),
            code => Err(code),
        }
    }

    /// Fails its context with an error. The first error stays.
    pub(crate) fn fail(&self, code: CUresult) {
        // Pairs with the load in `failed`.
        let (release, relaxed) = (Ordering::Release, Ordering::Relaxed);
        let _ = self.failed.compare_exchange(CUDA_SUCCESS, code, release, relaxed);
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Allocates memory of the device, if enough is left.
    pub(crate) fn take(&self, bytes: u64, script: &Script) -> Answer {
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= script.memory);
        // This counter orders no other memory accesses.
        let relaxed = Ordering::Relaxed;
        let taken = self.used.try_update(relaxed, relaxed, fits);
        taken.map(|_| ()).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
    }

    pub(crate) fn give_back(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// The same in every process.
    fn uuid(&self) -> [u8; 16] {
        let mut bytes = *b"Peerway-FakeGPU\0";
        bytes[15] = self.index as u8;
        bytes
    }

    fn bus(&self) -> u32 {
        0x0a + self.index
    }
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> CUresult {
    call("cuDeviceGetCount", |machine| {
        // SAFETY: by the pointers contract.
        unsafe { put(count, machine.devices.len() as c_int) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> CUresult {
    call("cuDeviceGet", |machine| {
        let found = machine.device(ordinal)?.ordinal();
        // SAFETY: by the pointers contract.
        unsafe { put(device, found) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(
    name: *mut c_char,
    len: c_int,
    device: CUdevice,
) -> CUresult {
    call("cuDeviceGetName", |machine| {
        let text = format!("Fake GPU {}", machine.device(device)?.index);
        // SAFETY: by the pointers contract, `name` has space for `len` bytes.
        unsafe { put_text(name, len, &text) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetPCIBusId(
    name: *mut c_char,
    len: c_int,
    device: CUdevice,
) -> CUresult {
    call("cuDeviceGetPCIBusId", |machine| {
        let text = format!("0000:{:02X}:00.0", machine.device(device)?.bus());
        // SAFETY: by the pointers contract, `name` has space for `len` bytes.
        unsafe { put_text(name, len, &text) }
    })
}

/// Copies as much of the text as fits, with a terminating zero.
///
/// # Safety
///
/// `out` is null, or has space for `len` bytes.
unsafe fn put_text(out: *mut c_char, len: c_int, text: &str) -> Answer {
    let room = usize::try_from(len).unwrap_or(0);
    valid(room > 0 && !out.is_null())?;
    for (at, byte) in text.bytes().take(room - 1).chain([0]).enumerate() {
        // SAFETY: by this function's contract; the loop writes at most `room` bytes.
        unsafe { out.add(at).write(byte.cast_signed()) };
    }
    Ok(())
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice) -> CUresult {
    call("cuDeviceGetUuid_v2", |machine| {
        let bytes = machine.device(device)?.uuid().map(|byte| byte as c_char);
        // SAFETY: by the pointers contract.
        unsafe { put(uuid, CUuuid { bytes }) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) -> CUresult {
    call("cuDeviceTotalMem_v2", |machine| {
        machine.device(device)?;
        // SAFETY: by the pointers contract.
        unsafe { put(bytes, machine.script.memory as usize) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult {
    call_in_context("cuMemGetInfo_v2", |machine, device| {
        let memory = machine.script.memory;
        // SAFETY: by the pointers contract.
        unsafe {
            put(free, (memory - device.used()) as usize)?;
            put(total, memory as usize)
        }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: u32,
    device: CUdevice,
) -> CUresult {
    call("cuDeviceGetAttribute", |machine| {
        let found = attribute_of(machine, machine.device(device)?, attribute)?;
        // SAFETY: by the pointers contract.
        unsafe { put(value, found) }
    })
}

// Attributes that only this file names.
const MAX_THREADS_PER_BLOCK: u32 = 1;
const WARP_SIZE: u32 = 10;
const CAN_MAP_HOST_MEMORY: u32 = 19;
const PCI_BUS: u32 = 33;
const MAX_THREADS_PER_MULTIPROCESSOR: u32 = 39;
const ASYNC_ENGINES: u32 = 40;
const UNIFIED_ADDRESSING: u32 = 41;
const HOST_POINTER_FOR_REGISTERED: u32 = 91;
const HOST_REGISTER: u32 = 99;
const STREAM_MEM_OPS_64: u32 = 122;
const WAIT_VALUE_NOR: u32 = 123;
/// The last attribute of CUDA 13.
const LAST_ATTRIBUTE: u32 = 147;

fn attribute_of(machine: &Machine, device: &Device, attribute: u32) -> Result<c_int, CUresult> {
    let Script { vmm, rdma_vmm, dmabuf, ordered, fd, fabric, .. } = machine.script;
    Ok(match attribute {
        MAX_THREADS_PER_BLOCK => 1024,
        WARP_SIZE => 32,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 8,
        PCI_BUS => device.bus().cast_signed(),
        MAX_THREADS_PER_MULTIPROCESSOR => 2048,
        ASYNC_ENGINES => 2,
        CAN_MAP_HOST_MEMORY | UNIFIED_ADDRESSING | HOST_POINTER_FOR_REGISTERED => 1,
        HOST_REGISTER | STREAM_MEM_OPS_64 | WAIT_VALUE_NOR => 1,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => 0,
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED => vmm.into(),
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED => {
            (vmm && fd != Mode::Unsupported).into()
        }
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED => (vmm && rdma_vmm).into(),
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED => 1,
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING if ordered => {
            CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER.cast_signed()
        }
        CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED => dmabuf.into(),
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED => {
            (vmm && fabric != Mode::Unsupported).into()
        }
        CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID => 0,
        _ if (1..=LAST_ATTRIBUTE).contains(&attribute) => 0,
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    })
}
