//! Streams, events and kernels.

use std::borrow::Cow;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::sync::Arc;

use super::error::CudaError;
use super::ffi::*;
use super::gpu::Gpu;

/// A queue of work for a GPU.
pub struct Stream {
    gpu: Arc<Gpu>,
    raw: CUstream,
}

// SAFETY: driver contract: any thread may use a stream.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream that does not synchronise with the default stream.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        gpu.with(|current| {
            // SAFETY: driver contract: writes one handle.
            let result =
                unsafe { (current.symbols().cuStreamCreate)(&mut raw, CU_STREAM_NON_BLOCKING) };
            current.check("cuStreamCreate", result)
        })?;
        Ok(Self { gpu: gpu.clone(), raw })
    }

    /// As [`Self::new`], with the highest priority if the driver supports priorities.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn urgent(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        // Lower numbers have higher priority. The driver clamps a number below its lowest one.
        const FIRST: c_int = -1000;
        let Some(create) = gpu.cuda.symbols.cuStreamCreateWithPriority else {
            return Self::new(gpu);
        };
        let mut raw = std::ptr::null_mut();
        gpu.with(|current| {
            // SAFETY: driver contract: writes one handle.
            let result = unsafe { create(&mut raw, CU_STREAM_NON_BLOCKING, FIRST) };
            current.check("cuStreamCreateWithPriority", result)
        })?;
        Ok(Self { gpu: gpu.clone(), raw })
    }

    /// The GPU of the stream.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The driver's handle.
    pub fn raw(&self) -> CUstream {
        self.raw
    }

    /// Waits for all work in the stream.
    ///
    /// # Errors
    ///
    /// The driver's error, for this call or for failed work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.gpu.with(|current| {
            // SAFETY: driver contract: this type owns the stream.
            let result = unsafe { (current.symbols().cuStreamSynchronize)(self.raw) };
            current.check("cuStreamSynchronize", result)
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.gpu.with(|current| {
            // SAFETY: driver contract: created once. The driver finishes pending work before it
            // frees the stream.
            let result = unsafe { (current.symbols().cuStreamDestroy_v2)(self.raw) };
            current.check("cuStreamDestroy", result)
        });
    }
}

