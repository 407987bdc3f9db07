//! Python objects as memory: its address, its length, and the reference that keeps it alive.
//!
//! The protocols are tried in this order: torch's tensor, the buffer protocol,
//! `__cuda_array_interface__`, `__array_interface__`, `__dlpack__`, `data_ptr()`. The owner
//! reference is dropped after the engine has released the memory, on any thread. pyo3 defers that
//! drop until a thread holds the interpreter.
//!
//! Peers can write this memory at any time, and a fault in a copy ends the process. The owner must
//! therefore keep the *memory* alive, not only the object: a tensor can get other storage. Memory
//! whose writability is only a claim is probed first.
//!
//! This module never accesses GPU memory; it asks the driver about it. A transfer moves the bytes
//! that are there when it runs. So registration waits for the producer's pending work if the object
//! names the stream.

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use peerway::{Endpoint, OwnedMemory, Region, gpu};
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
    place: Place,
    _owner: Py<PyAny>,
}

/// The location of the memory, as the object declares it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Place {
    /// Host memory whose read-only flag is reliable.
    Host,
    /// Not declared. Unless the driver knows it as GPU memory, it is host memory, which is probed
    /// before it is written.
    Unsaid,
    /// GPU memory. This stream may have pending work on it; 0 means no stream.
    Gpu { stream: usize },
}

// SAFETY: the pointer is an address that `_owner` keeps valid. No code of this type dereferences
// it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

// SAFETY: `_owner` keeps the memory valid and in place until it is dropped. A memory view or a
// capsule does so by its contract. An array interface promises it for a live object. For memory by
// address, the caller of `register_address` promises it. Python code and peers may write the memory
// at any time, so no Rust reference to it is made.
unsafe impl OwnedMemory for Memory {
    fn bytes(&mut self) -> (*mut u8, usize) {
        (self.ptr, self.len)
    }
}

/// The access that a transfer or a registration needs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Use {
    /// Read the memory.
    Read,
    /// Read and write the memory.
    Write,
}

/// The order of the elements of an array in its memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Order {
    /// Rows one after another.
    Row,
    /// Any order without gaps.
    Any,
}

/// Registers an object's memory with an endpoint. `name` names the argument in errors.
pub(crate) fn register(
    endpoint: &Endpoint,
    name: &str,
    object: &Bound<'_, PyAny>,
    needs: Use,
    order: Order,
) -> PyResult<Region> {
    let found = find(name, object, order)?;
    if found.readonly && needs == Use::Write {
        return Err(refuse_readonly(name));
    }
    let (range, place) = (found.range(), found.place);
    let region = registered(object.py(), endpoint, name, found)?;
    // Probe only after the registration, which finds out whether a GPU holds the memory. GPU memory
    // must not be probed.
    if needs == Use::Write && place == Place::Unsaid && region.gpu().is_none() {
        try_writing(name, range)?;
    }
    Ok(region)
}

/// The kind of access to probe a page for.
#[derive(Clone, Copy)]
enum Touch {
    Read,
    Write,
}

/// Whether the page at this address can be read or written. True where the kernel cannot tell
/// (before Linux 5.14).
fn can(touch: Touch, addr: usize) -> bool {
    fn populate(touch: Touch, addr: usize) -> bool {
        let page = rustix::param::page_size();
        let start = (addr & !(page - 1)) as *mut c_void;
        let advice = match touch {
            Touch::Read => Advice::LinuxPopulateRead,
            Touch::Write => Advice::LinuxPopulateWrite,
        };
        // SAFETY: the call faults a page in, as an access does, and changes no byte. It returns an
        // error for an address that is not mapped.
        unsafe { rustix::mm::madvise(start, page, advice) }.is_ok()
    }
    static KERNEL_CAN_SAY: OnceLock<bool> = OnceLock::new();
    populate(touch, addr) || {
        let ours = 0u8;
        !KERNEL_CAN_SAY.get_or_init(|| populate(Touch::Write, &raw const ours as usize))
    }
}

/// The first or last address of the range if its page does not allow this access. Memory that is
/// declared wrongly usually fails at an end. The probe costs about a microsecond.
fn unreachable_end(touch: Touch, range: (usize, usize)) -> Option<usize> {
    let (addr, len) = range;
    let ends = (len > 0).then(|| [addr, addr + (len - 1)]);
    ends.into_iter().flatten().find(|addr| !can(touch, *addr))
}

fn try_writing(name: &str, range: (usize, usize)) -> PyResult<()> {
    let Some(addr) = unreachable_end(Touch::Write, range) else { return Ok(()) };
    Err(PyBufferError::new_err(format!(
        "{name}: the memory at {addr:#x} cannot be written; it is read-only or not mapped"
    )))
}

