//! The sessions of a driver: their lanes and queues, and how the driver takes a new one.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use peerway_core::ids::SlotId;
use peerway_core::protocol::{Applied, Liveness, LostLanes, Role, Serves};
use peerway_core::wire::Control;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::driver::{Driver, LINK_SOCKET, LINK_WAKE, PROCESS};
use super::ending::SessionEnd;
use super::lane::Lane;
use super::reopening::Reopening;
use super::replacing::Replacing;
use super::windows::Exposed;
use crate::clock;
use crate::limits::Budget;
use crate::peers::Claim;
use crate::session::{REMOVED, Session};
use crate::transport::device::{KeyTable, Unfinished};

/// A session's lanes and queues.
pub(crate) struct SessionDriver {
    pub(super) session: Arc<Session>,
    pub(super) index: usize,
    pub(super) lanes: Vec<Option<Box<Lane>>>,
    /// Requests with data to put into frames. A [`SlotId`] includes the generation, because the
    /// next request in a slot may belong to another peer.
    pub(super) latency: VecDeque<SlotId>,
    pub(super) bulk: VecDeque<SlotId>,
    /// Requests whose bytes are all acknowledged and whose notification or count is due.
    pub(super) signals: Vec<SlotId>,
    /// Lanes that the peer reported as lost, with their generations.
    pub(super) lost_by_peer: Vec<(u16, u32)>,
    /// Lost lanes, until both sides agree on which of their frames were applied.
    pub(super) lost: LostLanes,
    /// Requests with parts to post to RDMA devices, as in `latency` and `bulk`.
    pub(super) parts_latency: VecDeque<SlotId>,
    pub(super) parts_bulk: VecDeque<SlotId>,
    /// The unfinished work of failed queue pairs, by lane, until the peer reports what arrived.
    pub(super) unfinished: HashMap<u16, Unfinished>,
    /// The state of opening queue pairs that replace lost ones.
    pub(super) reopening: Reopening,
    /// The state of replacing lost TCP lanes.
    pub(super) replacing: Replacing,
    /// What the peer has imported of our memory.
    pub(super) exposed: Exposed,
    /// Questions for missing keys to the peer's memory, by request.
    pub(super) asked: HashMap<u64, Weak<KeyTable>>,
    /// The lane that gets the next part.
    pub(super) next_queue: usize,
    pub(super) liveness: Liveness,
    /// The session's budget of half-received messages.
    pub(super) messages: Arc<Budget>,
    /// When the session's timer is due.
    pub(super) timer: u64,
    pub(super) dirty: bool,
    /// Copies from or to GPU memory are pending.
    pub(super) copies: bool,
    /// For a sub-session: when the session that it belongs to ended.
    pub(super) alone_since: Option<u64>,
    /// The session is over. The driver keeps it until this time at the latest, to learn when the
    /// peer can no longer access its memory.
    pub(super) lingering: Option<u64>,
}

/// A session that leaves the handshake.
pub(crate) struct NewSession {
    pub(crate) session: Arc<Session>,
    /// By index. A queue pair that could not be opened leaves `None`.
    pub(crate) lanes: Vec<Option<Lane>>,
    pub(crate) detect: Duration,
    /// The interval of heartbeats.
    pub(crate) beat: Duration,
    /// Held until the driver has adopted the session.
    pub(crate) claim: Option<Claim>,
}

impl SessionDriver {
    /// The lane for control messages: the latency lane, or the first usable lane. With queue pairs,
    /// the TCP connection is preferred, because one failed work request breaks its queue pair.
    pub(super) fn control_lane(&mut self) -> Option<&mut Box<Lane>> {
        if self.session.rdma.is_none() || self.lanes.first().is_none_or(Option::is_none) {
            return self.latency_lane();
        }
        self.lanes[0].as_mut()
    }

    /// The lane for the signal that follows a transfer's bytes.
    pub(super) fn latency_lane(&mut self) -> Option<&mut Box<Lane>> {
        let usable = |lane: &Option<Box<Lane>>| lane.as_ref().is_some_and(|l| l.draining.is_none());
        let latency = |lane: &Option<Box<Lane>>| {
            usable(lane) && lane.as_ref().is_some_and(|lane| lane.role == Role::Latency)
        };
        let at = self.lanes.iter().position(latency);
        let at = at.or_else(|| self.lanes.iter().position(usable))?;
        self.lanes[at].as_mut()
    }

    /// The queues that a lane of this role serves.
    pub(super) fn serves(&self, role: Role) -> Serves {
        let lives = |role: Role| {
            let live = self.lanes.iter().flatten().filter(|lane| lane.draining.is_none());
            live.into_iter().any(|lane| lane.role == role)
        };
        role.serves(lives, self.session.rdma.as_ref().is_some_and(|rdma| rdma.pinned))
    }

    /// Whether no request waits for a queue pair.
    pub(super) fn has_posted_all(&self) -> bool {
        self.parts_latency.is_empty() && self.parts_bulk.is_empty()
    }

    /// Whether no request waits for a lane.
    pub(super) fn has_framed_all(&self) -> bool {
        self.latency.is_empty() && self.bulk.is_empty()
    }

