//! The proxy as its owner holds it.

use std::fmt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use peerway_core::abi::LINE;
use peerway_core::command::{MAX_COUNTERS, MAX_PEERS};
use peerway_core::metadata::Metadata;
use peerway_core::region::Access;

use super::copiers::Set;
use super::counters::Counters;
use super::fault::{Fault, Faults};
use super::forward::{Forward, is_inside};
use super::host_producer::{HostProducer, HostProducerError};
use super::outgoing::Locals;
use super::peer_info::{MAX_WINDOWS, PeerInfo};
use super::proxy_memory::{ProxyMemory, Shape};
use super::space::{Space, Window};
use super::target::{PeerTarget, Targets};
use super::worker::{ProxyCounters, ProxyShared, ProxyWorker};
use crate::connect::opener::{self, TimeLimit};
use crate::endpoint::Endpoint;
use crate::error::{ImportError, RegisterError};
use crate::gpu::device::Device;
use crate::gpu::{CopierKind, GpuError, gpus};
use crate::inbox::{FIRST_PROXY_ID, MAX_PROXIES};
use crate::memory::SharedMemory;
use crate::os::process;
use crate::os::topology::cpus_of_node;
use crate::peer::Peer;
use crate::progress::engine::Engine;
use crate::region::Region;
use crate::session::Whom;
use crate::threads;

/// The most threads of a proxy by default.
const THREADS: usize = 4;
/// Rings per thread by default. Warps that share a ring wait for each other.
const RINGS_EACH: usize = 8;
const SLOTS: u32 = 2048;

/// Rings that kernels push commands into, and threads that execute the commands. See the
/// [module](super).
pub struct Proxy {
    shared: Arc<ProxyShared>,
    endpoint: Weak<Engine>,
    /// Keeps the advertisements of the windows.
    regions: std::sync::Mutex<Vec<Region>>,
    first_id: u32,
    threads: Vec<JoinHandle<()>>,
    gpu: Option<u32>,
    copier: CopierKind,
    workers: usize,
    fork_generation: u32,
    /// GPUs that the workers have copiers for. `window`, `add_peer` and `forward` hold this lock
    /// from before they call the CUDA driver until the workers can see the change. Workers take the
    /// other locks, so no other lock may be held across a driver call. No worker takes this one.
    copying: std::sync::Mutex<Vec<u32>>,
}

/// Configures and builds a [`Proxy`].
#[derive(Clone, Debug)]
pub struct ProxyBuilder {
    endpoint: Endpoint,
    gpu: Option<u32>,
    threads: Option<usize>,
    rings: Option<usize>,
    slots: u32,
    peers: usize,
    counters: usize,
    timeout: Duration,
    copier: CopierKind,
}

