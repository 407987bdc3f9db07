//! A request: a transfer on lanes, with its remaining and unanswered parts, and how it ends.

use std::collections::VecDeque;
use std::sync::Arc;

use peerway_core::ids::SlotId;
use peerway_core::outcome::{Ended, Reason, TransferError};
use peerway_core::protocol::{Effect, RequestState, Route, SentFrame};
use peerway_core::wire::{Header, Kind, MAX_PAYLOAD};
use peerway_core::work::Cursor;
use peerway_sys::cuda::CudaError;

use super::driver::Driver;
use super::lane::Lane;
use super::sessions::SessionDriver;
use super::transmit::Body;
use crate::bugs;
use crate::clock;
use crate::gpu::device::Device;
use crate::gpu::staging::StagedCopy;
use crate::session::Session;
use crate::work::{Direction, Signal, Work};

/// See the module.
pub(crate) struct Request {
    pub(crate) slot: SlotId,
    pub(crate) session: Arc<Session>,
    /// `None` when only a signal is sent.
    pub(crate) work: Option<Work>,
    /// Set when local memory is GPU memory: frames then carry it through pinned staging buffers.
    pub(crate) gpu: Option<Box<StagedRequest>>,
    /// The message of its notification.
    pub(crate) message: Option<Arc<[u8]>>,
    /// Limit of bytes per frame or part.
    pub(crate) piece: u64,
    /// Whether devices can carry it out: all its memory is registered with them.
    pub(crate) by_device: bool,
    pub(crate) bulk: bool,
    pub(crate) posted: u64,
    pub(crate) deadline: u64,
    pub(crate) queued: bool,
    pub(crate) state: RequestState,
}

/// The requests of a driver, by the slots of their transfers.
pub(crate) struct Requests {
    table: Box<[Option<Request>]>,
    active: Vec<SlotId>,
}

impl Requests {
    pub(super) fn new(slots: usize) -> Self {
        let table = (0..slots).map(|_| None).collect();
        Self { table, active: Vec::with_capacity(slots) }
    }

    /// Puts a request into its slot. `request` builds it there, because moving it costs more than
    /// building it.
    #[inline(always)]
    pub(super) fn insert(
        &mut self,
        slot: SlotId,
        request: impl FnOnce() -> Request,
    ) -> &mut Request {
        self.active.push(slot);
        self.table[slot.index as usize].insert(request())
    }

    /// The request in a slot, unless that transfer is over.
    #[inline]
    pub(super) fn get(&self, slot: SlotId) -> Option<&Request> {
        self.table[slot.index as usize].as_ref().filter(|request| request.slot == slot)
    }

    /// As [`Self::get`], to change it.
    #[inline]
    pub(super) fn get_mut(&mut self, slot: SlotId) -> Option<&mut Request> {
        self.table[slot.index as usize].as_mut().filter(|request| request.slot == slot)
    }

    /// Drops a request.
    #[inline]
    pub(super) fn remove(&mut self, slot: SlotId) {
        self.table[slot.index as usize] = None;
        if let Some(at) = self.active.iter().position(|active| *active == slot) {
            self.active.swap_remove(at);
        }
    }