/// The error for read-only memory in a call that writes it.
pub(crate) fn refuse_readonly(name: &str) -> PyErr {
    PyBufferError::new_err(format!(
        "{name}: the memory is read-only; copy it into a bytearray or a writable array"
    ))
}

fn registered(py: Python<'_>, endpoint: &Endpoint, name: &str, found: Memory) -> PyResult<Region> {
    // Empty memory needs no GPU, and may have no address.
    let stream = match found.place {
        Place::Gpu { stream } if found.len > 0 => Some(stream),
        _ => None,
    };
    let region = match (stream, memory::find(found.ptr as u64, found.len as u64)) {
        // The first registration opens the driver and makes a context, which is slow.
        (Some(stream), _) => py.detach(|| {
            let region = endpoint.register_gpu(found)?;
            if let (Some(index), 1..) = (region.gpu(), stream) {
                // SAFETY: the producer keeps the stream alive while the object's interface names
                // it.
                unsafe { gpu::wait_for_stream(index, stream as *mut c_void) }?;
            }
            Ok(region)
        }),
        (None, Some((shared, range))) => endpoint.register_shared(&shared, range),
        (None, None) => endpoint.register(found),
    };
    region.map_err(|error| errors::register_argument(py, name, error))
}

impl Memory {
    fn range(&self) -> (usize, usize) {
        (self.ptr as usize, self.len)
    }
}

fn find(name: &str, object: &Bound<'_, PyAny>, order: Order) -> PyResult<Memory> {
    if is_torch(object) {
        return of_torch(name, object);
    }
    // SAFETY: `object` is a live Python object, and the interpreter is held.
    if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } != 0 {
        return by_buffer(name, object, order);
    }
    if object.hasattr("__cuda_array_interface__")? {
        return by_cuda_interface(name, object);
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
        "a region or an object with memory (buffer protocol, data_ptr(), __array_interface__, \
         __cuda_array_interface__ or __dlpack__)",
    ))
}

/// Whether the object is a torch tensor. Such an object exists only if torch is loaded, so this
/// imports nothing.
fn is_torch(object: &Bound<'_, PyAny>) -> bool {
    let Ok(modules) = object.py().import("sys").and_then(|sys| sys.getattr("modules")) else {
        return false;
    };
    let tensor = modules.get_item("torch").and_then(|torch| torch.getattr("Tensor"));
    tensor.is_ok_and(|tensor| object.is_instance(&tensor).unwrap_or(false))
}

fn not_contiguous(name: &str) -> PyErr {
    PyBufferError::new_err(format!(
        "{name}: the memory is not contiguous; make a contiguous copy or transfer it in pieces"
    ))
}

fn by_buffer(name: &str, object: &Bound<'_, PyAny>, order: Order) -> PyResult<Memory> {
    let py = object.py();
    // The view keeps the buffer exported, so a bytearray cannot be resized while the view lives.
    let keeper = match PyMemoryView::from(object) {
        Ok(keeper) => keeper,
        // A type may support the buffer protocol only for its objects that are not on a GPU.
        Err(_) if object.hasattr("__cuda_array_interface__")? => {
            return by_cuda_interface(name, object);
        }
        // The buffer protocol has no format code for some NumPy types.
        Err(_) if object.hasattr("__array_interface__")? => {
            return by_array_interface(name, object);
        }
        Err(error) => {
            return Err(PyBufferError::new_err(format!("{name}: {}", error.value(py))));
        }
    };
    let mut view = MaybeUninit::<ffi::Py_buffer>::uninit();
    let mut get = |kind: c_int| {
        let flags = kind | ffi::PyBUF_FORMAT;
        // SAFETY: `keeper` is a live object. The caller releases the view if there is one.
        let failed =
            unsafe { ffi::PyObject_GetBuffer(keeper.as_ptr(), view.as_mut_ptr(), flags) } != 0;
        if failed {
            drop(PyErr::fetch(py));
        }
        !failed
    };
    let by_rows = get(ffi::PyBUF_C_CONTIGUOUS);
    if !by_rows && !get(ffi::PyBUF_F_CONTIGUOUS) {
        return Err(not_contiguous(name));
    }
    // SAFETY: the call above succeeded, so the view is filled. It is released once.
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
    if !by_rows && order == Order::Row {
        return Err(PyBufferError::new_err(format!(
            "{name}: the array is in Fortran order, so its bytes are not in the order of its \
             elements; register it with order='any' or make a copy in C order"
        )));
    }
    Ok(Memory { ptr, len, readonly, place: Place::Host, _owner: keeper.into_any().unbind() })
}

