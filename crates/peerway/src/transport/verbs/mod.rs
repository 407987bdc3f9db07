//! RDMA: devices read and write the memory of both sides, through queue pairs.
//!
//! A [`Nic`] is an open device with one port. Every shard has a [`PortCq`] on each: one completion
//! queue, polled by the shard's driver whatever the number of peers. A [`Queue`] is one queue pair to
//! one peer. It is two things at once: a [`Wire`](super::Wire) on which frames travel as messages, and a
//! list of work requests (*parts* of requests) that the device carries out without the peer's help.
//! What memory devices may touch is in [`keys`].

mod gpu;
pub(crate) mod keys;
pub(crate) mod nic;
pub(crate) mod pairing;
pub(crate) mod port;
pub(crate) mod queue;
mod work_requests;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use peerway_core::config::{Config, Pin};
use peerway_core::wire::RdmaPort;
use peerway_sys::efadv::Efa;
use peerway_sys::verbs::{Verbs, VerbsError};
use peerway_sys::{Library, LoadError};

use peerway_core::topology::{Place, nearest};

use self::keys::RegistrationCache;
use self::nic::Nic;
use crate::os::{affinity, topology};
use crate::path::PathKind;

/// The RDMA devices of an endpoint.
pub(crate) struct Rdma {
    pub(crate) nics: Vec<Arc<Nic>>,
    pub(crate) cache: RegistrationCache,
    /// Processors near the devices, where that is a part of the machine's.
    pub(crate) cpus: Vec<usize>,
    /// It was said that they do not reach memory of GPUs.
    told: AtomicBool,
}

/// Why an endpoint has no RDMA.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaError {
    /// The library is missing.
    #[error("{0}")]
    NoLibrary(LoadError),
    /// There is no device, or none of the kind that is wanted.
    #[error("no {kind} device is on this machine (`rdma link` lists RDMA devices)")]
    NoDevice {
        /// What was looked for.
        kind: &'static str,
    },
    /// A device that was asked for is not there.
    #[error("PEERWAY_RDMA_DEV names {name:?}, which is no RDMA device here (there are: {known})")]
    UnknownDevice {
        /// What was asked for.
        name: String,
        /// What is there.
        known: String,
    },
    /// No link is up.
    #[error(
        "no port of {devices} is active: bring its link up (`rdma link`, `ip link set ... up`)"
    )]
    NoActivePort {
        /// The devices looked at.
        devices: String,
    },
    /// A GID that is not there.
    #[error(
        "PEERWAY_RDMA_GID_INDEX={index} is no address of {device} (`peerway doctor` lists them)"
    )]
    NoGid {
        /// The index.
        index: String,
        /// Of this device.
        device: String,
    },
    /// A device of the first kind, that carries messages only.
    #[error(
        "{device} cannot read or write a peer's memory: that takes a later EFA device or driver"
    )]
    NoMemoryRequests {
        /// Which device.
        device: String,
    },
    /// A verb failed.
    #[error("{0}")]
    Verbs(#[from] VerbsError),
    /// Too little memory can be locked.
    #[error(
        "{error}: a device needs memory that stays where it is, and {limit} may be locked \
         (raise it with `ulimit -l unlimited`, or in a container `--ulimit memlock=-1`)"
    )]
    MemoryLock {
        /// What was tried.
        error: VerbsError,
        /// The limit in words.
        limit: String,
    },
    /// No device takes the memory of a GPU.
    #[error(
        "RDMA devices do not reach memory of GPU {gpu}: not as a dma-buf ({dma_buf}), and not by its \
         address, which nvidia_peermem would make work ({by_address}); it goes through pinned buffers"
    )]
    GpuMemory {
        /// Whose memory.
        gpu: u32,
        /// What the GPU or a device said to a dma-buf.
        dma_buf: String,
        /// What a device said to the address.
        by_address: String,
    },
    /// The GPU's memory is no longer what it was.
    #[error("the memory of GPU {gpu} at {address:#x} was freed since it was registered")]
    GpuMemoryFreed {
        /// Whose memory.
        gpu: u32,
        /// First byte.
        address: u64,
    },
    /// What devices write cannot be made visible in time.
    #[error(
        "GPU {gpu} sees what RDMA devices write only after a flush, which is not to be had: {why}"
    )]
    GpuUnordered {
        /// Whose memory.
        gpu: u32,
        /// What is in the way.
        why: String,
    },
    /// Switched off.
    #[error("pinned to {0}")]
    Pinned(Pin),
}

impl RdmaError {
    /// A registration that failed, with what the user can do about it.
    pub(crate) fn registering(error: VerbsError) -> Self {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        match (error.errno, limit) {
            (libc::ENOMEM | libc::EPERM, Some(bytes)) => {
                Self::MemoryLock { error, limit: format!("only {} KiB", bytes >> 10) }
            }
            _ => Self::Verbs(error),
        }
    }
}

