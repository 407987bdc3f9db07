//! One GPU, with its primary context held.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use super::error::CudaError;
use super::ffi::*;
use super::table::Cuda;

/// A GPU whose primary context is held: the one that the CUDA runtime and frameworks use, so that nothing
/// is doubled. Other GPUs get no context by it.
pub struct Gpu {
    pub(super) cuda: Arc<Cuda>,
    ordinal: u32,
    device: CUdevice,
    context: CUcontext,
    facts: Facts,
}

/// What does not change about a GPU.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Facts {
    /// As the driver calls it.
    pub name: String,
    /// Names the device on this and any other host, whatever its index is in a process.
    pub uuid: [u8; 16],
    /// Its address on the PCI bus, in lower case: `0000:0a:00.0`.
    pub bus_id: String,
    /// Bytes of its memory.
    pub memory: u64,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// The NUMA node of the host that it is near to.
    pub numa: Option<u32>,
    /// It says that memory can be mapped piece by piece (`cuMemCreate`).
    pub vmm: bool,
    /// It says that such memory can be handed over as a file descriptor.
    pub posix_fd: bool,
    /// It says that such memory can be handed over within a fabric. Whether it can, only an attempt tells.
    pub fabric: bool,
    /// NICs may access its memory.
    pub rdma: bool,
    /// And memory by `cuMemCreate` too.
    pub rdma_vmm: bool,
    /// What NICs wrote into its memory is seen by all that it is given to do afterwards. Elsewhere such writes
    /// must be flushed first.
    pub rdma_ordered: bool,
    /// Its memory can be exported as a dma-buf.
    pub dma_buf: bool,
    /// Processes share it through MPS.
    pub mps: bool,
}

// SAFETY: a primary context may be made current in any thread.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver locks where it must.
unsafe impl Sync for Gpu {}

impl Facts {
    /// What the driver says about the GPU of this number in the process. Makes no context.
    ///
    /// # Errors
    ///
    /// What the driver says; an index that there is no GPU for among it.
    pub fn of(cuda: &Cuda, ordinal: u32) -> Result<Self, CudaError> {
        let (device, symbols, of) = (device_of(cuda, ordinal)?, &cuda.symbols, Some(ordinal));
        let mut name: [c_char; 128] = [0; 128];
        // SAFETY: writes a terminated string of at most so many bytes.
        let result = unsafe { (symbols.cuDeviceGetName)(name.as_mut_ptr(), 128, device) };
        cuda.check("cuDeviceGetName", of, result)?;
        let mut bus: [c_char; 32] = [0; 32];
        // SAFETY: as above.
        let result = unsafe { (symbols.cuDeviceGetPCIBusId)(bus.as_mut_ptr(), 32, device) };
        cuda.check("cuDeviceGetPCIBusId", of, result)?;
        let mut uuid = CUuuid::zeroed();
        // SAFETY: writes the 16 bytes.
        let result = unsafe { (symbols.cuDeviceGetUuid_v2)(&mut uuid, device) };
        cuda.check("cuDeviceGetUuid", of, result)?;
        let mut memory = 0;
        // SAFETY: writes one size.
        let result = unsafe { (symbols.cuDeviceTotalMem_v2)(&mut memory, device) };
        cuda.check("cuDeviceTotalMem", of, result)?;
        // What an older driver does not know is not there.
        let attribute = |which: c_uint| {
            let mut value: c_int = 0;
            // SAFETY: writes one int, or nothing.
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
    /// Takes hold of a GPU's primary context, making it where nobody has yet.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn open(cuda: &Arc<Cuda>, ordinal: u32) -> Result<Arc<Self>, CudaError> {
        let facts = Facts::of(cuda, ordinal)?;
        let device = device_of(cuda, ordinal)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle, which is released once when this is dropped.
        let result = unsafe { (cuda.symbols.cuDevicePrimaryCtxRetain)(&mut context, device) };
        cuda.check("cuDevicePrimaryCtxRetain", Some(ordinal), result)?;
        Ok(Arc::new(Self { cuda: cuda.clone(), ordinal, device, context, facts }))
    }

    /// Its number in this process.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// What does not change about it.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The driver.
    pub fn cuda(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    /// The error of a call that gave what cannot be used.
    pub fn refuse(&self, call: &'static str) -> CudaError {
        self.cuda.error(call, Some(self.ordinal), CUDA_ERROR_INVALID_VALUE)
    }

    /// Waits for all work on the GPU that this process has given it.
    ///
    /// # Errors
    ///
    /// What the driver says, about this call or about work that failed.
    pub fn drain(&self) -> Result<(), CudaError> {
        self.with(|current| {
            // SAFETY: nothing is required.
            let result = unsafe { (current.symbols().cuCtxSynchronize)() };
            current.check("cuCtxSynchronize", result)
        })
    }

    /// Waits until the GPU sees what NICs wrote into its memory before this call.
    ///
    /// # Errors
    ///
    /// What the driver says; some cannot.
    pub fn flush_rdma_writes(&self) -> Result<(), CudaError> {
        const CALL: &str = "cuFlushGPUDirectRDMAWrites";
        let Some(flush) = self.cuda.symbols.cuFlushGPUDirectRDMAWrites else {
            return Err(CudaError::missing(CALL, Some(self.ordinal)));
        };
        self.with(|current| {
            let target = CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
            // SAFETY: numbers only, about the context that is current.
            let result = unsafe { flush(target, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER) };
            current.check(CALL, result)
        })
    }

    /// Runs `call` with the context current in this thread, and puts back what was current before.
    pub(super) fn with<T>(
        &self,
        call: impl FnOnce(&Current<'_>) -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        if !self.cuda.is_ours() {
            return Err(self.cuda.error("fork", Some(self.ordinal), CUDA_ERROR_NOT_INITIALIZED));
        }
        let symbols = &self.cuda.symbols;
        let mut before = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { (symbols.cuCtxGetCurrent)(&mut before) };
        let pushed = before != self.context;
        if pushed {
            // SAFETY: the context is held.
            let result = unsafe { (symbols.cuCtxPushCurrent_v2)(self.context) };
            self.check("cuCtxPushCurrent", result)?;
        }
        let current = Current { gpu: self, pushed, _thread: PhantomData };
        call(&current)
    }

    /// A call's result as an error that names this GPU.
    pub(super) fn check(&self, call: &'static str, result: CUresult) -> Result<(), CudaError> {
        self.cuda.check(call, Some(self.ordinal), result)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.cuda.is_ours() {
            // SAFETY: retained once by `open`; whoever used it has let go, as it holds the `Gpu`.
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
    /// Currency is the thread's own.
    _thread: PhantomData<*const ()>,
}

impl Current<'_> {
    /// The functions that may be called now.
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
            // SAFETY: pushed by `with` in this thread.
            unsafe { (self.symbols().cuCtxPopCurrent_v2)(&mut popped) };
        }
    }
}

fn device_of(cuda: &Cuda, ordinal: u32) -> Result<CUdevice, CudaError> {
    let mut device = 0;
    // SAFETY: writes one int; an index that is too large is refused.
    let result = unsafe { (cuda.symbols.cuDeviceGet)(&mut device, ordinal as c_int) };
    cuda.check("cuDeviceGet", Some(ordinal), result)?;
    Ok(device)
}

fn text(chars: &[c_char]) -> String {
    // SAFETY: the arrays are longer than what the driver was told to write, and were zero.
    unsafe { CStr::from_ptr(chars.as_ptr()) }.to_string_lossy().into_owned()
}
