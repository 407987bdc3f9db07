//! GPUs: the parts of CUDA that the engine needs. A process that uses no GPU never loads CUDA.
//!
//! The first call that names GPU memory loads the driver. The process keeps it, because a driver
//! cannot be unloaded. It has a context only on the GPUs whose memory was named: the primary
//! context, which frameworks use too.
//!
//! - [`DeviceMemory`] is memory that other processes can map.
//! - [`PinnedMemory`] is host memory that GPUs access at full speed.
//! - [`jit`]: kernels compiled at run time.
//! - `device`: a GPU with its copy streams, events and pinned buffers.
//! - `copy`: submits copies to a GPU and detects their completion.
//! - [`Copier`] (`peer_copy`): copies lists of pieces with one of three engines.
//! - `share`: exports memory to other processes and imports theirs.
//! - `staging`: moves memory that only a GPU can access to and from wires.

pub(crate) mod copy;
pub(crate) mod device;
pub mod jit;
mod memory;
pub(crate) mod peer_copy;
pub(crate) mod pin;
mod pinned;
pub(crate) mod share;
pub(crate) mod staging;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use peerway_sys::Library;
use peerway_sys::cuda::ffi::CUstream;
use peerway_sys::cuda::{Cuda, CudaError, NoCuda, Pointer};

pub use self::copy::Run;
pub use self::memory::{
    DeviceMemory, DeviceMemoryKind, DeviceMemoryOptions, ExportedMemory, ImportedMemory,
};
pub use self::peer_copy::{Copier, CopierKind, CopierOptions, NoSuchCopier, Ticket};
pub use self::pinned::PinnedMemory;
pub use peerway_sys::cuda::Facts;

use self::device::Device;

/// GPU memory is not available, or is not what the caller said.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// There is no usable driver.
    #[error("no GPU can be used: {0}")]
    NoDriver(#[from] NoCuda),
    /// A driver call failed.
    #[error("{0}")]
    Driver(#[from] CudaError),
    /// There is no GPU with that number.
    #[error("there is no GPU {index}: the process sees {count} of them ({variable})")]
    NoSuchGpu {
        /// The number given.
        index: u32,
        /// How many GPUs the process sees.
        count: u32,
        /// The setting that limits the GPUs.
        variable: &'static str,
    },
    /// The address is not GPU memory.
    #[error("{address:#x} is not memory of a GPU: {what}")]
    NotOfAGpu {
        /// The address.
        address: u64,
        /// The kind of memory at the address.
        what: &'static str,
    },
    /// The range exceeds the allocation that it starts in.
    #[error("{address:#x} + {len} leaves the allocation {base:#x} + {allocated} of GPU {gpu}")]
    LeavesAllocation {
        /// First byte.
        address: u64,
        /// Length in bytes.
        len: u64,
        /// First byte of the allocation.
        base: u64,
        /// Length of the allocation.
        allocated: u64,
        /// The GPU of the memory.
        gpu: u32,
    },
    /// The memory was freed while it was registered.
    #[error("the memory of GPU {gpu} at {address:#x} was freed while it was registered")]
    Freed {
        /// First byte of the region.
        address: u64,
        /// The GPU of the memory.
        gpu: u32,
    },
    /// The transfer uses no GPU memory, so it cannot be enqueued in a stream.
    #[error("neither side of the transfer is GPU memory of this process: post it without a stream")]
    NotForAStream,
    /// No word of pinned memory is free for the stream to wait on.
    #[error(
        "{most} transfers already wait in streams of GPU {gpu}: let some end, or release captured \
         ones"
    )]
    TooManyInStreams {
        /// The maximum number.
        most: usize,
        /// The GPU.
        gpu: u32,
    },
    /// The GPU cannot run the engine's kernels.
    #[error(
        "GPU {gpu} cannot run the copy kernels (see the logged warning): use the copier `engines`"
    )]
    NoKernels {
        /// The GPU.
        gpu: u32,
    },
    /// The bytes to import do not come from an export.
    #[error("the bytes are not exported GPU memory, or its file descriptor is missing")]
    NotExported,
    /// The memory cannot be exported to another process.
    #[error("the memory of GPU {gpu} at {address:#x} cannot be shared with another process")]
    NotShareable {
        /// First byte.
        address: u64,
        /// The GPU of the memory.
        gpu: u32,
    },
    /// Every permitted way of allocation failed.
    #[error("cannot allocate {len} bytes on GPU {gpu}: {reasons}")]
    Allocate {
        /// Length in bytes.
        len: u64,
        /// The GPU.
        gpu: u32,
        /// Each way that was tried, with the driver's error.
        reasons: String,
    },
}

