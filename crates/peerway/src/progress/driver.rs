//! The driver: the state of a shard that only the thread holding the poller's lock accesses.
//!
//! A turn polls the rings, asks epoll for socket events, polls the completion queues and copies one
//! quantum of pulled data. When timers are due, it sends heartbeats and checks deadlines. A turn
//! never blocks.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use peerway_core::ids::SlotId;
use peerway_core::outcome::{Ended, Fence, Reason, TransferError};
use peerway_core::protocol::{Applied, Liveness, LostLanes, Role, Serves};
use peerway_core::wire::{Control, Header, Kind};
use rustix::event::epoll::{self, EventData, EventFlags};

use super::ending::{LaneEnd, SessionEnd};
use super::port::Port;
use super::queues::{POLL, Reopening};
use super::request::Request;
use super::shard::{DriverCommand, Shard};
use super::staging::COPY_NAP;
use super::timers::Timers;
use crate::clock;
use crate::limits::Budget;
use crate::os::unix::{self, Received};
use crate::peers::Claim;
use crate::progress::copies::pool::Job;
use crate::progress::copies::pull::{PullJob, PullOrigin};
use crate::progress::engine::Engine;
use crate::progress::lane::Lane;
use crate::quarantine;
use crate::session::{CloseCause, PROCESS_ENDED, REMOVED, Session};
use crate::transport::device::{Completion, Unfinished};

/// Flag in epoll's event data for the acceptor: its first connection waits.
const ACCEPTOR: u64 = 1 << 62;
/// Flag in epoll's event data for completion queues.
pub(super) const PORT: u64 = 1 << 61;
/// Lane numbers in epoll's event data above every real lane. They stand for a session's event
/// descriptor, its local socket, and the descriptor of the peer's process.
const LINK_WAKE: u64 = 0xFFFE;
const LINK_SOCKET: u64 = 0xFFFF;
const PROCESS: u64 = 0xFFFD;

/// The interval between calls to epoll while no socket is busy. A call costs about as much as a
/// small transfer over a ring.
const SOCKET_LOOK_NS: u64 = 20_000;
/// The same interval when queue pairs carry the bytes of every session. Sockets then carry only
/// heartbeats, imports and new connections, which tolerate a delay of a millisecond.
const SOCKET_LOOK_BY_DEVICES_NS: u64 = 1_000_000;
/// After a socket event, every turn calls epoll for this long.
const SOCKET_WARM_NS: u64 = 1_000_000;
/// The time between two attempts to start the acceptor's thread.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// Bytes that one session may send or receive in a turn, so that it does not starve the others.
pub(super) const TURN_BYTES: u64 = 2 << 20;
/// The posting call itself sends work up to this size. More would make posting slow.
pub(crate) const INLINE_SEND: u64 = 16 << 10;

/// The state of a shard. See the module documentation.
pub(crate) struct Driver {
    pub(super) endpoint: Arc<Engine>,
    pub(super) shard: Arc<Shard>,
    pub(super) sessions: Vec<Option<Box<SessionDriver>>>,
    /// Sessions with rings. Every turn polls them.
    rings: Vec<usize>,
    /// The number of sessions without queue pairs. Rings or sockets carry their bytes.
    without_devices: usize,
    /// Sessions with data to send.
    dirty: Vec<usize>,
    /// Lanes, as (session, lane), that had more to receive than [`TURN_BYTES`].
    again: Vec<(usize, usize)>,
    pub(super) requests: Box<[Option<Request>]>,
    pub(super) active: Vec<SlotId>,
    pub(super) pulls: VecDeque<Arc<PullJob>>,
    pub(super) acceptor: Option<Box<dyn Listening>>,
    /// Sessions with pending copies from or to GPU memory.
    pub(super) staging: Vec<usize>,
    /// When such a copy last started or finished.
    pub(super) copies_moved: u64,
    /// Completion queues, one for each RDMA device.
    pub(super) ports: Vec<Port>,
    /// The completions of the last poll of a port.
    pub(super) completions: Vec<Completion>,
    pub(super) timers: Timers,
    /// The time until which the progress thread blocks with every event source armed. 0 while it
    /// does not block.
    armed_until: u64,
    /// An event source is not armed: it has fired, or it is new since the last [`Driver::arm`].
    pub(super) unarmed: bool,
    next_socket_look: u64,
    sockets_warm_until: u64,
    /// When the last turn began, for uses that do not justify reading the clock.
    pub(super) now: u64,
}

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
    /// Lanes that the peer reported as lost.
    pub(super) lost_by_peer: Vec<u16>,
    /// Lost lanes, until both sides agree on which of their frames were applied.
    pub(super) lost: LostLanes,
    /// Requests with parts to post to RDMA devices, as in `latency` and `bulk`.
    pub(super) parts_latency: VecDeque<SlotId>,
    pub(super) parts_bulk: VecDeque<SlotId>,
    /// The unfinished work of failed queue pairs, by lane, until the peer reports what arrived.
    pub(super) unfinished: HashMap<u16, Unfinished>,
    /// The state of opening queue pairs that replace lost ones.
    pub(super) reopening: Reopening,
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

