//! The error numbers, their names and their texts.

use std::ffi::{CStr, c_char};

use peerway_sys::cuda::ffi::*;

use crate::calls::{call_before_init, put};

// Error numbers that only this library names.
pub(crate) const INVALID_PTX: CUresult = 218;
pub(crate) const INVALID_HANDLE: CUresult = 400;
pub(crate) const CONTEXT_IS_DESTROYED: CUresult = 709;
pub(crate) const HOST_MEMORY_NOT_REGISTERED: CUresult = 713;
pub(crate) const CAPTURE_UNSUPPORTED: CUresult = 900;
pub(crate) const CAPTURE_INVALIDATED: CUresult = 901;
pub(crate) const CAPTURE_MERGE: CUresult = 902;
pub(crate) const CAPTURE_UNMATCHED: CUresult = 903;
pub(crate) const CAPTURE_UNJOINED: CUresult = 904;
pub(crate) const CAPTURE_ISOLATION: CUresult = 905;
pub(crate) const CAPTURED_EVENT: CUresult = 907;

const WORDS: &[(CUresult, &CStr, &CStr)] = &[
    (CUDA_SUCCESS, c"CUDA_SUCCESS", c"no error"),
    (CUDA_ERROR_INVALID_VALUE, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (CUDA_ERROR_OUT_OF_MEMORY, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (CUDA_ERROR_NOT_INITIALIZED, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (CUDA_ERROR_DEINITIALIZED, c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
    (CUDA_ERROR_NO_DEVICE, c"CUDA_ERROR_NO_DEVICE", c"no device is detected"),
    (CUDA_ERROR_INVALID_DEVICE, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (CUDA_ERROR_INVALID_CONTEXT, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (INVALID_PTX, c"CUDA_ERROR_INVALID_PTX", c"a PTX text could not be compiled"),
    (INVALID_HANDLE, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (CUDA_ERROR_NOT_FOUND, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (CUDA_ERROR_NOT_READY, c"CUDA_ERROR_NOT_READY", c"not ready"),
    (CUDA_ERROR_ILLEGAL_ADDRESS, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access"),
    (CONTEXT_IS_DESTROYED, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed"),
    (
        CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
        c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        c"part or all of the memory is already registered",
    ),
    (
        HOST_MEMORY_NOT_REGISTERED,
        c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        c"the pointer does not belong to registered memory",
    ),
    (CUDA_ERROR_NOT_PERMITTED, c"CUDA_ERROR_NOT_PERMITTED", c"operation not permitted"),
    (CUDA_ERROR_NOT_SUPPORTED, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (
        CAPTURE_UNSUPPORTED,
        c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        c"not permitted while the stream is capturing",
    ),
    (
        CAPTURE_INVALIDATED,
        c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        c"an earlier error invalidated the capture",
    ),
    (CAPTURE_MERGE, c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"the call would merge two captures"),
    (
        CAPTURE_UNMATCHED,
        c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
        c"the capture began on another stream",
    ),
    (
        CAPTURE_UNJOINED,
        c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
        c"the capture has a branch that was not joined",
    ),
    (
        CAPTURE_ISOLATION,
        c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        c"the capture would depend on uncaptured work",
    ),
    (CAPTURED_EVENT, c"CUDA_ERROR_CAPTURED_EVENT", c"the event was recorded in a capture"),
    (CUDA_ERROR_UNKNOWN, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(error: CUresult, name: *mut *const c_char) -> CUresult {
    call_before_init("cuGetErrorName", || words(error, name, |known| known.1))
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(error: CUresult, text: *mut *const c_char) -> CUresult {
    call_before_init("cuGetErrorString", || words(error, text, |known| known.2))
}

fn words(
    error: CUresult,
    out: *mut *const c_char,
    pick: fn(&(CUresult, &'static CStr, &'static CStr)) -> &'static CStr,
) -> Result<(), CUresult> {
    let known = WORDS.iter().find(|known| known.0 == error);
    // SAFETY: by the pointers contract.
    unsafe { put(out, known.map_or(std::ptr::null(), |known| pick(known).as_ptr())) }?;
    known.map(|_| ()).ok_or(CUDA_ERROR_INVALID_VALUE)
}
