//! Regions, slices of regions and block lists, local and remote.

use std::ffi::c_int;

use peerway::{Access, Fence};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::arguments::Int;
use crate::peer::Peer;
use crate::{arguments, errors, gpu, memory};

/// Registered local memory. Its advertisements end when this object is destroyed.
#[pyclass(frozen, module = "peerway", weakref)]
pub(crate) struct Region {
    pub(crate) region: peerway::Region,
    pub(crate) writable: bool,
}

impl Region {
    pub(crate) fn new(region: peerway::Region) -> Self {
        Self { region, writable: true }
    }

    /// For memory that was registered by address and may be read-only.
    pub(crate) fn perhaps_readonly(region: peerway::Region, writable: bool) -> Self {
        Self { region, writable }
    }
}

#[pymethods]
impl Region {
    /// Address of the first byte in this process.
    #[getter]
    fn address(&self) -> u64 {
        self.region.addr()
    }

    /// Bytes in the region.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.region.len()
    }

    /// Whether transfers may write into the region. False for read-only memory that was
    /// registered by address.
    #[getter]
    fn writable(&self) -> bool {
        self.writable
    }

    /// Whether local peers can map the region.
    #[getter]
    fn shareable(&self) -> bool {
        self.region.is_shareable()
    }

    /// The number of the GPU that holds the memory; None for host memory.
    #[getter]
    fn gpu(&self) -> Option<u32> {
        self.region.gpu()
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.region.gpu().is_none() {
            return Err(PyAttributeError::new_err("the region's memory is not on a GPU"));
        }
        gpu::interface(py, self.region.addr(), self.region.len(), !self.writable)
    }

    fn __len__(&self) -> usize {
        self.region.len() as usize
    }

    fn __getitem__(&self, bytes: &Bound<'_, PyAny>) -> PyResult<LocalSlice> {
        let range = arguments::range(bytes, self.region.len())?;
        let addr = self.region.addr() + range.start;
        Ok(LocalSlice { addr, slice: self.region.slice(range), writable: self.writable })
    }

    /// Selects blocks of ``nbytes`` bytes. Block ``i`` starts at ``base + indices[i] *
    /// stride``.
    #[pyo3(signature = (indices, nbytes, *, stride=None, base=Int(0)), text_signature = "($self, indices, nbytes, *, stride=None, base=0)")]
    fn blocks(
        &self,
        indices: &Bound<'_, PyAny>,
        nbytes: Int<u64>,
        stride: Option<Int<u64>>,
        base: Int<u64>,
    ) -> PyResult<BlockList> {
        local_blocks(self, indices, nbytes.0, stride.map(|s| s.0), base.0)
    }

    /// Returns a 64-byte descriptor that lets any peer, or only ``to``, access these bytes.
    #[pyo3(
        signature = (access="rw", *, start=Int(0), stop=None, to=None),
        text_signature = "($self, access='rw', *, start=0, stop=None, to=None)"
    )]
    fn advertise<'py>(
        &self,
        py: Python<'py>,
        access: &str,
        start: Int<u64>,
        stop: Option<Int<u64>>,
        to: Option<&Bound<'_, Peer>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let access = arguments::access(access)?;
        if !self.writable && access.allows(Access::WRITE) {
            return Err(PyBufferError::new_err(
                "access: the region's memory is read-only; advertise it with 'r'",
            ));
        }
        let range = start.0..stop.map_or(self.region.len(), |stop| stop.0);
        let to = to.map(|peer| &peer.get().peer);
        let descriptor = self.region.advertise_range(range, access, to);
        let descriptor = descriptor.map_err(|error| errors::register(py, error))?;
        Ok(PyBytes::new(py, &descriptor))
    }

    /// Ends every advertisement of the region. True: the fence is held, and no peer accesses
    /// the memory any more.
    ///
    /// False: a peer may still access the memory. The memory stays allocated until that peer
    /// leaves or dies, even after the region and its endpoint are gone (see ``quarantine``).
    /// Call again to wait again.
    fn revoke(&self, py: Python<'_>) -> bool {
        py.detach(|| self.region.revoke()) == Fence::Held
    }

    fn __repr__(&self) -> String {
        let (len, addr) = (self.region.len(), self.region.addr());
        let whose = self.region.gpu().map(|gpu| format!(" of GPU {gpu}")).unwrap_or_default();
        format!("<peerway.Region of {len} bytes at {addr:#x}{whose}>")
    }

    /// # Safety
    ///
    /// Called by the interpreter with a view to fill.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let region = &slf.get().region;
        if let Some(gpu) = region.gpu() {
            return Err(PyBufferError::new_err(format!(
                "the region is on GPU {gpu}, which the CPU cannot access; use __cuda_array_interface__"
            )));
        }
        if !region.is_shareable() {
            return Err(PyBufferError::new_err(
                "the region does not own its memory; use the object it was registered from",
            ));
        }
        let (ptr, len) = (region.addr() as *mut u8, region.len());
        // SAFETY: the interpreter passes a valid view. Shareable memory lives as long as the
        // region, and the view keeps `slf`, which owns the region.
        unsafe { memory::fill(slf.as_any(), view, flags, ptr, len) }
    }
}