/// The acceptor, as the driver of the first shard sees it: listeners that need a thread when the
/// first connection comes.
pub(crate) trait Listening: Send {
    /// Becomes readable when a connection waits.
    fn fd(&self) -> BorrowedFd<'_>;
    /// Starts the thread, which accepts from here on.
    fn start(&self, endpoint: &Arc<Engine>) -> io::Result<()>;
    /// Ends the thread, and closes the listeners and all connections in the handshake.
    fn stop(&self);
    /// Closes them in the child of a fork, to which the thread does not belong.
    fn abandon(&self);
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

    /// The answer to the peer's [`Control::LaneLost`]: which frames of the lost lane were applied.
    pub(super) fn fenced(&self, lane: u16) -> Control {
        fenced(lane, self.lost.applied(lane))
    }

    pub(super) fn is_local(&self) -> bool {
        self.session.link.is_some()
    }
}

impl Driver {
    pub(crate) fn new(
        endpoint: Arc<Engine>,
        shard: Arc<Shard>,
        acceptor: Option<Box<dyn Listening>>,
    ) -> Self {
        let slots = endpoint.slots.len();
        let mut timers = Timers::default();
        if acceptor.as_ref().is_some_and(|it| watch_acceptor(&shard, &**it).is_err()) {
            // Without the event, the thread starts at once.
            timers.acceptor = 0;
        }
        let ports = shard.ports().iter().cloned().map(Port::new).collect();
        Self {
            endpoint,
            shard,
            ports,
            completions: Vec::with_capacity(POLL),
            sessions: Vec::new(),
            rings: Vec::new(),
            without_devices: 0,
            dirty: Vec::new(),
            again: Vec::new(),
            requests: (0..slots).map(|_| None).collect(),
            active: Vec::with_capacity(slots),
            pulls: VecDeque::new(),
            staging: Vec::new(),
            copies_moved: 0,
            acceptor,
            timers,
            armed_until: 0,
            unarmed: false,
            next_socket_look: 0,
            sockets_warm_until: 0,
            now: 0,
        }
    }

    /// Ends every remaining transfer because the endpoint closes.
    pub(crate) fn end_all(&mut self) {
        // The closing endpoint did not know of sessions that were adopted since.
        for index in 0..self.sessions.len() {
            self.with_session(index, |driver, s| {
                if s.session.is_alive() {
                    driver.close_session(s, SessionEnd::Removed, REMOVED);
                }
            });
        }
        for slot in self.active.clone() {
            let Some(request) = self.request(slot) else { continue };
            if request.state.is_unfenced() {
                continue;
            }
            let closed = Reason::Failed(TransferError::EndpointClosed);
            let reason = request.state.end_reason().unwrap_or(closed);
            let fence = request.state.fence_now();
            self.endpoint.slots.end(slot, Ended { reason, fence });
        }
        // A pulling peer reads the source memory by itself, even after this endpoint is gone. The
        // quarantine keeps that memory.
        let fence = self.endpoint.config.fence;
        for request in self.requests.iter_mut().flatten() {
            if request.state.has_pulls()
                && let Some(work) = request.work.take()
            {
                quarantine::keep_source(request.session.clone(), work, fence);
            }
        }
    }

