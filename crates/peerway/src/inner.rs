//! What the parts of an endpoint share: its tables, its peers, its shards, and how it closes.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, OnceLock, Weak};
use std::time::Duration;

use peerway_core::config::Config;
use peerway_core::ids::{Incarnation, SlotId};
use peerway_core::metadata::Metadata;
use peerway_core::outcome::Fence;

use crate::address::Rail;
use crate::batch::{Tail, Work};
use crate::clock;
use crate::error::{AcceptError, ConnectError, PostError, RegisterError};
use crate::inbox::{Inbox, Notification};
use crate::memory::grants::{Grant, Grants};
use crate::os::process;
use crate::peer::Peer;
use crate::progress::crew::Crew;
use crate::progress::driver::NewSession;
use crate::progress::shard::{Command, Shard};
use crate::session::Session;
use crate::slots::Slots;
use crate::transfer;
use crate::transport::verbs::{Rdma, RdmaError};

/// Peers that were accepted and not asked for yet.
const MAX_UNASKED: usize = 65_536;

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
    pub(crate) rails: Vec<Rail>,
    pub(crate) addresses: Vec<SocketAddr>,
    /// RDMA devices, or why there are none.
    pub(crate) rdma: Result<Arc<Rdma>, RdmaError>,
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
    /// The last session with endpoints that there is none with now: who opens anew names it, which
    /// proves to the other side that the old one is over.
    last: HashMap<Incarnation, [u8; 16]>,
    /// Endpoints that a connect is under way to.
    opening: HashSet<Incarnation>,
    /// Endpoints whose connect has been agreed to, until its session is among the live ones.
    accepting: HashSet<Incarnation>,
}

impl Peers {
    fn is_settled(&self, who: &Incarnation) -> bool {
        let lives = self.by_incarnation.get(who).is_some_and(|session| session.is_alive());
        lives || self.accepting.contains(who)
    }
}

/// An endpoint's word that the session with `who` is being opened, or accepted, and no other is
/// begun meanwhile. Of two endpoints the lower name never gives both words at once, so that of two
/// attempts that cross one succeeds.
pub(crate) struct Claim {
    endpoint: Weak<Inner>,
    who: Incarnation,
    opening: bool,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let Some(endpoint) = self.endpoint.upgrade() else { return };
        let mut peers = endpoint.peers.lock().unwrap();
        let claims = if self.opening { &mut peers.opening } else { &mut peers.accepting };
        claims.remove(&self.who);
        drop(peers);
        endpoint.peers_changed.notify_all();
    }
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
unusable_as!(ConnectError, AcceptError, RegisterError, PostError);

impl Inner {
    pub(crate) fn new(
        incarnation: Incarnation,
        config: Config,
        local_name: String,
        rails: Vec<Rail>,
        addresses: Vec<SocketAddr>,
        rdma: Result<Arc<Rdma>, RdmaError>,
    ) -> Arc<Self> {
        Arc::new(Self {
            incarnation,
            slots: Slots::new(config.slots as usize),
            grants: Grants::default(),
            inbox: Inbox::new(config.notify_bytes),
            crew: Crew::new(usize::from(config.copy_threads)),
            local_name,
            rails,
            addresses,
            rdma,
            shards: OnceLock::new(),
            next_shard: AtomicUsize::new(0),
            peers: Mutex::default(),
            peers_changed: Condvar::new(),
            quarantine: Mutex::default(),
            closed: AtomicBool::new(false),
            fork_generation: process::fork_generation(),
            config,
        })
    }

    /// Gives the endpoint its shards, once.
    pub(crate) fn set_shards(&self, shards: Vec<Arc<Shard>>) {
        let _ = self.shards.set(shards);
    }

    /// Lets other endpoints of this process find it.
    pub(crate) fn announce(self: &Arc<Self>) {
        HERE.lock().unwrap().insert(self.incarnation, Arc::downgrade(self));
    }

