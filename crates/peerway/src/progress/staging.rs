//! GPU memory on lanes: transfers through pinned staging buffers.
//!
//! Outgoing bytes are fetched into a buffer first, some parts ahead of the frames. Incoming bytes
//! are received in a buffer and then put into GPU memory. The acknowledgement waits for that copy,
//! so that "done" means "in place" for GPU memory too. The driver checks the copies once per turn.
//! While copies are in progress, the progress thread blocks only for short times.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use peerway_core::ids::SlotId;
use peerway_core::outcome::{Reason, TransferError};
use peerway_core::protocol::FramePieces;
use peerway_core::wire::MAX_PAYLOAD;
use peerway_sys::cuda::CudaError;

use super::driver::Driver;
use super::lane::Lane;
use super::receive::IncomingWrite;
use super::request::Fetched;
use super::sessions::SessionDriver;
use crate::clock;
use crate::gpu::staging::{Buffer, StagedCopy};
use crate::hooks;
use crate::memory::grants::Grant;
use crate::os::Piece;
use crate::os::gate::GateRef;
use crate::work::Work;

/// Parts fetched ahead: enough that the copy of the next part is done when its turn comes.
const AHEAD: usize = 8;
/// How often the progress thread checks copies that take long.
pub(super) const COPY_NAP: Duration = Duration::from_micros(20);
/// A poll counts as progress for this long after a copy began or finished. One copy takes 30 µs.
const FRESH: Duration = Duration::from_micros(300);
/// If a completion flag has not been raised by then, the driver queries CUDA: kernels that fail
/// raise no flag.
const FLAG_PATIENCE: Duration = Duration::from_micros(500);

/// The copies in progress of a driver's sessions.
#[derive(Default)]
pub(super) struct Staging {
    /// Sessions with such copies.
    sessions: Vec<usize>,
    /// When one last started or finished.
    moved: u64,
}

/// Received bytes that the GPU is copying into GPU memory.
pub(crate) struct GpuPut {
    pub(crate) sequence: u64,
    /// Dropped first: its drop waits for the copy.
    pub(crate) staged: StagedCopy,
    pub(crate) begun: u64,
    pub(crate) of: GpuPutOwner,
}

/// The transfer that the bytes belong to. Keeps the destination memory alive.
pub(crate) enum GpuPutOwner {
    /// A write by the peer.
    Write { _grant: Arc<Grant>, gate: GateRef, counts: Option<u32> },
    /// One of our reads.
    Read { slot: SlotId, _work: Work },
}

impl Drop for GpuPutOwner {
    fn drop(&mut self) {
        if let Self::Write { gate, .. } = self {
            gate.leave();
        }
    }
}

impl Lane {
    /// Whether the answer to the read of this number has arrived and is being copied into GPU
    /// memory.
    pub(crate) fn is_being_put(&self, sequence: u64) -> bool {
        let of_read = |put: &GpuPut| matches!(put.of, GpuPutOwner::Read { .. });
        self.rx.puts.iter().any(|put| put.sequence == sequence && of_read(put))
    }
}

impl Driver {
    /// Whether copies from or to GPU memory are in progress.
    pub(crate) fn has_copies(&self) -> bool {
        !self.staging.sessions.is_empty()
    }

    /// Registers a session that has copies in progress.
    pub(super) fn note_staging(&mut self, s: &SessionDriver) {
        if !self.staging.sessions.contains(&s.index) {
            self.staging.sessions.push(s.index);
            self.staging.moved = clock::now();
        }
    }

    /// Checks every copy in progress. Returns true when one finished or the last progress is
    /// recent.
    pub(super) fn look_at_copies(&mut self, now: u64) -> bool {
        if self.staging.sessions.is_empty() {
            return false;
        }
        let mut progress = false;
        for index in std::mem::take(&mut self.staging.sessions) {
            self.with_session(index, |driver, s| progress |= driver.session_copies(s, now));
        }
        if progress {
            self.staging.moved = now;
        }
        let idle = Duration::from_nanos(now.saturating_sub(self.staging.moved));
        progress || (self.has_copies() && idle < FRESH)
    }

    fn session_copies(&mut self, s: &mut SessionDriver, now: u64) -> bool {
        let mut progress = false;
        s.copies = false;
        for at in 0..s.lanes.len() {
            let Some(mut lane) = s.lanes[at].take() else { continue };
            progress |= self.reap_puts(s, &mut lane, now);
            let fetches = lane.tx.replies.front().is_some_and(|reply| reply.staged.is_some());
            s.copies |= fetches || !lane.rx.puts.is_empty();
            s.lanes[at] = Some(lane);
        }
        s.copies |= self.requests.iter().any(|request| {
            request.gpu.as_ref().is_some_and(|gpu| !gpu.fetched.is_empty())
                && std::sync::Arc::ptr_eq(&request.session, &s.session)
        });
        // Fetched parts may be ready to send.
        s.dirty |= s.copies;
        progress
    }