/// The reason why an operation on a proxy failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProxyError {
    /// A setting is out of its range.
    #[error("{what} must be between {least} and {most}, not {given}")]
    OutOfRange {
        /// The setting.
        what: &'static str,
        /// The given value.
        given: u64,
        /// The smallest allowed value.
        least: u64,
        /// The largest allowed value.
        most: u64,
    },
    /// A forwarding rule is invalid.
    #[error("arrivals of counter {counter} cannot be forwarded: {why}")]
    Forward {
        /// The rule's counter.
        counter: u16,
        /// What is wrong with the rule.
        why: &'static str,
    },
    /// The proxy has no room for another window.
    #[error(
        "no room for a window of {len} bytes: \
         a proxy has at most {MAX_WINDOWS} windows, 256 GiB in all"
    )]
    NoRoom {
        /// The length of the window.
        len: u64,
    },
    /// A live peer has this number.
    #[error("peer {number} is there already; use another number, or wait until that peer is gone")]
    Taken {
        /// The number.
        number: u16,
    },
    /// The bytes are not peer info of this version: see [`Proxy::peer_info`].
    #[error(
        "these are not the bytes of a proxy's info; \
         pass what `Proxy::peer_info` of the same Peerway version returned"
    )]
    NotPeerInfo,
    /// The endpoint has no room for the counters of another proxy, or it is closed.
    #[error("the endpoint is closed, or it already has {most} proxies, which is the limit")]
    NoIds {
        /// The most proxies of one endpoint.
        most: usize,
    },
    /// Memory could not be registered or advertised.
    #[error("{0}")]
    Register(#[from] RegisterError),
    /// The peer's memory could not be imported.
    #[error("{0}")]
    Import(#[from] ImportError),
    /// A GPU operation failed.
    #[error("{0}")]
    Gpu(#[from] GpuError),
    /// The system could not start a thread.
    #[error("cannot start a proxy thread: {0}")]
    Thread(std::io::Error),
}

/// Statistics of a proxy.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct ProxyStats {
    /// Commands taken out of rings.
    pub commands: u64,
    /// Puts submitted.
    pub puts: u64,
    /// Bytes of the submitted puts.
    pub bytes: u64,
    /// Counts sent to counters of peers.
    pub counts: u64,
    /// Submissions of puts to a GPU or to the endpoint. Puts that a proxy thread copied are not
    /// included.
    pub requests: u64,
    /// Commands that failed.
    pub faults: u64,
}

impl ProxyBuilder {
    /// Makes rings for kernels of this GPU. Without it, the rings are for CPU threads
    /// ([`Proxy::host_producer`]).
    ///
    /// A kernel that waits blocks all work in its hardware queue. If the engine's copies share that
    /// queue, it blocks them too. A process has eight hardware queues, but only two under MPS. Set
    /// `CUDA_DEVICE_MAX_CONNECTIONS=32` there before the first use of CUDA.
    pub fn gpu(mut self, gpu: u32) -> Self {
        self.gpu = Some(gpu);
        self
    }

    /// Sets the number of threads that drain rings. Each thread has its own lanes to peers that
    /// lanes lead to. The default is a quarter of the CPUs, at most four.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Sets the number of rings, which the threads share out. The default is eight per thread.
    pub fn rings(mut self, rings: usize) -> Self {
        self.rings = Some(rings);
        self
    }

    /// Sets the number of commands that a ring holds, rounded up to a power of two. The default is
    /// 2048.
    pub fn slots(mut self, slots: u32) -> Self {
        self.slots = slots;
        self
    }

    /// Sets the number of peer numbers. The default is 64.
    pub fn peers(mut self, peers: usize) -> Self {
        self.peers = peers;
        self
    }

    /// Sets the number of counters that peers can raise. The default is 1024.
    pub fn counters(mut self, counters: usize) -> Self {
        self.counters = counters;
        self
    }

    /// Sets the longest time that a kernel waits for room, an answer or a counter. The default is
    /// 10 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets how GPUs copy memory that they can access on both sides.
    ///
    /// - [`CopierKind::Launched`] (the default) launches a kernel for each batch of puts.
    /// - [`CopierKind::Engines`] uses the driver's copies.
    /// - [`CopierKind::Resident`] adds a kernel for small batches that stays resident while there
    ///   is work. It is faster and takes two multiprocessors for each thread.
    pub fn copier(mut self, copier: CopierKind) -> Self {
        self.copier = copier;
        self
    }

    /// Builds the proxy. Its threads sleep until it is armed.
    ///
    /// # Errors
    ///
    /// [`ProxyError`]: a setting is out of range, the GPU does not exist, or there is no memory.
    pub fn build(self) -> Result<Proxy, ProxyError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = self.threads.unwrap_or_else(|| (cores / 4).clamp(1, THREADS));
        let rings = self.rings.unwrap_or(threads * RINGS_EACH);
        within("threads", threads, 1, 64)?;
        within("rings", rings, threads, 4096)?;
        within("slots", self.slots as usize, 32, 1 << 20)?;
        within("peers", self.peers, 1, MAX_PEERS)?;
        within("counters", self.counters, 1, MAX_COUNTERS)?;
        let device = self.gpu.map(|gpu| gpus()?.device(gpu)).transpose()?;
        if let Some(device) = &device {
            check_queues(device);
        }
        let memory = SharedMemory::allocate(Counters::bytes(self.counters))?;
        let region = self.endpoint.register_shared(&memory, 0..memory.len())?;
        let counters = Counters::new(memory, region, self.counters, device.as_ref())?;
        let counters = Arc::new(counters);
        let shape = Shape {
            rings,
            log2_slots: self.slots.next_power_of_two().trailing_zeros(),
            peers: self.peers,
            counters: self.counters,
            timeout_ns: u64::try_from(self.timeout.as_nanos()).unwrap_or(u64::MAX / 4),
        };
        let memory = ProxyMemory::new(shape, device.as_ref(), counters.address())?;
        let inner = self.endpoint.inner();
        let most = MAX_PROXIES;
        let first_id =
            inner.inbox.add_counters(counters.clone()).ok_or(ProxyError::NoIds { most })?;
        let shared = Arc::new(ProxyShared {
            endpoint: Arc::downgrade(inner),
            memory,
            counters,
            faults: Faults::default(),
            locals: std::sync::RwLock::default(),
            targets: std::sync::RwLock::new(vec![None; self.peers]),
            forwards: std::sync::RwLock::default(),
            copiers: std::sync::Mutex::default(),
            generation: 0.into(),
            fault_epoch: 0.into(),
            armed: 0.into(),
            stop: false.into(),
            sleepers: std::sync::Mutex::default(),
            wake: std::sync::Condvar::new(),
            spin: inner.config.spin,
            stats: ProxyCounters::default(),
        });
        let mut proxy = Proxy {
            shared: shared.clone(),
            endpoint: Arc::downgrade(inner),
            regions: std::sync::Mutex::default(),
            first_id,
            threads: Vec::new(),
            gpu: self.gpu,
            copier: self.copier,
            workers: threads,
            fork_generation: process::fork_generation(),
            copying: std::sync::Mutex::default(),
        };
        if let Some(device) = &device {
            proxy.have_copiers(&mut proxy.copying.lock().unwrap(), device)?;
        }
        let near = device.as_deref().map(cpus_near).unwrap_or_default();
        let cpus = self.endpoint.inner().cpus.near(&near);
        for first in 0..threads {
            let worker = ProxyWorker::new(shared.clone(), first, threads);
            let name = format!("peerway-proxy-{first}");
            let thread = threads::spawn(name, &cpus, move || worker.run());
            proxy.threads.push(thread.map_err(ProxyError::Thread)?);
        }
        Ok(proxy)
    }
}

