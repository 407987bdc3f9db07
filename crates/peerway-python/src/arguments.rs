//! Arguments that several calls take. Each check raises an exception that names the argument.

use std::time::Duration;

use peerway::{Access, Class};
use peerway_core::config::parse_duration;
use pyo3::Borrowed;
use pyo3::exceptions::{PyIndexError, PyOverflowError, PyTypeError, PyValueError};
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

/// A time: a number of seconds, or text with its unit, as settings have it.
pub(crate) enum Time {
    Seconds(f64),
    Text(String),
}

impl<'py> FromPyObject<'_, 'py> for Time {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(text) = object.extract::<String>() {
            return Ok(Self::Text(text));
        }
        object.extract().map(Self::Seconds).map_err(|_| {
            let found = type_name(&object);
            PyTypeError::new_err(format!("expected seconds or text such as '30s', not {found}"))
        })
    }
}

/// The value of the argument `name`.
pub(crate) fn time(name: &str, time: &Time) -> PyResult<Duration> {
    let not_a_time = |value: &dyn std::fmt::Display| {
        PyValueError::new_err(format!(
            "{name}: {value} is not a time; give 0 or more seconds, or text with a unit such as \
             '30s' or '500ms'"
        ))
    };
    match time {
        Time::Text(text) => parse_duration(text).ok_or_else(|| not_a_time(&format!("'{text}'"))),
        Time::Seconds(seconds) if seconds.is_nan() || *seconds < 0.0 => Err(not_a_time(seconds)),
        Time::Seconds(seconds) => {
            Ok(Duration::try_from_secs_f64(*seconds).unwrap_or(Duration::MAX))
        }
    }
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

/// The range of a subscript `[start:stop]` of `len` bytes. A negative number counts from the end. A
/// range that leaves the region is an error: a shorter transfer would be a surprise.
pub(crate) fn range(subscript: &Bound<'_, PyAny>, len: u64) -> PyResult<std::ops::Range<u64>> {
    let Ok(slice) = subscript.cast::<PySlice>() else {
        let found = type_name(subscript);
        return Err(PyTypeError::new_err(format!(
            "a region takes a slice of bytes, such as region[0:4096], not {found} ({subscript})"
        )));
    };
    let part = |name: &str| -> PyResult<Option<i128>> {
        let value = slice.getattr(name)?;
        if value.is_none() {
            return Ok(None);
        }
        let found = type_name(&value);
        value.extract().map(Some).map_err(|_| {
            PyTypeError::new_err(format!(
                "{name} of a slice of a region: expected int, not {found}"
            ))
        })
    };
    if !matches!(part("step")?, None | Some(1)) {
        return Err(PyValueError::new_err(
            "a slice of a region must have step 1; use blocks() for other steps",
        ));
    }
    let from_end = |at: i128| if at < 0 { at + i128::from(len) } else { at };
    let start = from_end(part("start")?.unwrap_or(0));
    let stop = from_end(part("stop")?.unwrap_or_else(|| i128::from(len)));
    match (u64::try_from(start), u64::try_from(stop)) {
        (Ok(start), Ok(stop)) if start <= stop && stop <= len => Ok(start..stop),
        _ => Err(PyIndexError::new_err(format!(
            "the slice [{start}:{stop}] is not inside the region's {len} bytes"
        ))),
    }
}

/// An argument of the wrong type.
pub(crate) fn wrong_type(name: &str, object: &Bound<'_, PyAny>, wanted: &str) -> PyErr {
    PyTypeError::new_err(format!("{name}: expected {wanted}, not {}", type_name(object)))
}

fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string())
}