    fn reap_puts(&mut self, s: &mut SessionDriver, lane: &mut Lane, now: u64) -> bool {
        let mut any = false;
        while let Some(put) = lane.rx.puts.front_mut() {
            match look(&mut put.staged, put.begun, now) {
                Ok(false) => break,
                Ok(true) => self.put_ended(s, lane, Ok(())),
                Err(error) => self.put_ended(s, lane, Err(failed(s.session.addr, &error))),
            }
            any = true;
        }
        if any {
            lane.push_ack();
            s.dirty = true;
        }
        any
    }

    /// Waits until all received bytes of a lane are in place. The lane is closing, and its frames
    /// must be answered.
    pub(super) fn finish_puts(&mut self, s: &mut SessionDriver, lane: &mut Lane) {
        while let Some(put) = lane.rx.puts.front_mut() {
            let result = put.staged.wait().map_err(|error| failed(s.session.addr, &error));
            self.put_ended(s, lane, result);
        }
    }

    /// Completes the lane's first put.
    fn put_ended(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        result: Result<(), TransferError>,
    ) {
        let Some(put) = lane.rx.puts.pop_front() else { return };
        match &put.of {
            GpuPutOwner::Write { counts, .. } => {
                let counted = result.and_then(|()| self.count(s, *counts));
                if let Err(error) = counted {
                    lane.refuse(put.sequence, error);
                }
            }
            GpuPutOwner::Read { slot, .. } => {
                if let Some(request) = self.request(*slot) {
                    request.state.put_ended();
                }
                match lane.sent.answer(put.sequence) {
                    Some(entry) => self.answered(s, entry, result),
                    None => self.settle(s, *slot),
                }
            }
        }
    }

    /// Prepares a staging buffer to receive a write to GPU memory.
    pub(super) fn land_in_buffer(
        &mut self,
        s: &SessionDriver,
        lane: &mut Lane,
        incoming: &mut IncomingWrite,
    ) -> Result<(), TransferError> {
        let Some(device) = incoming.grant.memory.device() else { return Ok(()) };
        if incoming.left == 0 {
            return Ok(());
        }
        let buffer = Buffer::any(device).map_err(|error| failed(s.session.addr, &error))?;
        let mut pieces = lane.spare.pop().unwrap_or_default();
        pieces.clear();
        pieces.push(Piece { addr: buffer.ptr() as u64, len: incoming.left });
        let target = std::mem::replace(&mut incoming.pieces, pieces);
        incoming.staged = Some((buffer, target));
        Ok(())
    }

