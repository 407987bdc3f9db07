//! Graphs: work that is captured from a stream once and launched many times.

use std::ffi::c_void;
use std::sync::Arc;

use super::error::CudaError;
use super::gpu::Gpu;
use super::stream::Stream;

/// Work that was captured, ready to be launched.
pub struct Graph {
    gpu: Arc<Gpu>,
    raw: *mut c_void,
    executable: *mut c_void,
}

// SAFETY: graphs may be used by any thread, one at a time; launching takes a stream, which orders it.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: what other threads do meanwhile is their affair.
const RELAXED: u32 = 2;

impl Graph {
    /// Captures what `work` puts into the stream.
    ///
    /// # Errors
    ///
    /// The first of what `work` and the driver say; a driver older than CUDA 11.4 is told apart.
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
            // SAFETY: the stream is alive.
            let result = unsafe { begin(stream.raw(), RELAXED) };
            current.check("cuStreamBeginCapture", result)
        })?;
        let worked = work();
        let mut raw = std::ptr::null_mut();
        let ended = gpu.with(|current| {
            // SAFETY: the capture was begun above; writes one handle.
            let result = unsafe { end(stream.raw(), &mut raw) };
            current.check("cuStreamEndCapture", result)
        });
        let mut graph = Self { gpu: gpu.clone(), raw, executable: std::ptr::null_mut() };
        worked?;
        ended?;
        gpu.with(|current| {
            // SAFETY: the graph was captured above; writes one handle.
            let result = unsafe { instantiate(&mut graph.executable, graph.raw, 0) };
            current.check("cuGraphInstantiate", result)
        })?;
        Ok(graph)
    }

    /// Puts all of it into a stream.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        let Some(launch) = self.gpu.cuda.symbols.cuGraphLaunch else {
            return Err(CudaError::missing("cuGraphLaunch", Some(self.gpu.ordinal())));
        };
        self.gpu.with(|current| {
            // SAFETY: an executable graph and a stream of the same GPU.
            let result = unsafe { launch(self.executable, stream.raw()) };
            current.check("cuGraphLaunch", result)
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let symbols = &self.gpu.cuda.symbols;
        let _ = self.gpu.with(|_| {
            // SAFETY: each was made once; launches under way are finished by the driver.
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