    pub(crate) fn metadata(&self) -> Vec<u8> {
        let addresses = self.addresses.clone();
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

    /// The session with `who`. One whose process has just ended is as good as over, though its driver may
    /// not have noticed.
    pub(crate) fn live_session(&self, who: &Incarnation) -> Option<Arc<Session>> {
        let peers = self.peers.lock().unwrap();
        let lives = |s: &&Arc<Session>| s.is_alive() && !s.is_process_dead();
        peers.by_incarnation.get(who).filter(lives).cloned()
    }

    pub(crate) fn wait_for(&self, who: &Incarnation, timeout: Duration) -> Option<Arc<Session>> {
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

    /// The session with `who` that is over, or about to be.
    pub(crate) fn last_session(&self, who: &Incarnation) -> Option<[u8; 16]> {
        let peers = self.peers.lock().unwrap();
        // Never one that lives: it may have been accepted since we looked.
        let ending = peers.by_incarnation.get(who).filter(|session| !session.is_alive());
        let ending = ending.map(|session| session.id);
        ending.or_else(|| peers.last.get(who).copied())
    }

    /// The next session that a peer opened, as soon as there is one.
    pub(crate) fn next_accepted(&self, timeout: Duration) -> Option<Arc<Session>> {
        let mut peers = self.peers.lock().unwrap();
        // Under the lock, which closing takes before it wakes whoever waits.
        if peers.accepted.is_empty() && self.check_open().is_ok() {
            peers = self.peers_changed.wait_timeout(peers, timeout).unwrap().0;
        }
        peers.accepted.pop_front()
    }

    /// Every session that lives.
    pub(crate) fn live_sessions(&self) -> Vec<Arc<Session>> {
        let peers = self.peers.lock().unwrap();
        peers.by_incarnation.values().chain(&peers.to_self).cloned().collect()
    }

    /// A connect to `who` has come to an end.
    pub(crate) fn end_opening(&self, who: &Incarnation) {
        self.peers.lock().unwrap().opening.remove(who);
        self.peers_changed.notify_all();
    }

    /// Notes that a connect to `who` is under way. When another thread's is, waits for it to come to
    /// an end and says false: there may be a session now.
    pub(crate) fn begin_opening(&self, who: Incarnation, deadline: u64) -> bool {
        let mut peers = self.peers.lock().unwrap();
        if !peers.accepting.contains(&who) && peers.opening.insert(who) {
            return true;
        }
        while peers.opening.contains(&who) || peers.accepting.contains(&who) {
            let left = clock::until(deadline, clock::now());
            if left == Duration::ZERO {
                return true;
            }
            peers = self.peers_changed.wait_timeout(peers, left).unwrap().0;
        }
        false
    }

    /// As `begin_opening`, for a connect by address, which has only now learned who is there. `None`
    /// when there is a session with them, or will be. With itself an endpoint may have many.
    pub(crate) fn learned(self: &Arc<Self>, who: Incarnation) -> Option<Claim> {
        let mut peers = self.peers.lock().unwrap();
        let free =
            who == self.incarnation || (!peers.is_settled(&who) && peers.opening.insert(who));
        free.then(|| self.claim(who, true))
    }

    /// Agrees to a session that `who` has opened; `None` when there is another.
    pub(crate) fn begin_accepting(self: &Arc<Self>, who: Incarnation) -> Option<Claim> {
        let mut peers = self.peers.lock().unwrap();
        let free = who == self.incarnation || !self.is_taken(&peers, &who);
        if free && who != self.incarnation {
            peers.accepting.insert(who);
        }
        free.then(|| self.claim(who, false))
    }

    /// Whether a session with `who` lives, or one that goes first is being opened.
    pub(crate) fn has_or_opens(&self, who: &Incarnation) -> bool {
        *who != self.incarnation && self.is_taken(&self.peers.lock().unwrap(), who)
    }

    /// Of two endpoints that open at the same time, the lower name's attempt goes first.
    fn is_taken(&self, peers: &Peers, who: &Incarnation) -> bool {
        peers.is_settled(who) || (peers.opening.contains(who) && self.incarnation < *who)
    }

    fn claim(self: &Arc<Self>, who: Incarnation, opening: bool) -> Claim {
        Claim { endpoint: Arc::downgrade(self), who, opening }
    }

    /// A session we opened is complete.
    pub(crate) fn opened(self: &Arc<Self>, new: NewSession) -> Peer {
        let session = new.session.clone();
        let mut peers = self.peers.lock().unwrap();
        if session.incarnation == self.incarnation {
            peers.to_self.push(session.clone());
        } else {
            peers.by_incarnation.insert(session.incarnation, session.clone());
            peers.last.remove(&session.incarnation);
        }
        drop(peers);
        self.peers_changed.notify_all();
        session.shard.submit(Command::Adopt(Box::new(new)));
        session.shard.kick();
        // Adopted at once, or as soon as whoever drives looks: without an index nothing can be sent.
        while session.index.load(Ordering::Acquire) == usize::MAX
            && session.is_alive()
            && self.check_open().is_ok()
        {
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
            // Bounded: who is forgotten waits until the other side notices by itself.
            if peers.last.len() >= MAX_UNASKED {
                peers.last.clear();
            }
            peers.last.insert(session.incarnation, session.id);
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
        // Gates in shared segments are the parent's, not an inherited copy's.
        if process::fork_generation() != self.fork_generation {
            return;
        }
        for grant in grants {
            self.grants.remove(grant.id);
            grant.bar();
        }
        let busy = grants.iter().filter(|grant| !grant.release_if_quiet()).cloned();
        self.quarantine.lock().unwrap().extend(busy);
    }

    /// Ends advertisements and waits until nobody is inside them.
    pub(crate) fn revoke(&self, grants: &[Arc<Grant>]) -> Fence {
        if process::fork_generation() != self.fork_generation {
            return Fence::Open;
        }
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
        let flight = transfer::tail_flight(slot, session.clone(), Some(work), tail, deadline);
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
    pub(crate) fn wait_until(
        &self,
        deadline: u64,
        over: impl Fn() -> bool,
        sleep: impl Fn(Duration),
    ) {
        while !over() && self.check_open().is_ok() {
            for shard in self.shards() {
                if shard.lend(&over, clock::now(), deadline, Duration::ZERO) {
                    return;
                }
            }
            let left = clock::until(deadline, clock::now());
            if left == Duration::ZERO {
                return;
            }
            // On a single shard the sleeper hears its lanes; with more, whoever serves wakes it.
            let nap = left.min(Duration::from_millis(500));
            let dozed = match self.shards() {
                [only] => only.doze(&over, nap),
                _ => false,
            };
            if !dozed {
                sleep(nap);
            }
        }
    }

    pub(crate) fn shut_down(&self) {
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
        for session in self.live_sessions() {
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