    /// Executes one command.
    pub(crate) fn handle(&mut self, command: DriverCommand) {
        match command {
            DriverCommand::Start(request) => {
                let (slot, session) = (request.slot, request.session.clone());
                self.start_request(slot, &session, || request);
            }
            DriverCommand::Cancel(slot) => {
                let Some(index) = self.session_of(slot) else { return };
                self.with_session(index, |driver, s| {
                    driver.stop(s, slot, Reason::Cancelled, clock::now());
                });
            }
            DriverCommand::Control { session, message } => {
                self.with(&session, |_, s| {
                    if let Some(lane) = s.control_lane() {
                        lane.push_control(&message);
                        s.dirty = true;
                    }
                });
            }
            DriverCommand::Adopt(new) => self.adopt(*new),
            DriverCommand::Close { session, cause } => {
                let end = match cause {
                    CloseCause::Removed => SessionEnd::Removed,
                    CloseCause::MemoryGone => SessionEnd::Closed,
                };
                self.with(&session, |driver, s| driver.close_session(s, end, cause.text()));
            }
            DriverCommand::LeaveBarredGates => self.leave_barred_gates(),
            DriverCommand::Pulled { session, origin, result } => {
                self.pulled(&session, origin, result)
            }
            DriverCommand::QueuesDone { session, done } => self.queues_done(&session, *done),
        }
    }

    /// Leaves the gates of barred grants that lanes still hold.
    ///
    /// A slow peer delays a frame that sends granted memory, and that frame holds the grant's gate.
    /// The lane continues such a frame from a private copy, at most one frame a lane.
    fn leave_barred_gates(&mut self) {
        for session in self.sessions.iter_mut().flatten() {
            for lane in session.lanes.iter_mut().flatten() {
                lane.copy_barred_reply();
            }
        }
    }

    fn session_of(&mut self, slot: SlotId) -> Option<usize> {
        self.request(slot).map(|f| f.session.index.load(Ordering::Relaxed))
    }

    /// Starts the request of a slot. `request` builds it in place, because moving it costs more
    /// than building it.
    #[inline]
    pub(crate) fn start_request(
        &mut self,
        slot: SlotId,
        session: &Arc<Session>,
        request: impl FnOnce() -> Request,
    ) {
        let index = session.index.load(Ordering::Acquire);
        if !session.is_alive() || self.sessions.get(index).is_none_or(Option::is_none) {
            self.refuse(slot);
            return;
        }
        let request = self.requests[slot.index as usize].insert(request());
        let left = request.state.left();
        let (inline, queued) = (left <= INLINE_SEND, left > 0);
        request.queued = queued;
        let (bulk, by_device) = (request.bulk, request.by_device);
        self.timers.end_by(request.deadline);
        self.active.push(slot);
        self.with_session(index, |driver, s| {
            if by_device && !bulk && queued && driver.post_at_once(s, slot) {
                return;
            }
            if queued {
                driver.enqueue(s, slot);
            } else {
                driver.settle(s, slot);
            }
            if by_device && !s.has_posted_all() {
                // Posting to a device is fast. Completions trigger the posting of the other parts.
                driver.post_parts(s, 1);
                if s.has_posted_all() {
                    return;
                }
            } else if inline && driver.flush_for(s, bulk) {
                return;
            }
            s.dirty = true;
        });
    }

    /// Fails a request to a session that is over.
    #[cold]
    fn refuse(&mut self, slot: SlotId) {
        let open = self.endpoint.check_open().is_ok();
        let why = if open { TransferError::PeerGone } else { TransferError::EndpointClosed };
        let reason = Reason::Failed(why);
        self.endpoint.slots.end(slot, Ended { reason, fence: Fence::Held });
    }