impl Proxy {
    /// Starts to configure a proxy of this endpoint.
    pub fn builder(endpoint: &Endpoint) -> ProxyBuilder {
        ProxyBuilder {
            endpoint: endpoint.clone(),
            gpu: None,
            threads: None,
            rings: None,
            slots: SLOTS,
            peers: 64,
            counters: 1024,
            timeout: Duration::from_secs(10),
            copier: CopierKind::Launched,
        }
    }

    /// Makes registered memory a window. From then on local commands can name it. Peers can name it
    /// if they got peer info that was made after this call.
    ///
    /// # Errors
    ///
    /// [`ProxyError::NoRoom`].
    pub fn window(&self, region: &Region) -> Result<Window, ProxyError> {
        let len = region.len();
        let mut copying = self.copying.lock().unwrap();
        if let Some(device) = region.handle.memory.device() {
            self.have_copiers(&mut copying, device)?;
        }
        // Map now, before taking a lock that a worker reads. A worker must not ask the driver for
        // the mapping while a kernel waits for that worker.
        let targets = self.shared.targets.read().unwrap().clone();
        for target in targets.iter().flatten().flat_map(Targets::all) {
            (0..target.space.len()).for_each(|at| drop(target.way(&region.handle.memory, at)));
        }
        let mut locals = self.shared.locals.write().unwrap();
        let mut space = Space::clone(&locals);
        let window = space.next(len).filter(|_| space.len() < MAX_WINDOWS);
        let window = window.ok_or(ProxyError::NoRoom { len })?;
        space.push(window, region.handle.memory.clone());
        *locals = Arc::new(space);
        self.regions.lock().unwrap().push(region.clone());
        drop(locals);
        self.changed();
        Ok(window)
    }

