//! The driver: the state of a shard that only the thread holding the poller's lock accesses.
//!
//! A turn polls the rings, asks epoll for socket events, polls the completion queues and copies one
//! quantum of pulled data. When timers are due, it sends heartbeats and checks deadlines. A turn
//! never blocks.

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use peerway_core::ids::SlotId;
use peerway_core::outcome::{Ended, Fence, Reason, TransferError};
use peerway_core::protocol::Serves;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::copies::pool::Job;
use super::copies::pull::PullJob;
use super::ending::{LaneEnd, SessionEnd};
use super::engine::Engine;
use super::lane::Lane;
pub(crate) use super::listening::Listening;
use super::listening::watch_acceptor;
use super::poller::Polled;
use super::port::Port;
use super::request::{NewRequest, Request, Requests};
pub(crate) use super::sessions::NewSession;
use super::sessions::SessionDriver;
use super::shard::{DriverCommand, Shard};
use super::staging::{COPY_NAP, Staging};
use super::timers::Timers;
use crate::bugs::{Bug, is_planted};
use crate::clock;
use crate::quarantine;
use crate::session::{CloseCause, REMOVED, Session};

/// Flag in epoll's event data for the acceptor: its first connection waits.
pub(super) const ACCEPTOR: u64 = 1 << 62;
/// Flag in epoll's event data for completion queues.
pub(super) const PORT: u64 = 1 << 61;
/// Lane numbers in epoll's event data above every real lane. They stand for a session's event
/// descriptor, its local socket, and the descriptor of the peer's process.
pub(super) const LINK_WAKE: u64 = 0xFFFE;
pub(super) const LINK_SOCKET: u64 = 0xFFFF;
pub(super) const PROCESS: u64 = 0xFFFD;

/// The interval between calls to epoll while no socket is busy. A call costs about as much as a
/// small transfer over a ring.
const SOCKET_LOOK_NS: u64 = 20_000;
/// The same interval when queue pairs carry the bytes of every session. Sockets then carry only
/// heartbeats, imports and new connections, which tolerate a delay of a millisecond.
const SOCKET_LOOK_BY_DEVICES_NS: u64 = 1_000_000;
/// After a socket event, every turn calls epoll for this long.
const SOCKET_WARM_NS: u64 = 1_000_000;
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
    pub(super) rings: Vec<usize>,
    /// The number of sessions without queue pairs. Rings or sockets carry their bytes.
    pub(super) without_devices: usize,
    /// Sessions with data to send.
    dirty: Vec<usize>,
    /// Lanes, as (session, lane), that had more to receive than [`TURN_BYTES`].
    pub(super) again: Vec<(usize, usize)>,
    pub(super) requests: Requests,
    pub(super) pulls: VecDeque<Arc<PullJob>>,
    pub(super) acceptor: Option<Box<dyn Listening>>,
    /// Copies from or to GPU memory.
    pub(super) staging: Staging,
    /// Completion queues, one for each RDMA device.
    pub(super) ports: Vec<Port>,
    pub(super) timers: Timers,
    /// The time until which the progress thread blocks with every event source armed. 0 while it
    /// does not block.
    armed_until: u64,
    /// An event source is not armed: it has fired, or it is new since the last [`Driver::arm`].
    pub(super) unarmed: bool,
    sockets: SocketLooks,
    /// When the last turn began, for uses that do not justify reading the clock.
    pub(super) now: u64,
}

