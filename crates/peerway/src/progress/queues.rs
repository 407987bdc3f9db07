//! The driver's handling of queue pairs: it posts parts of requests, processes completions, and
//! drains and replaces failed queue pairs.
//!
//! A request whose memory is all registered is cut into *parts*: lists of work requests that go to
//! one queue pair with one doorbell. The completion of a part answers it, without the peer's CPU.
//!
//! The signal follows the bytes on the same queue pair if that queue pair keeps the order and
//! carried all of them. Otherwise the driver first *flushes* each queue pair that carried any: a
//! read of the peer's memory completes only after the writes before it. GPU memory that does not
//! order such writes is always read itself before its bytes are reported as complete.
//!
//! New queue pairs are created and connected in another thread, one for each session at a time,
//! because that may block. Only the end of a used queue pair runs in the driver: the fences of its
//! requests depend on it, and no device waits for a peer there.

use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::Ordering;
use std::time::Duration;

use peerway_core::ids::SlotId;
use peerway_core::outcome::{Reason, TransferError};
use peerway_core::protocol::{Role, Route, SentFrame, lane_bit};
use peerway_core::wire::Kind;
use peerway_core::work::Cursor;

use super::driver::Driver;
use super::ending::LaneEnd;
use super::lane::Lane;
use super::port::Port;
use super::sessions::SessionDriver;
use crate::clock;
use crate::hooks;
use crate::transport::device::{
    Completed, Completion, Completions, DevicePart, DeviceWork, FlushWord, PART_REQUESTS, POLL,
    QueueEnds, Unfinished,
};

/// Polls of one completion queue before the next one has its turn.
const POLLS: usize = 4;
/// Limit of bytes in a part. It is large enough that a doorbell costs nothing, and small enough
/// that queue pairs share the load.
const PART_BYTES: u64 = 1 << 20;
/// How long the driver waits for the last completions of a failed queue pair. Devices take
/// microseconds.
const DRAIN: Duration = Duration::from_millis(500);

impl SessionDriver {
    /// Reads that the peer's device refused, and that wait for the peer's reason.
    pub(super) fn refused_reads(&self) -> Vec<SlotId> {
        let parts = self.unfinished.values().flat_map(|left| &left.parts);
        parts.filter(|part| part.read).map(|part| part.slot).collect()
    }

    /// Whether there is a queue pair that accepts parts.
    pub(super) fn has_queues(&self) -> bool {
        self.session.rdma.is_some() && self.lanes.iter().flatten().any(|lane| lane.is_queue())
    }

    /// The lane of the queue pair for small transfers, if it exists and only small parts are
    /// queued. The other lanes need no check then.
    fn only_small_parts(&self) -> Option<usize> {
        let is_it = |lane: &Option<Box<Lane>>| {
            lane.as_ref().is_some_and(|l| l.role == Role::Latency && l.draining.is_none())
        };
        if self.parts_bulk.is_empty() { self.lanes.iter().position(is_it) } else { None }
    }
}

impl Driver {
    /// Processes completions. Returns true when there were any.
    pub(super) fn look_at_ports(&mut self, now: u64) -> bool {
        if self.ports.is_empty() {
            return false;
        }
        let mut any = false;
        let mut places: Completions = [const { MaybeUninit::uninit() }; POLL];
        for at in 0..self.ports.len() {
            for _ in 0..POLLS {
                let port = &self.ports[at];
                if port.adopted == 0 || port.gone {
                    break;
                }
                let completions = match port.shared.poll(&mut places) {
                    Ok(completions) => completions,
                    Err(error) => {
                        tracing::error!(%error, "an RDMA device is lost: its poll failed");
                        self.ports[at].gone = true;
                        self.port_ended(at);
                        break;
                    }
                };
                any |= !completions.is_empty();
                for completion in completions {
                    self.dispatch(at, completion, now);
                }
                if completions.len() < POLL {
                    break;
                }
            }
        }
        any
    }

    fn dispatch(&mut self, port: usize, completion: &Completion, now: u64) {
        if let Some((index, lane)) = self.ports[port].owner(completion) {
            self.with_session(index, |driver, s| driver.completed(s, lane.into(), completion, now));
        }
    }