    /// Returns the bytes that a peer needs to send to this proxy. They grant write access to the
    /// windows and the counters. The application can send them by any means.
    ///
    /// # Errors
    ///
    /// [`ProxyError::Register`].
    pub fn peer_info(&self) -> Result<Vec<u8>, ProxyError> {
        let windows = self.shared.locals.read().unwrap().windows();
        let regions = self.regions.lock().unwrap();
        let described: Result<Vec<_>, RegisterError> = windows
            .into_iter()
            .zip(regions.iter())
            .map(|(window, region)| Ok((window, region.advertise(Access::WRITE)?)))
            .collect();
        let counters = &self.shared.counters;
        let words = counters.region.advertise(Access::WRITE)?;
        let count = counters.count() as u32;
        let endpoint = self.endpoint.upgrade();
        // A peer that has this peer info may open sub-sessions.
        if let Some(Err(error)) = endpoint.as_ref().map(|e| e.have_sub_sessions(self.workers - 1)) {
            tracing::warn!(%error, "cannot create a shard per proxy thread; threads share lanes");
        }
        let metadata = endpoint.map(|endpoint| endpoint.metadata()).unwrap_or_default();
        Ok(PeerInfo::new(metadata, described?, count, self.first_id, words).to_bytes())
    }

    /// Makes `number` stand for this peer in commands. The peer's proxy made `info`. Returns the
    /// peer's windows, as kernels name them.
    ///
    /// # Errors
    ///
    /// [`ProxyError`]: the number is out of range or in use, the bytes are not peer info, or an
    /// import fails.
    pub fn add_peer(
        &self,
        number: u16,
        peer: &Peer,
        info: &[u8],
    ) -> Result<Vec<Window>, ProxyError> {
        let most = self.shared.memory.shape().peers - 1;
        within("a peer's number", number.into(), 0, most)?;
        let info = PeerInfo::from_bytes(info).ok_or(ProxyError::NotPeerInfo)?;
        let target = Arc::new(target_of(peer, &info)?);
        let windows = target.space.windows();
        let taken = |place: &Option<Targets>| {
            place.as_ref().is_some_and(|there| there.all().iter().all(|t| t.peer.is_alive()))
        };
        if taken(&self.shared.targets.read().unwrap()[usize::from(number)]) {
            return Err(ProxyError::Taken { number });
        }
        let locals = self.shared.locals.read().unwrap().clone();
        let all = self.sub_sessions(target, &info, &locals);
        // Map the memory and create the copiers before the workers see the peer. Later a kernel may
        // wait for the worker while the driver waits for that kernel.
        let mut copying = self.copying.lock().unwrap();
        let locals = self.shared.locals.read().unwrap().clone();
        for target in &all {
            for (_, local) in locals.iter() {
                (0..target.space.len()).for_each(|window| drop(target.way(local, window)));
            }
            for window in 0..target.space.len() {
                if let Some(device) = target.remote(window).device() {
                    self.have_copiers(&mut copying, device)?;
                }
            }
        }
        let mut targets = self.shared.targets.write().unwrap();
        let place = &mut targets[usize::from(number)];
        if taken(place) {
            return Err(ProxyError::Taken { number });
        }
        *place = Some(Targets::new(all));
        self.shared.memory.peer_fault(number.into()).store(0, Ordering::Release);
        drop(targets);
        self.changed();
        Ok(windows)
    }

