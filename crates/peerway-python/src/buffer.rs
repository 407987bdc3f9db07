//! Python objects as memory: where it is, how much, and what keeps it.
//!
//! Whatever an object offers is asked in this order: torch's tensor, the buffer protocol,
//! `__array_interface__`, `__dlpack__`, `data_ptr()`. What keeps the memory is a reference that is let go of
//! when the engine has let go of the memory, on whichever thread: pyo3 puts it off until the interpreter is
//! at hand.
//!
//! Peers write this memory whenever they like, and a fault in a copy ends the process. So what keeps it must
//! keep the *memory*, not only the object (a tensor can be given other storage), and memory that only claims
//! to be writable is tried.

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use peerway::{Endpoint, OwnedMemory, Region};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyMemoryView};
use rustix::mm::Advice;

use crate::region::Region as PyRegion;
use crate::{arguments, errors, memory};

/// Memory of a Python object.
pub(crate) struct Memory {
    ptr: *mut u8,
    len: usize,
    readonly: bool,
    /// Whoever said that it is writable is to be believed.
    sure: bool,
    _owner: Py<PyAny>,
}

// SAFETY: the pointer is an address that `_owner` keeps valid; nothing here dereferences it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

// SAFETY: the owner keeps the memory valid and in place until it is dropped: a memory view or capsule by its own
// contract, whatever has an array interface because that is what the interface promises of a living object; for
// memory by address it is the caller's promise. Python code may write it at any time, as peers may; no Rust
// reference to it is made.
unsafe impl OwnedMemory for Memory {
    fn bytes(&mut self) -> (*mut u8, usize) {
        (self.ptr, self.len)
    }
}

/// What a transfer or a registration does with the memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Use {
    /// Only read it.
    Read,
    /// Write it, too.
    Write,
}

/// Registers an object's memory with an endpoint. `name` is the argument's.
pub(crate) fn register(
    endpoint: &Endpoint,
    name: &str,
    object: &Bound<'_, PyAny>,
    needs: Use,
) -> PyResult<Region> {
    let py = object.py();
    let found = find(name, object)?;
    if found.readonly && needs == Use::Write {
        return Err(refuse_readonly(name));
    }
    if needs == Use::Write {
        found.try_writing(name)?;
    }
    registered(py, endpoint, found)
}

/// Whether the page at this address can be written; true where the kernel cannot say (before 5.14).
fn is_writable(addr: usize) -> bool {
    fn populate(addr: usize) -> bool {
        let page = rustix::param::page_size();
        let start = (addr & !(page - 1)) as *mut c_void;
        // SAFETY: faults a page in as a write would, and changes no byte; an address that is not mapped is
        // an error.
        unsafe { rustix::mm::madvise(start, page, Advice::LinuxPopulateWrite) }.is_ok()
    }
    static KERNEL_CAN_SAY: OnceLock<bool> = OnceLock::new();
    populate(addr) || {
        let ours = 0u8;
        !KERNEL_CAN_SAY.get_or_init(|| populate(&raw const ours as usize))
    }
}

/// Memory that cannot be written, where it would be.
pub(crate) fn refuse_readonly(name: &str) -> PyErr {
    PyBufferError::new_err(format!(
        "{name}: the memory is read-only; copy it into a bytearray or a writable array"
    ))
}

fn registered(py: Python<'_>, endpoint: &Endpoint, found: Memory) -> PyResult<Region> {
    let region = match memory::find(found.ptr as u64, found.len as u64) {
        Some((shared, range)) => endpoint.register_shared(&shared, range),
        None => endpoint.register(found),
    };
    region.map_err(|error| errors::register(py, error))
}

impl Memory {
    /// Whether the pages at both ends are mapped and writable, which is what memory that claims to be
    /// writable gets wrong. Costs about a microsecond.
    fn try_writing(&self, name: &str) -> PyResult<()> {
        if self.sure || self.len == 0 {
            return Ok(());
        }
        for addr in [self.ptr as usize, self.ptr as usize + (self.len - 1)] {
            if !is_writable(addr) {
                return Err(PyBufferError::new_err(format!(
                    "{name}: the memory at {addr:#x} cannot be written; it is read-only or not mapped"
                )));
            }
        }
        Ok(())
    }
}

fn find(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Memory> {
    if is_torch(object) {
        return of_torch(name, object);
    }
    // SAFETY: a valid object.
    if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } != 0 {
        return by_buffer(name, object);
    }
    if object.hasattr("__cuda_array_interface__")? {
        return Err(no_cuda(object.py(), name));
    }
    if object.hasattr("__array_interface__")? {
        return by_array_interface(name, object);
    }
    if object.hasattr("__dlpack__")? {
        return by_dlpack(name, object);
    }
    if object.hasattr("data_ptr")? {
        return by_data_ptr(name, object);
    }
    Err(arguments::wrong_type(
        name,
        object,
        "a region or an object with memory (buffer protocol, data_ptr(), __array_interface__ or __dlpack__)",
    ))
}