    /// The slots of all requests. [`Self::remove`] moves the last one into the place of another.
    pub(super) fn slots(&self) -> &[SlotId] {
        &self.active
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Request> {
        self.active.iter().filter_map(|slot| self.get(*slot))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Request> {
        self.table.iter_mut().flatten()
    }

    /// The slots of a session's requests.
    pub(super) fn of(&self, session: &Arc<Session>) -> Vec<SlotId> {
        let its = self.iter().filter(|request| Arc::ptr_eq(&request.session, session));
        its.map(|request| request.slot).collect()
    }
}

/// The additional state of a request from or into GPU memory.
pub(crate) struct StagedRequest {
    pub(crate) device: Arc<Device>,
    /// Parts being copied out of GPU memory, in the order in which they are put into frames.
    pub(crate) fetched: VecDeque<Fetched>,
}

impl StagedRequest {
    pub(crate) fn new(device: Arc<Device>) -> Box<Self> {
        Box::new(Self { device, fetched: VecDeque::new() })
    }
}

/// A part of a request that is being copied out of GPU memory.
pub(crate) struct Fetched {
    pub(crate) part: Cursor,
    pub(crate) staged: StagedCopy,
    pub(crate) begun: u64,
}

/// The route of a transfer on lanes.
pub(crate) fn route_of(direction: Direction, pulls: bool) -> Route {
    match direction {
        Direction::Read => Route::Read,
        Direction::Write if pulls => Route::Pull,
        Direction::Write => Route::Write,
    }
}

/// A request that is about to be made. It borrows from the posting call, so that the request is
/// built once, in its place in the driver's table.
pub(crate) struct NewRequest<'a> {
    pub(crate) slot: SlotId,
    pub(crate) session: &'a Arc<Session>,
    pub(crate) route: Route,
    pub(crate) work: Option<&'a Work>,
    pub(crate) signal: &'a Signal,
    /// The GPU through whose staging buffers frames carry local memory.
    pub(crate) staged_by: Option<Arc<Device>>,
    pub(crate) piece: u64,
    pub(crate) by_device: bool,
    pub(crate) bulk: bool,
    /// Whether device writes to the peer's memory become visible only after a flush.
    pub(crate) is_unordered: bool,
    pub(crate) posted: u64,
    pub(crate) deadline: u64,
}

impl<'a> NewRequest<'a> {
    /// A request that carries no bytes, only a signal. It keeps `work` until the signal is
    /// answered.
    pub(crate) fn of_signal(
        slot: SlotId,
        session: &'a Arc<Session>,
        work: Option<&'a Work>,
        signal: &'a Signal,
        deadline: u64,
    ) -> Self {
        Self {
            slot,
            session,
            route: Route::SignalOnly,
            work,
            signal,
            staged_by: None,
            piece: MAX_PAYLOAD,
            by_device: false,
            bulk: false,
            is_unordered: false,
            posted: clock::now(),
            deadline,
        }
    }
}

impl Request {
    /// Makes the request. Inline, because a call would build it elsewhere and copy it.
    #[inline(always)]
    pub(crate) fn new(new: NewRequest<'_>) -> Self {
        let start = match new.work {
            Some(work) if new.route != Route::SignalOnly => work.shape.start(),
            _ => Cursor::default(),
        };
        Self {
            slot: new.slot,
            session: new.session.clone(),
            work: new.work.cloned(),
            gpu: new.staged_by.map(StagedRequest::new),
            message: new.signal.notify.clone(),
            piece: new.piece,
            by_device: new.by_device,
            bulk: new.bulk,
            posted: new.posted,
            deadline: new.deadline,
            queued: false,
            state: RequestState::new(new.route, start, new.signal.due(), new.is_unordered),
        }
    }

    /// Whether its outgoing bytes are fetched from a GPU first.
    pub(crate) fn is_staged(&self) -> bool {
        self.gpu.is_some() && self.state.route() == Route::Write
    }

    /// Makes the bytes that devices read into GPU memory visible to our GPUs.
    #[inline]
    fn show(&self) -> Result<(), CudaError> {
        let by_devices = self.state.is_by_devices() && self.state.route() == Route::Read;
        match self.work.as_ref().filter(|_| by_devices) {
            Some(work) => show_reads(work),
            None => Ok(()),
        }
    }
}

fn show_reads(work: &Work) -> Result<(), CudaError> {
    let mut shown = None;
    for device in work.local_devices().filter(|device| !device.gpu.facts().rdma_ordered) {
        if shown.replace(device.index()) != Some(device.index()) {
            device.gpu.flush_rdma_writes()?;
        }
    }
    Ok(())
}

impl Driver {
    /// The request in a slot, unless that transfer is over.
    pub(super) fn request(&mut self, slot: SlotId) -> Option<&mut Request> {
        self.requests.get_mut(slot)
    }

    /// Handles the answer to a frame of a transfer.
    pub(super) fn answered(
        &mut self,
        s: &mut SessionDriver,
        entry: SentFrame,
        result: Result<(), TransferError>,
    ) {
        let bytes = entry.part.left();
        let fence = self.endpoint.config.fence;
        let Some(request) = self.request(entry.slot) else { return };
        request.state.answered(entry.kind);
        match result {
            Ok(()) => {
                let done = &self.endpoint.slots.slot(entry.slot).done;
                done.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
            }
            Err(error) => {
                let until = clock::after(clock::now(), fence);
                request.state.fail(error, until);
                self.timers.end_by(until);
            }
        }
        self.settle(s, entry.slot);
    }

    /// Queues a part of a request to be sent again.
    pub(super) fn repeat(&mut self, s: &mut SessionDriver, slot: SlotId, part: Cursor) {
        let Some(request) = self.request(slot) else { return };
        if request.state.repeat(part) {
            if !request.queued {
                request.queued = true;
                self.enqueue(s, slot);
            }
            s.dirty = true;
        }
        self.settle(s, slot);
    }

    /// Ends a request if nothing is left to wait for, or queues its signal.
    #[inline(always)]
    pub(super) fn settle(&mut self, s: &mut SessionDriver, slot: SlotId) {
        let Some(request) = self.request(slot) else { return };
        let effect = bugs::distort(request.state.settle(), &request.state);
        self.apply(s, slot, effect);
    }