    /// Sends on the lanes that serve requests of this class; the other lanes have no new data.
    /// Returns true when nothing is left to send.
    fn flush_for(&mut self, s: &mut SessionDriver, bulk: bool) -> bool {
        let mut all = true;
        for at in 0..s.lanes.len() {
            let Some(lane) = &s.lanes[at] else { continue };
            let Serves { latency, bulk: bulk_too } = s.serves(lane.role);
            if (bulk && bulk_too) || (!bulk && latency) {
                self.flush_lane(s, at);
                all &= s.lanes[at].as_ref().is_some_and(|lane| lane.has_sent_all());
                if s.has_framed_all() {
                    return all;
                }
            }
        }
        false
    }

    /// Like `with_session`, but does nothing if another session has taken the index since.
    pub(super) fn with(
        &mut self,
        session: &Arc<Session>,
        work: impl FnOnce(&mut Self, &mut SessionDriver),
    ) {
        let index = session.index.load(Ordering::Acquire);
        self.with_session(index, |driver, s| {
            if Arc::ptr_eq(&s.session, session) {
                work(driver, s);
            }
        });
    }

    /// Takes a session out of the table, runs `work` on it, and puts it back. Records whether the
    /// session has data to send, and drops a session that has ended.
    pub(super) fn with_session(
        &mut self,
        index: usize,
        work: impl FnOnce(&mut Self, &mut SessionDriver),
    ) {
        let Some(mut s) = self.sessions.get_mut(index).and_then(Option::take) else { return };
        let was_dirty = s.dirty;
        work(self, &mut s);
        self.after_work(&mut s);
        if s.lanes.iter().all(Option::is_none) && s.lingering.is_none() {
            // The session has no lane left and waits for no proof.
            self.unwatch_session(&s);
            self.rings.retain(|i| *i != index);
            self.without_devices -= usize::from(s.session.rdma.is_none());
            return;
        }
        if s.dirty && !was_dirty {
            self.dirty.push(index);
        }
        self.sessions[index] = Some(s);
    }

    /// Does the work that requires every lane of the session to be in its place.
    #[inline]
    fn after_work(&mut self, s: &mut SessionDriver) {
        if s.reopening.has_news() {
            self.connect_queues(s);
            self.open_queues(s);
        }
        self.note_staging(s);
        if s.lost_by_peer.is_empty() && s.signals.is_empty() {
            return;
        }
        self.send_what_follows(s);
    }

    /// The rare part of [`Self::after_work`]: answers lost lanes and sends signals.
    fn send_what_follows(&mut self, s: &mut SessionDriver) {
        // A lane whose new queue pair is being connected is answered for when that is over.
        let waits = |lane: &mut u16| s.reopening.is_connecting(*lane);
        let mut waiting: Vec<u16> = s.lost_by_peer.extract_if(.., waits).collect();
        waiting.sort_unstable();
        waiting.dedup();
        while let Some(lost) = s.lost_by_peer.pop() {
            self.lost_by_peer(s, lost);
        }
        s.lost_by_peer = waiting;
        while let Some(slot) = s.signals.pop() {
            self.send_signal(s, slot);
        }
        self.flush(s);
    }

    /// Runs one turn. Returns true when it made progress.
    pub(crate) fn turn(&mut self, now: u64) -> bool {
        self.now = now;
        let mut progress = false;
        for at in 0..self.rings.len() {
            let Some(&index) = self.rings.get(at) else { break };
            self.with_session(index, |driver, s| progress |= driver.look_at_rings(s, now));
        }
        if now < self.sockets_warm_until || now >= self.next_socket_look {
            let by_devices = self.is_by_devices();
            let pause = if by_devices { SOCKET_LOOK_BY_DEVICES_NS } else { SOCKET_LOOK_NS };
            self.next_socket_look = now + pause;
            progress |= self.look_at_sockets(now);
        }
        for _ in 0..self.again.len() {
            let (index, lane) = self.again.swap_remove(0);
            progress = true;
            self.with_session(index, |driver, s| driver.serve_lane(s, lane, now));
        }
        progress |= self.look_at_ports(now);
        progress |= self.look_at_copies(now);
        progress |= self.flush_dirty();
        if let Some(pull) = self.pulls.front().cloned() {
            progress = true;
            if !pull.step() {
                self.pulls.pop_front();
            }
        }
        if now >= self.timers.next() {
            self.tick(now);
        }
        progress
    }

