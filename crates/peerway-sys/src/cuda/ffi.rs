//! `<cuda.h>` in Rust, with the header's names.
//!
//! NVIDIA's driver API reference documents it. Handles are opaque pointers.
#![allow(missing_docs, non_camel_case_types)]

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::layout::{c_constants, c_types};

pub type CUresult = c_int;
pub type CUdevice = c_int;
pub type CUdeviceptr = u64;
pub type CUcontext = *mut c_void;
pub type CUstream = *mut c_void;
pub type CUevent = *mut c_void;
pub type CUmodule = *mut c_void;
pub type CUfunction = *mut c_void;
pub type CUmemGenericAllocationHandle = u64;
pub type CUhostFn = unsafe extern "C" fn(*mut c_void);

c_types! {
    Exact struct CUuuid = "CUuuid" {
        bytes: [c_char; 16],
    }

    Exact struct CUipcMemHandle = "CUipcMemHandle" {
        reserved: [c_char; 64],
    }

    Exact struct CUmemFabricHandle = "CUmemFabricHandle" {
        data: [u8; 64],
    }

    Exact struct CUmemLocation = "CUmemLocation" {
        type_ = "type": c_uint,
        id: c_int,
    }

    Exact struct CUmemAllocationFlags = "__typeof__(((CUmemAllocationProp *)0)->allocFlags)" {
        compressionType: u8,
        gpuDirectRDMACapable: u8,
        usage: u16,
        reserved: [u8; 4],
    }

    Exact struct CUmemAllocationProp = "CUmemAllocationProp" {
        type_ = "type": c_uint,
        requestedHandleTypes: c_uint,
        location: CUmemLocation,
        win32HandleMetaData: *mut c_void,
        allocFlags: CUmemAllocationFlags,
    }

    Exact struct CUmemAccessDesc = "CUmemAccessDesc" {
        location: CUmemLocation,
        flags: c_uint,
    }

    Exact struct CUmemcpyAttributes = "CUmemcpyAttributes" {
        srcAccessOrder: c_uint,
        srcLocHint: CUmemLocation,
        dstLocHint: CUmemLocation,
        flags: c_uint,
    }
}

c_constants! {
    CUDA_SUCCESS: CUresult = 0;
    CUDA_ERROR_INVALID_VALUE: CUresult = 1;
    CUDA_ERROR_OUT_OF_MEMORY: CUresult = 2;
    CUDA_ERROR_NOT_INITIALIZED: CUresult = 3;
    CUDA_ERROR_DEINITIALIZED: CUresult = 4;
    CUDA_ERROR_NO_DEVICE: CUresult = 100;
    CUDA_ERROR_INVALID_DEVICE: CUresult = 101;
    CUDA_ERROR_INVALID_CONTEXT: CUresult = 201;
    CUDA_ERROR_ILLEGAL_ADDRESS: CUresult = 700;
    CUDA_ERROR_NOT_FOUND: CUresult = 500;
    CUDA_ERROR_NOT_READY: CUresult = 600;
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED: CUresult = 712;
    CUDA_ERROR_NOT_PERMITTED: CUresult = 800;
    CUDA_ERROR_NOT_SUPPORTED: CUresult = 801;
    CUDA_ERROR_UNKNOWN: CUresult = 999;

    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: c_uint = 16;
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: c_uint = 75;
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: c_uint = 76;
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: c_uint = 102;
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: c_uint = 103;
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: c_uint = 110;
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: c_uint = 116;
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: c_uint = 118;
    CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: c_uint = 124;
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED newer: c_uint = 128;
    CU_DEVICE_ATTRIBUTE_MPS_ENABLED newer: c_uint = 133;
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID newer: c_uint = 134;

    CU_POINTER_ATTRIBUTE_MEMORY_TYPE: c_uint = 2;
    CU_POINTER_ATTRIBUTE_DEVICE_POINTER: c_uint = 3;
    CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: c_uint = 6;
    CU_POINTER_ATTRIBUTE_BUFFER_ID: c_uint = 7;
    CU_POINTER_ATTRIBUTE_IS_MANAGED: c_uint = 8;
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: c_uint = 9;
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: c_uint = 10;
    CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: c_uint = 11;
    CU_POINTER_ATTRIBUTE_RANGE_SIZE: c_uint = 12;
    CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: c_uint = 14;

    CU_MEMORYTYPE_HOST: c_uint = 1;
    CU_MEMORYTYPE_DEVICE: c_uint = 2;

    CU_MEM_ALLOCATION_TYPE_PINNED: c_uint = 1;
    CU_MEM_LOCATION_TYPE_DEVICE: c_uint = 1;
    CU_MEM_HANDLE_TYPE_NONE: c_uint = 0;
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_uint = 1;
    CU_MEM_HANDLE_TYPE_FABRIC newer: c_uint = 8;
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE: c_uint = 3;
    CU_MEM_ALLOC_GRANULARITY_MINIMUM: c_uint = 0;
    CU_MEM_ALLOC_GRANULARITY_RECOMMENDED: c_uint = 1;
    CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD: c_uint = 1;
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
    CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: c_uint = 100;
    CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX: c_uint = 0;
    CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER: c_uint = 100;

    CU_MEMHOSTALLOC_PORTABLE: c_uint = 1;
    CU_MEMHOSTALLOC_DEVICEMAP: c_uint = 2;
    CU_MEMHOSTREGISTER_PORTABLE: c_uint = 1;
    CU_MEMHOSTREGISTER_DEVICEMAP: c_uint = 2;
    CU_MEMHOSTREGISTER_READ_ONLY: c_uint = 8;

    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM newer: c_uint = 1;
    CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE newer: c_uint = 1;

    CU_STREAM_NON_BLOCKING: c_uint = 1;
    CU_STREAM_CAPTURE_STATUS_NONE: c_uint = 0;
    CU_STREAM_CAPTURE_STATUS_ACTIVE: c_uint = 1;
    CU_STREAM_WAIT_VALUE_GEQ: c_uint = 0;
    CU_EVENT_BLOCKING_SYNC: c_uint = 1;
    CU_EVENT_DISABLE_TIMING: c_uint = 2;
}