/// Operations on any stream of the GPU, including streams that other code owns.
impl Gpu {
    /// Copies between any two memories that CUDA knows, including pageable memory.
    ///
    /// # Safety
    ///
    /// The stream belongs to this GPU's context. Both ranges stay valid until the work is done.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub unsafe fn copy(
        &self,
        to: u64,
        from: u64,
        len: usize,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        self.with(|current| {
            // SAFETY: driver contract; the caller guarantees stream and ranges.
            let result = unsafe { (current.symbols().cuMemcpyAsync)(to, from, len, stream) };
            current.check("cuMemcpyAsync", result)
        })
    }

    /// Whether the driver can copy a list in one call.
    pub fn has_batches(&self) -> bool {
        let symbols = &self.cuda.symbols;
        match self.cuda.version() {
            13_000.. => symbols.cuMemcpyBatchAsync_v2.is_some(),
            12_080.. => symbols.cuMemcpyBatchAsync.is_some(),
            _ => false,
        }
    }

    /// Copies a list in any order, with copy engines if possible. The slices have equal length, no
    /// size is zero, and the list is not empty.
    ///
    /// # Safety
    ///
    /// As for [`Self::copy`]. The stream is not a default stream.
    ///
    /// # Errors
    ///
    /// The driver's error. A driver older than CUDA 12.8 gives a distinct error.
    pub unsafe fn copy_batch(
        &self,
        to: &mut [u64],
        from: &mut [u64],
        sizes: &mut [usize],
        stream: CUstream,
    ) -> Result<(), CudaError> {
        const CALL: &str = "cuMemcpyBatchAsync";
        if to.len() != sizes.len() || from.len() != sizes.len() {
            return Err(self.refuse(CALL));
        }
        let mut attributes = CUmemcpyAttributes::zeroed();
        attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
        // The attributes apply to all copies from index `first` on.
        let (mut first, mut failed) = (0, 0);
        let symbols = &self.cuda.symbols;
        let (to, from, count) = (to.as_mut_ptr(), from.as_mut_ptr(), sizes.len());
        let sizes = sizes.as_mut_ptr();
        self.with(|current| {
            let result = match (symbols.cuMemcpyBatchAsync_v2, symbols.cuMemcpyBatchAsync) {
                // SAFETY: driver contract: three lists of equal length, which the driver reads
                // during the call, and one set of attributes. The caller guarantees the rest.
                (Some(copy), _) if self.cuda.version() >= 13_000 => unsafe {
                    copy(to, from, sizes, count, &mut attributes, &mut first, 1, stream)
                },
                // SAFETY: as above; the call also writes one number.
                (_, Some(copy)) if self.cuda.version() >= 12_080 => unsafe {
                    copy(
                        to,
                        from,
                        sizes,
                        count,
                        &mut attributes,
                        &mut first,
                        1,
                        &mut failed,
                        stream,
                    )
                },
                _ => return Err(CudaError::missing(CALL, Some(self.ordinal()))),
            };
            current.check(CALL, result)
        })
    }

    /// Fills GPU memory with a byte value.
    ///
    /// # Safety
    ///
    /// As for [`Self::copy`].
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub unsafe fn fill(
        &self,
        at: u64,
        value: u8,
        len: usize,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        self.with(|current| {
            // SAFETY: driver contract; the caller guarantees stream and range.
            let result = unsafe { (current.symbols().cuMemsetD8Async)(at, value, len, stream) };
            current.check("cuMemsetD8Async", result)
        })
    }

    /// Makes the stream wait for an event.
    ///
    /// # Safety
    ///
    /// Stream and event exist.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub unsafe fn wait_event(&self, stream: CUstream, event: CUevent) -> Result<(), CudaError> {
        self.with(|current| {
            // SAFETY: driver contract; the caller guarantees stream and event.
            let result = unsafe { (current.symbols().cuStreamWaitEvent)(stream, event, 0) };
            current.check("cuStreamWaitEvent", result)
        })
    }

    /// Makes the stream wait until the word at `address` is at least `value`.
    ///
    /// # Safety
    ///
    /// The word is in pinned or GPU memory and stays valid until the work is done.
    ///
    /// # Errors
    ///
    /// The driver's error. A driver older than CUDA 11.7 gives a distinct error.
    pub unsafe fn wait_value(
        &self,
        stream: CUstream,
        address: u64,
        value: u64,
    ) -> Result<(), CudaError> {
        const CALL: &str = "cuStreamWaitValue64";
        let Some(wait) = self.cuda.symbols.cuStreamWaitValue64_v2 else {
            return Err(CudaError::missing(CALL, Some(self.ordinal())));
        };
        self.with(|current| {
            // SAFETY: driver contract; the caller guarantees the word.
            let result = unsafe { wait(stream, address, value, CU_STREAM_WAIT_VALUE_GEQ) };
            current.check(CALL, result)
        })
    }

    /// Calls a host function when the stream reaches it. The function must not call CUDA.
    ///
    /// # Safety
    ///
    /// `data` is valid for the function until the driver has called it.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub unsafe fn host_function(
        &self,
        stream: CUstream,
        function: CUhostFn,
        data: *mut c_void,
    ) -> Result<(), CudaError> {
        self.with(|current| {
            // SAFETY: driver contract; the caller guarantees function and data.
            let result = unsafe { (current.symbols().cuLaunchHostFunc)(stream, function, data) };
            current.check("cuLaunchHostFunc", result)
        })
    }

    /// Whether the stream captures work into a graph instead of running it.
    ///
    /// # Safety
    ///
    /// The stream exists.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub unsafe fn is_capturing(&self, stream: CUstream) -> Result<bool, CudaError> {
        let mut status: c_uint = 0;
        self.with(|current| {
            // SAFETY: driver contract: writes one int. The caller guarantees the stream.
            let result = unsafe { (current.symbols().cuStreamIsCapturing)(stream, &mut status) };
            current.check("cuStreamIsCapturing", result)
        })?;
        Ok(status == CU_STREAM_CAPTURE_STATUS_ACTIVE)
    }

    /// Waits for all work in a stream that other code owns.
    ///
    /// # Safety
    ///
    /// The stream exists and belongs to this GPU's context.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub unsafe fn synchronize(&self, stream: CUstream) -> Result<(), CudaError> {
        self.with(|current| {
            // SAFETY: driver contract; the caller guarantees the stream.
            let result = unsafe { (current.symbols().cuStreamSynchronize)(stream) };
            current.check("cuStreamSynchronize", result)
        })
    }
}

