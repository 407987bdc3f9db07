//! The endpoint: sockets, registrations, peers and the threads that serve them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, OnceLock, Weak};
use std::time::Duration;

use peerway_core::config::{Config, Pin};
use peerway_core::ids::{Incarnation, SlotId};
use peerway_core::metadata::Metadata;
use peerway_core::outcome::Fence;

use crate::batch::{Tail, Work};
use crate::clock;
use crate::error::{AcceptError, BuildError, ConnectError, RegisterError};
use crate::inbox::{Inbox, Notification};
use crate::memory::grants::{Grant, Grants};
use crate::memory::{Backing, OwnedMemory, Region, RegionInner};
use crate::os::shm::{self, Mapping};
use crate::os::{net, process, unix};
use crate::peer::Peer;
use crate::progress::crew::Crew;
use crate::progress::driver::Driver;
use crate::progress::shard::{Command, Shard};
use crate::session::Session;
use crate::session::accept::Door;
use crate::session::connect::{self, Outcome};
use crate::slots::Slots;

/// Peers that were accepted and not asked for yet.
const MAX_UNASKED: usize = 65_536;

/// One end of transfers: it listens, connects, and owns registered memory.
///
/// Cheap to clone; the endpoint closes when the last clone is dropped or [`Endpoint::close`] is
/// called. After a fork the child's copy is dead: every call says so.
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

/// Closes the endpoint when the last user handle is gone.
struct Owner {
    inner: Arc<Inner>,
}

/// What the endpoint's parts share.
pub(crate) struct Inner {
    pub(crate) incarnation: Incarnation,
    pub(crate) config: Config,
    pub(crate) slots: Slots,
    pub(crate) grants: Grants,
    pub(crate) inbox: Inbox,
    pub(crate) crew: Crew,
    pub(crate) local_name: String,
    /// Local addresses that bulk lanes go round.
    pub(crate) rails: Vec<IpAddr>,
    addresses: OnceLock<Vec<SocketAddr>>,
    shards: OnceLock<Vec<Arc<Shard>>>,
    next_shard: AtomicUsize,
    peers: Mutex<Peers>,
    peers_changed: Condvar,
    quarantine: Mutex<Vec<Arc<Grant>>>,
    closed: AtomicBool,
    fork_generation: u32,
}

#[derive(Default)]
struct Peers {
    /// Live sessions by whom they lead to.
    by_incarnation: HashMap<Incarnation, Arc<Session>>,
    /// Sessions of an endpoint with itself, which lead to the same name at both ends.
    to_self: Vec<Arc<Session>>,
    accepted: VecDeque<Arc<Session>>,
    /// Endpoints that a connect is under way to.
    opening: HashSet<Incarnation>,
}

/// Endpoints of this process, so that two of them can find each other's memory.
static HERE: LazyLock<Mutex<HashMap<Incarnation, Weak<Inner>>>> = LazyLock::new(Mutex::default);

/// The endpoint of this process with that name.
pub(crate) fn find(who: &Incarnation) -> Option<Arc<Inner>> {
    HERE.lock().unwrap().get(who)?.upgrade()
}

/// Random bytes.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // Without randomness names and tokens would be guessable: there is no way on.
    getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
    bytes
}

/// Settings of an endpoint to be made. What is not set here comes from the environment
/// (`peerway doctor --config` lists the variables).
#[derive(Clone, Debug, Default)]
pub struct Builder {
    bind: Option<SocketAddr>,
    advertise: Option<IpAddr>,
    transport: Option<Pin>,
    deadline: Option<Duration>,
    detect: Option<Duration>,
    fence: Option<Duration>,
    connect_timeout: Option<Duration>,
    spin: Option<Duration>,
    lanes: Option<u16>,
    shards: Option<u16>,
    copy_threads: Option<u16>,
    slots: Option<u32>,
    notify_bytes: Option<u64>,
}

impl Builder {
    /// Listens here. Port 0 chooses a free one.
    pub fn bind(mut self, addr: SocketAddr) -> Self {
        self.bind = Some(addr);
        self
    }

    /// Tells peers this address instead of the bound one.
    pub fn advertise(mut self, addr: IpAddr) -> Self {
        self.advertise = Some(addr);
        self
    }

    /// Allows one transport only; a peer that cannot be reached by it is an error that says why.
    pub fn transport(mut self, pin: Pin) -> Self {
        self.transport = Some(pin);
        self
    }