    /// Starts the copy of a received write into GPU memory.
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
                // SAFETY: `find` checked the pieces against the grant. The put keeps the grant and
                // is inside its gate.
                let staged =
                    unsafe { StagedCopy::put(device, buffer, target.iter().copied(), true) };
                staged.map(|staged| (staged, of)).map_err(|error| failed(s.session.addr, &error))
            }
            _ => Err(TransferError::Revoked),
        };
        lane.keep(target);
        match put {
            Ok((staged, of)) => {
                lane.rx.puts.push_back(GpuPut { sequence, staged, begun: clock::now(), of });
                lane.applied.apply(sequence);
                s.copies = true;
            }
            Err(error) => lane.finish(sequence, Err(error)),
        }
    }

    /// The staging buffer for the answer to a read, if the read goes into GPU memory.
    pub(super) fn fill_buffer(&mut self, slot: SlotId) -> Result<Option<Buffer>, TransferError> {
        let request = self.request(slot).filter(|request| !request.state.is_ending());
        let Some((gpu, session)) = request.and_then(|f| Some((f.gpu.as_ref()?, &f.session))) else {
            return Ok(None);
        };
        Buffer::any(&gpu.device).map(Some).map_err(|error| failed(session.addr, &error))
    }

    /// Starts the copy of a received read answer into GPU memory.
    pub(super) fn put_read(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        sequence: u64,
        buffer: Buffer,
    ) {
        let Some(entry) = lane.sent.waiting(sequence).copied() else { return };
        let request =
            self.request(entry.slot).filter(|f| !f.state.is_ending() && !f.state.is_unfenced());
        let Some((work, gpu, state)) =
            request.and_then(|f| Some((f.work.clone()?, f.gpu.as_mut()?, &mut f.state)))
        else {
            // The request was cancelled, so its memory must not be touched any more.
            lane.sent.answer(sequence);
            return;
        };
        hooks::about_to_copy();
        // SAFETY: the put keeps the work, which keeps the local regions of the pieces alive.
        let staged = unsafe {
            let by_kernel = work.is_reached_by(&gpu.device);
            StagedCopy::put(&gpu.device, buffer, work.local_pieces(entry.part), by_kernel)
        };
        match staged {
            Ok(staged) => {
                state.put_began();
                let of = GpuPutOwner::Read { slot: entry.slot, _work: work };
                lane.rx.puts.push_back(GpuPut { sequence, staged, begun: clock::now(), of });
                s.copies = true;
            }
            Err(error) => {
                lane.sent.answer(sequence);
                self.answered(s, entry, Err(failed(s.session.addr, &error)));
            }
        }
    }

    /// Fetches the next parts of a request from GPU memory. Returns true when the first is ready to
    /// send.
    pub(super) fn fetch(&mut self, s: &mut SessionDriver, slot: SlotId) -> bool {
        let Some(request) = self.request(slot) else { return false };
        let (Some(gpu), Some(work)) = (request.gpu.as_mut(), request.work.clone()) else {
            return false;
        };
        let now = clock::now();
        let most = request.piece.min(MAX_PAYLOAD);
        let mut error = None;
        while gpu.fetched.len() < AHEAD && error.is_none() {
            if request.state.next_len() == 0 {
                break;
            }
            let begun = request.state.begin_cut();
            let mut rest = begun.start;
            FramePieces::new(&work.shape, &mut rest, most).for_each(drop);
            let part = request.state.end_cut(begun, rest);
            let by_kernel = work.is_reached_by(&gpu.device);
            // SAFETY: the request's work keeps the local regions of the pieces alive. A request
            // that ends waits for its fetches.
            match unsafe { StagedCopy::fetch(&gpu.device, work.local_pieces(part), by_kernel) } {
                Ok(staged) => {
                    gpu.fetched.push_back(Fetched { part, staged, begun: now });
                    request.state.fetch_began();
                }
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
            let reason = Reason::Failed(failed(s.session.addr, &error));
            self.stop(s, slot, reason, now);
            return false;
        }
        s.copies = true;
        ready
    }

    /// Whether the peer's next read can be answered. Starts the fetches for reads of GPU memory.
    pub(super) fn reply_is_ready(&mut self, s: &mut SessionDriver, lane: &mut Lane) -> bool {
        if lane.tx.replies.is_empty() {
            return false;
        }
        loop {
            let now = clock::now();
            for reply in lane.tx.replies.iter_mut().take(AHEAD) {
                let Some(device) = reply.grant.memory.device() else { continue };
                // A reply with a gate but no staged copy could not be fetched. It is refused when
                // its turn comes.
                if reply.staged.is_some() || reply.gate.is_some() || reply.total == 0 {
                    continue;
                }
                let gate = reply.grant.gate();
                // The gate is closed: the reply is refused when its turn comes.
                if !gate.enter() {
                    continue;
                }
                reply.gate = Some(gate);
                hooks::about_to_copy();
                // SAFETY: `find` checked the pieces against the grant. The reply keeps the grant
                // and is inside its gate.
                let staged =
                    unsafe { StagedCopy::fetch(device, reply.pieces.iter().copied(), true) };
                match staged {
                    Ok(staged) => (reply.staged, reply.begun) = (Some(staged), now),
                    Err(error) => {
                        failed(s.session.addr, &error);
                        break;
                    }
                }
            }
            let Some(front) = lane.tx.replies.front_mut() else { return false };
            let of_gpu = front.grant.memory.gpu.is_some() && front.total > 0;
            let begun = front.begun;
            let done = match &mut front.staged {
                Some(staged) => {
                    look(staged, begun, now).map_err(|error| failed(s.session.addr, &error))
                }
                // The gate was closed (`reply_frame` refuses it), or the fetch failed.
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
                    lane.tx.replies.pop_front();
                    lane.refuse(sequence, error);
                }
            }
        }
    }
}

fn look(staged: &mut StagedCopy, begun: u64, now: u64) -> Result<bool, CudaError> {
    if Duration::from_nanos(now.saturating_sub(begun)) > FLAG_PATIENCE {
        staged.look_closer()?;
    }
    staged.is_done()
}

fn failed(peer: SocketAddr, error: &CudaError) -> TransferError {
    tracing::error!(%error, %peer, "a GPU copy failed");
    TransferError::Device
}