/// A marker in a stream.
pub struct Event {
    gpu: Arc<Gpu>,
    raw: CUevent,
}

// SAFETY: driver contract: any thread may use an event.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event without timing. Threads that wait for it block.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        gpu.with(|current| {
            let flags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
            // SAFETY: driver contract: writes one handle.
            let result = unsafe { (current.symbols().cuEventCreate)(&mut raw, flags) };
            current.check("cuEventCreate", result)
        })?;
        Ok(Self { gpu: gpu.clone(), raw })
    }

    /// The driver's handle.
    pub fn raw(&self) -> CUevent {
        self.raw
    }

    /// Marks the work that the stream holds now.
    ///
    /// # Safety
    ///
    /// The stream exists and belongs to the event's GPU.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub unsafe fn record(&self, stream: CUstream) -> Result<(), CudaError> {
        self.gpu.with(|current| {
            // SAFETY: driver contract; the caller guarantees the stream.
            let result = unsafe { (current.symbols().cuEventRecord)(self.raw, stream) };
            current.check("cuEventRecord", result)
        })
    }

    /// Whether all work before the mark is done.
    ///
    /// # Errors
    ///
    /// The driver's error for the work.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // The query needs no current context.
        // SAFETY: driver contract: this type owns the event.
        let result = unsafe { (self.gpu.cuda.symbols.cuEventQuery)(self.raw) };
        match result {
            CUDA_ERROR_NOT_READY => Ok(false),
            _ => self.gpu.check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Blocks until all work before the mark is done.
    ///
    /// # Errors
    ///
    /// The driver's error for the work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: driver contract: this type owns the event.
        let result = unsafe { (self.gpu.cuda.symbols.cuEventSynchronize)(self.raw) };
        self.gpu.check("cuEventSynchronize", result)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.gpu.with(|current| {
            // SAFETY: driver contract: created once. The driver keeps the event until it has
            // occurred.
            let result = unsafe { (current.symbols().cuEventDestroy_v2)(self.raw) };
            current.check("cuEventDestroy", result)
        });
    }
}

/// A loaded module of compiled kernels on a GPU.
pub struct Module {
    gpu: Arc<Gpu>,
    raw: CUmodule,
}

// SAFETY: driver contract: any thread may use a module.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A kernel of a module. The module must outlive it.
#[derive(Clone, Copy, Debug)]
pub struct Function(CUfunction);

impl Function {
    /// The driver's handle.
    pub fn raw(self) -> CUfunction {
        self.0
    }
}

// SAFETY: driver contract: any thread may use a function.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// The launch dimensions of a kernel.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Grid {
    /// The number of blocks in three dimensions.
    pub blocks: [u32; 3],
    /// The number of threads of a block in three dimensions.
    pub threads: [u32; 3],
    /// Bytes of dynamic shared memory for each block, in addition to the static shared memory of
    /// the kernel.
    pub shared: u32,
}

impl Grid {
    /// Blocks and threads in one dimension, as most kernels use them.
    pub fn row(blocks: u32, threads: u32) -> Self {
        Self { blocks: [blocks, 1, 1], threads: [threads, 1, 1], shared: 0 }
    }
}