    pub(super) fn completed(
        &mut self,
        s: &mut SessionDriver,
        at: usize,
        completion: &Completion,
        now: u64,
    ) {
        let Some(Some(lane)) = s.lanes.get_mut(at) else { return };
        let Some(queue) = lane.wire.queue() else { return };
        match queue.complete(completion) {
            Completed::Nothing => {}
            Completed::Room => s.dirty |= lane.blocked,
            Completed::Input => {
                self.serve_lane(s, at, now);
                self.return_credits(s, at);
            }
            Completed::Immediate(id) => {
                if let Err(error) = self.count_alone(s, id) {
                    tracing::error!(%error, id, peer = %s.session.addr, "a count was lost");
                }
                self.return_credits(s, at);
            }
            Completed::Part(part) => {
                self.part_done(s, &part);
                s.dirty |= !s.has_posted_all();
            }
            Completed::Flushed(slot) => self.flushed(s, slot),
            Completed::Bound => self.window_bound(s, at),
            Completed::Failed(status) => {
                let device = queue.device_name();
                tracing::warn!(status, device, lane = at, peer = %s.session.addr, "queue pair failed");
                let error = io::Error::other(status.clone());
                self.lane_ended(s, at, LaneEnd::Broken(error));
            }
            Completed::Drained => {
                let error = io::Error::other("the queue pair was shut down");
                self.lane_ended(s, at, LaneEnd::Broken(error));
            }
        }
    }

    fn return_credits(&mut self, s: &mut SessionDriver, at: usize) {
        let Some(Some(lane)) = s.lanes.get_mut(at) else { return };
        let Some(queue) = lane.wire.queue() else { return };
        if let Err(error) = queue.return_credits() {
            self.lane_ended(s, at, LaneEnd::Broken(error));
        }
    }

    /// Accounts for a completed part.
    fn part_done(&mut self, s: &mut SessionDriver, part: &DevicePart) {
        let bytes = part.part.left();
        let stats = &s.session.stats;
        let counter = if part.read { &stats.one_sided_read } else { &stats.one_sided_written };
        counter.fetch_add(bytes, Ordering::Relaxed);
        let Some(request) = self.request(part.slot) else { return };
        request.state.part_answered();
        self.endpoint.slots.slot(part.slot).done.fetch_add(bytes, Ordering::Relaxed);
        self.settle(s, part.slot);
    }

    fn flushed(&mut self, s: &mut SessionDriver, slot: SlotId) {
        if let Some(request) = self.request(slot) {
            request.state.flush_answered();
            self.settle(s, slot);
        }
    }

    /// Posts the first part of a small request, which is mostly all of it. Returns false when the
    /// request must queue, because other parts are waiting or its queue pair has no room.
    pub(super) fn post_at_once(&mut self, s: &mut SessionDriver, slot: SlotId) -> bool {
        if !s.has_posted_all() {
            return false;
        }
        let Some(at) = s.only_small_parts() else { return false };
        let Some(posted) = s.lanes[at].as_mut().and_then(|lane| self.post_part(lane, slot)) else {
            let ends = s.lanes[at].as_ref().and_then(|lane| lane.ends);
            self.without_key(s, ends, slot);
            return false;
        };
        if let Err(error) = posted {
            self.lane_ended(s, at, LaneEnd::Broken(error));
        }
        if let Some(request) = self.request(slot) {
            request.queued = request.state.has_more();
            if request.queued {
                self.enqueue(s, slot);
                s.dirty = true;
            }
        }
        true
    }

    /// Posts parts of the queued requests, one to each queue pair per round. Returns true when any
    /// were posted.
    pub(super) fn post_parts(&mut self, s: &mut SessionDriver, rounds: usize) -> bool {
        let mut any = false;
        for _ in 0..rounds {
            if s.has_posted_all() {
                break;
            }
            let posted = match s.only_small_parts() {
                Some(at) => self.post_one(s, at),
                None if s.has_queues() => self.post_round(s),
                None => {
                    self.without_queues(s);
                    false
                }
            };
            any |= posted;
            if !posted {
                break;
            }
        }
        any
    }

    /// Posts a part to each queue pair that has room. Returns true when any were posted.
    fn post_round(&mut self, s: &mut SessionDriver) -> bool {
        let mut posted = false;
        for step in 0..s.lanes.len() {
            let at = (s.next_queue + step) % s.lanes.len();
            posted |= self.post_one(s, at);
        }
        s.next_queue = (s.next_queue + 1) % s.lanes.len();
        posted
    }

