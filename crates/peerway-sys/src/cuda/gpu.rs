//! One GPU, with a reference to its primary context.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use super::error::CudaError;
use super::ffi::*;
use super::table::Cuda;

/// A GPU with a reference to its primary context. The CUDA runtime and frameworks use the same
/// context, so nothing is duplicated. Other GPUs get no context.
pub struct Gpu {
    pub(super) cuda: Arc<Cuda>,
    ordinal: u32,
    device: CUdevice,
    context: CUcontext,
    facts: Facts,
}

/// The constant properties of a GPU.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Facts {
    /// The driver's name for the GPU.
    pub name: String,
    /// Identifies the device on all hosts, independently of its index in a process.
    pub uuid: [u8; 16],
    /// The address on the PCI bus, in lower case: `0000:0a:00.0`.
    pub bus_id: String,
    /// The size of its memory in bytes.
    pub memory: u64,
    /// The compute capability.
    pub capability: (u32, u32),
    /// The number of multiprocessors.
    pub multiprocessors: u32,
    /// The nearest NUMA node of the host.
    pub numa: Option<u32>,
    /// The driver reports support for mapping memory piece by piece (`cuMemCreate`).
    pub vmm: bool,
    /// The driver reports that such memory can be exported as a file descriptor.
    pub posix_fd: bool,
    /// The driver reports that such memory can be exported to a fabric. Only an attempt shows
    /// whether it works.
    pub fabric: bool,
    /// NICs can access its memory.
    pub rdma: bool,
    /// NICs can also access memory from `cuMemCreate`.
    pub rdma_vmm: bool,
    /// Work that starts later sees all earlier NIC writes to the GPU's memory. If false, such
    /// writes must be flushed first.
    pub rdma_ordered: bool,
    /// The memory can be exported as a dma-buf.
    pub dma_buf: bool,
    /// Processes share the GPU through MPS.
    pub mps: bool,
}

// SAFETY: driver contract: a primary context can be made current in any thread.
unsafe impl Send for Gpu {}
// SAFETY: driver contract: the driver takes its own locks.
unsafe impl Sync for Gpu {}

