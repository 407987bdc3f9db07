//! Shareable memory for arrays. It is allocated without an endpoint, and registration finds it by
//! its address.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use peerway::SharedMemory;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::arguments::Int;
use crate::errors;

/// Every live allocation by its first address. Registration uses it to recognise an array that any
/// library made from such an allocation.
static ALL: Mutex<BTreeMap<u64, Weak<SharedMemory>>> = Mutex::new(BTreeMap::new());

/// Zeroed memory that local peers can map. It exposes the buffer protocol.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct Memory {
    memory: Arc<SharedMemory>,
}

#[pymethods]
impl Memory {
    #[new]
    fn new(py: Python<'_>, nbytes: Int<usize>) -> PyResult<Self> {
        let memory =
            SharedMemory::allocate(nbytes.0).map_err(|error| errors::register(py, error))?;
        let memory = Arc::new(memory);
        let mut all = ALL.lock().unwrap();
        all.retain(|_, weak| weak.strong_count() > 0);
        all.insert(memory.addr(), Arc::downgrade(&memory));
        Ok(Self { memory })
    }

    /// Address of the first byte in this process.
    #[getter]
    fn address(&self) -> u64 {
        self.memory.addr()
    }

    /// Bytes of memory.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.memory.len()
    }

    fn __len__(&self) -> usize {
        self.memory.len() as usize
    }

    fn __repr__(&self) -> String {
        format!("<peerway.Memory of {} bytes at {:#x}>", self.memory.len(), self.memory.addr())
    }

    /// # Safety
    ///
    /// Called by the interpreter with a view to fill.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let (ptr, len) = (slf.get().memory.as_ptr(), slf.get().memory.len());
        // SAFETY: the interpreter passes a valid view. The memory lives as long as `slf`, and the
        // view keeps `slf`.
        unsafe { fill(slf.as_any(), view, flags, ptr, len) }
    }
}

/// Fills a view of `len` writable bytes that `owner` keeps alive.
///
/// # Safety
///
/// The interpreter passed `view` to be filled, and the bytes are valid while `owner` lives.
pub(crate) unsafe fn fill(
    owner: &Bound<'_, PyAny>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
    ptr: *mut u8,
    len: u64,
) -> PyResult<()> {
    // SAFETY: the contract of `fill`. The call takes a reference to `owner`.
    let result = unsafe {
        ffi::PyBuffer_FillInfo(view, owner.as_ptr(), ptr.cast(), len as ffi::Py_ssize_t, 0, flags)
    };
    if result == 0 { Ok(()) } else { Err(PyErr::fetch(owner.py())) }
}

/// The allocation that contains all of these bytes, and their range in it.
pub(crate) fn find(addr: u64, len: u64) -> Option<(Arc<SharedMemory>, Range<u64>)> {
    let all = ALL.lock().unwrap();
    let (_, memory) = all.range(..=addr).next_back()?;
    let memory = memory.upgrade()?;
    let start = addr - memory.addr();
    let end = start.checked_add(len)?;
    (end <= memory.len()).then_some((memory, start..end))
}