/// A part of a region.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct LocalSlice {
    addr: u64,
    pub(crate) slice: peerway::LocalSlice,
    pub(crate) writable: bool,
}

#[pymethods]
impl LocalSlice {
    /// Address of the first byte in this process.
    #[getter]
    fn address(&self) -> u64 {
        self.addr
    }

    /// Bytes in the slice.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.slice.len()
    }

    fn __len__(&self) -> usize {
        self.slice.len() as usize
    }
}

/// Memory that a peer advertised.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct RemoteRegion {
    pub(crate) region: peerway::RemoteRegion,
}

#[pymethods]
impl RemoteRegion {
    /// Bytes that the descriptor covers.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.region.len()
    }

    /// The access that the owner allows: ``r``, ``w`` or ``rw``.
    #[getter]
    fn access(&self) -> &'static str {
        match self.region.access() {
            access if access == Access::READ => "r",
            access if access == Access::WRITE => "w",
            _ => "rw",
        }
    }

    /// The path by which this process accesses the memory on its own; None when transfers go
    /// over lanes.
    #[getter]
    fn direct_path(&self) -> Option<String> {
        self.region.direct_path().map(|kind| kind.to_string())
    }

    fn __len__(&self) -> usize {
        self.region.len() as usize
    }

    fn __getitem__(&self, bytes: &Bound<'_, PyAny>) -> PyResult<RemoteSlice> {
        let range = arguments::range(bytes, self.region.len())?;
        Ok(RemoteSlice { slice: self.region.slice(range) })
    }

    /// Selects blocks of ``nbytes`` bytes. Block ``i`` starts at ``base + indices[i] *
    /// stride``.
    #[pyo3(signature = (indices, nbytes, *, stride=None, base=Int(0)), text_signature = "($self, indices, nbytes, *, stride=None, base=0)")]
    fn blocks(
        &self,
        indices: &Bound<'_, PyAny>,
        nbytes: Int<u64>,
        stride: Option<Int<u64>>,
        base: Int<u64>,
    ) -> PyResult<BlockList> {
        remote_blocks(&self.region, indices, nbytes.0, stride.map(|s| s.0), base.0)
    }

    fn __repr__(&self) -> String {
        format!("<peerway.RemoteRegion of {} bytes, '{}'>", self.region.len(), self.access())
    }
}

/// A part of a peer's memory.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct RemoteSlice {
    pub(crate) slice: peerway::RemoteSlice,
}

#[pymethods]
impl RemoteSlice {
    /// Bytes in the slice.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.slice.len()
    }

    fn __len__(&self) -> usize {
        self.slice.len() as usize
    }
}

/// Equal blocks of a region or a remote region, for example of a paged KV cache.
#[pyclass(frozen, module = "peerway")]
pub(crate) struct BlockList {
    pub(crate) side: BlockSide,
    count: usize,
    nbytes: u64,
    /// Whether a transfer may read bytes into the blocks. Meaningful for local blocks only.
    pub(crate) writable: bool,
}

/// The side that holds the blocks.
pub(crate) enum BlockSide {
    Local(peerway::LocalBlocks),
    Remote(peerway::RemoteBlocks),
}

