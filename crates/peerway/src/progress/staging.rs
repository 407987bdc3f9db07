//! Memory that only a GPU reaches, on lanes: through pinned buffers.
//!
//! What is sent is fetched into a buffer first, some parts ahead of the frames; what is received
//! lands in a buffer and is put into place from there. An acknowledgement waits for that, so that
//! done means there for GPU memory too. Copies are looked at once a turn; while some are under way
//! nobody sleeps for long.

use std::time::Duration;

use peerway_core::ids::SlotId;
use peerway_core::outcome::TransferError;
use peerway_core::wire::{MAX_PAYLOAD, MAX_SEGMENTS};
use peerway_core::work::Cursor;
use peerway_sys::cuda::CudaError;

use super::driver::{Driver, SessionDriver};
use super::receive::finish;
use super::request::Fetched;
use crate::batch::Work;
use crate::clock;
use crate::gpu::staging::{Buffer, StagedCopy};
use crate::hooks;
use crate::os::Piece;
use crate::transport::lane::{GpuPut, GpuPutOwner, IncomingWrite, Lane};

/// Parts fetched ahead: enough that the copies of the next ones are done when their turn comes.
const AHEAD: usize = 8;
/// How often the progress thread looks at copies that take long.
pub(super) const COPY_NAP: Duration = Duration::from_micros(20);
/// While copies were begun or done within this time, a poll counts as progress: one copy takes 30
/// µs.
const FRESH: Duration = Duration::from_micros(300);
/// A flag that has not come by then is asked about: kernels that fail raise none.
const FLAG_PATIENCE: Duration = Duration::from_micros(500);

impl Driver {
    /// Whether copies from or to GPU memory are under way.
    pub(crate) fn has_copies(&self) -> bool {
        !self.staging.is_empty()
    }

    /// Remembers a session with copies under way.
    #[inline]
    pub(super) fn note_staging(&mut self, s: &SessionDriver) {
        if s.copies && !self.staging.contains(&s.index) {
            self.staging.push(s.index);
            self.copies_moved = clock::now();
        }
    }

    /// Looks at every copy under way; true when one was done.
    pub(super) fn look_at_copies(&mut self, now: u64) -> bool {
        if self.staging.is_empty() {
            return false;
        }
        let mut progress = false;
        for index in std::mem::take(&mut self.staging) {
            self.with_session(index, |driver, s| progress |= driver.session_copies(s, now));
        }
        if progress {
            self.copies_moved = now;
        }
        let idle = Duration::from_nanos(now.saturating_sub(self.copies_moved));
        progress || (self.has_copies() && idle < FRESH)
    }

    fn session_copies(&mut self, s: &mut SessionDriver, now: u64) -> bool {
        let mut progress = false;
        s.copies = false;
        for at in 0..s.lanes.len() {
            let Some(mut lane) = s.lanes[at].take() else { continue };
            progress |= self.reap_puts(s, &mut lane, now);
            let fetches = lane.replies.front().is_some_and(|reply| reply.staged.is_some());
            s.copies |= fetches || !lane.puts.is_empty();
            s.lanes[at] = Some(lane);
        }
        for slot in &self.active {
            let request = self.requests[slot.index as usize].as_ref();
            s.copies |= request.is_some_and(|request| {
                request.has_fetched() && std::sync::Arc::ptr_eq(&request.session, &s.session)
            });
        }
        // What has been fetched may be sent.
        s.dirty |= s.copies;
        progress
    }

    fn reap_puts(&mut self, s: &mut SessionDriver, lane: &mut Lane, now: u64) -> bool {
        let mut any = false;
        while let Some(put) = lane.puts.front_mut() {
            match look(&mut put.staged, put.begun, now) {
                Ok(false) => break,
                Ok(true) => self.put_ended(s, lane, Ok(())),
                Err(error) => self.put_ended(s, lane, Err(failed(&error))),
            }
            any = true;
        }
        if any {
            lane.push_ack();
            s.dirty = true;
        }
        any
    }

    /// Waits for what a lane has received to be in its place: it is over, and must be answered for.
    pub(super) fn finish_puts(&mut self, s: &mut SessionDriver, lane: &mut Lane) {
        while let Some(put) = lane.puts.front_mut() {
            let result = put.staged.wait().map_err(|error| failed(&error));
            self.put_ended(s, lane, result);
        }
    }

