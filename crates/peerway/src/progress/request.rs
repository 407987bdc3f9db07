//! A transfer on lanes: what is left of it, what is unanswered, and how it ends.

use std::collections::VecDeque;
use std::sync::Arc;

use peerway_core::ids::SlotId;
use peerway_core::outcome::{Ended, Fence, Reason, TransferError};
use peerway_core::wire::{Header, Kind};
use peerway_core::work::Cursor;
use peerway_sys::cuda::CudaError;

use super::driver::{Driver, SessionDriver};
use crate::batch::{Direction, Signal, Work};
use crate::clock;
use crate::gpu::device::Device;
use crate::gpu::staging::StagedCopy;
use crate::session::Session;
use crate::transport::lane::{Body, Lane, Outstanding};

/// See the module.
pub(crate) struct Request {
    pub(crate) slot: SlotId,
    pub(crate) session: Arc<Session>,
    pub(crate) route: Route,
    /// `None` when only a notification or a count is sent.
    pub(crate) work: Option<Work>,
    /// Not yet put into frames.
    pub(crate) at: Cursor,
    /// Parts whose lane died before they were applied.
    pub(crate) redo: Vec<Cursor>,
    /// Local memory is a GPU's: the processor sends and receives it through pinned buffers.
    pub(crate) gpu: Option<Box<StagedRequest>>,
    /// Bytes of a frame or a part.
    pub(crate) piece: u64,
    /// RDMA devices can carry it out: all its memory is registered with them.
    pub(crate) by_device: bool,
    /// Parts that devices are at work on. They are among `unanswered`.
    pub(crate) parts: u32,
    /// The lanes whose queue pairs had parts of it, a bit each.
    pub(crate) queues: u64,
    /// Those queue pairs have been asked whether everything has arrived.
    pub(crate) flushed: bool,
    pub(crate) bulk: bool,
    pub(crate) posted: u64,
    pub(crate) deadline: u64,
    pub(crate) signal: Signal,
    /// The last frame took the signal along.
    pub(crate) signal_sent: bool,
    /// Frames that have not been answered.
    pub(crate) unanswered: u32,
    pub(crate) queued: bool,
    /// It will end for this reason as soon as its fence is held, and at this time at the latest.
    pub(crate) ending: Option<(Reason, u64)>,
    /// It has ended with an open fence; only its memory is still kept.
    pub(crate) unfenced: bool,
}

/// What a request from or into GPU memory has more than others.
pub(crate) struct StagedRequest {
    pub(crate) device: Arc<Device>,
    /// Parts on their way out of GPU memory, in the order in which they are put into frames.
    pub(crate) fetched: VecDeque<Fetched>,
    /// Parts on their way into GPU memory. They are among `unanswered`.
    pub(crate) puts: u32,
}

impl StagedRequest {
    pub(crate) fn new(device: Arc<Device>) -> Box<Self> {
        Box::new(Self { device, fetched: VecDeque::new(), puts: 0 })
    }
}

/// A part of a request on its way out of GPU memory.
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
    /// Whether it carries no bytes, so that none of it can change memory whatever the peer does: a notification that may still come is
    /// no fence's affair.
    pub(crate) fn is_bare(&self) -> bool {
        self.route == Route::SignalOnly
    }

    /// Whether something is left to put into frames.
    pub(crate) fn has_more(&self) -> bool {
        self.ending.is_none() && (self.at.left() > 0 || !self.redo.is_empty() || self.has_fetched())
    }

    /// Whether parts are on their way out of GPU memory.
    pub(crate) fn has_fetched(&self) -> bool {
        self.gpu.as_ref().is_some_and(|gpu| !gpu.fetched.is_empty())
    }

    /// Whether what it sends is fetched from a GPU first.
    pub(crate) fn is_staged(&self) -> bool {
        self.gpu.is_some() && self.route == Route::Write
    }

    /// Whether devices write memory of the peer's that shows it only after a flush.
    pub(crate) fn writes_unordered(&self) -> bool {
        let remotes = self.work.as_ref().map_or(&[][..], |work| work.remotes.as_slice());
        self.route == Route::Write && remotes.iter().any(|remote| remote.flush)
    }

    /// Whether what devices wrote of it has to be flushed before it is said to be there.
    fn must_flush(&self) -> bool {
        self.queues != 0 && !self.flushed && self.writes_unordered()
    }

    /// Shows our GPUs what devices read into their memory.
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

    /// Whether nothing of it can change memory any more. What a read still receives in frames is thrown
    /// away; what a device reads, or a GPU copies, is not in our hands until it is done.
    pub(crate) fn is_quiet(&self) -> bool {
        self.gpu.as_ref().is_none_or(|gpu| gpu.puts == 0)
            && (self.unanswered == 0 || (self.route == Route::Read && self.parts == 0))
    }
}

