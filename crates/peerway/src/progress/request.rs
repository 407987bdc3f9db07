//! A request: a transfer on lanes, with its remaining and unanswered parts, and how it ends.

use std::collections::VecDeque;
use std::sync::Arc;

use peerway_core::ids::SlotId;
use peerway_core::outcome::{Ended, Fence, Reason, TransferError};
use peerway_core::protocol::SentFrame;
use peerway_core::wire::MAX_PAYLOAD;
use peerway_core::wire::{Header, Kind};
use peerway_core::work::Cursor;
use peerway_sys::cuda::CudaError;

use super::driver::{Driver, SessionDriver};
use crate::bugs::{Bug, is_planted};
use crate::clock;
use crate::gpu::device::Device;
use crate::gpu::staging::StagedCopy;
use crate::progress::lane::{Body, Lane};
use crate::session::Session;
use crate::work::{Direction, Signal, Work};

/// See the module.
pub(crate) struct Request {
    pub(crate) slot: SlotId,
    pub(crate) session: Arc<Session>,
    pub(crate) route: Route,
    /// `None` when only a signal is sent.
    pub(crate) work: Option<Work>,
    /// The rest that is not yet in frames or parts.
    pub(crate) at: Cursor,
    /// Parts to send again, because their lane failed before the peer applied them.
    pub(crate) redo: Vec<Cursor>,
    /// Set when local memory is GPU memory: frames then carry it through pinned staging buffers.
    pub(crate) gpu: Option<Box<StagedRequest>>,
    /// Limit of bytes per frame or part.
    pub(crate) piece: u64,
    /// Whether RDMA devices can carry it out: all its memory is registered with them.
    pub(crate) by_device: bool,
    /// Parts that devices are working on. They are included in `unanswered`.
    pub(crate) parts: u32,
    /// A bit for each lane whose queue pair carried parts of it.
    pub(crate) queues: u64,
    /// Whether those queue pairs have been flushed.
    pub(crate) flushed: bool,
    pub(crate) bulk: bool,
    pub(crate) posted: u64,
    pub(crate) deadline: u64,
    pub(crate) signal: Signal,
    /// Whether the signal has been sent, with the last frame or after it.
    pub(crate) signal_sent: bool,
    /// Frames and parts that are not yet answered.
    pub(crate) unanswered: u32,
    pub(crate) queued: bool,
    /// The reason for which it will end as soon as its fence is held, and the latest time for that.
    pub(crate) ending: Option<(Reason, u64)>,
    /// Whether it has ended with an open fence. It only keeps its memory then.
    pub(crate) unfenced: bool,
}

/// The additional state of a request from or into GPU memory.
pub(crate) struct StagedRequest {
    pub(crate) device: Arc<Device>,
    /// Parts being copied out of GPU memory, in the order in which they are put into frames.
    pub(crate) fetched: VecDeque<Fetched>,
    /// Parts being copied into GPU memory. They are included in `unanswered`.
    pub(crate) puts: u32,
}

impl StagedRequest {
    pub(crate) fn new(device: Arc<Device>) -> Box<Self> {
        Box::new(Self { device, fetched: VecDeque::new(), puts: 0 })
    }
}

/// A part of a request that is being copied out of GPU memory.
pub(crate) struct Fetched {
    pub(crate) part: Cursor,
    pub(crate) staged: StagedCopy,
    pub(crate) begun: u64,
}

/// How lanes carry a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Route {
    /// Payload goes out in frames.
    Write,
    /// Payload comes back in frames.
    Read,
    /// The peer copies from our memory.
    Pull,
    /// No payload.
    SignalOnly,
}

impl Route {
    pub(crate) fn of(direction: Direction, pulls: bool) -> Self {
        match direction {
            Direction::Read => Self::Read,
            Direction::Write if pulls => Self::Pull,
            Direction::Write => Self::Write,
        }
    }
}

impl Request {
    /// A request that carries no bytes, only a signal.
    pub(crate) fn of_signal(
        slot: SlotId,
        session: Arc<Session>,
        work: Option<Work>,
        signal: Signal,
        deadline: u64,
    ) -> Self {
        Self {
            slot,
            session,
            route: Route::SignalOnly,
            work,
            at: Cursor::default(),
            redo: Vec::new(),
            gpu: None,
            piece: MAX_PAYLOAD,
            bulk: false,
            posted: clock::now(),
            deadline,
            signal,
            signal_sent: false,
            by_device: false,
            parts: 0,
            queues: 0,
            flushed: false,
            unanswered: 0,
            queued: false,
            ending: None,
            unfenced: false,
        }
    }