    /// Returns the target of each thread. If lanes carry anything, each thread gets its own
    /// sub-session with the peer, so that no thread waits for the lanes of another. A thread
    /// without a sub-session shares the first target; that is not an error.
    fn sub_sessions(
        &self,
        first: Arc<PeerTarget>,
        info: &PeerInfo,
        locals: &Locals,
    ) -> Vec<Arc<PeerTarget>> {
        let (endpoint, session) = (first.endpoint().clone(), first.session().clone());
        let metadata = Metadata::from_bytes(&info.metadata).ok();
        let metadata = metadata.filter(|m| m.incarnation == session.incarnation);
        let to_self = session.incarnation == endpoint.incarnation;
        let mut all = vec![first];
        let Some(metadata) = metadata.filter(|_| !to_self && all[0].needs_lanes(locals)) else {
            return all;
        };
        let sub_sessions = endpoint.have_sub_sessions(self.workers - 1);
        self.shared.counters.note_lanes();
        if let Err(error) = sub_sessions {
            tracing::warn!(
                %error,
                peer = %session.addr,
                "cannot create a shard per proxy thread; threads share lanes"
            );
            return all;
        }
        // One limit for all sub-sessions: a peer that hangs costs one time-out, not one for each
        // thread.
        let limit = TimeLimit::new(endpoint.config.connect_timeout);
        for worker in 1..self.workers {
            let whom = Whom { who: session.incarnation, sub_session: worker as u16 };
            let sub_session = opener::connect_to(&endpoint, whom, &metadata, limit)
                .map(|session| Peer::new(endpoint.clone(), session));
            let sub_session = sub_session.map_err(|error| error.to_string());
            let target = sub_session
                .and_then(|peer| target_of(&peer, info).map_err(|error| error.to_string()));
            match target {
                Ok(target) => all.push(Arc::new(target)),
                Err(error) => {
                    tracing::warn!(
                        %error,
                        peer = %session.addr,
                        worker,
                        "cannot open a sub-session; this proxy thread shares the first one's lanes"
                    );
                    all.push(all[0].clone());
                }
            }
        }
        all
    }

    /// Adds a forwarding rule. Whenever the rule's counter rises from now on, the proxy's threads
    /// copy the arrived bytes and then raise the rule's counters. They do so while the proxy is
    /// armed.
    ///
    /// # Errors
    ///
    /// [`ProxyError::Forward`]: a place lies outside its region or has another length, a counter
    /// does not exist, or the counter already has a rule.
    pub fn forward(&self, mut rule: Forward) -> Result<(), ProxyError> {
        let counter = rule.counter;
        let no = |why| Err(ProxyError::Forward { counter, why });
        let there = |counter: &u16| usize::from(*counter) < self.shared.counters.count();
        if !there(&counter) || !rule.then.iter().all(there) {
            return no("there is no such counter");
        }
        if rule.then.contains(&counter) {
            return no("the rule would make its counter count itself");
        }
        if !is_inside(&rule.from) || !rule.to.iter().all(is_inside) {
            return no("a place lies outside its region");
        }
        if rule.to.iter().any(|place| place.len != rule.from.len) {
            return no("a place has another length than the arriving bytes");
        }
        let mut copying = self.copying.lock().unwrap();
        for place in std::iter::once(&rule.from).chain(&rule.to) {
            if let Some(device) = place.region.handle.memory.device() {
                self.have_copiers(&mut copying, device)?;
            }
        }
        let mut rules = self.shared.forwards.write().unwrap();
        if rules.iter().any(|other| other.counter == counter) {
            return no("the counter has a rule already");
        }
        rule.since = self.counter(counter);
        rule.stopped = Arc::default();
        rules.push(Arc::new(rule));
        drop(rules);
        self.changed();
        Ok(())
    }

