//! A session: everything that two endpoint incarnations share.
//!
//! Any thread may hold this part. The parts that only the driver touches (lanes, queues, leases)
//! are in `progress::driver`.

pub(crate) mod imports;
pub(crate) mod lanes;
pub(crate) mod link;
pub(crate) mod remote;
pub(crate) mod stats;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use peerway_core::ids::{Incarnation, SlotId};
use peerway_core::wire::{Control, SubSession};

use crate::clock;
use crate::failure::LaneEvent;
use crate::gpu::share::Opens;
use crate::memory::grants::Importer;
use crate::os::process::Pidfd;
use crate::os::shm::ShmMapping;
use crate::path::Path;
use crate::transport::device::KeyTable;
use crate::transport::queues::QueueReach;
use imports::Imports;
use lanes::Replacements;
use link::Link;
use remote::RemoteInner;
use stats::PeerCounters;

/// See the module.
pub(crate) struct Session {
    pub(crate) id: [u8; 16],
    pub(crate) incarnation: Incarnation,
    /// Set if this is a sub-session of a proxy thread.
    pub(crate) sub_session: Option<SubSession>,
    pub(crate) addr: SocketAddr,
    owner: Arc<dyn SessionOwner>,
    /// Index of the shard whose driver has the session.
    pub(crate) shard: usize,
    /// Index in the driver's table. The driver sets it when it adopts the session.
    pub(crate) index: AtomicUsize,
    pub(crate) path: Path,
    pub(crate) reach: Reach,
    pub(crate) link: Option<Link>,
    /// Set if the path is RDMA queue pairs.
    pub(crate) rdma: Option<Arc<QueueReach>>,
    /// How lost TCP lanes are replaced.
    pub(crate) replacements: Replacements,
    pub(crate) imports: Imports,
    /// Remote regions by grant and token, so that a second import needs no round trip.
    pub(crate) known: Mutex<HashMap<Advertisement, Weak<RemoteInner>>>,
    /// The keys to the peer's memory, by grant.
    keys: Mutex<HashMap<SlotId, Weak<KeyTable>>>,
    /// Mapped files of the peer, by device, file number and whether they are writable here. Many
    /// advertisements may share a file, and a new mapping would fault in every page again.
    pub(crate) mapped: Mutex<HashMap<(u64, u64, bool), Weak<ShmMapping>>>,
    /// Mapped GPU memory of the peer.
    pub(crate) opens: Opens,
    pub(crate) stats: PeerCounters,
    pub(crate) initiator: bool,
    /// The peer's process, if it is on this host and visible.
    process: Option<Arc<Pidfd>>,
    /// Pulls from the peer's memory that the copy pool has not finished.
    pulls: AtomicUsize,
    /// The last end of a lane or of the session, and when it was. Written before any transfer fails
    /// because of it.
    last_event: Mutex<Option<(u64, String)>>,
    /// False after `mark_closed`.
    alive: AtomicBool,
    /// The session is about to close: callers post nothing new on it.
    closing: AtomicBool,
    /// The peer may raise counters: see `Peers::has_right`.
    right: AtomicBool,
}

/// What any thread may ask of the driver that has a session.
pub(crate) trait SessionOwner: Send + Sync {
    /// Closes the session.
    fn close(&self, session: &Arc<Session>, cause: CloseCause);
    /// Sends a control message.
    fn send(&self, session: &Arc<Session>, message: Control);
}

/// Why this process closes a session.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum CloseCause {
    /// The program closed it.
    Removed,
    /// The memory of the peer's process is gone.
    MemoryGone,
}

impl CloseCause {
    /// The cause, as errors and logs state it.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Removed => REMOVED,
            Self::MemoryGone => "the memory of the peer's process is gone",
        }
    }
}

/// Identifies a session: the peer's identity and the sub-session number, 0 for the main session.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Whom {
    pub(crate) who: Incarnation,
    pub(crate) sub_session: u16,
}

impl From<Incarnation> for Whom {
    /// The main session.
    fn from(who: Incarnation) -> Self {
        Self { who, sub_session: 0 }
    }
}

/// Causes of the end of a session.
pub(crate) const REMOVED: &str = "this process closed the session";
pub(crate) const PROCESS_ENDED: &str = "the peer's process ended";

/// Identifies an advertisement: its grant and its token.
type Advertisement = (SlotId, [u8; 16]);