    /// Whether it carries no bytes, so that it can change no memory. A fence does not cover a
    /// notification that may still arrive.
    pub(crate) fn is_bare(&self) -> bool {
        self.route == Route::SignalOnly
    }

    /// Whether some of it is left to put into frames or parts.
    pub(crate) fn has_more(&self) -> bool {
        self.ending.is_none() && (self.at.left() > 0 || !self.redo.is_empty() || self.has_fetched())
    }

    /// Whether parts are being copied out of GPU memory.
    pub(crate) fn has_fetched(&self) -> bool {
        self.gpu.as_ref().is_some_and(|gpu| !gpu.fetched.is_empty())
    }

    /// Whether its outgoing bytes are fetched from a GPU first.
    pub(crate) fn is_staged(&self) -> bool {
        self.gpu.is_some() && self.route == Route::Write
    }

    /// Whether devices write peer memory in which the writes are visible only after a flush.
    pub(crate) fn writes_unordered(&self) -> bool {
        let remotes = self.work.as_ref().map_or(&[][..], |work| work.remotes.as_slice());
        self.route == Route::Write && remotes.iter().any(|remote| remote.flush)
    }

    /// Whether its RDMA writes must be flushed before they are reported as complete.
    fn must_flush(&self) -> bool {
        self.queues != 0 && !self.flushed && self.writes_unordered()
    }

    /// Makes the bytes that devices read into GPU memory visible to our GPUs.
    fn show(&self) -> Result<(), CudaError> {
        let Some(work) = self.work.as_ref().filter(|_| self.route == Route::Read) else {
            return Ok(());
        };
        let mut shown = None;
        for device in work.local_devices().filter(|device| !device.gpu.facts().rdma_ordered) {
            if self.queues != 0 && shown.replace(device.index()) != Some(device.index()) {
                device.gpu.flush_rdma_writes()?;
            }
        }
        Ok(())
    }

    /// Whether it can change no memory any more. Payload that a read still receives in frames is
    /// discarded. The driver cannot stop a device's read or a GPU's copy, so those must finish.
    pub(crate) fn is_quiet(&self) -> bool {
        self.gpu.as_ref().is_none_or(|gpu| gpu.puts == 0)
            && (self.unanswered == 0
                || (self.route == Route::Read && self.parts == 0)
                || is_planted(Bug::HeldAtOnce))
    }
}

impl Driver {
    /// The request in a slot, unless that transfer is over.
    pub(super) fn request(&mut self, slot: SlotId) -> Option<&mut Request> {
        self.requests[slot.index as usize].as_mut().filter(|f| f.slot == slot)
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
        request.unanswered -= 1;
        match entry.kind {
            Kind::Notify => request.signal.notify = None,
            Kind::Count => request.signal.count = None,
            _ => {}
        }
        match result {
            Ok(()) => {
                let done = &self.endpoint.slots.slot(entry.slot).done;
                done.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
            }
            Err(error) => {
                let until = clock::after(clock::now(), fence);
                request.ending.get_or_insert((Reason::Failed(error), until));
                self.timers.end_by(until);
            }
        }
        self.settle(s, entry.slot);
    }

    /// Ends a request if nothing is left to wait for, or queues its signal.
    pub(super) fn settle(&mut self, s: &mut SessionDriver, slot: SlotId) {
        let Some(request) = self.request(slot) else { return };
        if request.unfenced {
            if request.is_quiet() {
                self.endpoint.slots.fenced(slot);
                self.forget(slot);
            }
            return;
        }
        if let Some((reason, _)) = request.ending {
            if request.is_quiet() {
                self.end(slot, Ended { reason, fence: Fence::Held });
            }
            return;
        }
        if (request.unanswered > 0 && !is_planted(Bug::SignalEarly)) || request.has_more() {
            return;
        }
        if (request.signal.is_empty() || request.signal_sent) && !request.must_flush() {
            let shown = request.show().map_err(|error| {
                let peer = s.session.addr;
                tracing::error!(%error, %peer, "could not flush RDMA reads into GPU memory");
                Reason::Failed(TransferError::Device)
            });
            let reason = shown.map_or_else(|reason| reason, |()| Reason::Done);
            self.end(slot, Ended { reason, fence: Fence::Held });
        } else if !s.signals.contains(&slot) {
            // `after_work` sends it when every lane is in the table: one is taken out while it is
            // served.
            s.signals.push(slot);
        }
    }

