//! Kernels that are compiled and launched at run time.

use std::ffi::c_void;
use std::mem::ManuallyDrop;

use peerway::gpu::jit::{self, JitError, Program, Source, Target};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::{Gpu, Int};
use crate::gpu::without_interpreter;
use crate::parameters::{Value, given};
use crate::transfer::Handle;
use crate::{errors, waiting};

/// The headers that a kernel includes to issue transfers.
const HEADERS: [(&str, &str); 2] = [
    ("peerway_device.cuh", include_str!("../../../include/peerway_device.cuh")),
    ("peerway_abi.h", include_str!("../../../include/peerway_abi.h")),
];

/// Returns the headers for kernels that issue transfers, by the names to include.
#[pyfunction]
pub(crate) fn device_headers() -> std::collections::BTreeMap<&'static str, &'static str> {
    HEADERS.into_iter().collect()
}

/// Compiles a program for a GPU and loads it there. ``compiler`` is the path of a libnvrtc,
/// used when PEERWAY_NVRTC_SO names none.
#[pyfunction]
pub(crate) fn compile_kernels(
    py: Python<'_>,
    source: String,
    name: String,
    headers: Vec<(String, String)>,
    options: Vec<String>,
    gpu: Gpu,
    compiler: Option<std::path::PathBuf>,
) -> PyResult<Module> {
    let ours = HEADERS.into_iter().filter(|(name, _)| !headers.iter().any(|(n, _)| n == name));
    let ours: Vec<_> = ours.map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
    let mut program = Source::new(name.clone(), source);
    for (name, text) in headers.into_iter().chain(ours) {
        program = program.header(name, text);
    }
    for option in options {
        program = program.option(option);
    }
    let Gpu(gpu) = gpu;
    if let Some(path) = compiler {
        jit::suggest_compiler(path);
    }
    // Compilation can take seconds and cannot be stopped.
    let made = waiting::aside(py, None, move || {
        let image = jit::compile(&program, Target::Gpu(gpu))?;
        let loaded = Program::load(&image, gpu)?;
        Ok::<_, JitError>((image, loaded))
    })?;
    let Some(made) = made else {
        return Err(errors::raise(py, "CompileError", format!("{name} was not compiled in time")));
    };
    let (image, program) = made.map_err(|error| errors::jit(py, error))?;
    Ok(Module { name, image, program: ManuallyDrop::new(program) })
}

/// Waits until a stream of a GPU has completed all its work. The default is torch's current
/// stream.
#[pyfunction]
#[pyo3(signature = (stream=None, gpu=Gpu(0)), text_signature = "(stream=None, gpu=0)")]
pub(crate) fn synchronize(
    py: Python<'_>,
    stream: Option<&Bound<'_, PyAny>>,
    gpu: Gpu,
) -> PyResult<()> {
    let Gpu(gpu) = gpu;
    let stream = match stream {
        Some(stream) => Handle::of_stream(stream)?,
        None => Handle::current_stream(py, gpu)?,
    };
    let waited = waiting::aside(py, None, move || {
        // SAFETY: the Python caller guarantees that the stream is alive and belongs to the GPU.
        unsafe { peerway::gpu::wait_for_stream(gpu, stream.get()) }
    })?;
    waited.unwrap_or(Ok(())).map_err(|error| errors::gpu(py, error))
}

/// A compiled program on a GPU. Keep it, or one of its kernels, until every launch has
/// ended and every graph that contains one is gone.
#[pyclass(frozen, module = "peerway.gpu", weakref)]
pub(crate) struct Module {
    name: String,
    image: jit::Image,
    program: ManuallyDrop<Program>,
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: only `drop` takes the value, and nothing uses it afterwards.
        let program = unsafe { ManuallyDrop::take(&mut self.program) };
        without_interpreter(move || drop(program));
    }
}

#[pymethods]
impl Module {
    /// Returns the kernel with this name, ready to launch. A kernel declared ``extern "C"`` has
    /// the name in the source.
    fn kernel(&self, py: Python<'_>, name: String) -> PyResult<Kernel> {
        let found = py.detach(|| self.program.kernel(&name));
        let kernel = ManuallyDrop::new(found.map_err(|error| errors::jit(py, error))?);
        Ok(Kernel { name, kernel })
    }

    /// The GPU that the program is loaded on.
    #[getter]
    fn gpu(&self) -> u32 {
        self.program.gpu()
    }