    /// Deadline of transfers that name none.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Silence after which a peer is held dead.
    pub fn detect(mut self, detect: Duration) -> Self {
        self.detect = Some(detect);
        self
    }

    /// How long a cancel or revoke waits for its fence.
    pub fn fence(mut self, fence: Duration) -> Self {
        self.fence = Some(fence);
        self
    }

    /// How long a connect, an import or a half-open connection may take.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = Some(timeout);
        self
    }

    /// How long a waiter polls before it sleeps.
    pub fn spin(mut self, spin: Duration) -> Self {
        self.spin = Some(spin);
        self
    }

    /// Bulk lanes per TCP peer.
    pub fn lanes(mut self, lanes: u16) -> Self {
        self.lanes = Some(lanes);
        self
    }

    /// Service threads; peers are spread over them.
    pub fn shards(mut self, shards: u16) -> Self {
        self.shards = Some(shards);
        self
    }

    /// Threads that may copy for one large local transfer.
    pub fn copy_threads(mut self, threads: u16) -> Self {
        self.copy_threads = Some(threads);
        self
    }

    /// Transfers that can be in flight.
    pub fn slots(mut self, slots: u32) -> Self {
        self.slots = Some(slots);
        self
    }

    /// Bytes of notifications kept for the application.
    pub fn notify_bytes(mut self, bytes: u64) -> Self {
        self.notify_bytes = Some(bytes);
        self
    }

    /// Makes the endpoint: it listens when this returns.
    pub fn build(self) -> Result<Endpoint, BuildError> {
        let (mut config, warnings) = Config::from_env(|name| std::env::var(name).ok())?;
        for warning in warnings {
            tracing::warn!("{warning}");
        }
        let set = |into: &mut Duration, value: Option<Duration>| {
            *into = value.unwrap_or(*into).max(Duration::from_micros(1));
        };
        config.transport = self.transport.unwrap_or(config.transport);
        set(&mut config.deadline, self.deadline);
        set(&mut config.detect, self.detect);
        set(&mut config.fence, self.fence);
        set(&mut config.connect_timeout, self.connect_timeout);
        config.spin = self.spin.unwrap_or(config.spin);
        config.lanes = self.lanes.or(config.lanes);
        config.shards = self.shards.unwrap_or(config.shards).max(1);
        config.copy_threads = self.copy_threads.unwrap_or(config.copy_threads).max(1);
        config.slots = self.slots.unwrap_or(config.slots).clamp(1, 1 << 20);
        config.notify_bytes = self.notify_bytes.unwrap_or(config.notify_bytes);
        if let Pin::Unavailable(name) = config.transport {
            return Err(BuildError::TransportUnavailable(name.to_owned()));
        }
        Endpoint::start(config, self.bind, self.advertise)
    }
}

impl Endpoint {
    /// An endpoint with the settings of the environment.
    pub fn new() -> Result<Self, BuildError> {
        Self::builder().build()
    }

    /// Settings for an endpoint.
    pub fn builder() -> Builder {
        Builder::default()
    }

    fn start(
        config: Config,
        bind: Option<SocketAddr>,
        advertise: Option<IpAddr>,
    ) -> Result<Self, BuildError> {
        process::watch_forks();
        let os = |what: &'static str| move |source| BuildError::Os { what, source };
        let places = crate::address::places(&config, bind, advertise)?;
        let (listeners, addresses) = listen_on_all(&places.bind)?;
        let advertised = places.advertised(&addresses);
        let incarnation = Incarnation(random());
        let local_name = format!("peerway-{incarnation}-{:016x}", u64::from_le_bytes(random()));
        let local = unix::listen(&local_name)
            .inspect_err(|error| tracing::debug!(%error, "no local socket: local paths are off"))
            .ok();
        let inner = Arc::new(Inner {
            incarnation,
            slots: Slots::new(config.slots as usize),
            grants: Grants::default(),
            inbox: Inbox::new(config.notify_bytes),
            crew: Crew::new(usize::from(config.copy_threads)),
            local_name: if local.is_some() { local_name } else { String::new() },
            rails: places.rails,
            addresses: OnceLock::from(advertised),
            shards: OnceLock::new(),
            next_shard: AtomicUsize::new(0),
            peers: Mutex::default(),
            peers_changed: Condvar::new(),
            quarantine: Mutex::default(),
            closed: AtomicBool::new(false),
            fork_generation: process::fork_generation(),
            config,
        });
        let mut shards = Vec::new();
        for _ in 0..inner.config.shards {
            shards.push(Shard::new(inner.config.spin).map_err(os("making a shard"))?);
        }
        let _ = inner.shards.set(shards.clone());
        let mut door =
            Some(Door::new(&shards[0], listeners, local).map_err(os("watching the listeners"))?);
        let endpoint = Self { owner: Arc::new(Owner { inner: inner.clone() }) };
        for shard in &shards {
            let driver = Driver::new(inner.clone(), shard.clone(), door.take());
            shard.start(driver).map_err(os("starting a service thread"))?;
        }
        HERE.lock().unwrap().insert(incarnation, Arc::downgrade(&inner));
        Ok(endpoint)
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.owner.inner
    }