    /// Removes the rule of a counter. Returns false if it had none.
    pub fn stop_forwarding(&self, counter: u16) -> bool {
        let mut rules = self.shared.forwards.write().unwrap();
        let before = rules.len();
        for rule in rules.iter().filter(|rule| rule.counter == counter) {
            rule.stopped.store(true, Ordering::Release);
        }
        rules.retain(|rule| rule.counter != counter);
        let taken = rules.len() < before;
        drop(rules);
        self.changed();
        taken
    }

    /// Creates the copiers of a GPU for every worker, and everything else that transfers need from
    /// the driver. The worker does not do this itself: the driver may wait for kernels meanwhile,
    /// and those kernels may wait for workers.
    fn have_copiers(&self, copying: &mut Vec<u32>, device: &Arc<Device>) -> Result<(), ProxyError> {
        if copying.contains(&device.index()) {
            return Ok(());
        }
        device.warm_up().map_err(GpuError::from)?;
        for worker in 0..self.workers {
            match Set::new(device, self.copier) {
                Ok(set) => self.shared.copiers.lock().unwrap().push((worker, set)),
                // Without kernels the driver's copies do the work.
                Err(error @ GpuError::NoKernels { .. }) => {
                    tracing::warn!(%error, "no copy kernels; the driver copies puts one by one");
                }
                Err(error) => return Err(error.into()),
            }
        }
        copying.push(device.index());
        self.changed();
        Ok(())
    }