    /// Carries out what follows from an event.
    #[inline]
    pub(super) fn apply(&mut self, s: &mut SessionDriver, slot: SlotId, effect: Effect) {
        match effect {
            Effect::Wait => {}
            Effect::Finish(Ended::DONE) => self.end_done(s, slot),
            Effect::Finish(ended) => self.end(slot, ended),
            Effect::Signal => {
                if !s.signals.contains(&slot) {
                    // `after_work` sends it when every lane is in the table: one is taken out while
                    // it is served.
                    s.signals.push(slot);
                }
            }
            Effect::Fenced => {
                self.endpoint.slots.fenced(slot);
                self.requests.remove(slot);
            }
            Effect::GivenUp(ended) => {
                if let Some(ended) = ended {
                    self.endpoint.slots.end(slot, ended);
                }
                self.endpoint.slots.unfenced_for_good(slot);
                self.requests.remove(slot);
            }
        }
    }

    /// Ends a request of which every byte is in place.
    fn end_done(&mut self, s: &mut SessionDriver, slot: SlotId) {
        let Some(request) = self.request(slot) else { return };
        let mut ended = Ended::DONE;
        if let Err(error) = request.show() {
            let peer = s.session.addr;
            tracing::error!(%error, %peer, "could not flush RDMA reads into GPU memory");
            ended.reason = Reason::Failed(TransferError::Device);
        }
        self.requests.remove(slot);
        self.endpoint.slots.end(slot, ended);
    }

    /// Sends the notification and the count that follow a transfer's bytes, all of which have been
    /// answered. The request keeps them until they are answered too, because their lane may fail.
    pub(super) fn send_signal(&mut self, s: &mut SessionDriver, slot: SlotId) {
        if self.flush_queues(s, slot) {
            return;
        }
        if self.request(slot).is_some_and(|request| request.state.is_signalled()) {
            // It only waited for a flush, and its devices are gone.
            self.settle(s, slot);
            return;
        }
        let totals = s.session.stats.one_sided();
        let Some(lane) = s.latency_lane() else { return };
        let Some(request) = self.request(slot) else { return };
        let Some(due) = request.state.take_signal() else { return };
        if due.notify {
            let message = request.message.as_deref().unwrap_or_default();
            let window = message.len() as u64;
            let sequence = lane.sent.push(Kind::Notify, slot, Cursor::default(), window);
            lane.push_with(Header::notify(sequence, slot.to_bits(), totals), message);
        }
        if let Some(id) = due.count {
            let sequence = lane.sent.push(Kind::Count, slot, Cursor::default(), 0);
            lane.push(&Header::count(sequence, slot.to_bits(), id, totals));
        }
        s.dirty = true;
    }

    /// Stops a request: the driver sends no more of it, and it ends when everything sent is
    /// answered.
    pub(super) fn stop(&mut self, s: &mut SessionDriver, slot: SlotId, reason: Reason, now: u64) {
        let until = clock::after(now, self.endpoint.config.fence);
        self.timers.end_by(until);
        let Some(request) = self.request(slot) else { return };
        if !request.state.stop(reason, until) {
            return;
        }
        // `clear` waits for the copies. After that the memory belongs to the caller again.
        request.gpu.iter_mut().for_each(|gpu| gpu.fetched.clear());
        let pulls = request.state.route() == Route::Pull;
        for lane in s.lanes.iter_mut().flatten() {
            if let Some(work) = &request.work {
                release_source(lane, slot, work);
            }
            let has_pulls = pulls && lane.sent.is_waiting_for(slot);
            if has_pulls {
                // Only the answers to the pulls matter. The cancel's own answer is assigned to the
                // slot's previous generation, and so is ignored.
                let before = slot.generation.wrapping_sub(1);
                let nobody = SlotId { index: slot.index, generation: before };
                let sequence = lane.sent.push(Kind::Cancel, nobody, Cursor::default(), 0);
                lane.push(&Header::cancel(sequence, slot.to_bits()));
                s.dirty = true;
            }
        }
        self.settle(s, slot);
    }

    /// Ends a request for the user. With an open fence the request keeps its memory.
    pub(super) fn end(&mut self, slot: SlotId, ended: Ended) {
        if self.request(slot).is_some_and(|request| request.state.finish(ended)) {
            self.requests.remove(slot);
        }
        self.endpoint.slots.end(slot, ended);
    }
}

/// Moves the rest of a half-sent frame into a private copy, so that the transfer's memory belongs
/// to the caller again. The frame must be finished, or the lane is lost.
pub(super) fn release_source(lane: &mut Lane, slot: SlotId, work: &Work) {
    let Some(frame) = &mut lane.tx.frame else { return };
    let Body::Request { slot: of, at } = &mut frame.body else { return };
    if *of != slot {
        return;
    }
    let mut bytes = Vec::with_capacity(frame.left as usize);
    while let Some(pair) = work.next(at, u64::MAX) {
        let from = work.local_addr(&pair.local);
        // SAFETY: the shape was checked against the local regions, which `work` keeps alive.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(from, pair.len as usize) });
    }
    frame.body = Body::Bytes { bytes, done: 0 };
}
