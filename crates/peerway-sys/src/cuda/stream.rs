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

// SAFETY: streams may be used by any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream that does not wait for the default one.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        gpu.with(|current| {
            // SAFETY: writes one handle.
            let result =
                unsafe { (current.symbols().cuStreamCreate)(&mut raw, CU_STREAM_NON_BLOCKING) };
            current.check("cuStreamCreate", result)
        })?;
        Ok(Self { gpu: gpu.clone(), raw })
    }

    /// As above, and what is in it goes before what is in others, where the driver knows that.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn urgent(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        // Lower numbers go first; the driver takes one below its lowest as that.
        const FIRST: c_int = -1000;
        let Some(create) = gpu.cuda.symbols.cuStreamCreateWithPriority else {
            return Self::new(gpu);
        };
        let mut raw = std::ptr::null_mut();
        gpu.with(|current| {
            // SAFETY: writes one handle.
            let result = unsafe { create(&mut raw, CU_STREAM_NON_BLOCKING, FIRST) };
            current.check("cuStreamCreateWithPriority", result)
        })?;
        Ok(Self { gpu: gpu.clone(), raw })
    }

    /// The GPU it is of.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The driver's handle.
    pub fn raw(&self) -> CUstream {
        self.raw
    }

    /// Waits for everything that was put into it.
    ///
    /// # Errors
    ///
    /// What the driver says, about this call or about work that failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.gpu.with(|current| {
            // SAFETY: a stream of ours.
            let result = unsafe { (current.symbols().cuStreamSynchronize)(self.raw) };
            current.check("cuStreamSynchronize", result)
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.gpu.with(|current| {
            // SAFETY: made once. Work in it goes on; the driver frees it afterwards.
            let result = unsafe { (current.symbols().cuStreamDestroy_v2)(self.raw) };
            current.check("cuStreamDestroy", result)
        });
    }
}

/// What is put into streams, by whoever they belong to.
impl Gpu {
    /// Copies between any two memories that CUDA knows, or pageable memory.
    ///
    /// # Safety
    ///
    /// The stream is of this GPU's context; both ranges are and stay valid until the work is done.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub unsafe fn copy(
        &self,
        to: u64,
        from: u64,
        len: usize,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        self.with(|current| {
            // SAFETY: the caller's promise.
            let result = unsafe { (current.symbols().cuMemcpyAsync)(to, from, len, stream) };
            current.check("cuMemcpyAsync", result)
        })
    }

    /// Whether the driver copies lists in one call.
    pub fn has_batches(&self) -> bool {
        let symbols = &self.cuda.symbols;
        match self.cuda.version() {
            13_000.. => symbols.cuMemcpyBatchAsync_v2.is_some(),
            12_080.. => symbols.cuMemcpyBatchAsync.is_some(),
            _ => false,
        }
    }

    /// Copies a list, in any order, by copy engines where that can be. The slices are of one length, none of the
    /// sizes is zero, and the list is not empty.
    ///
    /// # Safety
    ///
    /// As for [`Self::copy`]; the stream is not a default one.
    ///
    /// # Errors
    ///
    /// What the driver says; one older than CUDA 12.8 is told apart.
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
        // They are those of all copies from the first on.
        let (mut first, mut failed) = (0, 0);
        let symbols = &self.cuda.symbols;
        let (to, from, count) = (to.as_mut_ptr(), from.as_mut_ptr(), sizes.len());
        let sizes = sizes.as_mut_ptr();
        self.with(|current| {
            let result = match (symbols.cuMemcpyBatchAsync_v2, symbols.cuMemcpyBatchAsync) {
                // SAFETY: three lists of one length, which the driver reads during the call; one set of attributes;
                // the rest is the caller's promise.
                (Some(copy), _) if self.cuda.version() >= 13_000 => unsafe {
                    copy(to, from, sizes, count, &mut attributes, &mut first, 1, stream)
                },
                // SAFETY: as above; writes one number.
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

    /// Sets bytes of the GPU's memory.
    ///
    /// # Safety
    ///
    /// As for [`Self::copy`].
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub unsafe fn fill(
        &self,
        at: u64,
        value: u8,
        len: usize,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        self.with(|current| {
            // SAFETY: the caller's promise.
            let result = unsafe { (current.symbols().cuMemsetD8Async)(at, value, len, stream) };
            current.check("cuMemsetD8Async", result)
        })
    }

    /// Has the stream wait for an event.
    ///
    /// # Safety
    ///
    /// Stream and event are alive.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub unsafe fn wait_event(&self, stream: CUstream, event: CUevent) -> Result<(), CudaError> {
        self.with(|current| {
            // SAFETY: the caller's promise.
            let result = unsafe { (current.symbols().cuStreamWaitEvent)(stream, event, 0) };
            current.check("cuStreamWaitEvent", result)
        })
    }

    /// Has the stream wait until the word at `address` is at least `value`.
    ///
    /// # Safety
    ///
    /// The word is pinned memory, or the GPU's, and stays valid until the work is done.
    ///
    /// # Errors
    ///
    /// What the driver says; one older than CUDA 11.7 is told apart.
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
            // SAFETY: the caller's promise.
            let result = unsafe { wait(stream, address, value, CU_STREAM_WAIT_VALUE_GEQ) };
            current.check(CALL, result)
        })
    }

    /// Has a function of ours called when the stream comes to it. It may not call CUDA.
    ///
    /// # Safety
    ///
    /// `data` is what the function wants, until it was called.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub unsafe fn host_function(
        &self,
        stream: CUstream,
        function: CUhostFn,
        data: *mut c_void,
    ) -> Result<(), CudaError> {
        self.with(|current| {
            // SAFETY: the caller's promise.
            let result = unsafe { (current.symbols().cuLaunchHostFunc)(stream, function, data) };
            current.check("cuLaunchHostFunc", result)
        })
    }

    /// Whether what is put into the stream becomes part of a graph instead of being done.
    ///
    /// # Safety
    ///
    /// The stream is alive.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub unsafe fn is_capturing(&self, stream: CUstream) -> Result<bool, CudaError> {
        let mut status: c_uint = 0;
        self.with(|current| {
            // SAFETY: writes one int.
            let result = unsafe { (current.symbols().cuStreamIsCapturing)(stream, &mut status) };
            current.check("cuStreamIsCapturing", result)
        })?;
        Ok(status == CU_STREAM_CAPTURE_STATUS_ACTIVE)
    }

    /// Waits for everything that was put into a stream of somebody else's.
    ///
    /// # Safety
    ///
    /// The stream is alive and of this GPU's context.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub unsafe fn synchronize(&self, stream: CUstream) -> Result<(), CudaError> {
        self.with(|current| {
            // SAFETY: the caller's promise.
            let result = unsafe { (current.symbols().cuStreamSynchronize)(stream) };
            current.check("cuStreamSynchronize", result)
        })
    }
}