    /// Without queue pairs, frames carry the queued requests, unless the transport is pinned to
    /// RDMA.
    fn without_queues(&mut self, s: &mut SessionDriver) {
        if s.session.rdma.as_ref().is_some_and(|rdma| rdma.pinned) {
            return;
        }
        s.latency.append(&mut s.parts_latency);
        s.bulk.append(&mut s.parts_bulk);
        s.dirty = true;
    }

    fn post_one(&mut self, s: &mut SessionDriver, at: usize) -> bool {
        let Some(mut lane) = s.lanes[at].take_if(|lane| lane.is_queue()) else { return false };
        let has_room = lane.wire.queue().is_some_and(|queue| queue.has_room());
        let posted = has_room.then(|| self.post_next(s, &mut lane));
        s.lanes[at] = Some(lane);
        match posted {
            Some(Ok(posted)) => posted,
            Some(Err(error)) => {
                self.lane_ended(s, at, LaneEnd::Broken(error));
                false
            }
            None => false,
        }
    }

    /// Posts a part of the next queued request on this lane.
    fn post_next(&mut self, s: &mut SessionDriver, lane: &mut Lane) -> io::Result<bool> {
        loop {
            let is_small = !s.parts_latency.is_empty();
            let from_latency =
                is_small && (lane.role == Role::Latency || s.serves(lane.role).latency);
            let queue = if from_latency {
                &mut s.parts_latency
            } else if !s.parts_bulk.is_empty() && s.serves(lane.role).bulk {
                &mut s.parts_bulk
            } else {
                return Ok(false);
            };
            let Some(slot) = queue.pop_front() else { return Ok(false) };
            let Some(request) = self.request(slot) else { continue };
            if !request.state.has_more() {
                request.queued = false;
                continue;
            }
            let posted = self.post_part(lane, slot);
            if let Some(request) = self.request(slot) {
                request.queued = request.state.has_more();
                if request.queued {
                    let queue = if from_latency { &mut s.parts_latency } else { &mut s.parts_bulk };
                    queue.push_back(slot);
                }
            }
            if posted.is_none() {
                self.without_key(s, lane.ends, slot);
            }
            return posted.map_or(Ok(false), |posted| posted.map(|()| true));
        }
    }

    /// Posts the next part of a request. Returns `None` when the lane's queue pair has no room.
    fn post_part(&mut self, lane: &mut Lane, slot: SlotId) -> Option<io::Result<()>> {
        let QueueEnds { device, key_index, is_unordered } = lane.ends?;
        let queue = lane.wire.queue().filter(|queue| queue.has_room())?;
        let request = self.requests.get_mut(slot)?;
        let work = request.work.as_ref()?;
        let cut = request.state.begin_cut();
        let mut at = cut.start;
        let read = request.state.route() == Route::Read;
        let max = request.piece.min(PART_BYTES);
        hooks::about_to_copy();
        let mut list = [const { MaybeUninit::uninit() }; PART_REQUESTS];
        let (mut requests, mut total) = (0, 0u64);
        while requests < PART_REQUESTS
            && at.left() > 0
            && let Some(pair) = work.shape.peek(&at, max - total)
        {
            let remote = work.remote(&pair.remote);
            let (registered, rkey) = (work.local_keys(&pair.local), remote.keys.get(key_index));
            let (Some(registered), 1..) = (registered, rkey) else {
                // The part must not be lost, so restore the cursor.
                request.state.end_cut(cut, cut.start);
                // The owner has not sent the key for this queue pair yet: see `without_key`.
                if registered.is_some() {
                    return None;
                }
                // The post of the transfer checked this.
                let error = io::Error::other("the memory has no key for the RDMA device");
                return Some(Err(error));
            };
            list[requests].write(DeviceWork {
                local: work.local_addr(&pair.local) as u64,
                local_key: registered.keys[device],
                len: pair.len as u32,
                remote: remote.base + pair.remote.offset,
                remote_key: rkey,
                of_host: registered.of_host,
            });
            requests += 1;
            total += pair.len;
            work.shape.advance(&mut at, pair.len);
        }
        let part = request.state.end_cut(cut, at);
        let can_count = || !is_unordered && queue.has_credit();
        let counts = request.state.part_made(lane.index, can_count);
        let sent_at = &self.endpoint.slots.slot(slot).sent_at;
        if sent_at.load(Ordering::Relaxed) == 0 {
            sent_at.store(self.now.max(request.posted), Ordering::Relaxed);
        }
        let part = DevicePart { slot, part, read, immediate: None, failed: None };
        // SAFETY: the loop has written the first `requests` entries. The request keeps its work,
        // and so the memory with its registrations, until the part is answered or the queue is
        // gone.
        Some(unsafe { queue.post_part(list[..requests].assume_init_ref(), part, counts) })
    }

