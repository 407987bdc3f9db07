//! Errors of the CUDA driver.

use std::ffi::{CStr, c_char};
use std::fmt;

use super::ffi::*;

/// A call of the CUDA driver that failed.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct CudaError {
    /// The function of the library.
    pub call: &'static str,
    /// The index of the GPU, if the call concerned one.
    pub device: Option<u32>,
    /// The driver's error code.
    pub code: i32,
    /// The name of the error, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: String,
    /// The driver's description of the error.
    pub text: String,
}

impl CudaError {
    pub(super) fn new(
        call: &'static str,
        device: Option<u32>,
        code: i32,
        name: *const c_char,
        text: *const c_char,
    ) -> Self {
        let words = |pointer: *const c_char, or: &str| {
            if pointer.is_null() {
                return or.to_owned();
            }
            // SAFETY: the driver returned the pointer from `cuGetErrorName` or `cuGetErrorString`,
            // and it never frees these strings.
            unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
        };
        let (name, text) = (words(name, "an unknown error"), words(text, "no description"));
        Self { call, device, code, name, text }
    }

    /// The error for a call that this driver does not have.
    pub(super) fn missing(call: &'static str, device: Option<u32>) -> Self {
        let (name, text) = ("CUDA_ERROR_NOT_SUPPORTED".into(), "the driver is too old".into());
        Self { call, device, code: CUDA_ERROR_NOT_SUPPORTED, name, text }
    }

    /// Whether the GPU's memory is full.
    pub fn is_out_of_memory(&self) -> bool {
        self.code == CUDA_ERROR_OUT_OF_MEMORY
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, device, code, name, text } = self;
        match device {
            Some(device) => write!(f, "{call} on GPU {device}: {text} ({name}, {code})"),
            None => write!(f, "{call}: {text} ({name}, {code})"),
        }
    }
}

impl std::error::Error for CudaError {}