    fn look_at_rings(&mut self, s: &mut SessionDriver, now: u64) -> bool {
        let mut progress = false;
        for at in 0..s.lanes.len() {
            let Some(lane) = s.lanes[at].as_mut().filter(|l| l.wire.is_memory()) else { continue };
            match lane.wire.has_input() {
                Ok(false) => {
                    if lane.blocked {
                        s.dirty = true;
                    }
                    continue;
                }
                Ok(true) => progress = true,
                Err(error) => {
                    self.lane_ended(s, at, LaneEnd::Broken(error));
                    continue;
                }
            }
            self.serve_lane(s, at, now);
        }
        progress
    }

    fn look_at_sockets(&mut self, now: u64) -> bool {
        let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut buffer = [const { MaybeUninit::uninit() }; 64];
        let Ok((events, _)) = epoll::wait(self.shard.epoll(), &mut buffer, Some(&zero)) else {
            return false;
        };
        for event in &*events {
            let word = event.data.u64();
            if word & ACCEPTOR != 0 {
                self.start_accepting(now);
            } else if word & PORT != 0 {
                self.take_port_event((word & !PORT) as usize);
            } else {
                let (index, lane) = ((word >> 16) as usize, word & 0xFFFF);
                self.sockets_warm_until = now + SOCKET_WARM_NS;
                self.with_session(index, |driver, s| match lane {
                    LINK_WAKE => {
                        if let Some(link) = &s.session.link {
                            link.wake_fd.drain();
                        }
                        // The peer disarmed the ring that it signalled for.
                        driver.unarmed = true;
                        s.dirty = true;
                    }
                    LINK_SOCKET => driver.link_spoke(s, now),
                    PROCESS => driver.process_died(s, now),
                    lane => {
                        s.dirty = true;
                        driver.serve_lane(s, lane as usize, now);
                    }
                });
            }
        }
        !events.is_empty()
    }

    /// Closes the session of a peer on this host whose process has ended. Its memory is gone, and
    /// it can no longer access the memory of this process.
    fn process_died(&mut self, s: &mut SessionDriver, now: u64) {
        if let Some(process) = s.session.process() {
            let _ = epoll::delete(self.shard.epoll(), process.as_fd());
        }
        // The peer may have sent something before it died.
        for at in 0..s.lanes.len() {
            self.serve_lane(s, at, now);
        }
        self.close_session(s, SessionEnd::Released, PROCESS_ENDED);
    }

    /// Starts the acceptor's thread, because a connection waits. If the system has no room for a
    /// thread, a timer tries again.
    pub(super) fn start_accepting(&mut self, now: u64) {
        let Some(acceptor) = &self.acceptor else { return };
        let _ = epoll::delete(self.shard.epoll(), acceptor.fd());
        self.timers.acceptor = u64::MAX;
        if let Err(error) = acceptor.start(&self.endpoint) {
            tracing::error!(%error, "cannot start the thread that accepts connections");
            self.timers.acceptor = clock::after(now, ACCEPT_AGAIN);
        }
    }

    /// Takes the acceptor out, which the caller ends.
    pub(crate) fn take_acceptor(&mut self) -> Option<Box<dyn Listening>> {
        self.acceptor.take()
    }

    /// Receives on a lane, then sends on it.
    pub(super) fn serve_lane(&mut self, s: &mut SessionDriver, at: usize, now: u64) {
        let Some(mut lane) = s.lanes.get_mut(at).and_then(Option::take) else { return };
        let received = self.receive(s, &mut lane, now);
        s.lanes[at] = Some(lane);
        match received {
            Ok(again) => {
                if again {
                    self.again.push((s.index, at));
                }
                self.flush_lane(s, at);
            }
            Err(end) => self.lane_ended(s, at, end),
        }
    }