    /// The architecture that the program was compiled for, such as ``sm_90``.
    #[getter]
    fn architecture(&self) -> String {
        self.image.architecture().to_string()
    }

    /// The compiler that made the program.
    #[getter]
    fn compiler(&self) -> &str {
        self.image.compiler()
    }

    /// Whether the program came from the cache on disk (``PEERWAY_KERNEL_CACHE``).
    #[getter]
    fn cached(&self) -> bool {
        self.image.was_cached()
    }

    fn __repr__(&self) -> String {
        let (architecture, gpu) = (self.image.architecture(), self.program.gpu());
        format!("<peerway.gpu.Module {} for {architecture} on GPU {gpu}>", self.name)
    }
}

/// A kernel of a compiled program. Call it to launch it.
#[pyclass(frozen, module = "peerway.gpu", weakref)]
pub(crate) struct Kernel {
    name: String,
    kernel: ManuallyDrop<jit::Kernel>,
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // SAFETY: only `drop` takes the value, and nothing uses it afterwards.
        let kernel = unsafe { ManuallyDrop::take(&mut self.kernel) };
        without_interpreter(move || drop(kernel));
    }
}

#[pymethods]
impl Kernel {
    /// The kernel's name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The GPU that the kernel is loaded on.
    #[getter]
    fn gpu(&self) -> u32 {
        self.kernel.program().gpu()
    }

    /// The size of each parameter in bytes; None where the driver does not report it (before
    /// CUDA 12.4).
    #[getter]
    fn parameters(&self) -> Option<Vec<usize>> {
        self.kernel.parameters().map(<[usize]>::to_vec)
    }

    /// The driver's handle, a ``CUfunction``, for other code that launches the kernel.
    #[getter]
    fn handle(&self) -> usize {
        self.kernel.as_raw() as usize
    }

    #[pyo3(signature = (grid, block, *args, stream=None, shared=Int(0)))]
    fn __call__(
        &self,
        py: Python<'_>,
        grid: Extent,
        block: Extent,
        args: &Bound<'_, PyTuple>,
        stream: Option<&Bound<'_, PyAny>>,
        shared: Int<u32>,
    ) -> PyResult<()> {
        let gpu = self.gpu();
        let stream = match stream {
            Some(stream) => Handle::of_stream(stream)?,
            None => Handle::current_stream(py, gpu)?,
        };
        let sizes = self.kernel.parameters();
        if let Some(takes) = sizes.map(<[usize]>::len)
            && takes != args.len()
        {
            let error = JitError::Arguments { takes, given: args.len() };
            return Err(errors::jit(py, error));
        }
        let mut values = Vec::with_capacity(args.len());
        for (at, object) in args.iter().enumerate() {
            let size = sizes.map(|sizes| sizes[at]);
            values.push(given(&format!("argument {at}"), &object, size, gpu, stream)?);
        }
        let launched = py.detach(|| {
            let mut pointers: Vec<*mut c_void> = values.iter_mut().map(Value::as_mut_ptr).collect();
            let (grid, block, stream) = (grid.0, block.0, stream.get());
            // SAFETY: where the driver reports parameters, the count is checked above and `given`
            // checks each size. The Python caller guarantees that the stream is alive and that the
            // kernel handles these values.
            unsafe { self.kernel.launch(grid, block, shared.0, stream, &mut pointers) }
        });
        launched.map_err(|error| errors::jit(py, error))
    }

    fn __repr__(&self) -> String {
        format!("<peerway.gpu.Kernel {} on GPU {}>", self.name, self.gpu())
    }
}

/// The number of blocks or threads, in one to three dimensions.
struct Extent([u32; 3]);

impl<'py> FromPyObject<'_, 'py> for Extent {
    type Error = PyErr;

    fn extract(object: pyo3::Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let object = &*object;
        let wrong = |_| {
            let wanted = "a positive number or a sequence of one to three of them";
            PyTypeError::new_err(format!("{object} is not {wanted}"))
        };
        let sizes = match object.extract::<u32>() {
            Ok(size) => vec![size],
            Err(_) => object.extract::<Vec<u32>>().map_err(wrong)?,
        };
        if sizes.is_empty() || sizes.len() > 3 || sizes.contains(&0) {
            return Err(wrong(PyTypeError::new_err(())));
        }
        let size = |at: usize| sizes.get(at).copied().unwrap_or(1);
        Ok(Self([size(0), size(1), size(2)]))
    }
}
