//! GPU memory that other processes can map.
//!
//! There are three ways to allocate it, best first: with a handle for the NVLink fabric (other
//! hosts too), with a file descriptor (this host), or plainly (this host, by the driver's own IPC).
//! The code tries each one. The GPU's reported capabilities are not enough: without its daemon, a
//! fabric refuses only at allocation. The memory records the way that succeeded, and why better
//! ones failed.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use peerway_core::region::Span;
use peerway_core::wire::GpuOffer;

use peerway_sys::cuda::ffi::{CUDA_ERROR_NOT_PERMITTED, CUDA_ERROR_NOT_SUPPORTED, CUstream};
use peerway_sys::cuda::{CudaError, Mapped, Physical, Plain, Shared};

use super::device::Device;
use super::share::{self, Imported};
use super::{GpuError, gpus};
use crate::worker::REAPER;

/// GPU memory that other processes can map. Cheap to clone. Dropping the last clone waits for the
/// process's work on the GPU and frees the memory.
///
/// After [`crate::Endpoint::register_gpu`], peers on this host access it without a copy through the
/// CPU.
///
/// ```no_run
/// use peerway::gpu::{DeviceMemory, DeviceMemoryOptions};
///
/// let memory = DeviceMemory::allocate(0, 64 << 20, &DeviceMemoryOptions::default())?;
/// println!("{} bytes at {:#x}, {}", memory.len(), memory.address(), memory.kind());
/// if let Some(why) = memory.why_not_better() {
///     println!("{why}");
/// }
/// # Ok::<(), peerway::gpu::GpuError>(())
/// ```
#[derive(Clone)]
pub struct DeviceMemory {
    inner: Arc<DeviceMemoryInner>,
}

struct DeviceMemoryInner {
    device: Arc<Device>,
    len: u64,
    kind: DeviceMemoryKind,
    passed_over: Vec<String>,
    backing: Option<Backing>,
}

enum Backing {
    Mapped(Mapped),
    Plain(Plain),
}

/// How GPU memory was allocated, which determines the processes that can map it.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
#[non_exhaustive]
pub enum DeviceMemoryKind {
    /// Processes within an NVLink fabric, also on other hosts.
    Fabric,
    /// Processes on this host, by a file descriptor.
    PosixFd,
    /// Processes on this host, by the driver's own IPC.
    Plain,
}

impl fmt::Display for DeviceMemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fabric => "fabric",
            Self::PosixFd => "posix-fd",
            Self::Plain => "plain",
        })
    }
}

/// Options for an allocation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceMemoryOptions {
    /// The best way to try; better ones are skipped. [`DeviceMemoryKind::Plain`] forces a plain
    /// allocation.
    pub from: DeviceMemoryKind,
    /// Other GPUs of this process that may use the memory.
    pub peers: Vec<u32>,
    /// Fill the memory with zeros.
    pub zeroed: bool,
    /// Let NICs access the memory, if the GPU supports it.
    pub rdma: bool,
}

impl Default for DeviceMemoryOptions {
    fn default() -> Self {
        Self { from: DeviceMemoryKind::Fabric, peers: Vec::new(), zeroed: false, rdma: true }
    }
}

impl DeviceMemoryOptions {
    /// Sets the best way to try.
    pub fn from(mut self, from: DeviceMemoryKind) -> Self {
        self.from = from;
        self
    }

    /// Lets these GPUs use the memory too.
    pub fn peers(mut self, peers: &[u32]) -> Self {
        self.peers = peers.to_vec();
        self
    }

    /// Fills the memory with zeros.
    pub fn zeroed(mut self) -> Self {
        self.zeroed = true;
        self
    }
}

