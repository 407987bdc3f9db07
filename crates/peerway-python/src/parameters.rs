//! Python objects as arguments of kernels.
//!
//! | object | kernel argument |
//! |---|---|
//! | `Proxy` | the proxy's handle, a `const peerway_proxy *` |
//! | torch tensor, `data_ptr()`, `__cuda_array_interface__` | the address of the first byte |
//! | NumPy scalar, `ctypes` value or structure | the object's bytes |
//! | `bool` | one byte |
//! | `int` | 64 bits; fewer if the driver reports a smaller parameter and the number fits |
//! | `float` | a double |
//! | `None` | a null pointer |

use std::ffi::c_void;

use peerway::gpu;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyFloat, PyInt};

use crate::errors;
use crate::proxy::Proxy;
use crate::transfer::Handle;

/// The bytes of an argument, aligned for any type of parameter.
pub(crate) struct Value {
    words: Vec<u128>,
    len: usize,
}

impl Value {
    fn new(bytes: &[u8]) -> Self {
        let mut words = vec![0u128; bytes.len().div_ceil(16).max(1)];
        for (word, part) in words.iter_mut().zip(bytes.chunks(16)) {
            let mut whole = [0; 16];
            whole[..part.len()].copy_from_slice(part);
            *word = u128::from_ne_bytes(whole);
        }
        Self { words, len: bytes.len() }
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut c_void {
        self.words.as_mut_ptr().cast()
    }
}

/// The argument that an object stands for. `size` is the size of the kernel's parameter, if known.
/// `at` names the argument in errors.
pub(crate) fn given(
    at: &str,
    object: &Bound<'_, PyAny>,
    size: Option<usize>,
    gpu: u32,
    stream: Handle,
) -> PyResult<Value> {
    if object.is_exact_instance_of::<PyInt>() {
        return integer(at, object, size);
    }
    let value = bytes_of(at, object, gpu, stream)?;
    match size {
        Some(size) if size != value.len => {
            let (found, len) = (object.get_type(), value.len);
            Err(PyTypeError::new_err(format!(
                "{at}: {found} is {len} bytes and the kernel takes {size}; pass a NumPy or ctypes value of \
                 that size"
            )))
        }
        _ => Ok(value),
    }
}

/// A Python `int`, as wide as the kernel's parameter.
fn integer(at: &str, object: &Bound<'_, PyAny>, size: Option<usize>) -> PyResult<Value> {
    let size = size.unwrap_or(8);
    if size > 8 {
        return Err(PyTypeError::new_err(format!(
            "{at}: the kernel takes {size} bytes, but an int has at most 8; pass a ctypes structure"
        )));
    }
    let bits = 8 * size as u32;
    let number = object.extract::<i128>().ok();
    // Accept the signed and the unsigned range: the bits are the same, and the kernel knows the
    // type.
    let fits = |number: &i128| *number >= -(1 << (bits - 1)) && *number < 1 << bits;
    let number = number.filter(|_| bits > 0).filter(fits).ok_or_else(|| {
        PyTypeError::new_err(format!("{at}: {object} does not fit into {size} bytes"))
    })?;
    Ok(Value::new(&number.to_le_bytes()[..size]))
}

fn bytes_of(at: &str, object: &Bound<'_, PyAny>, gpu: u32, stream: Handle) -> PyResult<Value> {
    let py = object.py();
    let address = |address: u64| Ok(Value::new(&address.to_ne_bytes()));
    if let Ok(proxy) = object.cast::<Proxy>() {
        return address(proxy.get().handle_for(py, at, gpu)?);
    }
    if object.is_none() {
        return address(0);
    }
    if let Ok(flag) = object.cast::<PyBool>() {
        return Ok(Value::new(&[u8::from(flag.is_true())]));
    }
    if object.is_exact_instance_of::<PyFloat>() {
        return Ok(Value::new(&object.extract::<f64>()?.to_ne_bytes()));
    }
    if object.hasattr("data_ptr")? {
        return address(tensor(at, object)?);
    }
    if object.hasattr("__cuda_array_interface__")? {
        return address(by_interface(at, object, gpu, stream)?);
    }
    if is_scalar(object)? {
        let bytes = match object.hasattr("tobytes")? {
            true => object.call_method0("tobytes")?,
            false => py.get_type::<PyBytes>().call1((object,))?,
        };
        return Ok(Value::new(bytes.cast::<PyBytes>()?.as_bytes()));
    }
    let found = object.get_type();
    Err(PyTypeError::new_err(format!(
        "{at}: a kernel cannot be given {found}; pass a Proxy, memory that the GPU can access (data_ptr() or \
         __cuda_array_interface__), a number (int, float, bool, NumPy or ctypes) or None"
    )))
}

/// The address of a tensor that a kernel can access.
fn tensor(at: &str, object: &Bound<'_, PyAny>) -> PyResult<u64> {
    let yes = |name: &str| -> PyResult<Option<bool>> {
        let Ok(found) = object.getattr(name) else { return Ok(None) };
        let found = if found.is_callable() { found.call0()? } else { found };
        found.is_truthy().map(Some)
    };
    // Kernels can access pinned host memory, too.
    if yes("is_cuda")? == Some(false) && yes("is_pinned")? != Some(true) {
        return Err(PyValueError::new_err(format!(
            "{at}: the tensor is in host memory that kernels cannot access; copy it to the GPU"
        )));
    }
    object.call_method0("data_ptr")?.extract()
}

/// The address of an array. Waits first for the stream in which the array's producer has pending
/// work.
fn by_interface(at: &str, object: &Bound<'_, PyAny>, gpu: u32, stream: Handle) -> PyResult<u64> {
    let py = object.py();
    let interface = object.getattr("__cuda_array_interface__")?;
    let wrong =
        |_| PyTypeError::new_err(format!("{at}: the __cuda_array_interface__ is not valid"));
    let data = interface.get_item("data").map_err(wrong)?;
    let (address, _readonly): (u64, bool) = data.extract().map_err(wrong)?;
    let theirs = interface.get_item("stream").ok().filter(|stream| !stream.is_none());
    let theirs: Option<usize> = theirs.map(|stream| stream.extract().map_err(wrong)).transpose()?;
    if let Some(theirs) = theirs.filter(|theirs| *theirs != stream.get() as usize) {
        // SAFETY: the producer keeps the stream alive while the object's interface names it.
        py.detach(|| unsafe { gpu::wait_for_stream(gpu, theirs as *mut c_void) })
            .map_err(|error| errors::gpu(py, error))?;
    }
    Ok(address)
}

/// Whether the object is a number or a structure of NumPy or `ctypes`. Such an object exists only
/// if its module is loaded, so this imports nothing.
fn is_scalar(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let modules = object.py().import("sys")?.getattr("modules")?;
    for (module, class) in [
        ("numpy", "generic"),
        ("_ctypes", "_SimpleCData"),
        ("_ctypes", "Structure"),
        ("_ctypes", "Union"),
    ] {
        let class = modules.get_item(module).and_then(|module| module.getattr(class));
        if let Ok(class) = class
            && object.is_instance(&class)?
        {
            return Ok(true);
        }
    }
    Ok(false)
}
