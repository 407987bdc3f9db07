//! The endpoint: sockets, registrations, peers, and the threads that serve them.

mod builder;
mod stats;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::time::Duration;

use peerway_core::config::Config;
use peerway_core::ids::Incarnation;
use peerway_core::metadata::Metadata;

pub use builder::Builder;
pub use stats::EndpointStats;

use crate::address;
use crate::clock;
use crate::connect::accepting::Accepting;
use crate::connect::opener::{self, TimeLimit};
use crate::error::{AcceptError, BuildError, ConnectError, RegisterError, os};
use crate::gpu::{self, DeviceMemory, DeviceMemoryOptions};
use crate::identity::Identity;
use crate::inbox::Notification;
use crate::memory::{Backing, OwnedMemory, RegionInner, SharedMemory};
use crate::os::random;
use crate::os::{net, process, unix};
use crate::peer::Peer;
use crate::progress::driver::Listening;
use crate::progress::engine::Engine;
use crate::quarantine::quarantine;
use crate::region::Region;
use crate::threads::Cpus;
use crate::transport;

/// One side of transfers: it listens, connects and owns registered memory.
///
/// Cloning is cheap. The endpoint closes when the last clone is dropped or [`Endpoint::close`] is
/// called. After a fork the child's copy is unusable: its calls fail with an error that says so.
///
/// ```
/// use peerway::{Access, Endpoint};
///
/// let (a, b) = (Endpoint::new()?, Endpoint::new()?);
/// let theirs = b.allocate(1 << 20)?;
/// let descriptor = theirs.advertise(Access::READ_WRITE)?; // 64 bytes, sent by any means
///
/// let peer = a.connect(&b.metadata())?;
/// let remote = peer.import(&descriptor)?;
/// let ours = a.register(vec![7u8; 1 << 20])?;
/// peer.write(&ours.all(), &remote.all())?;
///
/// let mut check = [0; 4];
/// theirs.read_at(1000, &mut check)?;
/// assert_eq!(check, [7; 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Endpoint {
    owner: Arc<Owner>,
}

/// Closes the endpoint when the last handle of the user is dropped.
struct Owner {
    inner: Arc<Engine>,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({}, {:?})", self.incarnation(), self.addresses())
    }
}

impl Endpoint {
    /// Creates an endpoint with the settings of the environment.
    pub fn new() -> Result<Self, BuildError> {
        Self::builder().build()
    }

    /// Starts to configure an endpoint.
    pub fn builder() -> Builder {
        Builder::default()
    }

    pub(crate) fn start(config: Config, bind: Option<SocketAddr>) -> Result<Self, BuildError> {
        process::watch_forks();
        let cpus = Cpus::choose(config.cpus.as_deref())?;
        let places = address::places(&config, bind)?;
        let (listeners, addresses) = listen_on_all(&places.bind, config.ports.as_ref())?;
        places.warn_of_loopback();
        let advertised = places.advertised(&addresses);
        let identity = Identity::new(&config)?;
        let incarnation = identity.incarnation;
        let local_name = format!("peerway-{incarnation}-{:016x}", u64::from_le_bytes(random()));
        let local = unix::listen(&local_name)
            .inspect_err(|error| tracing::debug!(%error, "no local socket: local paths are off"))
            .ok();
        let local_name = if local.is_some() { local_name } else { String::new() };
        let rdma = transport::open_devices(&config);
        let rdma = match rdma {
            Err(error) if config.transport.is_rdma() => {
                let pin = config.transport.to_string();
                return Err(BuildError::NoRdma { pin, error });
            }
            rdma => rdma,
        };
        let inner = Engine::new(identity, config, cpus, local_name, places.rails, advertised, rdma);
        inner.make_shards()?;
        let accepting =
            Accepting::new(listeners, local).map_err(os("cannot watch the listeners"))?;
        let mut acceptor: Option<Box<dyn Listening>> = Some(Box::new(Arc::new(accepting)));
        let endpoint = Self { owner: Arc::new(Owner { inner: inner.clone() }) };
        for shard in inner.shards.shared() {
            inner.start_shard(shard, acceptor.take())?;
        }
        inner.announce();
        let (addresses, local) = (&*inner.addresses, !inner.local_name.is_empty());
        let transport = inner.config.transport;
        tracing::info!(?addresses, %incarnation, %transport, local, "an endpoint listens");
        Ok(endpoint)
    }