    /// Flushes every queue pair that carried parts of a request. Returns true when there are any to
    /// wait for.
    pub(super) fn flush_queues(&mut self, s: &mut SessionDriver, slot: SlotId) -> bool {
        let Some(request) = self.request(slot) else { return false };
        let Some(used) = request.state.begin_flush() else { return false };
        let work = if request.state.is_unordered() { request.work.clone() } else { None };
        let next = s.latency_lane().map(|lane| lane.index);
        let mut asked = 0;
        for at in 0..s.lanes.len() {
            let Some(lane) = s.lanes[at].as_mut().filter(|_| used & lane_bit(at as u16) != 0)
            else {
                continue;
            };
            if !lane.is_queue() {
                continue;
            }
            let (index, ends) = (lane.index, lane.ends);
            let (Some(ends), Some(queue)) = (ends, lane.wire.queue()) else { continue };
            // The signal goes by this queue pair, behind the bytes.
            if !ends.is_unordered && Some(index) == next && work.is_none() {
                continue;
            }
            // Count it even if the post fails: `unfinished` then reports the flush with the rest of
            // the queue pair's work.
            asked += 1;
            let words = work.iter().flat_map(|work| work.words(ends.key_index));
            let words: Vec<FlushWord> = words.collect();
            if let Err(error) = queue.post_flush(slot, &words) {
                self.lane_ended(s, at, LaneEnd::Broken(error));
            }
        }
        if let Some(request) = self.request(slot) {
            request.state.flushes_posted(asked);
        }
        asked > 0
    }

    /// Shuts down the queue pair of a lane that ends. Returns true while the lane must wait for the
    /// queue pair to drain, before which its parts cannot be answered.
    pub(super) fn drain_first(&mut self, s: &mut SessionDriver, lane: &mut Lane) -> bool {
        let Some(queue) = lane.wire.queue() else { return false };
        let now = clock::now();
        queue.shut();
        if queue.is_drained() {
            return false;
        }
        let until = *lane.draining.get_or_insert_with(|| clock::after(now, DRAIN));
        self.set_timer(s, until);
        now < until
    }

    /// Destroys a drained queue pair. Its unfinished parts are repeated, or wait for the peer's
    /// answer.
    pub(super) fn queue_ended(&mut self, s: &mut SessionDriver, mut lane: Box<Lane>) {
        self.forget_queue(&mut lane);
        let Some(queue) = lane.wire.queue() else { return };
        let mut left = queue.unfinished();
        let index = lane.index;
        s.session.imports.lane_lost(index);
        // From here on the device does not touch the request's memory.
        drop(lane);
        let reads: Vec<DevicePart> = left.parts.extract_if(.., |part| part.read).collect();
        let mut again = Vec::new();
        for part in reads {
            let goes_on = self.request(part.slot).is_some_and(|request| !request.state.is_ending());
            if part.failed == Some(TransferError::Revoked) && goes_on {
                // A device refuses access to revoked memory, and to the memory of a dying peer. The
                // peer's answer, or its end, tells which. Send nothing more meanwhile.
                self.stop(s, part.slot, Reason::Failed(TransferError::Revoked), clock::now());
                left.parts.push(part);
            } else {
                again.push(part);
            }
        }
        s.unfinished.insert(index, left);
        for part in again {
            self.again(s, part);
        }
    }

    /// The peer reports that its end of a lost queue pair is gone, and how many immediates had
    /// arrived by it.
    pub(super) fn replan_parts(&mut self, s: &mut SessionDriver, lane: u16, immediates: u64) {
        let Some(Unfinished { parts, flushes }) = s.unfinished.remove(&lane) else { return };
        // An immediate that arrived proves that all earlier writes on the same queue pair arrived,
        // because it keeps the order. Repeating them would change memory that the peer has already
        // been notified about.
        let came = |part: &DevicePart| part.immediate.is_some_and(|number| number <= immediates);
        let proven = parts.iter().rposition(came).map_or(0, |last| last + 1);
        for (at, part) in parts.into_iter().enumerate() {
            if at < proven {
                self.part_done(s, &part);
            } else {
                self.again(s, part);
            }
        }
        for slot in flushes {
            self.flushed(s, slot);
        }
        s.reopening.soon(clock::now());
        self.set_timer(s, clock::now());
    }

