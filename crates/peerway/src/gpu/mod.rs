//! GPUs: what the engine needs of CUDA, and nothing of it before somebody asks for a GPU.
//!
//! The driver is opened by the first call that names GPU memory. From then on the process has it (a driver
//! cannot be let go of), with a context on those GPUs alone whose memory was named: the primary one, which
//! frameworks use too.
//!
//! - [`DeviceMemory`] is memory that other processes can map.
//! - [`PinnedMemory`] is memory of the host that GPUs reach at full speed.
//! - [`jit`]: kernels that are compiled at run time.
//! - `device`: a GPU with its copy streams, events and pinned buffers.
//! - `copy`: how bytes are moved by a GPU, and when they are there.
//! - [`Copier`] (`peer_copy`): lists of pieces, copied by one of three engines.
//! - `share`: how memory goes to another process, and what came from others.
//! - `staging`: how memory that only a GPU reaches gets onto wires.

pub(crate) mod copy;
pub(crate) mod device;
pub mod jit;
mod memory;
pub(crate) mod peer_copy;
pub(crate) mod pin;
mod pinned;
pub(crate) mod share;
pub(crate) mod staging;
pub(crate) mod stream;

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

pub use self::stream::Enqueued;

use self::device::Device;

/// GPU memory could not be had, or is not what it was said to be.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// There is no driver, or none that can be used.
    #[error("no GPU can be used: {0}")]
    NoDriver(#[from] NoCuda),
    /// A call of the driver failed.
    #[error("{0}")]
    Driver(#[from] CudaError),
    /// There is no GPU of that number.
    #[error("there is no GPU {index}: the process sees {count} ({variable})")]
    NoSuchGpu {
        /// As it was given.
        index: u32,
        /// How many there are.
        count: u32,
        /// What decides that.
        variable: &'static str,
    },
    /// The address is not of GPU memory.
    #[error("{address:#x} is not memory of a GPU: {what}")]
    NotOfAGpu {
        /// The address.
        address: u64,
        /// What it is instead.
        what: &'static str,
    },
    /// The range leaves the allocation that it starts in.
    #[error("{address:#x} + {len} leaves the allocation {base:#x} + {allocated} of GPU {gpu}")]
    LeavesAllocation {
        /// First byte.
        address: u64,
        /// Bytes.
        len: u64,
        /// Where the allocation starts.
        base: u64,
        /// Its length.
        allocated: u64,
        /// Whose memory.
        gpu: u32,
    },
    /// The memory was freed while it was registered.
    #[error("the memory of GPU {gpu} at {address:#x} was freed while it was registered")]
    Freed {
        /// First byte of the region.
        address: u64,
        /// Whose memory.
        gpu: u32,
    },
    /// A transfer without GPU memory has no place in a stream.
    #[error(
        "neither side of the transfer is memory of a GPU of this process: it has no place in a stream"
    )]
    NotForAStream,
    /// No word in pinned memory is free to wait for.
    #[error(
        "{most} transfers wait in streams of GPU {gpu} already; let some end, or release captured ones"
    )]
    TooManyInStreams {
        /// How many can.
        most: usize,
        /// The GPU.
        gpu: u32,
    },
    /// The GPU does not run our kernels.
    #[error(
        "the copy kernels cannot be used on GPU {gpu} (a warning says why): copy by engines instead"
    )]
    NoKernels {
        /// The GPU.
        gpu: u32,
    },
    /// What was to be imported is not what an export gave.
    #[error("these are not the bytes of exported GPU memory, or its file descriptor is missing")]
    NotExported,
    /// The memory cannot be handed to another process.
    #[error("the memory of GPU {gpu} at {address:#x} cannot be handed to another process")]
    NotShareable {
        /// First byte.
        address: u64,
        /// Whose memory.
        gpu: u32,
    },
    /// No way to allocate that was allowed worked.
    #[error("cannot allocate {len} bytes on GPU {gpu}: {reasons}")]
    Allocate {
        /// Bytes.
        len: u64,
        /// The GPU.
        gpu: u32,
        /// What was tried, and what the driver said.
        reasons: String,
    },
}

/// The GPUs that the process sees, in the order of their numbers. Binds the process to the driver; makes no
/// context.
///
/// # Errors
///
/// [`GpuError::NoDriver`] says what is missing.
pub fn devices() -> Result<Vec<Facts>, GpuError> {
    let gpus = gpus()?;
    let facts = (0..gpus.count).map(|index| Facts::of(&gpus.cuda, index));
    Ok(facts.collect::<Result<_, _>>()?)
}

/// Whether the process uses a GPU: through the engine, or through something else that initialised the driver.
/// Opens and initialises nothing.
pub fn is_in_use() -> bool {
    in_use().is_some() || Cuda::is_in_use()
}

/// Takes a GPU into use: its context is held from now on, and GPU memory that peers on this host offer is mapped for
/// it. Memory of a GPU that is registered does the same; this is for a process that moves host memory alone.
///
/// # Errors
///
/// [`GpuError`]: no driver, no such GPU, or what the driver says.
pub fn open(index: u32) -> Result<(), GpuError> {
    gpus()?.device(index).map(drop)
}