/// When a turn calls epoll.
#[derive(Default)]
struct SocketLooks {
    /// The time of the next call.
    next: u64,
    /// Until this time every turn calls it.
    warm_until: u64,
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
            sessions: Vec::new(),
            rings: Vec::new(),
            without_devices: 0,
            dirty: Vec::new(),
            again: Vec::new(),
            requests: Requests::new(slots),
            pulls: VecDeque::new(),
            staging: Staging::default(),
            acceptor,
            timers,
            armed_until: 0,
            unarmed: false,
            sockets: SocketLooks::default(),
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
        for slot in self.requests.slots().to_vec() {
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
        for request in self.requests.iter_mut() {
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
                self.start(slot, &session, || request);
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
            DriverCommand::LaneOpened { session, attempt, opened } => {
                self.lane_opened(&session, attempt, opened);
            }
            DriverCommand::JoinLane { session, attempt, join } => {
                self.join_lane(&session, attempt, join);
            }
            DriverCommand::KeysMade { session, made } => self.keys_made(&session, *made),
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

    /// Starts the request of a slot. `request` builds it in its place in the table, because moving
    /// it costs more than building it.
    #[inline(always)]
    fn start(&mut self, slot: SlotId, session: &Arc<Session>, request: impl FnOnce() -> Request) {
        let index = session.index.load(Ordering::Acquire);
        if !session.is_alive() || self.sessions.get(index).is_none_or(Option::is_none) {
            self.refuse(slot);
            return;
        }
        let request = self.requests.insert(slot, request);
        let left = request.state.left();
        let (inline, queued) = (left <= INLINE_SEND, left > 0);
        request.queued = queued;
        let (bulk, by_device) = (request.bulk, request.by_device);
        self.timers.end_by(request.deadline);
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

    /// Adds a request to the send queue that fits it.
    pub(super) fn enqueue(&mut self, s: &mut SessionDriver, slot: SlotId) {
        // If the transport is pinned to RDMA, the request waits for a queue pair.
        let rdma = s.session.rdma.as_ref();
        let queues = rdma.is_some_and(|rdma| rdma.pinned) || (rdma.is_some() && s.has_queues());
        let Some(request) = self.request(slot) else { return };
        let queue = match (request.by_device && queues, request.bulk) {
            (true, true) => &mut s.parts_bulk,
            (true, false) => &mut s.parts_latency,
            (false, true) => &mut s.bulk,
            (false, false) => &mut s.latency,
        };
        queue.push_back(slot);
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
        if s.copies {
            self.note_staging(s);
        }
        if s.lost_by_peer.is_empty() && s.signals.is_empty() {
            return;
        }
        self.send_what_follows(s);
    }

    /// The rare part of [`Self::after_work`]: answers lost lanes and sends signals.
    fn send_what_follows(&mut self, s: &mut SessionDriver) {
        // A lane whose new queue pair is being connected is answered for when that is over.
        let waits = |(lane, _): &mut (u16, u32)| s.reopening.is_connecting(*lane);
        let mut waiting: Vec<(u16, u32)> = s.lost_by_peer.extract_if(.., waits).collect();
        waiting.sort_unstable();
        waiting.dedup();
        while let Some((lost, generation)) = s.lost_by_peer.pop() {
            self.lost_by_peer(s, lost, generation);
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
        if now < self.sockets.warm_until || now >= self.sockets.next {
            let by_devices = self.is_by_devices();
            let pause = if by_devices { SOCKET_LOOK_BY_DEVICES_NS } else { SOCKET_LOOK_NS };
            self.sockets.next = now + pause;
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
                self.sockets.warm_until = now + SOCKET_WARM_NS;
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

    /// Receives on a lane, then sends on it.
    pub(super) fn serve_lane(&mut self, s: &mut SessionDriver, at: usize, now: u64) {
        let Some(mut lane) = s.lanes.get_mut(at).and_then(Option::take) else { return };
        let received = self.receive(s, &mut lane, now);
        s.lanes[at] = Some(lane);
        match received {
            Ok(again) => {
                // One entry a lane: an event of the same lane may come before the entry is used.
                let is_new = !self.again.contains(&(s.index, at)) || is_planted(Bug::AgainTwice);
                if again && is_new {
                    self.again.push((s.index, at));
                }
                self.flush_lane(s, at);
            }
            Err(end) => self.lane_ended(s, at, end),
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
        self.sockets.next = 0;
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

/// The place of the driver in the poller.
pub(crate) struct Seat {
    /// `None` before the shard starts and after it stops.
    pub(super) driver: Option<Driver>,
    pub(super) endpoint: Weak<Engine>,
}

impl Polled for Seat {
    type Command = DriverCommand;

    #[inline]
    fn execute(&mut self, command: DriverCommand) {
        match &mut self.driver {
            Some(driver) => driver.handle(command),
            None => {
                if let DriverCommand::Start(request) = command {
                    self.refuse(request.slot);
                }
            }
        }
    }

    #[inline]
    fn poll(&mut self, now: u64) -> bool {
        self.driver.as_mut().is_some_and(|driver| driver.turn(now))
    }

    #[inline]
    fn has_work(&self) -> bool {
        self.driver.as_ref().is_some_and(Driver::has_work)
    }

    #[inline]
    fn take_unarmed(&mut self) -> bool {
        self.driver.as_mut().is_some_and(Driver::take_unarmed)
    }

    fn arm(&mut self, until: u64) -> bool {
        self.driver.as_mut().is_some_and(|driver| driver.arm(until))
    }

    fn end_block(&mut self) {
        if let Some(driver) = &mut self.driver {
            driver.end_block();
        }
    }

    fn next_timer(&self) -> u64 {
        self.driver.as_ref().map_or(u64::MAX, Driver::next_timer)
    }

    fn poll_every(&self) -> Option<Duration> {
        self.driver.as_ref().and_then(Driver::poll_every)
    }

    fn has_ended(&self, request: u64) -> bool {
        let slot = SlotId::from_bits(request);
        self.driver.as_ref().is_none_or(|driver| driver.has_ended(slot))
    }
}

impl Seat {
    /// Makes and starts a request.
    #[inline]
    pub(super) fn start(&mut self, new: NewRequest<'_>) {
        match &mut self.driver {
            Some(driver) => driver.start(new.slot, new.session, || Request::new(new)),
            None => self.refuse(new.slot),
        }
    }

    /// Fails a transfer that was submitted while the shard has no driver.
    #[cold]
    fn refuse(&self, slot: SlotId) {
        if let Some(endpoint) = self.endpoint.upgrade() {
            let reason = Reason::Failed(TransferError::EndpointClosed);
            endpoint.slots.end(slot, Ended { reason, fence: Fence::Held });
        }
    }
}
