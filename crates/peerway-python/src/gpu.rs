//! GPUs: their properties, and GPU memory for arrays.

use std::ffi::{CStr, c_void};
use std::mem::ManuallyDrop;

use peerway::gpu::{self, DeviceMemory, DeviceMemoryOptions};
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::Int;
use crate::buffer::{DL_CUDA, DlTensor};
use crate::errors;

/// Properties of a GPU.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct Gpu {
    index: u32,
    facts: gpu::Facts,
}

#[pymethods]
impl Gpu {
    /// The GPU's number in this process.
    #[getter]
    fn index(&self) -> u32 {
        self.index
    }

    /// The vendor's name for the GPU.
    #[getter]
    fn name(&self) -> &str {
        &self.facts.name
    }

    /// The GPU's unique name on every host, as ``nvidia-smi -L`` shows it.
    #[getter]
    fn uuid(&self) -> String {
        let hex: String = self.facts.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
        format!("GPU-{}", parts.join("-"))
    }

    /// The GPU's PCI address on this host, such as ``0000:4a:00.0``.
    #[getter]
    fn bus_id(&self) -> &str {
        &self.facts.bus_id
    }

    /// Bytes of memory.
    #[getter]
    fn memory(&self) -> u64 {
        self.facts.memory
    }

    /// The GPU's compute capability, such as ``(9, 0)``.
    #[getter]
    fn capability(&self) -> (u32, u32) {
        self.facts.capability
    }

    fn __repr__(&self) -> String {
        format!("<peerway.Gpu {} '{}' at {}>", self.index, self.facts.name, self.facts.bus_id)
    }
}

/// Lists the GPUs that the process sees, by number. Initialises the CUDA driver. Raises
/// ``NoCuda``.
#[pyfunction]
pub(crate) fn gpus(py: Python<'_>) -> PyResult<Vec<Gpu>> {
    let found = py.detach(gpu::devices).map_err(|error| errors::gpu(py, error))?;
    let numbered = (0..).zip(found);
    Ok(numbered.map(|(index, facts)| Gpu { index, facts }).collect())
}

/// Whether some code in the process uses a GPU. The call initialises nothing.
#[pyfunction]
pub(crate) fn gpu_in_use() -> bool {
    gpu::is_in_use()
}

/// Opens a GPU, so that GPU memory of peers on this host is mapped for it.
#[pyfunction]
pub(crate) fn open_gpu(py: Python<'_>, gpu: Int<u32>) -> PyResult<()> {
    py.detach(|| gpu::open(gpu.0)).map_err(|error| errors::gpu(py, error))
}

/// Returns the driver's id of the GPU allocation at an address, which the driver never
/// reuses; None for other memory.
#[pyfunction]
pub(crate) fn gpu_buffer_at(address: Int<u64>) -> Option<u64> {
    gpu::buffer_at(address.0)
}

/// The `__cuda_array_interface__` of plain bytes that no stream has pending work on.
pub(crate) fn interface<'py>(
    py: Python<'py>,
    address: u64,
    nbytes: u64,
    readonly: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("shape", (nbytes,))?;
    dict.set_item("typestr", "|u1")?;
    dict.set_item("data", (address, readonly))?;
    dict.set_item("strides", py.None())?;
    dict.set_item("stream", py.None())?;
    dict.set_item("version", 3)?;
    Ok(dict)
}

/// Zeroed GPU memory that local peers can map. It exposes ``__cuda_array_interface__`` and
/// DLPack.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct GpuMemory {
    memory: ManuallyDrop<DeviceMemory>,
}

impl GpuMemory {
    pub(crate) fn allocate(py: Python<'_>, gpu: u32, nbytes: u64) -> PyResult<Self> {
        let options = DeviceMemoryOptions::default().zeroed();
        let made = py.detach(|| DeviceMemory::allocate(gpu, nbytes, &options));
        let memory = ManuallyDrop::new(made.map_err(|error| errors::gpu(py, error))?);
        Ok(Self { memory })
    }
}

impl Drop for GpuMemory {
    fn drop(&mut self) {
        // SAFETY: only `drop` takes the value, and nothing uses it afterwards.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        without_interpreter(move || drop(memory));
    }
}

/// Runs work that may wait for a GPU, with the interpreter released. A stream of that GPU may
/// itself wait for a Python host function. The caller holds the interpreter.
pub(crate) fn without_interpreter(run: impl FnOnce() + Send) {
    let mut run = Some(run);
    Python::try_attach(|py| py.detach(|| run.take().map(|run| run())));
    // The interpreter is shutting down: the work blocks no Python thread.
    if let Some(run) = run {
        run();
    }
}

#[pymethods]
impl GpuMemory {
    #[new]
    fn new(py: Python<'_>, nbytes: Int<u64>, gpu: Int<u32>) -> PyResult<Self> {
        Self::allocate(py, gpu.0, nbytes.0)
    }

