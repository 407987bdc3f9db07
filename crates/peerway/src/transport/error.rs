//! Why devices cannot be used.

use peerway_core::config::Pin;
use peerway_sys::LoadError;
use peerway_sys::verbs::VerbsError;

/// Why an endpoint has no RDMA.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaError {
    /// The library is missing.
    #[error("{0}")]
    NoLibrary(LoadError),
    /// There is no device, or none of the required kind.
    #[error("no {kind} device is on this machine (`rdma link` lists RDMA devices)")]
    NoDevice {
        /// The kind that is required.
        kind: &'static str,
    },
    /// A configured device does not exist.
    #[error("PEERWAY_RDMA_DEV names {name:?}, which is not an RDMA device (there are: {known})")]
    UnknownDevice {
        /// The configured name.
        name: String,
        /// The devices that exist.
        known: String,
    },
    /// No link is up.
    #[error(
        "no port of {devices} is active: bring its link up (`rdma link`, `ip link set ... up`)"
    )]
    NoActivePort {
        /// The devices that were checked.
        devices: String,
    },
    /// A configured GID that does not exist.
    #[error(
        "PEERWAY_RDMA_GID_INDEX={index} is not a GID of {device} (`peerway doctor` lists them)"
    )]
    NoGid {
        /// The index.
        index: String,
        /// The device.
        device: String,
    },
    /// A first-generation EFA device, which carries messages only.
    #[error(
        "{device} does not support RDMA reads and writes: use a later EFA device or a later driver"
    )]
    NoMemoryRequests {
        /// The device.
        device: String,
    },
    /// A device without type 2 memory windows, which the settings require.
    #[error(
        "{device} has no type 2 memory windows, which PEERWAY_RDMA_WINDOWS=require asks for \
         (`peerway doctor` lists what devices have)"
    )]
    NoWindows {
        /// The device.
        device: String,
    },
    /// A device has no memory window for advertised memory, and the settings require one.
    #[error(
        "{device} has no memory window left, which PEERWAY_RDMA_WINDOWS=require asks for ({why})"
    )]
    NoWindowLeft {
        /// The device.
        device: String,
        /// Why there is none.
        why: String,
    },
    /// A verb failed.
    #[error("{0}")]
    Verbs(#[from] VerbsError),
    /// The limit of locked memory is too low.
    #[error(
        "{error}: the device needs locked memory, and the limit is {limit} \
         (raise it with `ulimit -l unlimited`, or in a container `--ulimit memlock=-1`)"
    )]
    MemoryLock {
        /// The call that failed.
        error: VerbsError,
        /// The limit in words.
        limit: String,
    },
    /// No device can register the memory of a GPU.
    #[error(
        "RDMA devices cannot register memory of GPU {gpu}, neither as a dma-buf ({dma_buf}) nor by \
         address, which needs nvidia_peermem ({by_address}); transfers use pinned buffers"
    )]
    GpuMemory {
        /// The index of the GPU.
        gpu: u32,
        /// Why the registration as a dma-buf failed.
        dma_buf: String,
        /// Why the registration by address failed.
        by_address: String,
    },
    /// The GPU memory was freed.
    #[error("the memory of GPU {gpu} at {address:#x} was freed since it was registered")]
    GpuMemoryFreed {
        /// The index of the GPU.
        gpu: u32,
        /// The address of the first byte.
        address: u64,
    },
    /// Writes by devices cannot be made visible to the GPU in time.
    #[error(
        "GPU {gpu} sees RDMA writes only after a flush, but such a flush is not available: {why}"
    )]
    GpuUnordered {
        /// The index of the GPU.
        gpu: u32,
        /// Why a flush is not available.
        why: String,
    },
    /// Switched off by the configured transport.
    #[error("pinned to {0}")]
    Pinned(Pin),
}

impl RdmaError {
    /// Wraps a failed registration and adds what the user can do about it.
    pub(crate) fn registering(error: VerbsError) -> Self {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        match (error.errno, limit) {
            (libc::ENOMEM | libc::EPERM, Some(bytes)) => {
                Self::MemoryLock { error, limit: format!("{} KiB", bytes >> 10) }
            }
            _ => Self::Verbs(error),
        }
    }
}