    fn link_spoke(&mut self, s: &mut SessionDriver, now: u64) {
        let Some(link) = &s.session.link else { return };
        let request = |bytes: &[u8]| bytes.first_chunk().map(|b| u64::from_le_bytes(*b));
        let error = loop {
            match unix::recv(link.socket.as_fd()) {
                Ok(Received::Packet(mut packet)) => {
                    if let (Some(request), Some(fd)) = (request(&packet.bytes), packet.fds.pop()) {
                        s.session.imports.descriptor_came(request, fd);
                    }
                }
                Ok(Received::Cut(bytes)) => {
                    tracing::warn!(
                        peer = %s.session.addr,
                        "lost a file descriptor that this peer sent, because this process has too \
                         many open files; the import fails. Raise the limit (ulimit -n)"
                    );
                    if let Some(request) = request(&bytes) {
                        s.session.imports.descriptor_lost(request);
                    }
                }
                Ok(Received::WouldBlock) => return,
                Ok(Received::Closed) => break None,
                Err(error) => {
                    let _ = epoll::delete(self.shard.epoll(), link.socket.as_fd());
                    break Some(error);
                }
            }
        };
        match error {
            // An error in this process proves nothing about the peer.
            Some(error) => {
                let cause = format!("receiving on the local link failed: {error}");
                self.close_session(s, SessionEnd::Closed, &cause);
            }
            // The peer closes its end after its last access, so it applies nothing more. Its
            // goodbye may still be in a ring.
            None => {
                for at in 0..s.lanes.len() {
                    self.serve_lane(s, at, now);
                }
                let cause = "the peer's process closed its local link or ended";
                self.close_session(s, SessionEnd::Released, cause);
            }
        }
    }

    /// Sends as much as possible for every dirty session. Returns true when it made progress.
    fn flush_dirty(&mut self) -> bool {
        let mut progress = false;
        for _ in 0..self.dirty.len() {
            let index = self.dirty.swap_remove(0);
            let Some(mut s) = self.sessions.get_mut(index).and_then(Option::take) else { continue };
            s.dirty = false;
            self.sessions[index] = Some(s);
            self.with_session(index, |driver, s| progress |= driver.flush(s));
        }
        progress
    }

    /// Sends on every lane of a session. Returns true when it sent anything.
    pub(super) fn flush(&mut self, s: &mut SessionDriver) -> bool {
        let mut progress = self.post_parts(s, usize::MAX);
        for at in 0..s.lanes.len() {
            progress |= self.flush_lane_progress(s, at);
        }
        progress
    }

    fn flush_lane(&mut self, s: &mut SessionDriver, at: usize) {
        self.flush_lane_progress(s, at);
    }

    fn flush_lane_progress(&mut self, s: &mut SessionDriver, at: usize) -> bool {
        let framed_all = s.has_framed_all();
        let has_more = |lane: &mut Box<Lane>| !framed_all || !lane.has_sent_all();
        let lane = s.lanes.get_mut(at).and_then(|lane| lane.take_if(has_more));
        let Some(mut lane) = lane else { return false };
        let sent = self.transmit(s, &mut lane);
        self.watch_out(s.index, &mut lane);
        // Only `arm` asks the peer to signal when a full ring has room.
        self.unarmed |= lane.blocked && lane.wire.is_memory();
        // A peer that closes says goodbye first. Sending may find the closed connection before this
        // side has read that.
        let heard = sent.as_ref().err().and_then(|_| self.receive(s, &mut lane, self.now).err());
        s.lanes[at] = Some(lane);
        match sent {
            Ok(progress) => progress,
            Err(end) => {
                self.lane_ended(s, at, heard.unwrap_or(end));
                false
            }
        }
    }