impl Driver {
    /// The request of a slot, unless that transfer is over.
    pub(super) fn request(&mut self, slot: SlotId) -> Option<&mut Request> {
        self.requests[slot.index as usize].as_mut().filter(|f| f.slot == slot)
    }

    /// A frame of a transfer was answered.
    pub(super) fn answered(
        &mut self,
        s: &mut SessionDriver,
        entry: Outstanding,
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

    /// Ends a request if nothing more is to be waited for, or sends what follows its bytes.
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
        if request.unanswered > 0 || request.has_more() {
            return;
        }
        if (request.signal.is_empty() || request.signal_sent) && !request.must_flush() {
            let shown = request.show().map_err(|error| {
                let peer = s.session.addr;
                tracing::error!(%error, %peer, "what was read cannot be shown to a GPU");
                Reason::Failed(TransferError::Device)
            });
            let reason = shown.map_or_else(|reason| reason, |()| Reason::Done);
            self.end(slot, Ended { reason, fence: Fence::Held });
        } else if !s.signals.contains(&slot) {
            // Sent when every lane is in its place: one of them is out while it works.
            s.signals.push(slot);
        }
    }

    /// Sends the notification and the count that follow a transfer's bytes, which have all been
    /// answered for. Kept until they are answered for themselves: a lane may take them with it.
    pub(super) fn send_signal(&mut self, s: &mut SessionDriver, slot: SlotId) {
        if self.flush_queues(s, slot) {
            return;
        }
        let nothing = self.request(slot).is_some_and(|f| f.signal.is_empty() || f.signal_sent);
        if nothing {
            // It only waited for queue pairs to be asked, and those are gone.
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
            head.sequence = lane.remember(Kind::Notify, slot, Cursor::default(), window).into();
            lane.push_with(head, message);
            request.unanswered += 1;
        }
        if let Some(id) = request.signal.count {
            let mut head = Header::new(Kind::Count);
            head.transfer = slot.to_bits().into();
            head.immediate = id.into();
            head.sequence = lane.remember(Kind::Count, slot, Cursor::default(), 0).into();
            lane.push(&head);
            request.unanswered += 1;
        }
        s.dirty = true;
    }

    /// Stops a request: nothing more of it is put into frames, and it ends when what was sent has
    /// been answered for.
    pub(super) fn stop(&mut self, s: &mut SessionDriver, slot: SlotId, reason: Reason, now: u64) {
        let until = clock::after(now, self.endpoint.config.fence);
        self.timers.end_by(until);
        let Some(request) = self.request(slot) else { return };
        if request.ending.is_some() || request.unfenced {
            return;
        }
        request.ending = Some((reason, until));
        // Waits for the copies: the memory is the caller's again.
        request.gpu.iter_mut().for_each(|gpu| gpu.fetched.clear());
        let pulls = request.route == Route::Pull;
        for lane in s.lanes.iter_mut().flatten() {
            if let Some(work) = &request.work {
                release_source(lane, slot, work);
            }
            let has_pulls = pulls && lane.outstanding.iter().any(|e| e.slot == slot && !e.answered);
            if has_pulls {
                let mut cancel = Header::new(Kind::Cancel);
                cancel.transfer = slot.to_bits().into();
                // Its own answer is of no interest, only that of the pulls: it belongs to a transfer that is over.
                let before = slot.generation.wrapping_sub(1);
                let nobody = SlotId { index: slot.index, generation: before };
                cancel.sequence = lane.remember(Kind::Cancel, nobody, Cursor::default(), 0).into();
                lane.push(&cancel);
                s.dirty = true;
            }
        }
        self.settle(s, slot);
    }

    /// Ends a request for the user. With an open fence its memory stays ours.
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

/// A half-sent frame must be finished, or the lane is lost; it is finished from a private copy, so
/// that the transfer's memory is the caller's again.
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