    /// The lane's first put is over.
    fn put_ended(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        result: Result<(), TransferError>,
    ) {
        let Some(put) = lane.puts.pop_front() else { return };
        match &put.of {
            GpuPutOwner::Write { counts, .. } => {
                let counted = result.and_then(|()| self.count(*counts));
                if let Err(error) = counted {
                    lane.push_nack(put.sequence, error as u8);
                }
            }
            GpuPutOwner::Read { slot, .. } => {
                if let Some(gpu) = self.request(*slot).and_then(|request| request.gpu.as_mut()) {
                    gpu.puts -= 1;
                }
                match lane.sent.answer(put.sequence) {
                    Some(entry) => self.answered(s, entry, result),
                    None => self.settle(s, *slot),
                }
            }
        }
    }

    /// Has a write to GPU memory received in a buffer.
    pub(super) fn land_in_buffer(
        &mut self,
        lane: &mut Lane,
        incoming: &mut IncomingWrite,
    ) -> Result<(), TransferError> {
        let Some(device) = incoming.grant.memory.device() else { return Ok(()) };
        if incoming.left == 0 {
            return Ok(());
        }
        let buffer = Buffer::any(device).map_err(|error| failed(&error))?;
        let mut pieces = lane.spare.pop().unwrap_or_default();
        pieces.clear();
        pieces.push(Piece { addr: buffer.ptr() as u64, len: incoming.left });
        let target = std::mem::replace(&mut incoming.pieces, pieces);
        incoming.staged = Some((buffer, target));
        Ok(())
    }

    /// A write to GPU memory has been received: it is put into its place.
    pub(super) fn put_incoming(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        incoming: IncomingWrite,
        buffer: Buffer,
        target: Vec<Piece>,
    ) {
        let IncomingWrite { sequence, grant, gate, counts, .. } = incoming;
        let put = match grant.memory.device() {
            Some(device) if gate.enter() => {
                hooks::about_to_copy();
                let of = GpuPutOwner::Write { _grant: grant.clone(), gate, counts };
                // SAFETY: the pieces were checked against the grant, which the put keeps; it holds
                // the gate.
                let staged =
                    unsafe { StagedCopy::put(device, buffer, target.iter().copied(), true) };
                staged.map(|staged| (staged, of)).map_err(|error| failed(&error))
            }
            _ => Err(TransferError::Revoked),
        };
        lane.keep(target);
        match put {
            Ok((staged, of)) => {
                lane.puts.push_back(GpuPut { sequence, staged, begun: clock::now(), of });
                lane.applied.apply(sequence);
                s.copies = true;
            }
            Err(error) => finish(lane, sequence, Err(error)),
        }
    }

    /// Where the answer to a read is received, if it is into GPU memory.
    pub(super) fn fill_buffer(&mut self, slot: SlotId) -> Result<Option<Buffer>, TransferError> {
        let request = self.request(slot).filter(|request| request.ending.is_none());
        let Some(gpu) = request.and_then(|request| request.gpu.as_ref()) else { return Ok(None) };
        Buffer::any(&gpu.device).map(Some).map_err(|error| failed(&error))
    }

    /// The answer to a read has been received: it is put into its place.
    pub(super) fn put_read(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        sequence: u64,
        buffer: Buffer,
    ) {
        let Some(entry) = lane.sent.waiting(sequence).copied() else { return };
        let request = self.request(entry.slot).filter(|f| f.ending.is_none() && !f.unfenced);
        let Some((work, gpu)) = request.and_then(|f| Some((f.work.clone()?, f.gpu.as_mut()?)))
        else {
            // Cancelled: its memory is not ours to touch any more.
            lane.sent.answer(sequence);
            return;
        };
        hooks::about_to_copy();
        // SAFETY: the pieces lie in local regions that the put's work keeps alive.
        let staged = unsafe {
            let by_kernel = work.is_reached_by(&gpu.device);
            StagedCopy::put(&gpu.device, buffer, work.local_pieces(entry.part), by_kernel)
        };
        match staged {
            Ok(staged) => {
                gpu.puts += 1;
                let of = GpuPutOwner::Read { slot: entry.slot, _work: work };
                lane.puts.push_back(GpuPut { sequence, staged, begun: clock::now(), of });
                s.copies = true;
            }
            Err(error) => {
                lane.sent.answer(sequence);
                self.answered(s, entry, Err(failed(&error)));
            }
        }
    }

