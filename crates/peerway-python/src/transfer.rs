//! `Transfer`, `Prepared`, `Enqueued` and `Staged`.

use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use peerway::{Fence, Reason};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{Int, Time};
use crate::wakeups::Watchers;
use crate::{errors, waiting};

/// A posted transfer. It continues when this object is dropped. It can be awaited.
#[pyclass(frozen, module = "peerway", weakref)]
pub(crate) struct Transfer {
    pub(crate) transfer: peerway::Transfer,
    pub(crate) watchers: Arc<Watchers>,
}

impl Transfer {
    pub(crate) fn new(transfer: peerway::Transfer) -> Self {
        Self { transfer, watchers: Arc::default() }
    }
}

#[pymethods]
impl Transfer {
    /// Whether the transfer has ended, with success or with an error.
    fn done(&self, py: Python<'_>) -> bool {
        py.detach(|| self.transfer.poll()).is_some()
    }

    /// Waits for the end. Raises the transfer's error, or ``WaitTimeout`` when it has not ended
    /// in time.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Time>) -> PyResult<()> {
        self.exception(py, timeout)?.map_or(Ok(()), Err)
    }

    /// Waits as ``wait`` does, but returns the transfer's error, or None after success. Raises
    /// only ``WaitTimeout``.
    #[pyo3(signature = (timeout=None))]
    fn exception(&self, py: Python<'_>, timeout: Option<Time>) -> PyResult<Option<PyErr>> {
        let timeout = waiting::timeout("timeout", timeout)?;
        match waiting::until(py, timeout, |left| self.transfer.wait(left))? {
            Some(ended) => Ok(errors::ended(py, ended, || self.transfer.failure())),
            None => {
                let what = "the transfer has not ended in this time; it continues";
                Err(errors::raise(py, "WaitTimeout", what))
            }
        }
    }

    /// Asks the transfer to stop. It ends within the fence deadline.
    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.transfer.cancel());
    }

    /// Whether the transfer ended because it was cancelled.
    fn cancelled(&self) -> bool {
        self.transfer.ended().is_some_and(|ended| ended.reason == Reason::Cancelled)
    }

    /// True: the transfer no longer changes memory. False: it may still change memory. None: it
    /// has not ended.
    #[getter]
    fn fenced(&self) -> Option<bool> {
        self.transfer.ended().map(|ended| ended.fence == Fence::Held)
    }

    /// The path that the transfer took.
    #[getter]
    fn path(&self) -> String {
        self.transfer.path().to_string()
    }

    /// ``bytes_done`` and ``bytes_total``; ``until_sent`` and ``until_ended`` in seconds, or
    /// None.
    #[getter]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.transfer.stats();
        let dict = PyDict::new(py);
        dict.set_item("bytes_done", stats.bytes_done)?;
        dict.set_item("bytes_total", stats.bytes_total)?;
        dict.set_item("until_sent", stats.until_sent.map(|time| time.as_secs_f64()))?;
        dict.set_item("until_ended", stats.until_ended.map(|time| time.as_secs_f64()))?;
        Ok(dict)
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("peerway._aio")?.call_method1("wait", (slf,))
    }

    fn __repr__(&self) -> String {
        let stats = self.transfer.stats();
        let state = match self.transfer.ended() {
            Some(ended) => ended.to_string(),
            None => format!("{} of {} bytes", stats.bytes_done, stats.bytes_total),
        };
        format!("<peerway.Transfer by {}: {state}>", self.transfer.path())
    }
}

/// A checked transfer. Any thread can post it many times.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct Prepared {
    pub(crate) prepared: peerway::Prepared,
}

#[pymethods]
impl Prepared {
    /// Bytes in the transfer.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.prepared.total()
    }

    /// Posts the transfer.
    fn post(&self, py: Python<'_>) -> PyResult<Transfer> {
        let posted = self.prepared.post().map_err(|error| errors::post(py, error))?;
        Ok(Transfer::new(posted))
    }

    /// Posts the transfer and waits for its end.
    fn run(&self, py: Python<'_>) -> PyResult<()> {
        let begun = self.prepared.begin().map_err(|error| errors::post(py, error))?;
        waiting::finish(py, &begun)
    }

    /// Enqueues the transfer in a CUDA stream, or in the graph that captures the stream.
    fn enqueue(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<Enqueued> {
        let stream = Handle::of_stream(stream)?;
        // SAFETY: the Python caller guarantees that the stream is alive and belongs to the GPU.
        let put = py.detach(|| unsafe { self.prepared.enqueue(stream.get()) });
        Ok(Enqueued { enqueued: Mutex::new(Some(put.map_err(|error| errors::post(py, error))?)) })
    }
}

/// A transfer that is enqueued in a CUDA stream or captured in a graph.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct Enqueued {
    enqueued: Mutex<Option<peerway::Enqueued>>,
}

#[pymethods]
impl Enqueued {
    /// How many times the transfer has ended.
    #[getter]
    fn runs(&self) -> u64 {
        self.enqueued.lock().unwrap().as_ref().map_or(0, peerway::Enqueued::runs)
    }