/// Has everything ready on a GPU that transfers will want of it: its context, the engine's kernels, pinned buffers. What
/// loads code or allocates waits for all work of the process on the GPU, and cannot be done while a stream is being
/// captured, so call this before; for kernels of your own there is [`jit::Program::load`].
///
/// # Errors
///
/// As [`open`].
pub fn warm_up(index: u32) -> Result<(), GpuError> {
    Ok(gpus()?.device(index)?.warm_up()?)
}

/// The driver's name for the allocation at an address, which no other allocation is ever given; `None` for what is
/// not memory of a GPU, and where none is in use.
pub fn buffer_at(address: u64) -> Option<u64> {
    if !is_in_use() {
        return None;
    }
    match Pointer::of(&gpus().ok()?.cuda, address) {
        Ok(Pointer::Device { buffer, .. }) => Some(buffer),
        _ => None,
    }
}

/// Waits for everything that was put into a stream of somebody else's.
///
/// # Safety
///
/// The stream is alive and of that GPU's primary context, or one of the driver's special ones.
///
/// # Errors
///
/// [`GpuError`]: no such GPU, or what the driver says; also what work in the stream failed with.
pub unsafe fn wait_for_stream(gpu: u32, stream: *mut std::ffi::c_void) -> Result<(), GpuError> {
    let device = gpus()?.device(gpu)?;
    // SAFETY: the caller's promise.
    unsafe { device.gpu.synchronize(stream as CUstream) }?;
    Ok(())
}

/// The driver and the GPUs that are in use.
pub(crate) struct Gpus {
    pub(crate) cuda: Arc<Cuda>,
    count: u32,
    open: Mutex<HashMap<u32, Arc<Device>>>,
}

static GPUS: OnceLock<Result<Gpus, NoCuda>> = OnceLock::new();

/// The driver, opened now if it was not yet.
pub(crate) fn gpus() -> Result<&'static Gpus, GpuError> {
    let gpus = GPUS.get_or_init(|| {
        let cuda = Cuda::load(Library::Cuda.named())?;
        let count = cuda.device_count()?;
        Ok(Gpus { cuda, count, open: Mutex::default() })
    });
    gpus.as_ref().map_err(|error| error.clone().into())
}

/// The driver, if something in the process has asked for it.
pub(crate) fn in_use() -> Option<&'static Gpus> {
    // A child that was forked has the table and not the driver.
    GPUS.get().and_then(|gpus| gpus.as_ref().ok()).filter(|gpus| gpus.cuda.is_ours())
}

impl Gpus {
    /// A GPU, with its context held from now on.
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

    /// What a GPU is, without taking it into use.
    fn facts(&self, index: u32) -> Result<Facts, GpuError> {
        self.check(index)?;
        Ok(Facts::of(&self.cuda, index)?)
    }

    fn check(&self, index: u32) -> Result<(), GpuError> {
        if index < self.count {
            return Ok(());
        }
        let variable = "CUDA_VISIBLE_DEVICES decides which";
        Err(GpuError::NoSuchGpu { index, count: self.count, variable })
    }

    /// A GPU that is in use, or else the first.
    pub(crate) fn any(&self) -> Result<Arc<Device>, GpuError> {
        let index = self.open.lock().unwrap().keys().min().copied();
        self.device(index.unwrap_or(0))
    }

    /// GPUs in use whose memory a copy to or from the GPU of that name could go by: itself if it is among
    /// them.
    pub(crate) fn near(&self, uuid: &[u8; 16]) -> Option<Arc<Device>> {
        let open = self.open.lock().unwrap();
        let same = open.values().find(|device| device.gpu.facts().uuid == *uuid);
        same.or_else(|| open.values().min_by_key(|device| device.gpu.ordinal())).cloned()
    }

    /// The GPU and the allocation that a range of memory lies in.
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
            Pointer::Managed => Err(not("it is managed memory, which moves")),
            _ => Err(not("the driver does not know it (host memory, or freed)")),
        }
    }
}

/// Where GPU memory is.
#[derive(Clone)]
pub(crate) struct Located {
    pub(crate) device: Arc<Device>,
    pub(crate) allocation: Allocation,
}

/// An allocation of a GPU.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Allocation {
    pub(crate) base: u64,
    pub(crate) len: u64,
    /// The driver's name for it, never given to another: memory that was freed and allocated anew at the
    /// same address is told apart by it.
    pub(crate) buffer: u64,
    pub(crate) handles: u32,
    pub(crate) legacy_ipc: bool,
}

impl Located {
    /// Whether the memory at its address is still the same.
    pub(crate) fn is_still_there(&self, address: u64) -> bool {
        let now = Pointer::of(self.device.gpu.cuda(), address);
        matches!(now, Ok(Pointer::Device { buffer, .. }) if buffer == self.allocation.buffer)
    }
}

/// Where the memory is if it is a GPU's. Where nothing in the process uses a GPU it is not, and nothing is asked.
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