/// Whether it is a tensor of torch's, which cannot be there without torch.
fn is_torch(object: &Bound<'_, PyAny>) -> bool {
    let Ok(modules) = object.py().import("sys").and_then(|sys| sys.getattr("modules")) else {
        return false;
    };
    let tensor = modules.get_item("torch").and_then(|torch| torch.getattr("Tensor"));
    tensor.is_ok_and(|tensor| object.is_instance(&tensor).unwrap_or(false))
}

fn no_cuda(py: Python<'_>, name: &str) -> PyErr {
    let what =
        "the memory is on a GPU, and this build moves host memory only; copy it to the CPU first";
    errors::raise(py, "NoCuda", format!("{name}: {what}"))
}

fn not_contiguous(name: &str) -> PyErr {
    PyBufferError::new_err(format!(
        "{name}: the memory is not contiguous; make a contiguous copy or transfer it in pieces"
    ))
}

fn by_buffer(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let py = object.py();
    // The view keeps the export: a bytearray cannot be resized under us while it lives.
    let keeper = match PyMemoryView::from(object) {
        Ok(keeper) => keeper,
        // NumPy has types that the buffer protocol has no letter for.
        Err(_) if object.hasattr("__array_interface__")? => {
            return by_array_interface(name, object);
        }
        Err(error) => {
            return Err(PyBufferError::new_err(format!("{name}: {}", error.value(py))));
        }
    };
    let mut view = MaybeUninit::<ffi::Py_buffer>::uninit();
    const FLAGS: c_int = ffi::PyBUF_ANY_CONTIGUOUS | ffi::PyBUF_FORMAT;
    // SAFETY: a valid object and a view to fill, which is released below.
    if unsafe { ffi::PyObject_GetBuffer(keeper.as_ptr(), view.as_mut_ptr(), FLAGS) } != 0 {
        drop(PyErr::fetch(py));
        return Err(not_contiguous(name));
    }
    // SAFETY: the call above succeeded, so the view is filled; it is released once.
    let (ptr, len, readonly, objects) = unsafe {
        let filled = view.assume_init_mut();
        let format = filled.format;
        let objects = !format.is_null() && CStr::from_ptr(format).to_bytes().contains(&b'O');
        let found = (filled.buf.cast(), filled.len as usize, filled.readonly != 0, objects);
        ffi::PyBuffer_Release(filled);
        found
    };
    if objects {
        return Err(holds_objects(name));
    }
    Ok(Memory { ptr, len, readonly, sure: true, _owner: keeper.into_any().unbind() })
}

fn holds_objects(name: &str) -> PyErr {
    PyBufferError::new_err(format!("{name}: it holds Python objects, which are no bytes to move"))
}

/// A tensor's bytes, kept by an array that shares its storage: that holds the storage when the tensor is given
/// another, and keeps it from being resized.
fn of_torch(name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let device: String = tensor.getattr("device")?.getattr("type")?.extract()?;
    match device.as_str() {
        "cpu" => {}
        "cuda" => return Err(no_cuda(tensor.py(), name)),
        other => {
            return Err(PyTypeError::new_err(format!(
                "{name}: the tensor is on device '{other}'; copy it to the CPU first"
            )));
        }
    }
    if !tensor.call_method0("is_contiguous")?.is_truthy()? {
        return Err(not_contiguous(name));
    }
    let bytes = tensor.py().import("torch")?.getattr("uint8")?;
    let flat = tensor.call_method0("detach")?.call_method1("reshape", (-1,))?;
    let array = flat.call_method1("view", (bytes,)).and_then(|flat| flat.call_method0("numpy"));
    let array = array.map_err(|error| {
        let why = error.value(tensor.py());
        PyTypeError::new_err(format!("{name}: the tensor's bytes cannot be had: {why}"))
    })?;
    // torch says of every tensor that it is writable.
    Ok(Memory { sure: false, ..by_buffer(name, &array)? })
}

