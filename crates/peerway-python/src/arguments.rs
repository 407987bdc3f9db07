//! Arguments that several calls take. Each check raises an exception that names the argument.

use std::time::Duration;

use peerway::{Access, Class};
use pyo3::Borrowed;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PySlice};

/// An integer that fits into `T`. pyo3 adds the argument's name only to a `TypeError`, so a number
/// that does not fit raises `TypeError`.
pub(crate) struct Int<T>(pub(crate) T);

impl<'py, T> FromPyObject<'_, 'py> for Int<T>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        object.extract::<T>().map(Self).map_err(|error| {
            if !error.is_instance_of::<PyOverflowError>(object.py()) {
                return error;
            }
            PyTypeError::new_err(format!("{} is out of range", &*object))
        })
    }
}

/// A GPU: its number, or a `torch.device`.
pub(crate) struct Gpu(pub(crate) u32);

impl<'py> FromPyObject<'_, 'py> for Gpu {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let object = &*object;
        let (Ok(kind), Ok(index)) = (object.getattr("type"), object.getattr("index")) else {
            return object.extract::<Int<u32>>().map(|Int(gpu)| Self(gpu));
        };
        if kind.extract::<String>().ok().as_deref() != Some("cuda") {
            return Err(PyTypeError::new_err(format!("{object} is not a CUDA device")));
        }
        if !index.is_none() {
            return index.extract::<Int<u32>>().map(|Int(gpu)| Self(gpu));
        }
        // A device without an index means torch's current device.
        let cuda = object.py().import("torch")?.getattr("cuda")?;
        Ok(Self(cuda.call_method0("current_device")?.extract()?))
    }
}

/// A time in seconds.
pub(crate) fn seconds(name: &str, seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(PyValueError::new_err(format!(
            "{name}: {seconds} is not a time; give 0 or more seconds"
        )));
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// The access that a descriptor grants.
pub(crate) fn access(text: &str) -> PyResult<Access> {
    match text {
        "r" => Ok(Access::READ),
        "w" => Ok(Access::WRITE),
        "rw" => Ok(Access::READ_WRITE),
        _ => Err(PyValueError::new_err(format!("access: '{text}' is not 'r', 'w' or 'rw'"))),
    }
}

/// The lane class of a transfer.
pub(crate) fn class(text: &str) -> PyResult<Class> {
    match text {
        "auto" => Ok(Class::Auto),
        "latency" => Ok(Class::Latency),
        "bulk" => Ok(Class::Bulk),
        _ => {
            Err(PyValueError::new_err(format!("kind: '{text}' is not 'auto', 'latency' or 'bulk'")))
        }
    }
}

/// The bytes of a descriptor, a peer info or a message.
pub(crate) fn bytes<'a>(name: &str, object: &'a Bound<'_, PyAny>) -> PyResult<&'a [u8]> {
    object
        .cast::<PyBytes>()
        .map(|bytes| bytes.as_bytes())
        .map_err(|_| wrong_type(name, object, "bytes"))
}

/// The range of a subscript `[start:stop]` of `len` bytes.
pub(crate) fn range(slice: &Bound<'_, PySlice>, len: u64) -> PyResult<std::ops::Range<u64>> {
    let indices = slice.indices(isize::try_from(len).unwrap_or(isize::MAX))?;
    if indices.step != 1 {
        return Err(PyValueError::new_err(
            "a slice of a region must have step 1; use blocks() for other steps",
        ));
    }
    let (start, stop) = (indices.start.max(0) as u64, indices.stop.max(0) as u64);
    Ok(start..stop.max(start))
}

/// An argument of the wrong type.
pub(crate) fn wrong_type(name: &str, object: &Bound<'_, PyAny>, wanted: &str) -> PyErr {
    let found = object.get_type();
    let found = found.name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
    PyTypeError::new_err(format!("{name}: expected {wanted}, not {found}"))
}