/// Lists the GPUs that the process sees, by number. Loads the driver, but creates no context.
///
/// # Errors
///
/// [`GpuError::NoDriver`] if there is no usable driver.
pub fn devices() -> Result<Vec<Facts>, GpuError> {
    let gpus = gpus()?;
    let facts = (0..gpus.count).map(|index| Facts::of(&gpus.cuda, index));
    Ok(facts.collect::<Result<_, _>>()?)
}

/// Whether the process uses a GPU, through the engine or through other code that initialized the
/// driver. Does not load or initialize anything.
pub fn is_in_use() -> bool {
    in_use().is_some() || Cuda::is_in_use()
}

/// Starts to use a GPU. The engine holds its context from now on, and maps GPU memory that peers on
/// this host offer for it. Registering memory of a GPU does the same. This function is for a
/// process that transfers host memory only.
///
/// # Errors
///
/// [`GpuError`]: no driver, no such GPU, or a driver call failed.
pub fn open(index: u32) -> Result<(), GpuError> {
    gpus()?.device(index).map(drop)
}

/// Prepares everything that transfers need on a GPU: its context, the engine's kernels, pinned
/// buffers.
///
/// Loading code and allocating memory wait for all work of the process on the GPU, and fail while a
/// stream is being captured. So call this first. For kernels of your own, use
/// [`jit::Program::load`].
///
/// # Errors
///
/// As [`open`].
pub fn warm_up(index: u32) -> Result<(), GpuError> {
    Ok(gpus()?.device(index)?.warm_up()?)
}

/// The driver's id of the allocation at an address, which is unique among all allocations. `None`
/// if the address is not GPU memory, or if the process uses no GPU.
pub fn buffer_at(address: u64) -> Option<u64> {
    if !is_in_use() {
        return None;
    }
    match Pointer::of(&gpus().ok()?.cuda, address) {
        Ok(Pointer::Device { buffer, .. }) => Some(buffer),
        _ => None,
    }
}

/// Waits for all work in a caller's stream.
///
/// # Safety
///
/// The stream is alive and belongs to that GPU's primary context, or is one of the driver's special
/// streams.
///
/// # Errors
///
/// [`GpuError`]: no such GPU, a driver call failed, or work in the stream failed.
pub unsafe fn wait_for_stream(gpu: u32, stream: *mut std::ffi::c_void) -> Result<(), GpuError> {
    let device = gpus()?.device(gpu)?;
    // SAFETY: the caller upholds this function's contract.
    unsafe { device.gpu.synchronize(stream as CUstream) }?;
    Ok(())
}

/// The driver, and the GPUs in use.
pub(crate) struct Gpus {
    pub(crate) cuda: Arc<Cuda>,
    count: u32,
    open: Mutex<HashMap<u32, Arc<Device>>>,
}

static GPUS: OnceLock<Result<Gpus, NoCuda>> = OnceLock::new();

/// The driver. The first call loads it.
pub(crate) fn gpus() -> Result<&'static Gpus, GpuError> {
    let gpus = GPUS.get_or_init(|| {
        let cuda = Cuda::load(Library::Cuda.named())?;
        let count = cuda.device_count()?;
        Ok(Gpus { cuda, count, open: Mutex::default() })
    });
    gpus.as_ref().map_err(|error| error.clone().into())
}

/// The driver, if the engine has loaded it.
pub(crate) fn in_use() -> Option<&'static Gpus> {
    // A forked child inherits the table but not the driver.
    GPUS.get().and_then(|gpus| gpus.as_ref().ok()).filter(|gpus| gpus.cuda.is_ours())
}