/// A mark in a stream.
pub struct Event {
    gpu: Arc<Gpu>,
    raw: CUevent,
}

// SAFETY: events may be used by any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event whose waiters sleep and that keeps no time.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        gpu.with(|current| {
            let flags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
            // SAFETY: writes one handle.
            let result = unsafe { (current.symbols().cuEventCreate)(&mut raw, flags) };
            current.check("cuEventCreate", result)
        })?;
        Ok(Self { gpu: gpu.clone(), raw })
    }

    /// The driver's handle.
    pub fn raw(&self) -> CUevent {
        self.raw
    }

    /// Marks what the stream holds now.
    ///
    /// # Safety
    ///
    /// The stream is alive and of the event's GPU.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub unsafe fn record(&self, stream: CUstream) -> Result<(), CudaError> {
        self.gpu.with(|current| {
            // SAFETY: the caller's promise.
            let result = unsafe { (current.symbols().cuEventRecord)(self.raw, stream) };
            current.check("cuEventRecord", result)
        })
    }

    /// Whether everything before the mark is done.
    ///
    /// # Errors
    ///
    /// What the driver says about the work.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // No context need be current to ask.
        // SAFETY: an event of ours.
        let result = unsafe { (self.gpu.cuda.symbols.cuEventQuery)(self.raw) };
        match result {
            CUDA_ERROR_NOT_READY => Ok(false),
            _ => self.gpu.check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Sleeps until everything before the mark is done.
    ///
    /// # Errors
    ///
    /// What the driver says about the work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: an event of ours.
        let result = unsafe { (self.gpu.cuda.symbols.cuEventSynchronize)(self.raw) };
        self.gpu.check("cuEventSynchronize", result)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.gpu.with(|current| {
            // SAFETY: made once; the driver keeps it until it has happened.
            let result = unsafe { (current.symbols().cuEventDestroy_v2)(self.raw) };
            current.check("cuEventDestroy", result)
        });
    }
}