impl DeviceMemory {
    /// Allocates `len` bytes on a GPU, rounded up to the GPU's allocation granularity.
    ///
    /// # Errors
    ///
    /// [`GpuError`]: no driver, no such GPU, or every way that was tried failed.
    pub fn allocate(gpu: u32, len: u64, options: &DeviceMemoryOptions) -> Result<Self, GpuError> {
        let gpus = gpus()?;
        let device = gpus.device(gpu)?;
        for peer in &options.peers {
            gpus.device(*peer)?;
        }
        let mut passed_over = Vec::new();
        let ways = [DeviceMemoryKind::Fabric, DeviceMemoryKind::PosixFd, DeviceMemoryKind::Plain];
        for kind in ways.into_iter().filter(|kind| *kind >= options.from) {
            match attempt(&device, len, kind, options) {
                Ok(backing) => {
                    let backing = Some(backing);
                    let inner = DeviceMemoryInner { device, len, kind, passed_over, backing };
                    let memory = Self { inner: Arc::new(inner) };
                    if options.zeroed {
                        memory.zero()?;
                    }
                    return Ok(memory);
                }
                Err(reason) => passed_over.push(format!("{kind}: {reason}")),
            }
        }
        let reasons = passed_over.join("; ");
        Err(GpuError::Allocate { len, gpu, reasons })
    }

    /// First byte. Only GPUs can use the address.
    pub fn address(&self) -> u64 {
        match &self.inner.backing {
            Some(Backing::Mapped(mapped)) => mapped.address(),
            Some(Backing::Plain(plain)) => plain.address(),
            None => 0,
        }
    }

    /// Requested length in bytes.
    pub fn len(&self) -> u64 {
        self.inner.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.inner.len == 0
    }

    /// The GPU's number in this process.
    pub fn gpu(&self) -> u32 {
        self.inner.device.index()
    }

    /// How the memory was allocated.
    pub fn kind(&self) -> DeviceMemoryKind {
        self.inner.kind
    }

    /// Why better kinds failed, in the driver's words. `None` if this is the best kind.
    pub fn why_not_better(&self) -> Option<String> {
        (!self.inner.passed_over.is_empty()).then(|| self.inner.passed_over.join("; "))
    }

    /// Frees this clone after the work that the stream holds now, and returns at once. If it is the
    /// last clone, this frees the memory. It does not wait for other work of the process on the
    /// GPU.
    ///
    /// # Safety
    ///
    /// The stream is alive and belongs to the memory's GPU, and no other stream uses the memory.
    pub unsafe fn free_after(self, stream: *mut std::ffi::c_void) -> Result<(), GpuError> {
        // SAFETY: the caller upholds this function's contract.
        let mark = unsafe { self.inner.device.mark(stream as CUstream)? };
        REAPER.run(move || {
            if let Err(error) = mark.wait() {
                tracing::error!(%error, "a CUDA stream failed; freeing the GPU memory it used");
            }
            if let Ok(mut inner) = Arc::try_unwrap(self.inner) {
                inner.backing = None;
            }
        });
        Ok(())
    }

    fn zero(&self) -> Result<(), GpuError> {
        // SAFETY: covers the new allocation, which no other code knows yet.
        unsafe { self.inner.device.fill_now(self.address(), 0, self.inner.len as usize)? };
        Ok(())
    }

    /// Exports the memory, so that another process can map it.
    ///
    /// # Errors
    ///
    /// [`GpuError::NotShareable`], or a driver call failed.
    pub fn export(&self) -> Result<ExportedMemory, GpuError> {
        let (address, gpu) = (self.address(), self.gpu());
        let located = gpus()?.locate(address, self.inner.len)?;
        let span = Span { offset: 0, len: self.inner.len };
        let (offer, fd) =
            share::offer(&located, address, span).ok_or(GpuError::NotShareable { address, gpu })?;
        let bytes =
            postcard::to_allocvec(&(offer, self.inner.len)).map_err(|_| GpuError::NotExported)?;
        Ok(ExportedMemory { bytes, fd })
    }
}

/// The data that another process needs to map GPU memory: bytes, and for some kinds a file
/// descriptor to pass over a Unix socket (`SCM_RIGHTS`). A process that has both can read and write
/// the memory.
#[derive(Debug)]
pub struct ExportedMemory {
    /// Opaque bytes; pass them on unchanged.
    pub bytes: Vec<u8>,
    /// A file descriptor to pass along with the bytes, if the kind has one.
    pub fd: Option<OwnedFd>,
}

/// GPU memory of another process, mapped here until this value is dropped.
pub struct ImportedMemory {
    imported: Imported,
    address: u64,
    len: u64,
}