    fn changed(&self) {
        self.shared.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// The argument for kernels: the address of a `peerway_proxy`. It stays valid until the proxy
    /// is dropped.
    pub fn handle(&self) -> u64 {
        self.shared.memory.handle()
    }

    /// The GPU whose kernels push, if any.
    pub fn gpu(&self) -> Option<u32> {
        self.gpu
    }

    /// The number of rings.
    pub fn rings(&self) -> u32 {
        self.shared.memory.shape().rings as u32
    }

    /// The number of peer numbers.
    pub fn peers(&self) -> u32 {
        self.shared.memory.shape().peers as u32
    }

    /// The number of counters that peers can raise.
    pub fn counters(&self) -> u32 {
        self.shared.memory.shape().counters as u32
    }

    /// Makes the threads poll for commands while the returned guard lives. Hold the guard from
    /// before a kernel is launched until after it has ended. Without a guard the threads sleep.
    pub fn arm(&self) -> Armed {
        Armed::new(&self.shared)
    }

    /// A producer that pushes commands from the CPU in place of a kernel.
    ///
    /// # Errors
    ///
    /// [`HostProducerError`]: the rings belong to a GPU, or the ring does not exist.
    pub fn host_producer(&self, ring: u32) -> Result<HostProducer, HostProducerError> {
        HostProducer::new(&self.shared, ring)
    }

    /// The value of a counter of this proxy.
    pub fn counter(&self, counter: u16) -> u64 {
        self.shared.counters.value(counter.into())
    }

    /// Waits until a counter reaches `value` or `timeout` is over. Returns the counter's value.
    pub fn wait_counter(&self, counter: u16, value: u64, timeout: Duration) -> u64 {
        super::host_producer::wait_for(timeout, || self.counter(counter) >= value);
        self.counter(counter)
    }

    /// Takes the first fault since the last call. Faults up to then no longer count: a kernel's
    /// `quiet` reports only failures of later commands, except for peers that are gone.
    pub fn take_fault(&self) -> Option<Fault> {
        let fault = self.shared.faults.take(&self.shared.memory);
        if fault.is_some() {
            self.shared.fault_epoch.fetch_add(1, Ordering::AcqRel);
        }
        fault
    }

    /// Statistics since the proxy was built.
    pub fn stats(&self) -> ProxyStats {
        let stats = &self.shared.stats;
        let load = |word: &std::sync::atomic::AtomicU64| word.load(Ordering::Relaxed);
        ProxyStats {
            commands: load(&stats.commands),
            puts: load(&stats.puts),
            bytes: load(&stats.bytes),
            counts: load(&stats.counts),
            requests: load(&stats.requests),
            faults: self.shared.faults.count(),
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if process::fork_generation() != self.fork_generation {
            // A forked child has none of these threads, and the locks may be in any state.
            self.threads.drain(..).for_each(std::mem::forget);
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        self.shared.rouse();
        for thread in self.threads.drain(..) {
            // A thread that panicked has already reported it.
            let _ = thread.join();
        }
        if let Some(endpoint) = self.endpoint.upgrade() {
            endpoint.inbox.remove_counters(self.first_id);
        }
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rings = self.rings();
        write!(f, "Proxy({rings} rings, {} threads, GPU {:?})", self.threads.len(), self.gpu)
    }
}

/// The proxy's threads poll for commands while this guard lives.
#[must_use = "the proxy is armed only while this lives"]
pub struct Armed {
    shared: Arc<ProxyShared>,
}

impl Armed {
    fn new(shared: &Arc<ProxyShared>) -> Self {
        if shared.armed.fetch_add(1, Ordering::AcqRel) == 0 {
            shared.rouse();
        }
        Self { shared: shared.clone() }
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        self.shared.armed.fetch_sub(1, Ordering::AcqRel);
    }
}

impl fmt::Debug for Armed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Armed")
    }
}

/// With fewer hardware queues, a copy is likely to queue behind a kernel that waits for it.
const QUEUES: u32 = 8;

/// Warns if kernels that wait would block the copies that they wait for.
fn check_queues(device: &Device) {
    let asked = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok();
    let few = match asked.and_then(|asked| asked.parse::<u32>().ok()) {
        Some(queues) => queues < QUEUES,
        None => device.gpu.facts().mps,
    };
    if few {
        tracing::warn!(
            gpu = device.index(),
            "kernels that wait may block the copies that they wait for: \
             set CUDA_DEVICE_MAX_CONNECTIONS=32 before the first use of CUDA"
        );
    }
}

/// The CPUs near a GPU. Empty if unknown.
fn cpus_near(device: &Device) -> Vec<usize> {
    let node = device.gpu.facts().numa.and_then(|node| u16::try_from(node).ok());
    node.map(|node| cpus_of_node(Path::new("/"), node)).unwrap_or_default()
}

fn within(what: &'static str, given: usize, least: usize, most: usize) -> Result<(), ProxyError> {
    if (least..=most).contains(&given) {
        return Ok(());
    }
    let [given, least, most] = [given, least, most].map(|n| n as u64);
    Err(ProxyError::OutOfRange { what, given, least, most })
}

/// Imports the windows and counters of a peer info over one session.
fn target_of(peer: &Peer, info: &PeerInfo) -> Result<PeerTarget, ProxyError> {
    let mut space = Space::default();
    for (window, descriptor) in &info.windows {
        let remote = peer.import(descriptor)?;
        let writes = remote.access().allows(Access::WRITE);
        if remote.len() != window.len || !writes || !space.push(*window, remote) {
            return Err(ProxyError::NotPeerInfo);
        }
    }
    let counter_words = peer.import(&info.counter_words)?;
    let enough = counter_words.len() >= Counters::bytes(info.counters as usize) as u64;
    let writes = counter_words.access().allows(Access::WRITE);
    // If they are mapped, each counter word must start on a line.
    let mapped = counter_words.inner.direct.mapped().map(|(base, _)| base as usize);
    let aligned = mapped
        .is_none_or(|base| (base + counter_words.window.offset as usize).is_multiple_of(LINE));
    let ids = info.first_id >= FIRST_PROXY_ID && info.first_id & 0xffff == 0;
    if !enough || !writes || !aligned || !ids {
        return Err(ProxyError::NotPeerInfo);
    }
    Ok(PeerTarget {
        peer: peer.clone(),
        space,
        counters: info.counters as usize,
        first_id: info.first_id,
        counter_words,
    })
}