    /// Waits until the transfer has ended once and is not running. Raises the error of the last
    /// run, or ``WaitTimeout``.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Time>) -> PyResult<()> {
        let timeout = waiting::timeout("timeout", timeout)?;
        let ended = waiting::until(py, timeout, |left| {
            self.enqueued.lock().unwrap().as_ref().and_then(|enqueued| enqueued.wait(left))
        })?;
        let Some(ended) = ended else {
            let what = "the enqueued transfer has not ended in this time; it continues";
            return Err(errors::raise(py, "WaitTimeout", what));
        };
        let enqueued = self.enqueued.lock().unwrap();
        let failure = enqueued.as_ref().and_then(peerway::Enqueued::failure);
        // The interpreter may run other threads while it makes the exception.
        drop(enqueued);
        errors::ended(py, ended, || failure).map_or(Ok(()), Err)
    }

    /// Releases the resources kept for a graph that captured the transfer. That graph must be
    /// gone.
    fn release(&self) {
        if let Some(enqueued) = self.enqueued.lock().unwrap().take() {
            // SAFETY: the Python caller guarantees that the graph is gone.
            unsafe { enqueued.release() };
        }
    }
}

/// A CUDA handle that can move between threads.
#[derive(Clone, Copy)]
pub(crate) struct Handle(usize);

impl Handle {
    pub(crate) fn get(self) -> *mut c_void {
        self.0 as *mut c_void
    }

    /// A stream: its number, an object with `__cuda_stream__`, or a `torch.cuda.Stream`.
    pub(crate) fn of_stream(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(protocol) = object.getattr("__cuda_stream__") {
            let (_version, handle): (u32, usize) = protocol.call0()?.extract()?;
            return Ok(Self(handle));
        }
        Self::of(object, "stream", "cuda_stream")
    }

    /// torch's current stream of the GPU; the default stream if torch does not use CUDA.
    pub(crate) fn current_stream(py: Python<'_>, gpu: u32) -> PyResult<Self> {
        let modules = py.import("sys")?.getattr("modules")?;
        let Ok(cuda) = modules.get_item("torch").and_then(|torch| torch.getattr("cuda")) else {
            return Ok(Self(0));
        };
        // `current_stream` would initialise CUDA.
        if !cuda.call_method0("is_initialized")?.is_truthy()? {
            return Ok(Self(0));
        }
        Self::of_stream(&cuda.call_method1("current_stream", (gpu,))?)
    }

    /// An event: its number, or a `torch.cuda.Event`.
    fn of_event(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::of(object, "event", "cuda_event")
    }

    fn of(object: &Bound<'_, PyAny>, name: &str, attribute: &str) -> PyResult<Self> {
        let number = object.getattr(attribute).unwrap_or_else(|_| object.clone());
        let number = number.extract().map_err(|_| {
            let kind = object.get_type();
            PyTypeError::new_err(format!("{name} must be a CUDA {name} or its number, not {kind}"))
        })?;
        Ok(Self(number))
    }
}

/// Stages of one transfer that the caller releases one by one.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct Staged {
    pub(crate) staged: peerway::Staged,
}

#[pymethods]
impl Staged {
    fn __len__(&self) -> usize {
        self.staged.len()
    }

    /// Releases a stage: at once, when a CUDA stream reaches this point, or when a CUDA event
    /// has completed.
    #[pyo3(signature = (stage, *, stream=None, event=None))]
    fn release(
        &self,
        py: Python<'_>,
        stage: Int<usize>,
        stream: Option<&Bound<'_, PyAny>>,
        event: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let stream = stream.map(Handle::of_stream).transpose()?;
        let event = event.map(Handle::of_event).transpose()?;
        let released = py.detach(|| match (stream, event) {
            (None, None) => Ok(self.staged.release(stage.0)),
            // SAFETY: the Python caller guarantees that the stream is alive and belongs to the GPU.
            (Some(stream), None) => Ok(unsafe { self.staged.release_in(stage.0, stream.get()) }),
            // SAFETY: the Python caller guarantees that the event is alive, recorded, and of the
            // GPU.
            (None, Some(event)) => Ok(unsafe { self.staged.release_when(stage.0, event.get()) }),
            (Some(_), Some(_)) => Err(PyTypeError::new_err("give a stream or an event, not both")),
        })?;
        released.map_err(|error| errors::post(py, error))
    }

    /// Whether a stage was released and has ended.
    fn done(&self, py: Python<'_>, stage: Int<usize>) -> bool {
        py.detach(|| self.staged.poll(stage.0)).is_some()
    }

    /// Cancels every released stage. Stages that were not released are never sent.
    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.staged.cancel());
    }

    /// Waits for every released stage. Raises the error of the first stage that failed, or
    /// ``WaitTimeout``.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Time>) -> PyResult<()> {
        let timeout = waiting::timeout("timeout", timeout)?;
        let Some(ended) = waiting::until(py, timeout, |left| self.staged.wait(left))? else {
            let what = "the released stages have not ended in this time; they continue";
            return Err(errors::raise(py, "WaitTimeout", what));
        };
        errors::ended(py, ended, || self.staged.failure()).map_or(Ok(()), Err)
    }
}