impl ImportedMemory {
    /// Maps the memory for a GPU of this process.
    ///
    /// # Errors
    ///
    /// [`GpuError::NotExported`] if the bytes do not come from an export, or a driver call failed.
    pub fn open(gpu: u32, exported: &ExportedMemory) -> Result<Self, GpuError> {
        let (offer, len): (GpuOffer, u64) =
            postcard::from_bytes(&exported.bytes).map_err(|_| GpuError::NotExported)?;
        if !share::is_whole(&offer, exported.fd.as_ref(), len) {
            return Err(GpuError::NotExported);
        }
        let device = gpus()?.device(gpu)?;
        let imported = share::import(&device, &offer, exported.fd.as_ref())?;
        Ok(Self { address: imported.base + offer.offset, imported, len })
    }

    /// First byte. Only GPUs can use the address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The GPU that the memory is mapped for.
    pub fn gpu(&self) -> u32 {
        self.imported.device.index()
    }
}

impl Drop for ImportedMemory {
    fn drop(&mut self) {
        // Unmapping does not wait for work in progress.
        let _ = self.imported.device.gpu.drain();
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (address, len, gpu) = (self.address(), self.len(), self.gpu());
        write!(f, "DeviceMemory({address:#x}, {len} bytes, GPU {gpu}, {})", self.inner.kind)
    }
}

impl Drop for DeviceMemoryInner {
    fn drop(&mut self) {
        // Unlike freeing, unmapping does not wait, and work in progress would fault.
        if self.backing.is_some()
            && let Err(error) = self.device.gpu.drain()
        {
            tracing::debug!(%error, "work on the GPU failed before its memory was freed");
        }
    }
}

/// Tries one way. The error is a text for users.
fn attempt(
    device: &Arc<Device>,
    len: u64,
    kind: DeviceMemoryKind,
    options: &DeviceMemoryOptions,
) -> Result<Backing, String> {
    let gpu = &device.gpu;
    let facts = gpu.facts();
    let words = |error: CudaError| explain(kind, &error);
    let len = usize::try_from(len.max(1))
        .map_err(|_| "the length exceeds the address space".to_owned())?;
    let shared = match kind {
        DeviceMemoryKind::Plain => {
            return Plain::allocate(gpu, len).map(Backing::Plain).map_err(words);
        }
        DeviceMemoryKind::Fabric => Shared::Fabric,
        DeviceMemoryKind::PosixFd => Shared::PosixFd,
    };
    // Trust the GPU's "no", but not its "yes".
    if !facts.vmm {
        return Err("the GPU has no virtual memory management".into());
    }
    let offered = if kind == DeviceMemoryKind::Fabric { facts.fabric } else { facts.posix_fd };
    if !offered {
        return Err("the GPU reports that it does not support this kind of handle".into());
    }
    if let Some(refused) = device.refused(kind) {
        return Err(refused);
    }
    let rdma = options.rdma && facts.rdma_vmm;
    let create = |rdma| {
        let unit = device.granularity(shared, rdma)?;
        let rounded = len.checked_next_multiple_of(unit).unwrap_or(len);
        Physical::create(gpu, rounded, shared, rdma)
    };
    let physical = match create(rdma) {
        // Memory that NICs cannot access is better than none.
        Err(error) if rdma && !error.is_out_of_memory() => create(false),
        made => made,
    };
    let physical = physical.map_err(|error| {
        let reason = explain(kind, &error);
        if matches!(error.code, CUDA_ERROR_NOT_PERMITTED | CUDA_ERROR_NOT_SUPPORTED) {
            device.refuse(kind, reason.clone());
        }
        reason
    })?;
    physical.map(&options.peers).map(Backing::Mapped).map_err(words)
}

/// The driver's error, with advice.
fn explain(kind: DeviceMemoryKind, error: &CudaError) -> String {
    match (kind, error.code) {
        (DeviceMemoryKind::Fabric, CUDA_ERROR_NOT_PERMITTED) => {
            format!(
                "{error}; a fabric needs an IMEX channel (nvidia-imex, \
                 /dev/nvidia-caps-imex-channels)"
            )
        }
        _ => error.to_string(),
    }
}