    /// Repeats a part that a queue pair did not finish, unless the part itself caused the failure.
    fn again(&mut self, s: &mut SessionDriver, part: DevicePart) {
        let Some(request) = self.request(part.slot) else { return };
        request.state.part_lost();
        match part.failed {
            Some(error) => self.answered(s, entry(&part), Err(error)),
            None => self.repeat(s, part.slot, part.part),
        }
    }

    /// Stops the queue pairs that still work on a cancelled read after its fence timeout.
    pub(super) fn sever(&mut self, s: &mut SessionDriver, slot: SlotId, now: u64) {
        tracing::debug!(peer = %s.session.addr, now, "stopping queue pairs for a cancelled read");
        for at in 0..s.lanes.len() {
            let Some(lane) = s.lanes[at].as_mut().filter(|lane| lane.draining.is_none()) else {
                continue;
            };
            if lane.wire.queue().is_some_and(|queue| queue.has_part(slot)) {
                let error = io::Error::other("a cancelled read did not finish in time");
                self.lane_ended(s, at, LaneEnd::Broken(error));
            }
        }
        // Reads that only wait for the peer's answer touch no memory any more.
        let waits = |part: &mut DevicePart| part.read && part.slot == slot;
        let left = s.unfinished.values_mut();
        let waiting: Vec<DevicePart> =
            left.flat_map(|left| left.parts.extract_if(.., waits)).collect();
        for part in waiting {
            self.again(s, part);
        }
    }

    /// Unregisters the lane's queue pair: its completions have no owner from now on.
    pub(super) fn forget_queue(&mut self, lane: &mut Lane) {
        if let Some(queue) = lane.wire.queue() {
            self.ports[queue.device()].forget(queue.key());
        }
    }

    /// A completion queue has failed: every queue pair on it is lost.
    fn port_ended(&mut self, port: usize) {
        for index in 0..self.sessions.len() {
            self.with_session(index, |driver, s| {
                for at in 0..s.lanes.len() {
                    let queue = s.lanes[at].as_mut().and_then(|lane| lane.wire.queue());
                    if queue.is_some_and(|queue| queue.device() == port) {
                        let error = io::Error::other("the RDMA device is lost");
                        driver.lane_ended(s, at, LaneEnd::Broken(error));
                    }
                }
            });
        }
    }

    /// Consumes the events of a completion queue that epoll reported. The driver polls the queue in
    /// the same turn.
    pub(super) fn take_port_event(&mut self, port: usize) {
        let Some(port) = self.ports.get_mut(port) else { return };
        if port.shared.take_events() {
            port.armed = false;
            self.unarmed = true;
        }
    }

    /// Arms each completion queue, so that its next completion generates an event. Returns true
    /// when there are completions already.
    pub(super) fn arm_ports(&mut self) -> bool {
        let mut armed = false;
        let unarmed = |port: &&mut Port| port.adopted > 0 && !port.armed && !port.gone;
        for port in self.ports.iter_mut().filter(unarmed) {
            port.armed = port.shared.arm();
            armed = true;
        }
        // Completions from before the arming generate no event, so poll once more.
        armed && self.look_at_ports(clock::now())
    }

    /// Assigns the completions of a session's queue pairs to the session. Returns those that
    /// arrived before.
    pub(super) fn adopt_queues(&mut self, s: &mut SessionDriver) -> Vec<(usize, Completion)> {
        let mut early = Vec::new();
        for lane in s.lanes.iter_mut().flatten() {
            let index = lane.index;
            let Some(queue) = lane.wire.queue() else { continue };
            let port = queue.device();
            let came = self.ports[port].adopt(queue.key(), s.index, index);
            early.extend(came.into_iter().map(|completion| (port, completion)));
        }
        early
    }

    /// Processes completions that arrived before their queue pair was adopted.
    pub(super) fn replay(&mut self, early: &[(usize, Completion)], now: u64) {
        for (port, completion) in early {
            self.dispatch(*port, completion, now);
        }
    }
}

fn entry(part: &DevicePart) -> SentFrame {
    let kind = if part.read { Kind::Read } else { Kind::Write };
    let (slot, part): (SlotId, Cursor) = (part.slot, part.part);
    SentFrame { kind, slot, part, window: 0, is_answered: true }
}