/// Compiled kernels on a GPU.
pub struct Module {
    gpu: Arc<Gpu>,
    raw: CUmodule,
}

// SAFETY: modules may be used by any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A kernel of a module, which must outlive it.
#[derive(Clone, Copy, Debug)]
pub struct Function(CUfunction);

impl Function {
    /// The driver's handle.
    pub fn raw(self) -> CUfunction {
        self.0
    }
}

// SAFETY: as for modules.
unsafe impl Send for Function {}
// SAFETY: as for modules.
unsafe impl Sync for Function {}

/// How many of a kernel run together.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Grid {
    /// Blocks, in three directions.
    pub blocks: [u32; 3],
    /// Threads of a block, likewise.
    pub threads: [u32; 3],
    /// Bytes of shared memory that each block has besides those that its kernel declares.
    pub shared: u32,
}

impl Grid {
    /// Blocks and threads in one direction, as most kernels want them.
    pub fn row(blocks: u32, threads: u32) -> Self {
        Self { blocks: [blocks, 1, 1], threads: [threads, 1, 1], shared: 0 }
    }
}

impl Module {
    /// Loads PTX, which the driver compiles for the GPU, or code that was.
    ///
    /// # Safety
    ///
    /// `image` is PTX, or all of what a compiler made: the driver believes the lengths that code has inside.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub unsafe fn load(gpu: &Arc<Gpu>, image: &[u8]) -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        // The driver is told no length: PTX ends where a NUL is.
        let image = match image.last() {
            Some(0) => Cow::Borrowed(image),
            _ => Cow::Owned([image, &[0]].concat()),
        };
        gpu.with(|current| {
            // SAFETY: a terminated text, or the caller's promise.
            let result =
                unsafe { (current.symbols().cuModuleLoadData)(&mut raw, image.as_ptr().cast()) };
            current.check("cuModuleLoadData", result)
        })?;
        Ok(Self { gpu: gpu.clone(), raw })
    }

    /// The kernel of that name.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn function(&self, name: &CStr) -> Result<Function, CudaError> {
        let mut function = std::ptr::null_mut();
        self.gpu.with(|current| {
            // SAFETY: writes one handle, valid while the module is.
            let result = unsafe {
                (current.symbols().cuModuleGetFunction)(&mut function, self.raw, name.as_ptr())
            };
            current.check("cuModuleGetFunction", result)
        })?;
        Ok(Function(function))
    }

    /// Has the kernel's code on the GPU now; otherwise the driver loads it when it is first launched, which waits for
    /// other work. Drivers before CUDA 12.4 cannot be asked to, and nothing is done.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn preload(&self, function: Function) -> Result<(), CudaError> {
        let Some(load) = self.gpu.cuda.symbols.cuFuncLoad else { return Ok(()) };
        self.gpu.with(|current| {
            // SAFETY: a kernel of this module, which is loaded.
            let result = unsafe { load(function.0) };
            current.check("cuFuncLoad", result)
        })
    }

    /// Bytes of each parameter that the kernel takes; `None` where the driver cannot be asked, before CUDA 12.4.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn parameters(&self, function: Function) -> Result<Option<Vec<usize>>, CudaError> {
        let Some(ask) = self.gpu.cuda.symbols.cuFuncGetParamInfo else { return Ok(None) };
        let mut sizes = Vec::new();
        self.gpu.with(|current| {
            loop {
                let (mut offset, mut size) = (0, 0);
                // SAFETY: a kernel of this module, which is loaded; two numbers to fill.
                match unsafe { ask(function.0, sizes.len(), &mut offset, &mut size) } {
                    // There is none of that number.
                    CUDA_ERROR_INVALID_VALUE => return Ok(()),
                    result => current.check("cuFuncGetParamInfo", result)?,
                }
                sizes.push(size);
            }
        })?;
        Ok(Some(sizes))
    }

    /// Puts a kernel of this module into a stream.
    ///
    /// # Safety
    ///
    /// `arguments` point to what the kernel takes, in order; what those name stays valid until the kernel is
    /// done; the stream is of the module's GPU.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub unsafe fn launch(
        &self,
        function: Function,
        grid: Grid,
        stream: CUstream,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let Grid { blocks, threads, shared } = grid;
        self.gpu.with(|current| {
            // SAFETY: the caller's promise.
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
            // SAFETY: loaded once; kernels of it are done, as the owner promises by dropping it.
            let result = unsafe { (current.symbols().cuModuleUnload)(self.raw) };
            current.check("cuModuleUnload", result)
        });
    }
}