    /// Makes epoll report a full socket when it has room again.
    fn watch_out(&mut self, index: usize, lane: &mut Lane) {
        let want = lane.blocked;
        let Some(fd) = lane.wire.socket().filter(|_| want != lane.watched_out) else { return };
        lane.watched_out = want;
        let flags = if want { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
        let data = EventData::new_u64((index as u64) << 16 | u64::from(lane.index));
        // SAFETY: the wire owns the descriptor, and `lane` owns the wire and outlives this borrow.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let _ = epoll::modify(self.shard.epoll(), fd, data, flags);
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
    fn unwatch_session(&mut self, s: &SessionDriver) {
        let epoll = self.shard.epoll();
        if let Some(link) = &s.session.link {
            let _ = epoll::delete(epoll, link.wake_fd.as_fd());
            let _ = epoll::delete(epoll, link.socket.as_fd());
        }
        if let Some(process) = s.session.process() {
            let _ = epoll::delete(epoll, process.as_fd());
        }
    }

    fn adopt(&mut self, new: NewSession) {
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

    /// Answers the frame of a pull that the copy pool has finished.
    fn pulled(
        &mut self,
        session: &Arc<Session>,
        origin: PullOrigin,
        result: Result<(), TransferError>,
    ) {
        self.with(session, |driver, s| {
            let result = result.and_then(|()| driver.count(s, origin.counts));
            let Some(Some(lane)) = s.lanes.get_mut(origin.lane as usize) else { return };
            answer_pull(lane, origin.sequence, result);
            driver.flush(s);
        });
    }

    /// Arms every event source before the progress thread blocks until `until`. Returns true when
    /// there is already work, so that the thread must not block.
    pub(super) fn arm(&mut self, until: u64) -> bool {
        self.unarmed = false;
        let mut ready = self.has_work();
        for at in 0..self.rings.len() {
            if let Some(s) = &mut self.sessions[self.rings[at]] {
                for lane in s.lanes.iter_mut().flatten() {
                    ready |= lane.wire.arm(lane.blocked).unwrap_or(true);
                }
            }
        }
        ready |= self.arm_ports();
        self.armed_until = until;
        ready || self.timers.next() < until
    }

    /// Disarms the rings after the progress thread has blocked, so that peers need not signal. The
    /// next turn calls epoll to get the event that ended the wait.
    pub(super) fn end_block(&mut self) {
        if self.armed_until == 0 {
            return;
        }
        self.armed_until = 0;
        self.next_socket_look = 0;
        for at in 0..self.rings.len() {
            if let Some(s) = &mut self.sessions[self.rings[at]] {
                for lane in s.lanes.iter_mut().flatten() {
                    lane.wire.disarm();
                }
            }
        }
    }

    /// Whether queue pairs carry the bytes of every session.
    pub(crate) fn is_by_devices(&self) -> bool {
        self.without_devices == 0 && self.ports.iter().any(|port| port.adopted > 0)
    }

    /// Whether the next turn has work that no event source announces.
    pub(super) fn has_work(&self) -> bool {
        !self.dirty.is_empty()
            || !self.pulls.is_empty()
            || !self.again.is_empty()
            || self.has_copies()
    }

    /// Whether the blocked progress thread must arm an event source again, or must wake earlier for
    /// a new timer.
    pub(super) fn take_unarmed(&mut self) -> bool {
        if self.armed_until == 0 {
            return false;
        }
        std::mem::take(&mut self.unarmed) || self.timers.next() < self.armed_until
    }

    pub(super) fn has_ended(&self, slot: SlotId) -> bool {
        self.endpoint.slots.has_ended(slot)
    }

    pub(super) fn next_timer(&self) -> u64 {
        self.timers.next()
    }

    /// The polling interval while GPU copies are pending: epoll does not report their end.
    pub(super) fn poll_every(&self) -> Option<Duration> {
        self.has_copies().then_some(COPY_NAP)
    }
}

/// Makes epoll report the acceptor's first connection.
fn watch_acceptor(shard: &Shard, acceptor: &dyn Listening) -> io::Result<()> {
    let data = EventData::new_u64(ACCEPTOR);
    Ok(epoll::add(shard.epoll(), acceptor.fd(), data, EventFlags::IN)?)
}

/// The message that reports which frames of a lost lane were applied.
pub(super) fn fenced(lane: u16, applied: Applied) -> Control {
    let Applied { last, refused, immediates } = applied;
    Control::LaneFenced { lane, applied: last, refused, immediates }
}

/// Answers a pull frame.
pub(super) fn answer_pull(lane: &mut Lane, sequence: u64, result: Result<(), TransferError>) {
    match result {
        Ok(()) => {
            let mut head = Header::new(Kind::Pulled);
            head.sequence = sequence.into();
            lane.push(&head);
        }
        Err(error) => lane.push_nack(sequence, error as u8),
    }
}