fn holds_objects(name: &str) -> PyErr {
    PyBufferError::new_err(format!(
        "{name}: the memory holds Python objects, which cannot be transferred; use a numeric dtype"
    ))
}

/// A tensor's bytes. The owner is an array that shares the tensor's storage. It keeps that storage
/// when the tensor gets another one, and prevents a resize. GPU storage has no such array, so there
/// the owner is another tensor.
fn of_torch(name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let device: String = tensor.getattr("device")?.getattr("type")?.extract()?;
    match device.as_str() {
        "cpu" | "cuda" => {}
        other => {
            return Err(PyTypeError::new_err(format!(
                "{name}: the tensor is on device '{other}'; copy it to the CPU or to a CUDA GPU first"
            )));
        }
    }
    if !tensor.call_method0("is_contiguous")?.is_truthy()? {
        return Err(not_contiguous(name));
    }
    let torch = tensor.py().import("torch")?;
    let flat = tensor.call_method0("detach")?.call_method1("reshape", (-1,))?;
    let flat = flat.call_method1("view", (torch.getattr("uint8")?,));
    let bytes = match device.as_str() {
        "cuda" => flat,
        _ => flat.and_then(|flat| flat.call_method0("numpy")),
    };
    let bytes = bytes.map_err(|error| {
        let why = error.value(tensor.py());
        PyTypeError::new_err(format!("{name}: the tensor does not expose its bytes: {why}"))
    })?;
    if device == "cuda" {
        // The work that computes the tensor is in torch's current stream of its device.
        let stream =
            torch.getattr("cuda")?.call_method1("current_stream", (tensor.getattr("device")?,))?;
        stream.call_method0("synchronize")?;
        return Ok(Memory { place: Place::Gpu { stream: 0 }, ..by_data_ptr(name, &bytes)? });
    }
    // torch declares every tensor as writable, so the memory is probed.
    Ok(Memory { place: Place::Unsaid, ..by_buffer(name, &bytes, Order::Row)? })
}

fn by_data_ptr(name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<Memory> {
    if tensor.hasattr("is_contiguous")? && !tensor.call_method0("is_contiguous")?.is_truthy()? {
        return Err(not_contiguous(name));
    }
    let number = |method: &str| tensor.call_method0(method)?.extract::<usize>();
    let (ptr, count, size) = (number("data_ptr")?, number("numel")?, number("element_size")?);
    let len = count.checked_mul(size).ok_or_else(|| too_long(name))?;
    let on_gpu = tensor.hasattr("is_cuda")? && tensor.getattr("is_cuda")?.is_truthy()?;
    let place = if on_gpu { Place::Gpu { stream: 0 } } else { Place::Unsaid };
    let owner = tensor.clone().unbind();
    Ok(Memory { ptr: ptr as *mut u8, len, readonly: false, place, _owner: owner })
}

/// Memory by `__cuda_array_interface__`. Its `stream` may have pending work on the memory.
fn by_cuda_interface(name: &str, array: &Bound<'_, PyAny>) -> PyResult<Memory> {
    const NAME: &str = "__cuda_array_interface__";
    let interface = array.getattr(NAME)?;
    let found = by_interface(name, array, NAME, &interface)?;
    let item = |key: &str| interface.get_item(key).ok().filter(|item| !item.is_none());
    if item("mask").is_some() {
        return Err(PyBufferError::new_err(format!(
            "{name}: the array is masked; transfer an array without a mask"
        )));
    }
    let stream = item("stream").map(|stream| stream.extract::<usize>()).transpose()?;
    if stream == Some(0) {
        // The interface forbids 0, because it could mean two streams.
        return Err(PyBufferError::new_err(format!(
            "{name}: 0 is not a valid stream; use 1 for the default stream, 2 for the thread's, or None for \
             no pending work"
        )));
    }
    Ok(Memory { place: Place::Gpu { stream: stream.unwrap_or(0) }, ..found })
}

fn by_array_interface(name: &str, array: &Bound<'_, PyAny>) -> PyResult<Memory> {
    const NAME: &str = "__array_interface__";
    by_interface(name, array, NAME, &array.getattr(NAME)?)
}

/// The common part of both array interfaces.
fn by_interface(
    name: &str,
    array: &Bound<'_, PyAny>,
    of: &str,
    interface: &Bound<'_, PyAny>,
) -> PyResult<Memory> {
    let wrong =
        || PyBufferError::new_err(format!("{name}: its {of} is not valid for plain memory"));
    let interface = interface.cast::<PyDict>().map_err(|_| wrong())?;
    let item = |key: &str| interface.get_item(key).ok().flatten().filter(|item| !item.is_none());
    let (ptr, readonly): (usize, bool) = item("data").ok_or_else(wrong)?.extract()?;
    let shape: Vec<usize> = item("shape").ok_or_else(wrong)?.extract()?;
    let kind: String = item("typestr").ok_or_else(wrong)?.extract()?;
    // The unit of a time follows the size: `<M8[s]`.
    let digits = kind.get(2..).map(|rest| rest.split('[').next().unwrap_or(rest));
    let size: usize = digits.and_then(|size| size.parse().ok()).ok_or_else(wrong)?;
    match kind.as_bytes()[1] {
        b'O' => return Err(holds_objects(name)),
        // Bit fields: the size counts bits, not bytes.
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
    Ok(Memory { ptr: ptr as *mut u8, len, readonly, place: Place::Unsaid, _owner: owner })
}

/// Bytes of an array that is contiguous in row-major order. Strides are in bytes.
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
    PyValueError::new_err(format!("{name}: its size in bytes overflows"))
}

/// DLPack's tensor, in the layout of its specification.
#[repr(C)]
pub(crate) struct DlTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device_type: i32,
    pub(crate) device_id: i32,
    pub(crate) ndim: i32,
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
    pub(crate) shape: *const i64,
    pub(crate) strides: *const i64,
    pub(crate) byte_offset: u64,
}