impl Module {
    /// Loads PTX, which the driver compiles for the GPU, or compiled code.
    ///
    /// # Safety
    ///
    /// `image` is PTX or the complete output of a compiler, because the driver trusts the lengths
    /// inside compiled code.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub unsafe fn load(gpu: &Arc<Gpu>, image: &[u8]) -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        // The driver receives no length: PTX ends at a NUL.
        let image = match image.last() {
            Some(0) => Cow::Borrowed(image),
            _ => Cow::Owned([image, &[0]].concat()),
        };
        gpu.with(|current| {
            // SAFETY: driver contract: `image` is NUL-terminated text, or the caller guarantees
            // complete code.
            let result =
                unsafe { (current.symbols().cuModuleLoadData)(&mut raw, image.as_ptr().cast()) };
            current.check("cuModuleLoadData", result)
        })?;
        Ok(Self { gpu: gpu.clone(), raw })
    }

    /// The kernel with this name.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn function(&self, name: &CStr) -> Result<Function, CudaError> {
        let mut function = std::ptr::null_mut();
        self.gpu.with(|current| {
            // SAFETY: driver contract: writes one handle, which is valid while the module is
            // loaded.
            let result = unsafe {
                (current.symbols().cuModuleGetFunction)(&mut function, self.raw, name.as_ptr())
            };
            current.check("cuModuleGetFunction", result)
        })?;
        Ok(Function(function))
    }

    /// Loads the kernel's code onto the GPU now. Otherwise the driver loads it at the first launch
    /// and waits for other work. Drivers before CUDA 12.4 lack the call; then this function does
    /// nothing.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn preload(&self, function: Function) -> Result<(), CudaError> {
        let Some(load) = self.gpu.cuda.symbols.cuFuncLoad else { return Ok(()) };
        self.gpu.with(|current| {
            // SAFETY: driver contract: the kernel belongs to this module, which is loaded.
            let result = unsafe { load(function.0) };
            current.check("cuFuncLoad", result)
        })
    }

    /// The size of each kernel parameter in bytes. `None` if the driver lacks the call, before CUDA
    /// 12.4.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn parameters(&self, function: Function) -> Result<Option<Vec<usize>>, CudaError> {
        let Some(ask) = self.gpu.cuda.symbols.cuFuncGetParamInfo else { return Ok(None) };
        let mut sizes = Vec::new();
        self.gpu.with(|current| {
            loop {
                let (mut offset, mut size) = (0, 0);
                // SAFETY: driver contract: the kernel belongs to this module, which is loaded; the
                // call writes two numbers.
                match unsafe { ask(function.0, sizes.len(), &mut offset, &mut size) } {
                    // There is no parameter with this index.
                    CUDA_ERROR_INVALID_VALUE => return Ok(()),
                    result => current.check("cuFuncGetParamInfo", result)?,
                }
                sizes.push(size);
            }
        })?;
        Ok(Some(sizes))
    }

    /// Launches a kernel of this module in a stream.
    ///
    /// # Safety
    ///
    /// `arguments` point to the kernel's parameters, in order. The memory that they name stays
    /// valid until the kernel is done. The stream belongs to the module's GPU.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub unsafe fn launch(
        &self,
        function: Function,
        grid: Grid,
        stream: CUstream,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let Grid { blocks, threads, shared } = grid;
        self.gpu.with(|current| {
            // SAFETY: driver contract; the caller guarantees arguments and stream.
            let result = unsafe {
                (current.symbols().cuLaunchKernel)(
                    function.0,
                    blocks[0],
                    blocks[1],
                    blocks[2],
                    threads[0],
                    threads[1],
                    threads[2],
                    shared,
                    stream,
                    arguments.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            };
            current.check("cuLaunchKernel", result)
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.gpu.with(|current| {
            // SAFETY: driver contract: loaded once, and its kernels are done.
            let result = unsafe { (current.symbols().cuModuleUnload)(self.raw) };
            current.check("cuModuleUnload", result)
        });
    }
}