    /// Address of the first byte. Only GPUs can use it.
    #[getter]
    fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Bytes of memory.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.memory.len()
    }

    /// The GPU's number in this process.
    #[getter]
    fn gpu(&self) -> u32 {
        self.memory.gpu()
    }

    /// How the memory was allocated, which limits how it can be shared: ``fabric``,
    /// ``posix-fd`` or ``plain``.
    #[getter]
    fn kind(&self) -> String {
        self.memory.kind().to_string()
    }

    /// Why the memory is not of a better kind, in the driver's words; None for the best kind.
    #[getter]
    fn why_not_better(&self) -> Option<String> {
        self.memory.why_not_better()
    }

    fn __len__(&self) -> usize {
        self.memory.len() as usize
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        interface(py, self.memory.address(), self.memory.len(), false)
    }

    fn __dlpack_device__(&self) -> (i32, u32) {
        (DL_CUDA, self.memory.gpu())
    }

    /// Returns the memory as a DLPack tensor with DLPack's type ``code`` and ``bits``.
    fn dlpack<'py>(
        &self,
        py: Python<'py>,
        shape: Vec<Int<i64>>,
        code: Int<u8>,
        bits: Int<u8>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let shape: Vec<i64> = shape.into_iter().map(|size| size.0).collect();
        let bytes = shape.iter().try_fold(u64::from(bits.0.div_ceil(8)), |bytes, size| {
            u64::try_from(*size).ok().and_then(|size| bytes.checked_mul(size))
        });
        if bytes.is_none_or(|bytes| bytes > self.memory.len()) {
            return Err(PyValueError::new_err(format!(
                "shape: {shape:?} of {} bits does not fit into {} bytes",
                bits.0,
                self.memory.len()
            )));
        }
        capsule(py, Exported::new(&self.memory, shape, code.0, bits.0))
    }

    /// The memory as a one-dimensional tensor of bytes. The stream option has no effect, because no
    /// work is pending on the memory.
    #[pyo3(signature = (**_options))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        _options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let shape = vec![self.memory.len() as i64];
        capsule(py, Exported::new(&self.memory, shape, DL_UINT, 8))
    }

    fn __repr__(&self) -> String {
        let (len, address, gpu) = (self.memory.len(), self.memory.address(), self.memory.gpu());
        format!("<peerway.GpuMemory of {len} bytes at {address:#x} of GPU {gpu}>")
    }
}

/// DLPack's code for unsigned integers.
const DL_UINT: u8 = 1;
const FRESH: &CStr = c"dltensor";

/// DLPack's managed tensor in the layout of its specification, followed by the data it points to.
#[repr(C)]
struct Exported {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    shape: Vec<i64>,
    _memory: DeviceMemory,
}

impl Exported {
    fn new(memory: &DeviceMemory, shape: Vec<i64>, code: u8, bits: u8) -> Box<Self> {
        let tensor = DlTensor {
            data: memory.address() as *mut c_void,
            device_type: DL_CUDA,
            device_id: memory.gpu() as i32,
            ndim: shape.len() as i32,
            code,
            bits,
            lanes: 1,
            shape: shape.as_ptr(),
            // Null means row-major order without gaps.
            strides: std::ptr::null(),
            byte_offset: 0,
        };
        let context = std::ptr::null_mut();
        Box::new(Self { tensor, context, deleter: Some(delete), shape, _memory: memory.clone() })
    }
}

/// The deleter that the tensor's consumer calls, on any thread. It therefore drops no Python
/// object.
unsafe extern "C" fn delete(exported: *mut Exported) {
    if !exported.is_null() {
        // SAFETY: `capsule` made the pointer by `Box::into_raw`. DLPack requires that the deleter
        // is called once.
        drop(unsafe { Box::from_raw(exported) });
    }
}

/// A capsule that owns the tensor until a consumer takes it over. A consumer renames the capsule to
/// show that it has done so.
fn capsule(py: Python<'_>, exported: Box<Exported>) -> PyResult<Bound<'_, PyAny>> {
    debug_assert_eq!(exported.tensor.shape, exported.shape.as_ptr());
    unsafe extern "C" fn end(capsule: *mut ffi::PyObject) {
        // SAFETY: the interpreter passes the capsule that it destroys.
        let ours = unsafe { ffi::PyCapsule_IsValid(capsule, FRESH.as_ptr()) != 0 };
        if ours {
            // SAFETY: as above; the capsule has this name.
            let exported = unsafe { ffi::PyCapsule_GetPointer(capsule, FRESH.as_ptr()) } as usize;
            // SAFETY: while the capsule has this name, no consumer has taken the tensor over, so
            // the deleter has not run.
            without_interpreter(move || unsafe { delete(exported as *mut Exported) });
        }
    }
    let exported = Box::into_raw(exported);
    // SAFETY: the pointer is not null and the name is static. `PyCapsule_New` returns a new
    // reference, or null with the error set.
    unsafe {
        let made = ffi::PyCapsule_New(exported.cast(), FRESH.as_ptr(), Some(end));
        if made.is_null() {
            delete(exported);
        }
        Bound::from_owned_ptr_or_err(py, made)
    }
}