/// Which local paths are open between the two processes, besides the TCP lanes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reach {
    pub(crate) same_process: bool,
    pub(crate) map: bool,
    /// This process can read the peer's memory by CMA.
    pub(crate) we_pull: bool,
    /// The peer can read this process's memory by CMA.
    pub(crate) peer_pulls: bool,
}

/// The result of a handshake, from which a session is made.
pub(crate) struct Parts {
    pub(crate) id: [u8; 16],
    pub(crate) incarnation: Incarnation,
    pub(crate) sub_session: Option<SubSession>,
    pub(crate) addr: SocketAddr,
    pub(crate) path: Path,
    pub(crate) reach: Reach,
    pub(crate) link: Option<Link>,
    pub(crate) rdma: Option<Arc<QueueReach>>,
    pub(crate) replacements: Replacements,
    pub(crate) initiator: bool,
    /// The peer's process in this PID namespace, if known.
    pub(crate) pid: Option<u32>,
}

impl Parts {
    fn announce(&self) {
        let Self { addr, incarnation, path: Path { kind, why, .. }, .. } = self;
        match (self.initiator, self.sub_session) {
            (_, Some(SubSession { number, .. })) => {
                tracing::debug!(peer = %addr, %incarnation, path = %kind, number, "a sub-session opens");
            }
            (true, None) => {
                tracing::info!(peer = %addr, %incarnation, path = %kind, %why, "connected to a peer");
            }
            (false, None) => {
                tracing::info!(peer = %addr, %incarnation, path = %kind, %why, "accepted a peer");
            }
        }
    }
}

impl Session {
    pub(crate) fn new(parts: Parts, shard: usize, owner: Arc<dyn SessionOwner>) -> Arc<Self> {
        let opened = parts.link.as_ref().and_then(|link| link.process().cloned());
        let named = || parts.pid.and_then(|pid| Pidfd::open(pid).ok()).map(Arc::new);
        parts.announce();
        Arc::new(Self {
            id: parts.id,
            incarnation: parts.incarnation,
            sub_session: parts.sub_session,
            addr: parts.addr,
            owner,
            shard,
            index: AtomicUsize::new(usize::MAX),
            path: parts.path,
            reach: parts.reach,
            link: parts.link,
            rdma: parts.rdma,
            replacements: parts.replacements,
            imports: Imports::default(),
            known: Mutex::default(),
            keys: Mutex::default(),
            mapped: Mutex::default(),
            opens: Opens::default(),
            stats: PeerCounters::default(),
            initiator: parts.initiator,
            process: opened.or_else(named),
            pulls: AtomicUsize::new(0),
            last_event: Mutex::default(),
            alive: AtomicBool::new(true),
            closing: AtomicBool::new(false),
            right: AtomicBool::new(parts.initiator),
        })
    }

    /// The peer and the sub-session number of this session.
    pub(crate) fn whom(&self) -> Whom {
        Whom {
            who: self.incarnation,
            sub_session: self.sub_session.map_or(0, |sub_session| sub_session.number),
        }
    }

    /// The id of the main session.
    pub(crate) fn main_id(&self) -> [u8; 16] {
        self.sub_session.map_or(self.id, |sub_session| sub_session.of)
    }

    /// Whether it is known that the peer may raise counters. Ask `Peers::has_right`.
    #[inline]
    pub(crate) fn has_right(&self) -> bool {
        self.right.load(Ordering::Relaxed)
    }

    pub(crate) fn note_right(&self) {
        self.right.store(true, Ordering::Relaxed);
    }

