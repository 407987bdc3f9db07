//! A session: everything two endpoint incarnations share.
//!
//! This is the part that any thread may hold. What only the driver touches (lanes, queues, leases)
//! is in `progress::driver`.

pub(crate) mod acceptor;
pub(crate) mod choose;
pub(crate) mod connect;
mod crowd;
pub(crate) mod hello;
pub(crate) mod import;
pub(crate) mod link;
pub(crate) mod queues;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use peerway_core::ids::{Incarnation, SlotId};
use peerway_core::wire::SubSession;

use crate::gpu::share::Opens;
use crate::memory::RemoteInner;
use crate::os::process::Pidfd;
use crate::os::shm::ShmMapping;
use crate::path::Path;
use crate::peers::Whom;
use crate::progress::shard::{DriverCommand, Shard};
use import::Imports;
use link::Link;

/// See the module.
pub(crate) struct Session {
    pub(crate) id: [u8; 16],
    pub(crate) incarnation: Incarnation,
    /// Set for a thread's own.
    pub(crate) sub_session: Option<SubSession>,
    pub(crate) addr: SocketAddr,
    pub(crate) shard: Arc<Shard>,
    /// Position in the driver's table, set when the driver takes the session over.
    pub(crate) index: AtomicUsize,
    pub(crate) path: Path,
    pub(crate) reach: Reach,
    pub(crate) link: Option<Link>,
    /// Set when queue pairs are the path.
    pub(crate) rdma: Option<Arc<queues::QueueReach>>,
    pub(crate) imports: Imports,
    /// Remote regions by grant and token, so that importing twice costs one round trip.
    pub(crate) known: Mutex<HashMap<Advertisement, Weak<RemoteInner>>>,
    /// The peer's files that are mapped here, by file number: many advertisements may share one, and
    /// mapping it anew would fault every page in again.
    pub(crate) mapped: Mutex<HashMap<(u64, u64), Weak<ShmMapping>>>,
    /// The peer's GPU memory that is mapped here.
    pub(crate) opens: Opens,
    pub(crate) stats: PeerCounters,
    pub(crate) initiator: bool,
    /// The peer's process, when it is on this host and visible.
    process: Option<Arc<Pidfd>>,
    /// Pulls from the peer's memory that our copy pool has not finished.
    pulls: AtomicUsize,
    /// The driver has not buried it.
    alive: AtomicBool,
    /// It is to be buried: nothing new is posted on it.
    closing: AtomicBool,
}

/// What names an advertisement: its grant and its token.
type Advertisement = (SlotId, [u8; 16]);

/// Which ways besides the TCP lanes are open between the two processes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reach {
    pub(crate) same_process: bool,
    pub(crate) map: bool,
    /// We can read the peer's memory by CMA.
    pub(crate) we_pull: bool,
    /// The peer can read ours.
    pub(crate) peer_pulls: bool,
}

/// Bytes and frames, counted in the hot path.
#[derive(Debug, Default)]
pub(crate) struct PeerCounters {
    pub(crate) bytes_written: AtomicU64,
    pub(crate) bytes_read: AtomicU64,
    pub(crate) bytes_served: AtomicU64,
    pub(crate) bytes_landed: AtomicU64,
    pub(crate) transfers: AtomicU64,
    pub(crate) lanes_lost: AtomicU64,
}

/// What a session is made of once the handshake is over.
pub(crate) struct Parts {
    pub(crate) id: [u8; 16],
    pub(crate) incarnation: Incarnation,
    pub(crate) sub_session: Option<SubSession>,
    pub(crate) addr: SocketAddr,
    pub(crate) path: Path,
    pub(crate) reach: Reach,
    pub(crate) link: Option<Link>,
    pub(crate) rdma: Option<Arc<queues::QueueReach>>,
    pub(crate) initiator: bool,
    /// The peer's process in our PID namespace, if it is known.
    pub(crate) pid: Option<u32>,
}

impl Session {
    pub(crate) fn new(parts: Parts, shard: Arc<Shard>) -> Arc<Self> {
        let opened = parts.link.as_ref().and_then(|link| link.process().cloned());
        let named = || parts.pid.and_then(|pid| Pidfd::open(pid).ok()).map(Arc::new);
        Arc::new(Self {
            id: parts.id,
            incarnation: parts.incarnation,
            sub_session: parts.sub_session,
            addr: parts.addr,
            shard,
            index: AtomicUsize::new(usize::MAX),
            path: parts.path,
            reach: parts.reach,
            link: parts.link,
            rdma: parts.rdma,
            imports: Imports::default(),
            known: Mutex::default(),
            mapped: Mutex::default(),
            opens: Opens::default(),
            stats: PeerCounters::default(),
            initiator: parts.initiator,
            process: opened.or_else(named),
            pulls: AtomicUsize::new(0),
            alive: AtomicBool::new(true),
            closing: AtomicBool::new(false),
        })
    }

    /// Whom it leads to.
    pub(crate) fn whom(&self) -> Whom {
        Whom {
            who: self.incarnation,
            sub_session: self.sub_session.map_or(0, |sub_session| sub_session.number),
        }
    }

    /// Whether transfers can be posted.
    #[inline]
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire) && !self.closing.load(Ordering::Relaxed)
    }

    /// Whether it was ended before the driver had it.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Ends the session: for everybody who asks at once, for the driver as soon as it gets to it.
    pub(crate) fn remove(self: &Arc<Self>) {
        self.closing.store(true, Ordering::SeqCst);
        self.shard.submit(DriverCommand::Remove { session: self.clone() });
        self.shard.notify_if_blocked();
    }

    /// Somebody found the peer's memory gone, which comes before the end of its connections in the death of
    /// a process: nobody posts to it any more.
    pub(crate) fn found_gone(self: &Arc<Self>) {
        if !self.closing.swap(true, Ordering::SeqCst) {
            self.shard.submit(DriverCommand::Gone { session: self.clone() });
            self.shard.notify_if_blocked();
        }
    }

    /// No more transfers; returns whether this call made it so.
    pub(crate) fn mark_closed(&self) -> bool {
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

    /// The peer's process, when it is on this host and visible.
    pub(crate) fn process(&self) -> Option<&Pidfd> {
        self.process.as_deref()
    }

    /// Whether the peer's process is known to have ended. Only peers on this host can be asked.
    pub(crate) fn is_process_dead(&self) -> bool {
        self.process.as_ref().is_some_and(|process| process.is_dead())
    }

    /// Whether there is proof that the peer copies no more from our memory by itself.
    pub(crate) fn can_pull_no_more(&self) -> bool {
        self.is_process_dead() || self.link.as_ref().is_none_or(Link::is_closed_by_peer)
    }

    /// Whether the end of the peer's process would be noticed.
    pub(crate) fn is_watched(&self) -> bool {
        self.process.is_some()
    }

    /// Our copy pool begins to copy from the peer's memory.
    pub(crate) fn pull_began(&self) {
        self.pulls.fetch_add(1, Ordering::SeqCst);
    }

    /// Pulls that are under way.
    pub(crate) fn pulls(&self) -> usize {
        self.pulls.load(Ordering::Relaxed)
    }

    /// It has finished.
    pub(crate) fn pull_ended(&self) {
        self.pulls.fetch_sub(1, Ordering::SeqCst);
        self.close_link_if_idle();
    }

    /// Once the session is over and nothing of it is being copied, the peer may know.
    pub(crate) fn close_link_if_idle(&self) {
        if let Some(link) = &self.link
            && !self.alive.load(Ordering::Acquire)
            && self.pulls.load(Ordering::SeqCst) == 0
        {
            link.close();
        }
    }
}