impl Facts {
    /// Reads the properties of the GPU with this index in the process. Creates no context.
    ///
    /// # Errors
    ///
    /// The driver's error, for example for an index without a GPU.
    pub fn of(cuda: &Cuda, ordinal: u32) -> Result<Self, CudaError> {
        let (device, symbols, of) = (device_of(cuda, ordinal)?, &cuda.symbols, Some(ordinal));
        let mut name: [c_char; 128] = [0; 128];
        // SAFETY: driver contract: writes a terminated string of at most 128 bytes.
        let result = unsafe { (symbols.cuDeviceGetName)(name.as_mut_ptr(), 128, device) };
        cuda.check("cuDeviceGetName", of, result)?;
        let mut bus: [c_char; 32] = [0; 32];
        // SAFETY: driver contract: writes a terminated string of at most 32 bytes.
        let result = unsafe { (symbols.cuDeviceGetPCIBusId)(bus.as_mut_ptr(), 32, device) };
        cuda.check("cuDeviceGetPCIBusId", of, result)?;
        let mut uuid = CUuuid::zeroed();
        // SAFETY: driver contract: writes 16 bytes.
        let result = unsafe { (symbols.cuDeviceGetUuid_v2)(&mut uuid, device) };
        cuda.check("cuDeviceGetUuid", of, result)?;
        let mut memory = 0;
        // SAFETY: driver contract: writes one size.
        let result = unsafe { (symbols.cuDeviceTotalMem_v2)(&mut memory, device) };
        cuda.check("cuDeviceTotalMem", of, result)?;
        // An attribute that an older driver does not know counts as absent.
        let attribute = |which: c_uint| {
            let mut value: c_int = 0;
            // SAFETY: driver contract: writes one int, or nothing.
            let result = unsafe { (symbols.cuDeviceGetAttribute)(&mut value, which, device) };
            (result == CUDA_SUCCESS).then_some(value)
        };
        let number = |which| attribute(which).unwrap_or(0) as u32;
        let yes = |which| attribute(which).is_some_and(|value| value != 0);
        Ok(Self {
            name: text(&name),
            uuid: uuid.bytes.map(|byte| byte as u8),
            bus_id: text(&bus).to_lowercase(),
            memory: memory as u64,
            capability: (
                number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            ),
            multiprocessors: number(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            numa: attribute(CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID).and_then(|id| id.try_into().ok()),
            vmm: yes(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED),
            posix_fd: yes(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
            fabric: yes(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED),
            rdma: yes(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED),
            rdma_vmm: yes(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
            rdma_ordered: number(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)
                >= CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER,
            dma_buf: yes(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED),
            mps: yes(CU_DEVICE_ATTRIBUTE_MPS_ENABLED),
        })
    }
}

impl Gpu {
    /// Takes a reference to a GPU's primary context. Creates the context if it does not exist.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn open(cuda: &Arc<Cuda>, ordinal: u32) -> Result<Arc<Self>, CudaError> {
        let facts = Facts::of(cuda, ordinal)?;
        let device = device_of(cuda, ordinal)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: driver contract: writes one handle, which `drop` releases once.
        let result = unsafe { (cuda.symbols.cuDevicePrimaryCtxRetain)(&mut context, device) };
        cuda.check("cuDevicePrimaryCtxRetain", Some(ordinal), result)?;
        Ok(Arc::new(Self { cuda: cuda.clone(), ordinal, device, context, facts }))
    }

    /// The index of the GPU in this process.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The constant properties.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The driver.
    pub fn cuda(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    /// The error for a call with invalid arguments.
    pub fn refuse(&self, call: &'static str) -> CudaError {
        self.cuda.error(call, Some(self.ordinal), CUDA_ERROR_INVALID_VALUE)
    }

    /// Waits for all work that this process submitted to the GPU.
    ///
    /// # Errors
    ///
    /// The driver's error, for this call or for failed work.
    pub fn drain(&self) -> Result<(), CudaError> {
        self.with(|current| {
            // SAFETY: driver contract: no requirement beyond the current context.
            let result = unsafe { (current.symbols().cuCtxSynchronize)() };
            current.check("cuCtxSynchronize", result)
        })
    }

    /// Waits until the GPU sees all earlier NIC writes to its memory.
    ///
    /// # Errors
    ///
    /// The driver's error. Some drivers do not support the call.
    pub fn flush_rdma_writes(&self) -> Result<(), CudaError> {
        const CALL: &str = "cuFlushGPUDirectRDMAWrites";
        let Some(flush) = self.cuda.symbols.cuFlushGPUDirectRDMAWrites else {
            return Err(CudaError::missing(CALL, Some(self.ordinal)));
        };
        self.with(|current| {
            let target = CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
            // SAFETY: driver contract: the call takes only numbers and acts on the current context.
            let result = unsafe { flush(target, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER) };
            current.check(CALL, result)
        })
    }

    /// Runs `call` with the context current in this thread, and restores the previous context.
    pub(super) fn with<T>(
        &self,
        call: impl FnOnce(&Current<'_>) -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        if !self.cuda.is_ours() {
            return Err(self.cuda.error("fork", Some(self.ordinal), CUDA_ERROR_NOT_INITIALIZED));
        }
        let symbols = &self.cuda.symbols;
        let mut before = std::ptr::null_mut();
        // SAFETY: driver contract: writes one handle.
        unsafe { (symbols.cuCtxGetCurrent)(&mut before) };
        let pushed = before != self.context;
        if pushed {
            // SAFETY: `open` took a reference to the context, and `drop` has not released it.
            let result = unsafe { (symbols.cuCtxPushCurrent_v2)(self.context) };
            self.check("cuCtxPushCurrent", result)?;
        }
        let current = Current { gpu: self, pushed, _thread: PhantomData };
        call(&current)
    }

    /// Converts a result into an error that names this GPU.
    pub(super) fn check(&self, call: &'static str, result: CUresult) -> Result<(), CudaError> {
        self.cuda.check(call, Some(self.ordinal), result)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.cuda.is_ours() {
            // SAFETY: `open` took one reference. All users of the context hold this `Gpu`, so none
            // is left.
            unsafe { (self.cuda.symbols.cuDevicePrimaryCtxRelease_v2)(self.device) };
        }
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({}, {})", self.ordinal, self.facts.name)
    }
}

/// A context that is current in this thread.
pub(super) struct Current<'a> {
    pub(super) gpu: &'a Gpu,
    pushed: bool,
    /// Keeps the value on this thread, because the current context belongs to the thread.
    _thread: PhantomData<*const ()>,
}

impl Current<'_> {
    /// The driver's functions, which may be called now.
    pub(super) fn symbols(&self) -> &super::table::Symbols {
        &self.gpu.cuda.symbols
    }

    pub(super) fn check(&self, call: &'static str, result: CUresult) -> Result<(), CudaError> {
        self.gpu.check(call, result)
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: `with` pushed the context in this thread.
            unsafe { (self.symbols().cuCtxPopCurrent_v2)(&mut popped) };
        }
    }
}

fn device_of(cuda: &Cuda, ordinal: u32) -> Result<CUdevice, CudaError> {
    let mut device = 0;
    // SAFETY: driver contract: writes one int. The driver refuses an index that is too large.
    let result = unsafe { (cuda.symbols.cuDeviceGet)(&mut device, ordinal as c_int) };
    cuda.check("cuDeviceGet", Some(ordinal), result)?;
    Ok(device)
}

fn text(chars: &[c_char]) -> String {
    // SAFETY: the arrays started as zeros, and the driver writes at most their length with a
    // terminator.
    unsafe { CStr::from_ptr(chars.as_ptr()) }.to_string_lossy().into_owned()
}