impl Rdma {
    /// Opens the devices that the configuration asks for: all with an active port, else.
    pub(crate) fn open(config: &Config) -> Result<Arc<Self>, RdmaError> {
        let pin = config.transport;
        if !matches!(pin, Pin::Auto | Pin::Ib | Pin::Efa) {
            return Err(RdmaError::Pinned(pin));
        }
        let library = Library::Ibverbs.named();
        // Where nothing asks for RDMA and the kernel has no device, no library is even looked for.
        if library.is_none() && pin == Pin::Auto && !kernel_has_devices() {
            return Err(RdmaError::NoDevice { kind: "RDMA" });
        }
        let verbs = Verbs::load(library).map_err(RdmaError::NoLibrary)?;
        let list = verbs.devices()?;
        let names: Vec<String> = list.iter().map(|device| device.name()).collect();
        let places = topology::read(Path::new("/"));
        let wanted = match &config.rdma.devices {
            Some(setting) => wanted(setting, &names)?,
            None => by_nearness(&names, &places),
        };
        let mut efa = None;
        let (mut nics, mut failed) = (Vec::new(), None);
        for (at, device) in wanted.into_iter().filter_map(|at| Some((at, list.iter().nth(at)?))) {
            let datagrams = nic::is_efa(&device);
            let fits = match pin {
                Pin::Ib => !datagrams,
                Pin::Efa => datagrams,
                _ => true,
            };
            if !fits {
                continue;
            }
            if datagrams && efa.is_none() {
                efa = Some(Efa::load(Library::Efa.named()).map_err(RdmaError::NoLibrary)?);
            }
            let place = places.iter().find(|place| place.name == names[at]);
            let node = place.and_then(|place| place.numa);
            let efa = efa.as_ref().filter(|_| datagrams);
            match Nic::open(&device, nics.len(), efa, node, &config.rdma) {
                Ok(nic) => nics.push(Arc::new(nic)),
                // A wrong setting is told even where another device would do.
                Err(error @ RdmaError::NoGid { .. }) => return Err(error),
                Err(error) => {
                    tracing::debug!(device = names[at], %error, "not used");
                    failed.get_or_insert(error);
                }
            }
        }
        // Connections and datagrams do not mix: the kind of the first one is taken.
        let datagrams = nics.first().is_some_and(|nic| nic.efa.is_some());
        nics.retain(|nic| nic.efa.is_some() == datagrams);
        if nics.is_empty() {
            let kind = if pin == Pin::Efa { "EFA" } else { "RDMA" };
            return Err(failed.unwrap_or(RdmaError::NoDevice { kind }));
        }
        let cpus = cpus(nics.iter().map(|nic| nic.node));
        Ok(Arc::new(Self {
            nics,
            cache: RegistrationCache::new(),
            cpus,
            told: AtomicBool::new(false),
        }))
    }

    /// Says that memory could not be registered. That a machine's devices do not reach its GPUs is no news the
    /// second time.
    pub(crate) fn not_reached(&self, error: &RdmaError) {
        let of_gpus = matches!(error, RdmaError::GpuMemory { .. });
        if of_gpus && self.told.swap(true, Ordering::Relaxed) {
            tracing::debug!(%error, "memory is not reached by RDMA");
        } else {
            tracing::warn!(%error, "memory is not reached by RDMA");
        }
    }

    /// What peers must know to reach the devices.
    pub(crate) fn ports(&self) -> Vec<RdmaPort> {
        self.nics.iter().map(|nic| nic.address).collect()
    }

    /// The path that they give.
    pub(crate) fn kind(&self) -> PathKind {
        if self.nics[0].efa.is_some() { PathKind::Efa } else { PathKind::Verbs }
    }
}

fn kernel_has_devices() -> bool {
    let found = std::fs::read_dir(Path::new("/sys/class/infiniband"));
    found.is_ok_and(|mut entries| entries.next().is_some())
}

/// All devices, those near the processor that asks first.
fn by_nearness(names: &[String], places: &[topology::Device]) -> Vec<usize> {
    let here = topology::node_of_cpu(Path::new("/"), affinity::current_cpu());
    let here = here.map_or(Place::Unknown, Place::Node);
    let near = nearest(places, &here);
    let rank = |name: &str| near.iter().position(|place| place.name == name);
    let mut all: Vec<usize> = (0..names.len()).collect();
    all.sort_by_key(|at| rank(&names[*at]).unwrap_or(usize::MAX));
    all
}

/// The processors of the one node that all devices are on; none where there is no such node.
fn cpus(mut nodes: impl Iterator<Item = Option<u16>>) -> Vec<usize> {
    let root = Path::new("/");
    let Some(Some(node)) = nodes.next() else { return Vec::new() };
    if nodes.any(|other| other != Some(node)) {
        return Vec::new();
    }
    topology::cpus_of_node(root, node)
}

/// Which devices a setting names: by name, or by number in the list.
fn wanted(setting: &str, names: &[String]) -> Result<Vec<usize>, RdmaError> {
    let mut wanted = Vec::new();
    for name in setting.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        let number = || name.parse().ok().filter(|at| *at < names.len());
        let Some(at) = names.iter().position(|known| known == name).or_else(number) else {
            let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            return Err(RdmaError::UnknownDevice { name: name.to_owned(), known });
        };
        if !wanted.contains(&at) {
            wanted.push(at);
        }
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_or_numbered_once_each() {
        let names = ["mlx5_0", "mlx5_1", "7"].map(String::from);
        assert_eq!(wanted("mlx5_1, 0,mlx5_1", &names).unwrap(), [1, 0]);
        assert_eq!(wanted("7", &names).unwrap(), [2], "a name goes before a number");
        let error = wanted("mlx5_9", &names).unwrap_err().to_string();
        assert!(error.contains("PEERWAY_RDMA_DEV") && error.contains("mlx5_0, mlx5_1"), "{error}");
        assert!(wanted("3", &names).is_err());
        assert!(wanted("0", &[]).unwrap_err().to_string().contains("there are: none"));
    }
}