impl Gpus {
    /// A GPU. The engine holds its context from now on.
    pub(crate) fn device(&self, index: u32) -> Result<Arc<Device>, GpuError> {
        self.check(index)?;
        let mut open = self.open.lock().unwrap();
        if let Some(device) = open.get(&index) {
            return Ok(device.clone());
        }
        let device = Arc::new(Device::open(&self.cuda, index)?);
        open.insert(index, device.clone());
        Ok(device)
    }

    /// The properties of a GPU, without starting to use it.
    fn facts(&self, index: u32) -> Result<Facts, GpuError> {
        self.check(index)?;
        Ok(Facts::of(&self.cuda, index)?)
    }

    fn check(&self, index: u32) -> Result<(), GpuError> {
        if index < self.count {
            return Ok(());
        }
        let variable = "CUDA_VISIBLE_DEVICES can limit them";
        Err(GpuError::NoSuchGpu { index, count: self.count, variable })
    }

    /// The lowest-numbered GPU in use, or GPU 0 if none is.
    pub(crate) fn any(&self) -> Result<Arc<Device>, GpuError> {
        let index = self.open.lock().unwrap().keys().min().copied();
        self.device(index.unwrap_or(0))
    }

    /// The GPU that should copy to or from memory of the GPU with that UUID: that GPU if it is in
    /// use, otherwise the lowest-numbered GPU in use.
    pub(crate) fn near(&self, uuid: &[u8; 16]) -> Option<Arc<Device>> {
        let open = self.open.lock().unwrap();
        let same = open.values().find(|device| device.gpu.facts().uuid == *uuid);
        same.or_else(|| open.values().min_by_key(|device| device.gpu.ordinal())).cloned()
    }

    /// The GPU and the allocation that contain a range of memory.
    pub(crate) fn locate(&self, address: u64, len: u64) -> Result<Located, GpuError> {
        let not = |what| GpuError::NotOfAGpu { address, what };
        match Pointer::of(&self.cuda, address)? {
            Pointer::Device { ordinal, base, len: allocated, buffer, handles, legacy_ipc } => {
                let end = address.checked_add(len);
                if end.is_none_or(|end| end > base.saturating_add(allocated)) {
                    let gpu = ordinal;
                    return Err(GpuError::LeavesAllocation { address, len, base, allocated, gpu });
                }
                let device = self.device(ordinal)?;
                let allocation = Allocation { base, len: allocated, buffer, handles, legacy_ipc };
                Ok(Located { device, allocation })
            }
            Pointer::Pinned { .. } => Err(not("it is pinned host memory")),
            Pointer::Managed => Err(not("it is managed memory, which can migrate")),
            _ => Err(not("the driver does not know the address (host memory, or freed)")),
        }
    }
}

/// The location of GPU memory.
#[derive(Clone)]
pub(crate) struct Located {
    pub(crate) device: Arc<Device>,
    pub(crate) allocation: Allocation,
}

/// An allocation on a GPU.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Allocation {
    pub(crate) base: u64,
    pub(crate) len: u64,
    /// The driver's id, unique among all allocations. It distinguishes memory that was freed and
    /// allocated again at the same address.
    pub(crate) buffer: u64,
    pub(crate) handles: u32,
    pub(crate) legacy_ipc: bool,
}

impl Located {
    /// Whether the address still belongs to the same allocation.
    pub(crate) fn is_still_there(&self, address: u64) -> bool {
        let now = Pointer::of(self.device.gpu.cuda(), address);
        matches!(now, Ok(Pointer::Device { buffer, .. }) if buffer == self.allocation.buffer)
    }
}

/// The location of the memory if it is GPU memory. If the process uses no GPU, this returns `None`
/// and calls no driver.
pub(crate) fn locate_if_gpu(address: u64, len: u64) -> Result<Option<Located>, GpuError> {
    if in_use().is_none() && !Cuda::is_in_use() {
        return Ok(None);
    }
    let gpus = gpus()?;
    match Pointer::of(&gpus.cuda, address)? {
        Pointer::Device { .. } => gpus.locate(address, len).map(Some),
        _ => Ok(None),
    }
}