fn by_data_ptr(name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<Memory> {
    if tensor.hasattr("is_contiguous")? && !tensor.call_method0("is_contiguous")?.is_truthy()? {
        return Err(not_contiguous(name));
    }
    let number = |method: &str| tensor.call_method0(method)?.extract::<usize>();
    let (ptr, count, size) = (number("data_ptr")?, number("numel")?, number("element_size")?);
    let len = count.checked_mul(size).ok_or_else(|| too_long(name))?;
    let owner = tensor.clone().unbind();
    Ok(Memory { ptr: ptr as *mut u8, len, readonly: false, sure: false, _owner: owner })
}

fn by_array_interface(name: &str, array: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let interface = array.getattr("__array_interface__")?;
    let wrong = || {
        PyBufferError::new_err(format!(
            "{name}: its __array_interface__ does not name plain memory"
        ))
    };
    let interface = interface.cast::<PyDict>().map_err(|_| wrong())?;
    let item = |key: &str| interface.get_item(key).ok().flatten().filter(|item| !item.is_none());
    let (ptr, readonly): (usize, bool) = item("data").ok_or_else(wrong)?.extract()?;
    let shape: Vec<usize> = item("shape").ok_or_else(wrong)?.extract()?;
    let kind: String = item("typestr").ok_or_else(wrong)?.extract()?;
    // A time's unit follows its size: `<M8[s]`.
    let digits = kind.get(2..).map(|rest| rest.split('[').next().unwrap_or(rest));
    let size: usize = digits.and_then(|size| size.parse().ok()).ok_or_else(wrong)?;
    match kind.as_bytes()[1] {
        b'O' => return Err(holds_objects(name)),
        // Bits: their count is no count of bytes.
        b't' => return Err(wrong()),
        _ => {}
    }
    let strides: Option<Vec<isize>> =
        item("strides").map(|strides| strides.extract()).transpose()?;
    if strides.as_ref().is_some_and(|strides| strides.len() != shape.len()) {
        return Err(wrong());
    }
    let len = contiguous(name, &shape, size, strides.as_deref())?;
    let owner = array.clone().unbind();
    Ok(Memory { ptr: ptr as *mut u8, len, readonly, sure: false, _owner: owner })
}

/// Bytes of an array that lies in one piece, in row order; strides are in bytes.
fn contiguous(
    name: &str,
    shape: &[usize],
    size: usize,
    strides: Option<&[isize]>,
) -> PyResult<usize> {
    let mut len = size;
    for (axis, &count) in shape.iter().enumerate().rev() {
        let stride = strides.and_then(|strides| strides.get(axis));
        if count > 1 && stride.is_some_and(|&stride| stride != len as isize) {
            return Err(not_contiguous(name));
        }
        len = len.checked_mul(count).ok_or_else(|| too_long(name))?;
    }
    Ok(len)
}

fn too_long(name: &str) -> PyErr {
    PyValueError::new_err(format!("{name}: its size overflows"))
}

/// DLPack's tensor, as its specification lays it out.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

const DL_CPU: i32 = 1;

fn by_dlpack(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let device = object.call_method0("__dlpack_device__")?;
    let device = device.extract::<(i32, i32)>().map_err(|_| {
        PyTypeError::new_err(format!("{name}: its __dlpack_device__ gives no pair of numbers"))
    })?;
    let (device, _) = device;
    if device != DL_CPU {
        return Err(no_cuda(object.py(), name));
    }
    let capsule = object.call_method0("__dlpack__")?;
    let plain = || PyBufferError::new_err(format!("{name}: its __dlpack__ gives no plain tensor"));
    let holder = capsule.cast::<PyCapsule>().map_err(|_| plain())?;
    let tensor = holder.pointer_checked(Some(c"dltensor")).map_err(|_| plain())?;
    // SAFETY: a capsule of this name holds a managed tensor, which begins with the tensor, and which lives
    // until the capsule is dropped: we never take it over.
    let tensor = unsafe { tensor.cast::<DlTensor>().as_ref() };
    let axes = usize::try_from(tensor.ndim).map_err(|_| plain())?;
    let numbers = |ptr: *const i64| {
        if axes == 0 {
            return Vec::new();
        }
        // SAFETY: by its specification each array has `ndim` entries.
        unsafe { std::slice::from_raw_parts(ptr, axes) }.to_vec()
    };
    let size = usize::from(tensor.bits).div_ceil(8) * usize::from(tensor.lanes);
    let shape: Option<Vec<usize>> =
        numbers(tensor.shape).into_iter().map(|count| usize::try_from(count).ok()).collect();
    let strides: Option<Vec<isize>> = (!tensor.strides.is_null()).then(|| {
        numbers(tensor.strides).into_iter().map(|stride| stride as isize * size as isize).collect()
    });
    let len = contiguous(name, &shape.ok_or_else(plain)?, size, strides.as_deref())?;
    let ptr = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
    Ok(Memory { ptr, len, readonly: false, sure: false, _owner: capsule.unbind() })
}

/// Memory by address, with or without something that keeps it.
pub(crate) fn at_address(
    py: Python<'_>,
    endpoint: &Endpoint,
    addr: usize,
    len: usize,
    owner: Py<PyAny>,
) -> PyResult<PyRegion> {
    let found = Memory { ptr: addr as *mut u8, len, readonly: false, sure: false, _owner: owner };
    let writable = found.try_writing("address").is_ok();
    Ok(PyRegion::perhaps_readonly(registered(py, endpoint, found)?, writable))
}
