//! Graphs: work that is captured from a stream once and launched many times.

use std::ffi::c_void;
use std::sync::Arc;

use super::error::CudaError;
use super::gpu::Gpu;
use super::stream::Stream;

/// Captured work, ready to launch.
pub struct Graph {
    gpu: Arc<Gpu>,
    raw: *mut c_void,
    executable: *mut c_void,
}

// SAFETY: driver contract: any thread may use a graph, one at a time. A launch takes a stream,
// which orders it.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: calls of other threads do not affect the capture.
const RELAXED: u32 = 2;

impl Graph {
    /// Captures the work that `work` adds to the stream.
    ///
    /// # Errors
    ///
    /// The first error of `work` or of the driver. A driver older than CUDA 11.4 gives a distinct
    /// error.
    pub fn capture<E: From<CudaError>>(
        stream: &Stream,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let gpu = stream.gpu().clone();
        let symbols = &gpu.cuda.symbols;
        let (Some(begin), Some(end), Some(instantiate)) = (
            symbols.cuStreamBeginCapture_v2,
            symbols.cuStreamEndCapture,
            symbols.cuGraphInstantiateWithFlags,
        ) else {
            return Err(CudaError::missing("cuStreamBeginCapture", Some(gpu.ordinal())).into());
        };
        gpu.with(|current| {
            // SAFETY: `stream` is borrowed, so it exists.
            let result = unsafe { begin(stream.raw(), RELAXED) };
            current.check("cuStreamBeginCapture", result)
        })?;
        let worked = work();
        let mut raw = std::ptr::null_mut();
        let ended = gpu.with(|current| {
            // SAFETY: the capture started above; the call writes one handle.
            let result = unsafe { end(stream.raw(), &mut raw) };
            current.check("cuStreamEndCapture", result)
        });
        let mut graph = Self { gpu: gpu.clone(), raw, executable: std::ptr::null_mut() };
        worked?;
        ended?;
        gpu.with(|current| {
            // SAFETY: the graph was captured above; the call writes one handle.
            let result = unsafe { instantiate(&mut graph.executable, graph.raw, 0) };
            current.check("cuGraphInstantiate", result)
        })?;
        Ok(graph)
    }

    /// Adds the captured work to a stream.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        let Some(launch) = self.gpu.cuda.symbols.cuGraphLaunch else {
            return Err(CudaError::missing("cuGraphLaunch", Some(self.gpu.ordinal())));
        };
        self.gpu.with(|current| {
            // SAFETY: both the executable graph and the stream exist and belong to the same GPU.
            let result = unsafe { launch(self.executable, stream.raw()) };
            current.check("cuGraphLaunch", result)
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let symbols = &self.gpu.cuda.symbols;
        let _ = self.gpu.with(|_| {
            // SAFETY: driver contract: each object was created once. The driver finishes launches
            // in progress.
            unsafe {
                if let (Some(destroy), false) =
                    (symbols.cuGraphExecDestroy, self.executable.is_null())
                {
                    destroy(self.executable);
                }
                if let (Some(destroy), false) = (symbols.cuGraphDestroy, self.raw.is_null()) {
                    destroy(self.raw);
                }
            }
            Ok(())
        });
    }
}