    /// Sends the notification and the count that follow a transfer's bytes, all of which have been
    /// answered. The request keeps them until they are answered too, because their lane may fail.
    pub(super) fn send_signal(&mut self, s: &mut SessionDriver, slot: SlotId) {
        if self.flush_queues(s, slot) {
            return;
        }
        let nothing = self.request(slot).is_some_and(|f| f.signal.is_empty() || f.signal_sent);
        if nothing {
            // It only waited for a flush, and its queue pairs are gone.
            self.settle(s, slot);
            return;
        }
        let Some(lane) = s.latency_lane() else { return };
        let Some(request) = self.request(slot).filter(|f| f.ending.is_none()) else { return };
        request.signal_sent = true;
        if let Some(message) = &request.signal.notify {
            let mut head = Header::new(Kind::Notify);
            head.transfer = slot.to_bits().into();
            let window = message.len() as u64;
            head.sequence = lane.sent.push(Kind::Notify, slot, Cursor::default(), window).into();
            lane.push_with(head, message);
            request.unanswered += 1;
        }
        if let Some(id) = request.signal.count {
            let mut head = Header::new(Kind::Count);
            head.transfer = slot.to_bits().into();
            head.immediate = id.into();
            head.sequence = lane.sent.push(Kind::Count, slot, Cursor::default(), 0).into();
            lane.push(&head);
            request.unanswered += 1;
        }
        s.dirty = true;
    }

    /// Stops a request: the driver sends no more of it, and it ends when everything sent is
    /// answered.
    pub(super) fn stop(&mut self, s: &mut SessionDriver, slot: SlotId, reason: Reason, now: u64) {
        let until = clock::after(now, self.endpoint.config.fence);
        self.timers.end_by(until);
        let Some(request) = self.request(slot) else { return };
        if request.ending.is_some() || request.unfenced {
            return;
        }
        request.ending = Some((reason, until));
        // `clear` waits for the copies. After that the memory belongs to the caller again.
        request.gpu.iter_mut().for_each(|gpu| gpu.fetched.clear());
        let pulls = request.route == Route::Pull;
        for lane in s.lanes.iter_mut().flatten() {
            if let Some(work) = &request.work {
                release_source(lane, slot, work);
            }
            let has_pulls = pulls && lane.sent.is_waiting_for(slot);
            if has_pulls {
                let mut cancel = Header::new(Kind::Cancel);
                cancel.transfer = slot.to_bits().into();
                // Only the answers to the pulls matter. The cancel's own answer is assigned to the
                // slot's previous generation, and so is ignored.
                let before = slot.generation.wrapping_sub(1);
                let nobody = SlotId { index: slot.index, generation: before };
                cancel.sequence = lane.sent.push(Kind::Cancel, nobody, Cursor::default(), 0).into();
                lane.push(&cancel);
                s.dirty = true;
            }
        }
        self.settle(s, slot);
    }

    /// Ends a request for the user. With an open fence the request keeps its memory.
    pub(super) fn end(&mut self, slot: SlotId, ended: Ended) {
        if ended.fence == Fence::Open {
            if let Some(request) = self.request(slot) {
                request.unfenced = true;
            }
        } else {
            self.forget(slot);
        }
        self.endpoint.slots.end(slot, ended);
    }

    /// Drops the request and the memory it kept.
    pub(super) fn forget(&mut self, slot: SlotId) {
        self.requests[slot.index as usize] = None;
        if let Some(at) = self.active.iter().position(|s| *s == slot) {
            self.active.swap_remove(at);
        }
    }
}

/// Moves the rest of a half-sent frame into a private copy, so that the transfer's memory belongs
/// to the caller again. The frame must be finished, or the lane is lost.
pub(super) fn release_source(lane: &mut Lane, slot: SlotId, work: &Work) {
    let Some(frame) = &mut lane.frame else { return };
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
