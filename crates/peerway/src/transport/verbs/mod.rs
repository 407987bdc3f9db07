//! RDMA: devices read and write the memory of both sides through queue pairs.
//!
//! A [`Nic`] is an open device with one port. Every shard has a [`PortCq`] on each: one completion
//! queue, which the shard's driver polls for all peers. A [`Queue`] is one queue pair to one peer.
//! It is a [`Wire`](super::Wire) on which frames travel as messages. It also carries out work
//! requests (*parts* of requests) without the peer's CPU. Memory registrations are in [`keys`].

mod gpu;
mod keys;
mod messages;
mod nic;
mod port;
mod queue;
mod window;
mod work_requests;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use peerway_core::config::{Config, Pin};
use peerway_core::region::Access;
use peerway_core::topology::{Place, nearest};
use peerway_core::wire::RdmaPort;
use peerway_sys::Library;
use peerway_sys::efadv::Efa;
use peerway_sys::verbs::Verbs;

use self::keys::{Registration, RegistrationCache};
use self::nic::Nic;
use self::port::PortCq;
use super::device::{CompletionQueue, Devices, Keeper, LocalKeys, RemoteKeys};
use super::error::RdmaError;
use crate::gpu::Located;
use crate::os::{affinity, topology};
use crate::path::PathKind;

/// The RDMA devices of an endpoint.
pub(super) struct Rdma {
    nics: Vec<Arc<Nic>>,
    cache: RegistrationCache,
    /// CPUs of the NUMA node of the devices. Empty when the devices are not all on one known node.
    cpus: Vec<usize>,
    /// Whether a warning has said that the devices cannot reach GPU memory.
    told: AtomicBool,
}

/// Opens the configured devices, or else all devices with an active port.
pub(super) fn open(config: &Config) -> Result<Arc<dyn Devices>, RdmaError> {
    Ok(Rdma::open(config)?)
}

impl Rdma {
    fn open(config: &Config) -> Result<Arc<Self>, RdmaError> {
        let pin = config.transport;
        if !matches!(pin, Pin::Auto | Pin::Ib | Pin::Efa) {
            return Err(RdmaError::Pinned(pin));
        }
        let library = Library::Ibverbs.named();
        // When no setting requires RDMA and the kernel has no device, skip loading the library.
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
                // Report a wrong setting even where another device would work.
                Err(error @ RdmaError::NoGid { .. }) => return Err(error),
                Err(error) => {
                    tracing::debug!(device = names[at], %error, "RDMA device not used");
                    failed.get_or_insert(error);
                }
            }
        }
        // Connections and datagrams do not mix. The first device decides.
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
}

impl Devices for Rdma {
    fn kind(&self) -> PathKind {
        if self.nics[0].efa.is_some() { PathKind::Efa } else { PathKind::Verbs }
    }

    fn ports(&self) -> Vec<RdmaPort> {
        self.nics.iter().map(|nic| nic.address).collect()
    }

    fn has_windows(&self) -> bool {
        self.nics.iter().all(|nic| nic.windows)
    }

    fn cpus(&self) -> &[usize] {
        &self.cpus
    }

    fn completion_queues(&self) -> Result<Vec<Arc<dyn CompletionQueue>>, RdmaError> {
        let queue = |nic| Ok(PortCq::new(nic)? as Arc<dyn CompletionQueue>);
        self.nics.iter().map(queue).collect()
    }

    unsafe fn register_local(
        &self,
        ptr: *mut u8,
        len: usize,
        keeper: Keeper<'_>,
        gpu: Option<&Located>,
    ) -> Result<LocalKeys, RdmaError> {
        // SAFETY: the caller vouches for the memory.
        let registration = unsafe { self.register_own(ptr, len, keeper, gpu) }?;
        Ok(LocalKeys {
            keys: registration.lkeys(),
            of_host: registration.is_of_host(),
            registration,
        })
    }

    unsafe fn register_remote(
        &self,
        ptr: *mut u8,
        len: usize,
        access: Access,
        gpu: Option<&Located>,
    ) -> Result<Box<dyn RemoteKeys>, RdmaError> {
        // SAFETY: the caller vouches for the memory.
        unsafe { self.register_for_peers(ptr, len, access, gpu) }.map(|made| Box::new(made) as _)
    }

    fn made(&self, keys: &LocalKeys) -> bool {
        let registration = keys.registration.downcast_ref::<Registration>();
        registration.is_some_and(|registration| registration.is_of(&self.nics))
    }

    /// The log level drops after the first report that the devices cannot reach GPUs, because that
    /// does not change.
    fn not_reached(&self, error: &RdmaError) {
        let of_gpus = matches!(error, RdmaError::GpuMemory { .. });
        if of_gpus && self.told.swap(true, Ordering::Relaxed) {
            tracing::debug!(%error, "memory could not be registered for RDMA");
        } else {
            tracing::warn!(%error, "memory could not be registered for RDMA");
        }
    }
}

fn kernel_has_devices() -> bool {
    let found = std::fs::read_dir(Path::new("/sys/class/infiniband"));
    found.is_ok_and(|mut entries| entries.next().is_some())
}

/// All devices, those nearest to the current CPU first.
fn by_nearness(names: &[String], places: &[topology::Device]) -> Vec<usize> {
    let here = topology::node_of_cpu(Path::new("/"), affinity::current_cpu());
    let here = here.map_or(Place::Unknown, Place::Node);
    let near = nearest(places, &here);
    let rank = |name: &str| near.iter().position(|place| place.name == name);
    let mut all: Vec<usize> = (0..names.len()).collect();
    all.sort_by_key(|at| rank(&names[*at]).unwrap_or(usize::MAX));
    all
}

/// The CPUs of the NUMA node of all devices. Empty when the devices are on several nodes or their
/// node is unknown.
fn cpus(mut nodes: impl Iterator<Item = Option<u16>>) -> Vec<usize> {
    let root = Path::new("/");
    let Some(Some(node)) = nodes.next() else { return Vec::new() };
    if nodes.any(|other| other != Some(node)) {
        return Vec::new();
    }
    topology::cpus_of_node(root, node)
}

/// The devices that a setting names, by name or by index.
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
