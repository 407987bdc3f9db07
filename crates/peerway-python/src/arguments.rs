//! Arguments that several calls take, checked and named in what they raise.

use std::time::Duration;

use peerway::{Access, Class};
use pyo3::Borrowed;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PySlice};

/// A whole number that fits. pyo3 puts the argument's name before a `TypeError`, and before no other, so a
/// number that does not fit is one.
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
        // torch's current one, as everywhere in torch.
        let cuda = object.py().import("torch")?.getattr("cuda")?;
        Ok(Self(cuda.call_method0("current_device")?.extract()?))
    }
}

/// A time in seconds.
pub(crate) fn seconds(name: &str, seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(PyValueError::new_err(format!(
            "{name}: {seconds} is not a time; give seconds, 0 or more"
        )));
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// What a descriptor allows.
pub(crate) fn access(text: &str) -> PyResult<Access> {
    match text {
        "r" => Ok(Access::READ),
        "w" => Ok(Access::WRITE),
        "rw" => Ok(Access::READ_WRITE),
        _ => Err(PyValueError::new_err(format!("access: '{text}' is none of 'r', 'w', 'rw'"))),
    }
}

/// The lane of a transfer.
pub(crate) fn class(text: &str) -> PyResult<Class> {
    match text {
        "auto" => Ok(Class::Auto),
        "latency" => Ok(Class::Latency),
        "bulk" => Ok(Class::Bulk),
        _ => Err(PyValueError::new_err(format!(
            "kind: '{text}' is none of 'auto', 'latency', 'bulk'"
        ))),
    }
}

/// The bytes of a descriptor, of metadata or of a message.
pub(crate) fn bytes<'a>(name: &str, object: &'a Bound<'_, PyAny>) -> PyResult<&'a [u8]> {
    object
        .cast::<PyBytes>()
        .map(|bytes| bytes.as_bytes())
        .map_err(|_| wrong_type(name, object, "bytes"))
}

/// The range of a subscript `[start:stop]` of something that is `len` bytes long.
pub(crate) fn range(slice: &Bound<'_, PySlice>, len: u64) -> PyResult<std::ops::Range<u64>> {
    let indices = slice.indices(isize::try_from(len).unwrap_or(isize::MAX))?;
    if indices.step != 1 {
        return Err(PyValueError::new_err(
            "a part of a region has step 1; use blocks() for others",
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