    /// What others need to connect: hand it over by any means.
    pub fn metadata(&self) -> Vec<u8> {
        self.inner().metadata()
    }

    /// The name of this life of the endpoint.
    pub fn incarnation(&self) -> Incarnation {
        self.inner().incarnation
    }

    /// Where peers can connect.
    pub fn addresses(&self) -> &[SocketAddr] {
        self.inner().addresses.get().map_or(&[], Vec::as_slice)
    }

    /// Connects to the endpoint that gave this metadata. A second connect to the same incarnation
    /// returns the same peer.
    pub fn connect(&self, metadata: &[u8]) -> Result<Peer, ConnectError> {
        let metadata = Metadata::from_bytes(metadata)?;
        self.inner().check_open().map_err(ConnectError::from)?;
        let deadline = clock::after(clock::now(), self.inner().config.connect_timeout);
        let mut last = None;
        for &addr in &metadata.addresses {
            match self.open(addr, Some(metadata.incarnation), deadline) {
                Ok(peer) => return Ok(peer),
                // Only an address that nobody answers at is a reason to try the next.
                Err(error @ (ConnectError::Unreachable { .. } | ConnectError::TimedOut { .. })) => {
                    last = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        Err(last.unwrap_or(ConnectError::EndpointClosed))
    }

    /// Connects to whichever endpoint listens at `addr`.
    pub fn connect_addr(&self, addr: SocketAddr) -> Result<Peer, ConnectError> {
        self.inner().check_open().map_err(ConnectError::from)?;
        let deadline = clock::after(clock::now(), self.inner().config.connect_timeout);
        self.open(addr, None, deadline)
    }

    fn open(
        &self,
        addr: SocketAddr,
        expects: Option<Incarnation>,
        deadline: u64,
    ) -> Result<Peer, ConnectError> {
        let inner = self.inner();
        loop {
            if let Some(who) = expects {
                if let Some(session) = inner.live_session(&who) {
                    return Ok(Peer::new(inner.clone(), session));
                }
                if !inner.begin_opening(who, deadline) {
                    continue;
                }
            }
            let outcome = connect::open(inner, addr, expects, deadline);
            if let Some(who) = expects {
                inner.peers.lock().unwrap().opening.remove(&who);
                inner.peers_changed.notify_all();
            }
            let who = match outcome? {
                Outcome::Opened(new) => return Ok(inner.opened(*new)),
                Outcome::Exists(who) => who,
            };
            // The other side opens, or has not noticed that the last session is over: one of the
            // two is true within moments.
            if let Some(session) = inner.wait_for(&who, Duration::from_millis(20)) {
                return Ok(Peer::new(inner.clone(), session));
            }
            if clock::now() >= deadline {
                let millis = inner.config.connect_timeout.as_millis() as u64;
                return Err(ConnectError::TimedOut { addr, millis });
            }
        }
    }

    /// The next peer that connected to us. Peers are accepted in the background whether or not
    /// anybody asks; this only hands them out.
    pub fn accept(&self, timeout: Duration) -> Result<Peer, AcceptError> {
        let inner = self.inner();
        let deadline = clock::after(clock::now(), timeout);
        let mut peers = inner.peers.lock().unwrap();
        loop {
            inner.check_open().map_err(AcceptError::from)?;
            if let Some(session) = peers.accepted.pop_front() {
                return Ok(Peer::new(inner.clone(), session));
            }
            let left = clock::until(deadline, clock::now());
            if left == Duration::ZERO {
                return Err(AcceptError::TimedOut);
            }
            peers = inner.peers_changed.wait_timeout(peers, left).unwrap().0;
        }
    }

    /// Every live peer.
    pub fn peers(&self) -> Vec<Peer> {
        let peers = self.inner().peers.lock().unwrap();
        let sessions = peers.by_incarnation.values().chain(&peers.to_self);
        sessions.map(|session| Peer::new(self.inner().clone(), session.clone())).collect()
    }

    /// Closes the session with a peer. Its transfers end; connecting again makes a new one.
    pub fn remove_peer(&self, peer: &Peer) {
        peer.remove();
    }

    /// Registers memory that the region then owns.
    pub fn register(&self, memory: impl OwnedMemory) -> Result<Region, RegisterError> {
        let mut memory: Box<dyn OwnedMemory> = Box::new(memory);
        let (ptr, len) = memory.bytes();
        self.region(ptr, len, Backing::Owned { _memory: memory })
    }

    /// Registers memory that the caller keeps.
    ///
    /// # Safety
    ///
    /// The range must be valid for reads and writes, and no Rust reference may cover any of it,
    /// until the region and every transfer that uses it are gone: peers read and write it at any
    /// time. After a transfer or a revoke that ended with an open fence, that is until the peer has
    /// gone on or died.
    pub unsafe fn register_raw(&self, ptr: *mut u8, len: usize) -> Result<Region, RegisterError> {
        self.region(ptr, len, Backing::Raw)
    }

    /// Allocates zeroed memory that local peers can map: the fastest path there is.
    pub fn allocate(&self, len: usize) -> Result<Region, RegisterError> {
        let fail = |source| RegisterError::Allocate { len, source };
        let fd = shm::create_memfd("peerway-region", len.max(1)).map_err(fail)?;
        let mapping = Mapping::of_fd(fd.as_fd(), len.max(1), true).map_err(fail)?;
        let ptr = mapping.ptr();
        self.region(ptr, len, Backing::Shared { fd, _mapping: mapping })
    }

    fn region(&self, ptr: *mut u8, len: usize, backing: Backing) -> Result<Region, RegisterError> {
        self.inner().check_open().map_err(RegisterError::from)?;
        let wraps = (ptr as usize).checked_add(len).is_none();
        if ptr.is_null() && len > 0 || wraps || len > isize::MAX as usize {
            return Err(RegisterError::BadRange { ptr: ptr as usize, len });
        }
        let memory = RegionInner::new(ptr, len, backing);
        Ok(Region::new(Arc::downgrade(self.inner()), memory))
    }

    /// The oldest notification, if there is one.
    pub fn try_notification(&self) -> Option<Notification> {
        self.inner().inbox.take(None)
    }

    /// The oldest notification, as soon as there is one.
    pub fn notification(&self, timeout: Duration) -> Option<Notification> {
        self.inner().wait_notification(None, timeout)
    }

    /// Arrivals counted under this id.
    pub fn counter(&self, id: u32) -> u64 {
        self.inner().inbox.counter(id)
    }

    /// Waits until at least `n` arrivals have been counted; returns how many have.
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

    /// Forgets a counter and returns what it had, so that its id can be used afresh.
    pub fn reset_counter(&self, id: u32) -> u64 {
        self.inner().inbox.reset_counter(id)
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

/// Why nothing can be done with an endpoint.
pub(crate) enum Unusable {
    Closed,
    Forked,
}

macro_rules! unusable_as {
    ($($error:ty),*) => {$(
        impl From<Unusable> for $error {
            fn from(unusable: Unusable) -> Self {
                match unusable {
                    Unusable::Closed => Self::EndpointClosed,
                    Unusable::Forked => Self::Forked,
                }
            }
        }
    )*};
}
unusable_as!(ConnectError, AcceptError, RegisterError, crate::error::PostError);

impl Inner {
    pub(crate) fn metadata(&self) -> Vec<u8> {
        let addresses = self.addresses.get().cloned().unwrap_or_default();
        Metadata { incarnation: self.incarnation, addresses }.to_bytes()
    }

    /// Whether the endpoint can be used.
    #[inline]
    pub(crate) fn check_open(&self) -> Result<(), Unusable> {
        if process::fork_generation() != self.fork_generation {
            return Err(Unusable::Forked);
        }
        if self.closed.load(Ordering::Relaxed) { Err(Unusable::Closed) } else { Ok(()) }
    }

    fn shards(&self) -> &[Arc<Shard>] {
        self.shards.get().map_or(&[], Vec::as_slice)
    }

    /// The shard for the next session.
    pub(crate) fn next_shard(&self) -> Arc<Shard> {
        let shards = self.shards();
        shards[self.next_shard.fetch_add(1, Ordering::Relaxed) % shards.len()].clone()
    }

    pub(crate) fn live_session(&self, who: &Incarnation) -> Option<Arc<Session>> {
        let peers = self.peers.lock().unwrap();
        peers.by_incarnation.get(who).filter(|s| s.is_alive()).cloned()
    }

    fn wait_for(&self, who: &Incarnation, timeout: Duration) -> Option<Arc<Session>> {
        let deadline = clock::after(clock::now(), timeout);
        let mut peers = self.peers.lock().unwrap();
        loop {
            if let Some(session) = peers.by_incarnation.get(who).filter(|s| s.is_alive()) {
                return Some(session.clone());
            }
            let left = clock::until(deadline, clock::now());
            if left == Duration::ZERO {
                return None;
            }
            peers = self.peers_changed.wait_timeout(peers, left).unwrap().0;
        }
    }

    /// Notes that a connect to `who` is under way. When another thread's is, waits for it to come to
    /// an end and says false: there may be a session now.
    fn begin_opening(&self, who: Incarnation, deadline: u64) -> bool {
        let mut peers = self.peers.lock().unwrap();
        if peers.opening.insert(who) {
            return true;
        }
        while peers.opening.contains(&who) {
            let left = clock::until(deadline, clock::now());
            if left == Duration::ZERO {
                return true;
            }
            peers = self.peers_changed.wait_timeout(peers, left).unwrap().0;
        }
        false
    }

    /// Whether a session with `who` lives, or one that goes first is being opened. Of two endpoints
    /// that open at the same time, the lower name's attempt goes first.
    pub(crate) fn has_or_opens(&self, who: &Incarnation) -> bool {
        if *who == self.incarnation {
            return false;
        }
        let peers = self.peers.lock().unwrap();
        peers.by_incarnation.get(who).is_some_and(|s| s.is_alive())
            || (peers.opening.contains(who) && self.incarnation < *who)
    }

    /// A session we opened is complete.
    fn opened(self: &Arc<Self>, new: crate::progress::driver::NewSession) -> Peer {
        let session = new.session.clone();
        let mut peers = self.peers.lock().unwrap();
        if session.incarnation == self.incarnation {
            peers.to_self.push(session.clone());
        } else {
            peers.by_incarnation.insert(session.incarnation, session.clone());
        }
        drop(peers);
        self.peers_changed.notify_all();
        session.shard.submit(Command::Adopt(Box::new(new)));
        session.shard.kick();
        // Adopted at once, or as soon as whoever drives looks: without an index nothing can be sent.
        while session.index.load(Ordering::Acquire) == usize::MAX && session.is_alive() {
            std::thread::yield_now();
        }
        Peer::new(self.clone(), session)
    }

    /// A session that a peer opened is complete.
    pub(crate) fn accepted(&self, session: &Arc<Session>) {
        let mut peers = self.peers.lock().unwrap();
        if session.incarnation != self.incarnation {
            peers.by_incarnation.insert(session.incarnation, session.clone());
            if peers.accepted.len() < MAX_UNASKED {
                peers.accepted.push_back(session.clone());
            }
        }
        drop(peers);
        self.peers_changed.notify_all();
    }

    /// A session is over.
    pub(crate) fn peer_gone(&self, session: &Arc<Session>) {
        let mut peers = self.peers.lock().unwrap();
        let same = |s: &Arc<Session>| Arc::ptr_eq(s, session);
        if peers.by_incarnation.get(&session.incarnation).is_some_and(same) {
            peers.by_incarnation.remove(&session.incarnation);
        }
        peers.to_self.retain(|s| !same(s));
        peers.accepted.retain(|s| !same(s));
        drop(peers);
        self.peers_changed.notify_all();
    }

    /// Who is at the other end of a session of ours with this id.
    pub(crate) fn counterpart(&self, id: &[u8; 16]) -> Option<Incarnation> {
        let peers = self.peers.lock().unwrap();
        peers.by_incarnation.values().find(|s| s.id == *id).map(|s| s.incarnation)
    }

    /// Ends advertisements without waiting.
    pub(crate) fn bar(&self, grants: &[Arc<Grant>]) {
        for grant in grants {
            self.grants.remove(grant.id);
            grant.bar();
        }
        let busy = grants.iter().filter(|grant| !grant.release_if_quiet()).cloned();
        self.quarantine.lock().unwrap().extend(busy);
    }

    /// Ends advertisements and waits until nobody is inside them.
    pub(crate) fn revoke(&self, grants: &[Arc<Grant>]) -> Fence {
        self.bar(grants);
        let deadline = clock::after(clock::now(), self.config.fence);
        let mut pause = Duration::from_micros(1);
        loop {
            if grants.iter().all(|grant| grant.is_quiet()) {
                self.sweep_quarantine();
                return Fence::Held;
            }
            if clock::now() >= deadline {
                return Fence::Open;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    /// Lets go of revoked memory that peers have left by now.
    pub(crate) fn sweep_quarantine(&self) {
        let mut quarantine = self.quarantine.lock().unwrap();
        quarantine.retain(|grant| !grant.release_if_quiet());
    }

    /// Has a lane deliver what follows a transfer that was copied directly.
    pub(crate) fn send_tail(
        self: &Arc<Self>,
        slot: SlotId,
        session: &Arc<Session>,
        work: Work,
        tail: Tail,
        deadline: u64,
    ) {
        let flight =
            crate::transfer::tail_flight(slot, session.clone(), Some(work), tail, deadline);
        session.shard.submit(Command::Start(flight));
        session.shard.kick();
    }

    pub(crate) fn wait_notification(
        &self,
        from: Option<&Incarnation>,
        timeout: Duration,
    ) -> Option<Notification> {
        let deadline = clock::after(clock::now(), timeout);
        loop {
            if let Some(message) = self.inbox.take(from) {
                return Some(message);
            }
            if clock::now() >= deadline || self.check_open().is_err() {
                return None;
            }
            self.wait_until(
                deadline,
                || self.inbox.has_message(from),
                |left| self.inbox.sleep_unless(left, |a| a.has_message(from)),
            );
        }
    }

    /// Lends the thread while things happen, then sleeps; until `over` or the deadline.
    fn wait_until(&self, deadline: u64, over: impl Fn() -> bool, sleep: impl Fn(Duration)) {
        while !over() && self.check_open().is_ok() {
            for shard in self.shards() {
                if shard.lend(&over, deadline) {
                    return;
                }
            }
            let left = clock::until(deadline, clock::now());
            if left == Duration::ZERO {
                return;
            }
            sleep(left.min(Duration::from_millis(500)));
        }
    }

    fn shut_down(&self) {
        if process::fork_generation() != self.fork_generation {
            // The threads and the peers are the parent's: only descriptors are let go of.
            self.crew.abandon();
            for shard in self.shards() {
                shard.abandon();
            }
            return;
        }
        if self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        let sessions: Vec<Arc<Session>> = {
            let peers = self.peers.lock().unwrap();
            peers.by_incarnation.values().chain(&peers.to_self).cloned().collect()
        };
        for session in sessions {
            session.remove();
        }
        for shard in self.shards() {
            shard.stop();
        }
        self.crew.stop();
        self.grants.bar_all();
        let mut peers = self.peers.lock().unwrap();
        peers.by_incarnation.clear();
        peers.to_self.clear();
        peers.accepted.clear();
        drop(peers);
        self.peers_changed.notify_all();
        HERE.lock().unwrap().remove(&self.incarnation);
    }
}

/// Listens on every address under one port, so that one port number names the endpoint.
fn listen_on_all(places: &[SocketAddr]) -> Result<(Vec<TcpListener>, Vec<SocketAddr>), BuildError> {
    // A port that is free on the first address may be taken on the next: another one is tried.
    let mut tries = 16;
    loop {
        tries -= 1;
        let (mut listeners, mut addresses) = (Vec::new(), Vec::<SocketAddr>::new());
        let mut failed = None;
        for place in places {
            let port = addresses.first().unwrap_or(place).port();
            let addr = SocketAddr::new(place.ip(), port);
            match net::listen(addr).and_then(|l| Ok((l.local_addr()?, l))) {
                Ok((bound, listener)) => {
                    addresses.push(bound);
                    listeners.push(listener);
                }
                Err(source) => failed = Some(BuildError::Listen { addr, source }),
            }
        }
        match failed {
            None => return Ok((listeners, addresses)),
            Some(_) if tries > 0 && listeners.len() < places.len() && places[0].port() == 0 => {}
            Some(error) => return Err(error),
        }
    }
}

/// Loopback for tests and defaults.
pub(crate) const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