#[pymethods]
impl BlockList {
    #[new]
    #[pyo3(signature = (region, indices, nbytes, *, stride=None, base=Int(0)), text_signature = "(region, indices, nbytes, *, stride=None, base=0)")]
    fn new(
        region: &Bound<'_, PyAny>,
        indices: &Bound<'_, PyAny>,
        nbytes: Int<u64>,
        stride: Option<Int<u64>>,
        base: Int<u64>,
    ) -> PyResult<Self> {
        let (nbytes, stride, base) = (nbytes.0, stride.map(|s| s.0), base.0);
        if let Ok(local) = region.cast::<Region>() {
            return local_blocks(local.get(), indices, nbytes, stride, base);
        }
        if let Ok(remote) = region.cast::<RemoteRegion>() {
            return remote_blocks(&remote.get().region, indices, nbytes, stride, base);
        }
        Err(arguments::wrong_type("region", region, "Region or RemoteRegion"))
    }

    /// Bytes of all blocks together.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes.saturating_mul(self.count as u64)
    }

    /// Number of blocks.
    fn __len__(&self) -> usize {
        self.count
    }
}

fn local_blocks(
    region: &Region,
    indices: &Bound<'_, PyAny>,
    nbytes: u64,
    stride: Option<u64>,
    base: u64,
) -> PyResult<BlockList> {
    let indices = indices_of(indices)?;
    let blocks = region.region.blocks(base, stride.unwrap_or(nbytes), nbytes, &indices);
    let writable = region.writable;
    Ok(BlockList { side: BlockSide::Local(blocks), count: indices.len(), nbytes, writable })
}

fn remote_blocks(
    region: &peerway::RemoteRegion,
    indices: &Bound<'_, PyAny>,
    nbytes: u64,
    stride: Option<u64>,
    base: u64,
) -> PyResult<BlockList> {
    let indices = indices_of(indices)?;
    let blocks = region.blocks(base, stride.unwrap_or(nbytes), nbytes, &indices);
    let writable = true;
    Ok(BlockList { side: BlockSide::Remote(blocks), count: indices.len(), nbytes, writable })
}

/// Block numbers from a sequence, or from an array of any integer type. An array costs no Python
/// object per number.
fn indices_of(object: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let py = object.py();
    if let Ok(buffer) = PyBuffer::<u32>::get(object) {
        return buffer.to_vec(py);
    }
    fn narrow<T: Copy + std::fmt::Display>(numbers: Vec<T>) -> PyResult<Vec<u32>>
    where
        u32: TryFrom<T>,
    {
        let one = |(at, number): (usize, T)| {
            u32::try_from(number).map_err(|_| {
                let range = "0 to 4294967295";
                PyValueError::new_err(format!("indices: number {number} at {at} is not in {range}"))
            })
        };
        numbers.into_iter().enumerate().map(one).collect()
    }
    macro_rules! of {
        ($($number:ty),*) => {
            $(if let Ok(buffer) = PyBuffer::<$number>::get(object) {
                return narrow(buffer.to_vec(py)?);
            })*
        };
    }
    of!(i64, i32, u64, u16, i16, u8, i8);
    if object.hasattr("data_ptr")? && object.hasattr("numpy")? {
        // A tensor exposes its numbers as an array without a copy.
        return indices_of(&object.call_method0("numpy")?);
    }
    object
        .extract::<Vec<i64>>()
        .map_err(|_| {
            let wanted = "an array of integers or a sequence of int";
            match object.getattr("dtype") {
                Ok(dtype) => PyTypeError::new_err(format!(
                    "indices: expected {wanted}, not an array of dtype {dtype}"
                )),
                Err(_) => arguments::wrong_type("indices", object, wanted),
            }
        })
        .and_then(narrow)
}

/// Reports memory of this process that was released while a peer might still access it.
///
/// ``regions`` and ``bytes`` count the memory in quarantine now, over all endpoints,
/// including closed ones. The objects stay alive until the peer leaves the memory or dies.
/// ``entries_ever`` counts all entries since the process started.
#[pyfunction]
pub(crate) fn quarantine(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let now = peerway::quarantine();
    let stats = PyDict::new(py);
    stats.set_item("regions", now.regions)?;
    stats.set_item("bytes", now.bytes)?;
    stats.set_item("entries_ever", now.entries_ever)?;
    Ok(stats)
}