const DL_CPU: i32 = 1;
pub(crate) const DL_CUDA: i32 = 2;
/// Pinned host memory.
const DL_CUDA_HOST: i32 = 3;
/// The driver's default stream, in DLPack and in the driver. It runs after all work queued earlier.
const DEFAULT_STREAM: usize = 1;

fn by_dlpack(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let device = object.call_method0("__dlpack_device__")?;
    let device = device.extract::<(i32, i32)>().map_err(|_| {
        PyTypeError::new_err(format!("{name}: its __dlpack_device__ is not a pair of numbers"))
    })?;
    let (device, _) = device;
    let (capsule, place) = match device {
        DL_CPU | DL_CUDA_HOST => (object.call_method0("__dlpack__")?, Place::Unsaid),
        DL_CUDA => {
            // The producer orders its work before this stream, and registration waits for the
            // stream.
            let stream = PyDict::new(object.py());
            stream.set_item("stream", DEFAULT_STREAM)?;
            let capsule = object.call_method("__dlpack__", (), Some(&stream))?;
            (capsule, Place::Gpu { stream: DEFAULT_STREAM })
        }
        _ => {
            return Err(PyTypeError::new_err(format!(
                "{name}: the memory is on a DLPack device of kind {device}; copy it to the CPU or to a CUDA \
                 GPU first"
            )));
        }
    };
    let plain = || PyBufferError::new_err(format!("{name}: its __dlpack__ is not a valid tensor"));
    let holder = capsule.cast::<PyCapsule>().map_err(|_| plain())?;
    let tensor = holder.pointer_checked(Some(c"dltensor")).map_err(|_| plain())?;
    // SAFETY: a capsule of this name holds a managed tensor, which begins with the tensor. It lives
    // until the capsule is dropped, because this code never takes it over.
    let tensor = unsafe { tensor.cast::<DlTensor>().as_ref() };
    let axes = usize::try_from(tensor.ndim).map_err(|_| plain())?;
    let numbers = |ptr: *const i64| {
        if axes == 0 {
            return Vec::new();
        }
        // SAFETY: the DLPack specification gives each array `ndim` entries.
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
    Ok(Memory { ptr, len, readonly: false, place, _owner: capsule.unbind() })
}

/// Registers memory by address. `owner` keeps it alive; with Python's `None`, the caller does.
pub(crate) fn at_address(
    py: Python<'_>,
    endpoint: &Endpoint,
    addr: usize,
    len: usize,
    owner: Py<PyAny>,
) -> PyResult<PyRegion> {
    let (ptr, place) = (addr as *mut u8, Place::Unsaid);
    let found = Memory { ptr, len, readonly: false, place, _owner: owner };
    let region = registered(py, endpoint, "address", found)?;
    let writable = region.gpu().is_some() || unreachable_end(Touch::Write, (addr, len)).is_none();
    // The addresses of freed GPU memory can stay reserved, and an access there ends the process.
    if !writable
        && gpu::is_in_use()
        && let Some(at) = unreachable_end(Touch::Read, (addr, len))
    {
        let what = format!(
            "address: {at:#x} is neither host memory nor GPU memory; it was freed or never allocated"
        );
        return Err(errors::raise(py, "GpuError", what));
    }
    Ok(PyRegion::perhaps_readonly(region, writable))
}