    /// Fetches the next parts of a request; true when the first is ready to be sent.
    pub(super) fn fetch(&mut self, s: &mut SessionDriver, slot: SlotId) -> bool {
        let Some(request) = self.request(slot) else { return false };
        let (Some(gpu), Some(work)) = (request.gpu.as_mut(), request.work.clone()) else {
            return false;
        };
        let now = clock::now();
        let most = request.piece.min(MAX_PAYLOAD);
        let mut error = None;
        while gpu.fetched.len() < AHEAD && error.is_none() {
            let at = request.redo.last_mut().unwrap_or(&mut request.at);
            if at.left() == 0 {
                break;
            }
            let part = cut(&work, at, most);
            if request.redo.last().is_some_and(|rest| rest.left() == 0) {
                request.redo.pop();
            }
            let by_kernel = work.is_reached_by(&gpu.device);
            // SAFETY: the pieces lie in local regions that the request's work keeps alive; a request
            // that ends waits for what it fetches.
            match unsafe { StagedCopy::fetch(&gpu.device, work.local_pieces(part), by_kernel) } {
                Ok(staged) => gpu.fetched.push_back(Fetched { part, staged, begun: now }),
                Err(why) => error = Some(why),
            }
        }
        let mut ready = false;
        if let (Some(first), None) = (gpu.fetched.front_mut(), &error) {
            match look(&mut first.staged, first.begun, now) {
                Ok(done) => ready = done,
                Err(why) => error = Some(why),
            }
        }
        if let Some(error) = error {
            let reason = peerway_core::outcome::Reason::Failed(failed(&error));
            self.stop(s, slot, reason, now);
            return false;
        }
        s.copies = true;
        ready
    }

    /// Whether the next read of the peer's can be answered. Starts fetching where it is of GPU
    /// memory.
    pub(super) fn reply_is_ready(&mut self, s: &mut SessionDriver, lane: &mut Lane) -> bool {
        if lane.replies.is_empty() {
            return false;
        }
        loop {
            let now = clock::now();
            for reply in lane.replies.iter_mut().take(AHEAD) {
                let Some(device) = reply.grant.memory.device() else { continue };
                // One with a gate and nothing staged could not be fetched, and is refused when its
                // turn comes.
                if reply.staged.is_some() || reply.gate.is_some() || reply.total == 0 {
                    continue;
                }
                let gate = reply.grant.gate();
                // Closed: it is refused when its turn comes.
                if !gate.enter() {
                    continue;
                }
                reply.gate = Some(gate);
                hooks::about_to_copy();
                // SAFETY: the pieces were checked against the grant, which the reply keeps; it
                // holds the gate.
                let staged =
                    unsafe { StagedCopy::fetch(device, reply.pieces.iter().copied(), true) };
                match staged {
                    Ok(staged) => (reply.staged, reply.begun) = (Some(staged), now),
                    Err(error) => {
                        failed(&error);
                        break;
                    }
                }
            }
            let Some(front) = lane.replies.front_mut() else { return false };
            let of_gpu = front.grant.memory.gpu.is_some() && front.total > 0;
            let begun = front.begun;
            let done = match &mut front.staged {
                Some(staged) => look(staged, begun, now).map_err(|error| failed(&error)),
                // Refused by its gate, or by the driver.
                None if of_gpu && front.gate.is_none() => Ok(true),
                None if of_gpu => Err(TransferError::Device),
                None => Ok(true),
            };
            match done {
                Ok(true) => return true,
                Ok(false) => {
                    s.copies = true;
                    return false;
                }
                Err(error) => {
                    let sequence = front.sequence;
                    lane.replies.pop_front();
                    lane.push_nack(sequence, error as u8);
                }
            }
        }
    }
}

/// Takes from the cursor what one frame can carry.
fn cut(work: &Work, at: &mut Cursor, most: u64) -> Cursor {
    let start = *at;
    let (mut count, mut total, mut region) = (0, 0, None);
    while count < MAX_SEGMENTS
        && let Some(pair) = work.shape.peek(at, most - total)
    {
        if region.is_some_and(|region| region != pair.remote.region) {
            break;
        }
        region = Some(pair.remote.region);
        count += 1;
        total += pair.len;
        work.shape.advance(at, pair.len);
    }
    start.limited(total)
}

fn look(staged: &mut StagedCopy, begun: u64, now: u64) -> Result<bool, CudaError> {
    if Duration::from_nanos(now.saturating_sub(begun)) > FLAG_PATIENCE {
        staged.look_closer()?;
    }
    staged.is_done()
}

fn failed(error: &CudaError) -> TransferError {
    tracing::error!(%error, "a copy by a GPU failed");
    TransferError::Device
}