    pub(crate) fn inner(&self) -> &Arc<Engine> {
        &self.owner.inner
    }

    /// The bytes that other endpoints need to connect. The application can send them by any means.
    pub fn metadata(&self) -> Vec<u8> {
        self.inner().metadata()
    }

    /// The identity of this incarnation of the endpoint.
    pub fn incarnation(&self) -> Incarnation {
        self.inner().incarnation
    }

    /// The addresses at which peers can connect.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.inner().addresses
    }

    /// Connects to the endpoint that made this metadata. A second connect to the same incarnation
    /// returns the same peer.
    pub fn connect(&self, metadata: &[u8]) -> Result<Peer, ConnectError> {
        self.connect_within(metadata, self.inner().config.connect_timeout)
    }

    /// Does [`Self::connect`] with this time limit. It covers everything: all addresses of the peer
    /// and every step of the handshake.
    pub fn connect_within(&self, metadata: &[u8], timeout: Duration) -> Result<Peer, ConnectError> {
        let metadata = Metadata::from_bytes(metadata)?;
        let (whom, limit) = (metadata.incarnation.into(), TimeLimit::new(timeout));
        let session = opener::connect_to(self.inner(), whom, &metadata, limit)?;
        Ok(Peer::new(self.inner().clone(), session))
    }

    /// Connects to the endpoint that listens at `addr`.
    pub fn connect_addr(&self, addr: SocketAddr) -> Result<Peer, ConnectError> {
        self.connect_addr_within(addr, self.inner().config.connect_timeout)
    }

    /// Does [`Self::connect_addr`] with this time limit.
    pub fn connect_addr_within(
        &self,
        addr: SocketAddr,
        timeout: Duration,
    ) -> Result<Peer, ConnectError> {
        self.inner().check_open().map_err(ConnectError::from)?;
        let limit = TimeLimit::new(timeout);
        let session = opener::connect_at(self.inner(), addr, None, timeout, limit)?;
        Ok(Peer::new(self.inner().clone(), session))
    }

    /// The time limit of a connect that sets none.
    pub fn connect_timeout(&self) -> Duration {
        self.inner().config.connect_timeout
    }

    /// Returns the next peer that connected to this endpoint. The progress thread accepts peers in
    /// the background; this call only returns them.
    pub fn accept(&self, timeout: Duration) -> Result<Peer, AcceptError> {
        let inner = self.inner();
        let deadline = clock::after(clock::now(), timeout);
        loop {
            inner.check_open().map_err(AcceptError::from)?;
            let left = clock::until(deadline, clock::now());
            if let Some(session) = inner.peers.next_accepted(left) {
                return Ok(Peer::new(inner.clone(), session));
            }
            if left == Duration::ZERO {
                return Err(AcceptError::TimedOut);
            }
        }
    }

    /// All live peers.
    pub fn peers(&self) -> Vec<Peer> {
        let sessions = self.inner().peers.live_sessions();
        let sessions = sessions.into_iter().filter(|session| session.sub_session.is_none());
        sessions.map(|s| Peer::new(self.inner().clone(), s)).collect()
    }

    /// Closes the session with a peer and ends its transfers. A new connect opens a new session.
    pub fn remove_peer(&self, peer: &Peer) {
        peer.remove();
    }

    /// Registers memory. The region owns it from then on.
    pub fn register(&self, memory: impl OwnedMemory) -> Result<Region, RegisterError> {
        let mut memory: Box<dyn OwnedMemory> = Box::new(memory);
        let (ptr, len) = memory.bytes();
        self.region(ptr, len, Backing::Owned { _memory: memory })
    }

    /// Registers memory that the caller keeps: host memory, or GPU memory if the process already
    /// uses CUDA.
    ///
    /// # Safety
    ///
    /// The range must be valid for reads and writes until the region and every transfer that uses
    /// it are gone. No Rust reference may cover any of it in that time, because peers read and
    /// write it at any moment. After a transfer or a revoke that ended with an open fence, the
    /// range must stay valid until the peer has finished or died.
    pub unsafe fn register_raw(&self, ptr: *mut u8, len: usize) -> Result<Region, RegisterError> {
        self.region(ptr, len, Backing::Raw)
    }

    /// Registers GPU memory. The region owns it from then on. It can be a
    /// [`DeviceMemory`](crate::gpu::DeviceMemory) or any other owner of a GPU address.
    ///
    /// # Errors
    ///
    /// [`RegisterError::Gpu`]: no driver, memory that is not GPU memory, or a range outside its
    /// allocation.
    pub fn register_gpu(&self, memory: impl OwnedMemory) -> Result<Region, RegisterError> {
        let mut memory: Box<dyn OwnedMemory> = Box::new(memory);
        let (ptr, len) = memory.bytes();
        self.gpu_region(ptr, len, Backing::Owned { _memory: memory })
    }

    /// Registers GPU memory that the caller keeps. The driver tells which GPU it belongs to.
    ///
    /// # Safety
    ///
    /// As for [`Self::register_raw`], for copies by the GPU.
    ///
    /// # Errors
    ///
    /// As for [`Self::register_gpu`].
    pub unsafe fn register_gpu_raw(
        &self,
        address: u64,
        len: usize,
    ) -> Result<Region, RegisterError> {
        self.gpu_region(address as *mut u8, len, Backing::Raw)
    }

    /// Allocates memory on a GPU that local peers can map.
    ///
    /// # Errors
    ///
    /// As for [`DeviceMemory::allocate`](crate::gpu::DeviceMemory::allocate).
    pub fn allocate_gpu(&self, gpu: u32, len: u64) -> Result<Region, RegisterError> {
        self.register_gpu(DeviceMemory::allocate(gpu, len, &DeviceMemoryOptions::default())?)
    }

    fn gpu_region(
        &self,
        ptr: *mut u8,
        len: usize,
        backing: Backing,
    ) -> Result<Region, RegisterError> {
        self.check_range(ptr, len)?;
        let located = gpu::gpus()?.locate(ptr as u64, len as u64)?;
        let memory = RegionInner::new(ptr, len, backing, Some(located));
        Ok(Region::new(self.inner(), memory))
    }

    /// Allocates zeroed memory that local peers can map: the fastest path.
    pub fn allocate(&self, len: usize) -> Result<Region, RegisterError> {
        self.register_shared(&SharedMemory::allocate(len)?, 0..len as u64)
    }

    /// Registers a part of memory that local peers can map.
    pub fn register_shared(
        &self,
        memory: &SharedMemory,
        range: Range<u64>,
    ) -> Result<Region, RegisterError> {
        let (offset, len) = (range.start, range.end.saturating_sub(range.start));
        if range.end < offset || range.end > memory.len() {
            return Err(RegisterError::Outside { offset, len });
        }
        // The check above keeps the address inside the mapping.
        let ptr = memory.as_ptr().wrapping_add(offset as usize);
        self.region(ptr, len as usize, Backing::Shared { memory: memory.clone(), offset })
    }

    fn check_range(&self, ptr: *mut u8, len: usize) -> Result<(), RegisterError> {
        self.inner().check_open().map_err(RegisterError::from)?;
        let wraps = (ptr as usize).checked_add(len).is_none();
        if ptr.is_null() && len > 0 || wraps || len > isize::MAX as usize {
            return Err(RegisterError::BadRange { ptr: ptr as usize, len });
        }
        Ok(())
    }

    fn region(&self, ptr: *mut u8, len: usize, backing: Backing) -> Result<Region, RegisterError> {
        self.check_range(ptr, len)?;
        let located = gpu::locate_if_gpu(ptr as u64, len as u64)?;
        let memory = RegionInner::new(ptr, len, backing, located);
        Ok(Region::new(self.inner(), memory))
    }

    /// Takes the oldest notification, if there is one.
    pub fn try_notification(&self) -> Option<Notification> {
        self.inner().inbox.take(None)
    }

    /// Waits for a notification and takes the oldest.
    pub fn notification(&self, timeout: Duration) -> Option<Notification> {
        self.inner().wait_notification(None, timeout)
    }

    /// The number of arrivals counted under this id.
    pub fn counter(&self, id: u32) -> u64 {
        self.inner().inbox.counter(id)
    }

    /// Waits until at least `n` arrivals are counted. Returns the count.
    pub fn wait_counter(&self, id: u32, n: u64, timeout: Duration) -> u64 {
        let inner = self.inner();
        let deadline = clock::after(clock::now(), timeout);
        inner.wait_until(
            deadline,
            || inner.inbox.counter(id) >= n,
            |left| inner.inbox.sleep_unless(left, |a| a.counter(id) >= n),
        );
        inner.inbox.counter(id)
    }

    /// Removes a counter and returns its value, so that its id can be used again from zero.
    pub fn reset_counter(&self, id: u32) -> u64 {
        self.inner().inbox.reset_counter(id)
    }

    /// Statistics of the endpoint.
    pub fn stats(&self) -> EndpointStats {
        let inner = self.inner();
        let (traffic, peers) = inner.peers.stats();
        EndpointStats {
            cpus: inner.cpus.numbers(),
            quarantine: quarantine(),
            peers,
            traffic,
            refusals: inner.refusals.stats(),
        }
    }

    /// Whether this is the only clone. Dropping it closes the endpoint.
    pub fn is_last(&self) -> bool {
        Arc::strong_count(&self.owner) == 1
    }

    /// Whether the endpoint is closed or belongs to the parent process.
    pub fn is_closed(&self) -> bool {
        self.inner().check_open().is_err()
    }

    /// Closes the endpoint: its transfers end, its threads stop, its sockets close.
    pub fn close(&self) {
        self.inner().shut_down();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.inner.shut_down();
    }
}