    pub(super) fn is_local(&self) -> bool {
        self.session.link.is_some()
    }
}

impl Driver {
    /// Takes a session that has finished its handshake.
    pub(super) fn adopt(&mut self, new: NewSession) {
        let now = clock::now();
        let claim = new.claim;
        let index = match self.sessions.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.sessions.push(None);
                self.sessions.len() - 1
            }
        };
        let mut s = Box::new(SessionDriver {
            session: new.session,
            index,
            lanes: new.lanes.into_iter().map(|lane| lane.map(Box::new)).collect(),
            latency: VecDeque::new(),
            bulk: VecDeque::new(),
            signals: Vec::new(),
            lost_by_peer: Vec::new(),
            lost: LostLanes::default(),
            parts_latency: VecDeque::new(),
            parts_bulk: VecDeque::new(),
            unfinished: HashMap::new(),
            reopening: Reopening::default(),
            replacing: Replacing::default(),
            exposed: Exposed::default(),
            asked: HashMap::new(),
            next_queue: 0,
            liveness: Liveness::new(new.detect, new.beat, now),
            messages: self.endpoint.messages.of_session(),
            timer: u64::MAX,
            dirty: false,
            copies: false,
            alone_since: None,
            lingering: None,
        });
        let watch = |fd: BorrowedFd<'_>, lane: u64| {
            let data = EventData::new_u64((index as u64) << 16 | lane);
            epoll::add(self.shard.epoll(), fd, data, EventFlags::IN)
        };
        let mut watched = Ok(());
        for lane in s.lanes.iter_mut().flatten() {
            if let Some(fd) = lane.wire.socket() {
                // SAFETY: the wire owns the descriptor, and the lane owns the wire and outlives
                // `fd`.
                let fd = unsafe { BorrowedFd::borrow_raw(fd) };
                watched = watched.and_then(|()| watch(fd, u64::from(lane.index)));
            }
        }
        if let Some(link) = &s.session.link {
            watched = watched.and_then(|()| watch(link.wake_fd.as_fd(), LINK_WAKE));
            watched = watched.and_then(|()| watch(link.socket.as_fd(), LINK_SOCKET));
            self.endpoint.copy_pool.start();
            for wire in link.wires() {
                let role = if s.lanes.iter().flatten().any(|l| l.role == Role::Latency) {
                    Role::Bulk
                } else {
                    Role::Latency
                };
                let at = s.lanes.len() as u16;
                s.lanes.push(Some(Box::new(Lane::new(Box::new(wire), at, role, now))));
            }
        }
        if s.lanes.iter().flatten().any(|lane| lane.wire.is_memory()) {
            self.rings.push(index);
        }
        if let Some(process) = s.session.process() {
            watched = watched.and_then(|()| watch(process.as_fd(), PROCESS));
        }
        if let Some(frames) = self.endpoint.config.max_inflight_ops {
            s.lanes.iter_mut().flatten().for_each(|lane| lane.limit_frames(frames));
        }
        if let Err(error) = watched {
            tracing::error!(%error, peer = %s.session.addr, "cannot add a session to epoll");
            self.unwatch_session(&s);
            s.session.mark_closed(&format!("cannot add the session to epoll: {error}"));
            return;
        }
        s.session.index.store(index, Ordering::Release);
        self.set_timer(&mut s, now);
        self.unarmed = true;
        let session = s.session.clone();
        self.without_devices += usize::from(session.rdma.is_none());
        let early = self.adopt_queues(&mut s);
        self.sessions[index] = Some(s);
        // Publish the session only now: before, it could not send. Publish it before `replay`,
        // which may end the session: a session that is over must not be published.
        if !session.initiator {
            self.endpoint.peers.accepted(&session, claim);
        }
        self.replay(&early, now);
        // A `Close` before the adoption found no session, so close the session here.
        if session.is_closing() {
            self.with(&session, |driver, s| driver.close_session(s, SessionEnd::Removed, REMOVED));
        }
    }

    pub(super) fn unwatch(&mut self, lane: &Lane) {
        if let Some(fd) = lane.wire.socket() {
            // SAFETY: the wire owns the descriptor, and `lane` owns the wire and outlives this
            // borrow.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            let _ = epoll::delete(self.shard.epoll(), fd);
        }
    }

    /// Removes a session's own descriptors from epoll. [`Self::unwatch`] removes those of lanes.
    pub(super) fn unwatch_session(&mut self, s: &SessionDriver) {
        let epoll = self.shard.epoll();
        if let Some(link) = &s.session.link {
            let _ = epoll::delete(epoll, link.wake_fd.as_fd());
            let _ = epoll::delete(epoll, link.socket.as_fd());
        }
        if let Some(process) = s.session.process() {
            let _ = epoll::delete(epoll, process.as_fd());
        }
    }
}

/// The message that reports which frames of a lost lane were applied.
pub(super) fn fenced(lane: u16, generation: u32, applied: Applied) -> Control {
    let Applied { last, refused, immediates } = applied;
    Control::LaneFenced { lane, generation, applied: last, refused, immediates }
}