    /// Whether transfers can be posted.
    #[inline]
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire) && !self.closing.load(Ordering::Relaxed)
    }

    /// Whether the session was closed before the driver adopted it.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Closes the session. Callers see it closed at once; the driver closes it when it handles the
    /// command.
    pub(crate) fn remove(self: &Arc<Self>) {
        self.note_event(REMOVED);
        self.closing.store(true, Ordering::SeqCst);
        self.owner.close(self, CloseCause::Removed);
    }

    /// Called when a thread finds that the peer's memory is gone. When a process dies, its memory
    /// goes before its connections close. From now on no caller posts to the session.
    pub(crate) fn found_gone(self: &Arc<Self>) {
        self.note_event(CloseCause::MemoryGone.text());
        if !self.closing.swap(true, Ordering::SeqCst) {
            self.owner.close(self, CloseCause::MemoryGone);
        }
    }

    /// Sends a control message to the peer.
    pub(crate) fn send(self: &Arc<Self>, message: Control) {
        self.owner.send(self, message);
    }

    /// Keeps what happened to a lane or to the session, for the transfers that fail because of it.
    #[cold]
    pub(crate) fn note_event(&self, what: &str) {
        *self.last_event.lock().unwrap() = Some((clock::now(), what.to_owned()));
    }

    /// The last end of a lane or of the session.
    pub(crate) fn last_event(&self) -> Option<LaneEvent> {
        let event = self.last_event.lock().unwrap();
        let (at, what) = event.as_ref()?;
        let age = Duration::from_nanos(clock::now().saturating_sub(*at));
        Some(LaneEvent { what: what.clone(), age })
    }

    /// Marks the session closed for new transfers. Returns whether this call did it. Only the
    /// session's driver calls it.
    pub(crate) fn mark_closed(&self, cause: &str) -> bool {
        if self.alive.load(Ordering::Acquire) {
            self.note_event(cause);
        }
        let was_alive = self.alive.swap(false, Ordering::AcqRel);
        if was_alive {
            self.imports.fail_all();
            self.opens.forget();
            if let Some(link) = &self.link {
                link.bar_all();
            }
        }
        was_alive
    }

    /// The table of the keys to a grant of the peer. The driver fills it in.
    pub(crate) fn key_table(&self, grant: SlotId) -> Arc<KeyTable> {
        let mut keys = self.keys.lock().unwrap();
        if let Some(table) = keys.get(&grant).and_then(Weak::upgrade) {
            return table;
        }
        if keys.len() == keys.capacity() {
            // Sweep before the map grows, so that each import pays a constant cost.
            keys.retain(|_, weak| weak.strong_count() > 0);
        }
        let table = Arc::new(KeyTable::new());
        keys.insert(grant, Arc::downgrade(&table));
        table
    }

    /// Stores a key to a grant of the peer, if this side uses the grant.
    pub(crate) fn set_key(&self, grant: SlotId, index: usize, key: u32, is_revoked: bool) {
        if let Some(table) = self.keys.lock().unwrap().get(&grant).and_then(Weak::upgrade) {
            table.set(index, key);
            if is_revoked {
                table.set_revoked();
            }
        }
    }

    /// Voids all keys at this index.
    pub(crate) fn forget_keys(&self, index: usize) {
        let keys = self.keys.lock().unwrap();
        keys.values().filter_map(Weak::upgrade).for_each(|table| table.void(index));
    }

    /// The peer's process, if it is on this host and visible.
    pub(crate) fn process(&self) -> Option<&Pidfd> {
        self.process.as_deref()
    }

    /// Whether the peer's process has certainly ended. Only a peer on this host can be checked.
    pub(crate) fn is_process_dead(&self) -> bool {
        self.process.as_ref().is_some_and(|process| process.is_dead())
    }

    /// Whether it is certain that the peer copies no more from this process's memory.
    pub(crate) fn can_pull_no_more(&self) -> bool {
        self.is_process_dead() || self.link.as_ref().is_none_or(Link::is_closed_by_peer)
    }

    /// Whether the session detects the end of the peer's process.
    pub(crate) fn is_watched(&self) -> bool {
        self.process.is_some()
    }

    /// The copy pool starts to copy from the peer's memory.
    pub(crate) fn pull_began(&self) {
        self.pulls.fetch_add(1, Ordering::SeqCst);
    }

    /// The number of pulls in progress.
    pub(crate) fn pulls(&self) -> usize {
        self.pulls.load(Ordering::Relaxed)
    }

    /// A pull has finished.
    pub(crate) fn pull_ended(&self) {
        self.pulls.fetch_sub(1, Ordering::SeqCst);
        self.close_link_if_idle();
    }

    /// Tells the peer that this side has finished, once the session is closed and no pull is in
    /// progress.
    pub(crate) fn close_link_if_idle(&self) {
        if let Some(link) = &self.link
            && !self.alive.load(Ordering::Acquire)
            && self.pulls.load(Ordering::SeqCst) == 0
        {
            link.close();
        }
    }
}

impl Importer for Session {
    fn addr(&self) -> SocketAddr {
        self.addr
    }

    fn is_alive(&self) -> bool {
        self.is_alive()
    }

    fn is_process_dead(&self) -> bool {
        self.is_process_dead()
    }

    fn forget_gate(&self, grant: SlotId) {
        if let Some(link) = &self.link {
            link.forget_gate(grant);
        }
    }
}
