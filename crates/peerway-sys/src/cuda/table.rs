//! The functions of libcuda.

use std::ffi::{OsString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::Arc;

use super::error::CudaError;
use super::ffi::*;
use crate::probe::{in_process, load_with};
use crate::symbols::symbol_table;
use crate::{Found, Library, LoadError};

/// A loaded and initialised libcuda.
pub struct Cuda {
    pub(super) symbols: Symbols,
    found: Found,
    version: u32,
    pid: u32,
}

/// Why there is no CUDA driver to call.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NoCuda {
    /// libcuda is missing, or lacks a required function.
    #[error(transparent)]
    Library(#[from] LoadError),
    /// The driver is present but cannot be used.
    #[error("{0}")]
    Driver(#[from] CudaError),
    /// The driver is too old.
    #[error("the NVIDIA driver supports CUDA {}.{}, but Peerway needs {}.{} or later: install a newer driver", found / 1000, found % 1000 / 10, needed / 1000, needed % 1000 / 10)]
    TooOld {
        /// The version from `cuDriverGetVersion`.
        found: u32,
        /// The required version.
        needed: u32,
    },
}

/// CUDA 11.4, the first version with all required functions.
const OLDEST: u32 = 11_040;

impl Cuda {
    /// Opens libcuda, first the file `named`, and initialises it.
    ///
    /// From here on the process is bound to the driver: a forked child cannot use it. Call this
    /// function only when the caller asks for a GPU. It creates no context.
    ///
    /// # Errors
    ///
    /// [`NoCuda`]: no library, no device, or a driver that is too old.
    pub fn load(named: Option<OsString>) -> Result<Arc<Self>, NoCuda> {
        let (found, symbols) = load_with(Library::Cuda, named, Symbols::resolve)?;
        let mut cuda = Self { symbols, found, version: 0, pid: std::process::id() };
        let mut version: c_int = 0;
        // SAFETY: driver contract: the call works before initialisation and writes one int.
        cuda.check("cuDriverGetVersion", None, unsafe {
            (cuda.symbols.cuDriverGetVersion)(&mut version)
        })?;
        cuda.version = version as u32;
        if cuda.version < OLDEST {
            return Err(NoCuda::TooOld { found: cuda.version, needed: OLDEST });
        }
        // SAFETY: driver contract: the flags are zero. Repeated calls are harmless.
        cuda.check("cuInit", None, unsafe { (cuda.symbols.cuInit)(0) })?;
        Ok(Arc::new(cuda))
    }

    /// Whether any code in this process has initialised the driver. Loads and initialises nothing.
    pub fn is_in_use() -> bool {
        type GetCurrent = unsafe extern "C" fn(*mut CUcontext) -> CUresult;
        let Some(address) = in_process(Library::Cuda, c"cuCtxGetCurrent") else { return false };
        let mut context = std::ptr::null_mut();
        // SAFETY: the address is the library's function of this name and type. The call writes one
        // handle or fails.
        let result =
            unsafe { std::mem::transmute::<*mut c_void, GetCurrent>(address)(&mut context) };
        result == CUDA_SUCCESS
    }

    /// The file and the candidates that were skipped before it.
    pub fn found(&self) -> &Found {
        &self.found
    }

    /// The newest CUDA version that the driver supports, as 1000 * major + 10 * minor.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The functions.
    pub fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    /// The number of GPUs that the process sees.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn device_count(&self) -> Result<u32, CudaError> {
        let mut count = 0;
        // SAFETY: driver contract: writes one int.
        let result = unsafe { (self.symbols.cuDeviceGetCount)(&mut count) };
        self.check("cuDeviceGetCount", None, result)?;
        Ok(count as u32)
    }

    /// Whether this process initialised the driver. A forked child did not.
    pub fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Converts a result into an error with the name of the call.
    pub(super) fn check(
        &self,
        call: &'static str,
        device: Option<u32>,
        result: CUresult,
    ) -> Result<(), CudaError> {
        if result == CUDA_SUCCESS {
            return Ok(());
        }
        Err(self.error(call, device, result))
    }

    #[cold]
    pub(super) fn error(
        &self,
        call: &'static str,
        device: Option<u32>,
        result: CUresult,
    ) -> CudaError {
        let mut name: *const c_char = std::ptr::null();
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: driver contract: both calls write null or a pointer to a string that is never
        // freed.
        unsafe {
            (self.symbols.cuGetErrorName)(result, &mut name);
            (self.symbols.cuGetErrorString)(result, &mut text);
        }
        CudaError::new(call, device, result, name, text)
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("found", &self.found).finish_non_exhaustive()
    }
}

symbol_table! {
    /// The functions that libcuda exports and Peerway calls, under the names of their current
    /// versions in the header.
    #[allow(non_snake_case)]
    pub struct Symbols {
        required {
            fn cuInit(c_uint) -> CUresult;
            fn cuDriverGetVersion(*mut c_int) -> CUresult;
            fn cuGetErrorName(CUresult, *mut *const c_char) -> CUresult;
            fn cuGetErrorString(CUresult, *mut *const c_char) -> CUresult;
            fn cuDeviceGetCount(*mut c_int) -> CUresult;
            fn cuDeviceGet(*mut CUdevice, c_int) -> CUresult;
            fn cuDeviceGetName(*mut c_char, c_int, CUdevice) -> CUresult;
            fn cuDeviceGetUuid_v2(*mut CUuuid, CUdevice) -> CUresult;
            fn cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice) -> CUresult;
            fn cuDeviceGetAttribute(*mut c_int, c_uint, CUdevice) -> CUresult;
            fn cuDeviceTotalMem_v2(*mut usize, CUdevice) -> CUresult;
            fn cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice) -> CUresult;
            fn cuDevicePrimaryCtxRelease_v2(CUdevice) -> CUresult;
            fn cuDevicePrimaryCtxGetState(CUdevice, *mut c_uint, *mut c_int) -> CUresult;
            fn cuCtxPushCurrent_v2(CUcontext) -> CUresult;
            fn cuCtxPopCurrent_v2(*mut CUcontext) -> CUresult;
            fn cuCtxGetCurrent(*mut CUcontext) -> CUresult;
            fn cuCtxSynchronize() -> CUresult;
            fn cuPointerGetAttributes(
                c_uint, *mut c_uint, *mut *mut c_void, CUdeviceptr,
            ) -> CUresult;
            fn cuPointerSetAttribute(*const c_void, c_uint, CUdeviceptr) -> CUresult;
            fn cuMemGetAddressRange_v2(*mut CUdeviceptr, *mut usize, CUdeviceptr) -> CUresult;
            fn cuMemAlloc_v2(*mut CUdeviceptr, usize) -> CUresult;
            fn cuMemFree_v2(CUdeviceptr) -> CUresult;
            fn cuMemCreate(
                *mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, u64,
            ) -> CUresult;
            fn cuMemRelease(CUmemGenericAllocationHandle) -> CUresult;
            fn cuMemAddressReserve(
                *mut CUdeviceptr, usize, usize, CUdeviceptr, u64,
            ) -> CUresult;
            fn cuMemAddressFree(CUdeviceptr, usize) -> CUresult;
            fn cuMemMap(
                CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, u64,
            ) -> CUresult;
            fn cuMemUnmap(CUdeviceptr, usize) -> CUresult;
            fn cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize) -> CUresult;
            fn cuMemGetAllocationGranularity(
                *mut usize, *const CUmemAllocationProp, c_uint,
            ) -> CUresult;
            fn cuMemExportToShareableHandle(
                *mut c_void, CUmemGenericAllocationHandle, c_uint, u64,
            ) -> CUresult;
            fn cuMemImportFromShareableHandle(
                *mut CUmemGenericAllocationHandle, *mut c_void, c_uint,
            ) -> CUresult;
            fn cuMemRetainAllocationHandle(
                *mut CUmemGenericAllocationHandle, *mut c_void,
            ) -> CUresult;
            fn cuIpcGetMemHandle(*mut CUipcMemHandle, CUdeviceptr) -> CUresult;
            fn cuIpcOpenMemHandle_v2(*mut CUdeviceptr, CUipcMemHandle, c_uint) -> CUresult;
            fn cuIpcCloseMemHandle(CUdeviceptr) -> CUresult;
            fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> CUresult;
            fn cuMemFreeHost(*mut c_void) -> CUresult;
            fn cuMemHostRegister_v2(*mut c_void, usize, c_uint) -> CUresult;
            fn cuMemHostUnregister(*mut c_void) -> CUresult;
            fn cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, CUstream) -> CUresult;
            fn cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream) -> CUresult;
            fn cuStreamCreate(*mut CUstream, c_uint) -> CUresult;
            fn cuStreamDestroy_v2(CUstream) -> CUresult;
            fn cuStreamSynchronize(CUstream) -> CUresult;
            fn cuStreamWaitEvent(CUstream, CUevent, c_uint) -> CUresult;
            fn cuStreamIsCapturing(CUstream, *mut c_uint) -> CUresult;
            fn cuLaunchHostFunc(CUstream, CUhostFn, *mut c_void) -> CUresult;
            fn cuEventCreate(*mut CUevent, c_uint) -> CUresult;
            fn cuEventDestroy_v2(CUevent) -> CUresult;
            fn cuEventRecord(CUevent, CUstream) -> CUresult;
            fn cuEventQuery(CUevent) -> CUresult;
            fn cuEventSynchronize(CUevent) -> CUresult;
            fn cuModuleLoadData(*mut CUmodule, *const c_void) -> CUresult;
            fn cuModuleUnload(CUmodule) -> CUresult;
            fn cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char) -> CUresult;
            fn cuLaunchKernel(
                CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint,
                CUstream, *mut *mut c_void, *mut *mut c_void,
            ) -> CUresult;
        }
        optional {
            fn cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int) -> CUresult;
            // 12.8; the second to last parameter receives the index of a refused copy
            fn cuMemcpyBatchAsync(
                *mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize,
                *mut CUmemcpyAttributes, *mut usize, usize, *mut usize, CUstream,
            ) -> CUresult;
            // 13.0
            fn cuMemcpyBatchAsync_v2(
                *const CUdeviceptr, *const CUdeviceptr, *const usize, usize,
                *mut CUmemcpyAttributes, *mut usize, usize, CUstream,
            ) -> CUresult;
            // 11.3
            fn cuFlushGPUDirectRDMAWrites(c_uint, c_uint) -> CUresult;
            // 11.7
            fn cuMemGetHandleForAddressRange(
                *mut c_void, CUdeviceptr, usize, c_uint, u64,
            ) -> CUresult;
            // 11.7; earlier versions have another name and other restrictions
            fn cuStreamWaitValue64_v2(CUstream, CUdeviceptr, u64, c_uint) -> CUresult;
            fn cuStreamBeginCapture_v2(CUstream, c_uint) -> CUresult;
            fn cuStreamEndCapture(CUstream, *mut *mut c_void) -> CUresult;
            // 11.4
            fn cuGraphInstantiateWithFlags(*mut *mut c_void, *mut c_void, u64) -> CUresult;
            fn cuGraphLaunch(*mut c_void, CUstream) -> CUresult;
            fn cuGraphExecDestroy(*mut c_void) -> CUresult;
            fn cuGraphDestroy(*mut c_void) -> CUresult;
            // 12.4
            fn cuFuncLoad(CUfunction) -> CUresult;
            fn cuFuncGetParamInfo(CUfunction, usize, *mut usize, *mut usize) -> CUresult;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_without_the_driver_names_every_candidate() {
        match Cuda::load(Some("/nonexistent/libcuda.so.1".into())) {
            Ok(cuda) => assert_eq!(cuda.found().passed_over.len(), 1),
            Err(NoCuda::Library(error)) => {
                assert!(error.to_string().contains("/nonexistent"), "{error}");
            }
            // The machine has a driver but no GPU.
            Err(error) => assert!(error.to_string().contains("cuInit"), "{error}"),
        }
    }
}