/// Listens on every address with one port, so that one port number identifies the endpoint: the
/// port of the first address, else the first free one of `ports`, else one that the system picks.
fn listen_on_all(
    places: &[SocketAddr],
    ports: Option<&RangeInclusive<u16>>,
) -> Result<(Vec<TcpListener>, Vec<SocketAddr>), BuildError> {
    // A port that is free on the first address may be in use on the next. Then another port is
    // tried.
    let mut candidates: Vec<u16> = match (places.first().map_or(0, SocketAddr::port), ports) {
        (0, Some(ports)) => ports.clone().rev().collect(),
        (0, None) => vec![0; 16],
        (port, _) => vec![port],
    };
    loop {
        let first = candidates.pop().unwrap_or(0);
        let (mut listeners, mut addresses) = (Vec::new(), Vec::<SocketAddr>::new());
        let mut failed = None;
        for place in places {
            let port = addresses.first().map_or(first, SocketAddr::port);
            let addr = SocketAddr::new(place.ip(), port);
            match net::listen(addr).and_then(|l| Ok((l.local_addr()?, l))) {
                Ok((bound, listener)) => {
                    addresses.push(bound);
                    listeners.push(listener);
                }
                // An address of another rail may not be usable yet. Only the first address is
                // required.
                Err(source)
                    if source.kind() == io::ErrorKind::AddrNotAvailable
                        && !listeners.is_empty() =>
                {
                    tracing::warn!(%addr, %source, "cannot listen on this interface address");
                }
                Err(source) => failed = Some(BuildError::Listen { addr, source }),
            }
        }
        match failed {
            None => return Ok((listeners, addresses)),
            Some(_) if !candidates.is_empty() => {}
            Some(error) => {
                return Err(match (error, ports) {
                    (BuildError::Listen { addr, source }, Some(ports)) if addr.port() != 0 => {
                        BuildError::PortsInUse { ports: ports.clone(), ip: addr.ip(), source }
                    }
                    (error, _) => error,
                });
            }
        }
    }
}
