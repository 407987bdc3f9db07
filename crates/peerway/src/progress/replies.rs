//! Reads and pulls: what a peer asks for, and the answers to our own reads.
//!
//! The peer's read waits in the lane until its turn to send comes. A peer's pull asks the driver to
//! copy from the peer's memory, and a large one goes to the copy pool. The answer to one of our own
//! reads goes straight into the memory of the request.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use peerway_core::outcome::TransferError;
use peerway_core::protocol::{Named, Run};
use peerway_core::region::Access;
use peerway_core::wire::{FrameError, Header, Kind};
use peerway_core::work::Cursor;
use zerocopy::IntoBytes;

use super::driver::Driver;
use super::lane::{Lane, WINDOW_FRAMES};
use super::receive::{AfterSkip, LAND_PIECES, RecvState, Step, from_scratch_or_wire, nonsense};
use super::sessions::SessionDriver;
use super::transmit::{Body, OutFrame};
use crate::gpu::staging::StagedCopy;
use crate::hooks;
use crate::memory::grants::Grant;
use crate::os::Piece;
use crate::os::gate::GateRef;
use crate::progress::copies::pool::{Haste, Job};
use crate::progress::copies::pull::{self, PullJob, PullOrigin};
use crate::session::Session;

/// The driver does a pull up to this size at once. It takes about 100 µs, no more than waking a
/// helper and waiting for it.
const INLINE_PULL: u64 = 1 << 20;

/// A read by the peer that this side answers.
pub(crate) struct Reply {
    pub(crate) sequence: u64,
    pub(crate) transfer: u64,
    pub(crate) grant: Arc<Grant>,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) next: usize,
    pub(crate) within: u64,
    pub(crate) total: u64,
    pub(crate) gate: Option<GateRef>,
    /// The copy of its bytes out of GPU memory, and when it began.
    pub(crate) staged: Option<StagedCopy>,
    pub(crate) begun: u64,
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(gate) = self.gate.take() {
            gate.leave();
        }
    }
}

impl Lane {
    /// Answers a pull.
    pub(crate) fn answer_pull(&mut self, sequence: u64, result: Result<(), TransferError>) {
        let answer = self.applied.answer_pull(sequence, result);
        self.push_answer(&answer);
    }

    /// Switches the frame being sent to a private copy, and leaves the gate, if the frame carries
    /// granted memory that was revoked in the meantime.
    pub(crate) fn copy_barred_reply(&mut self) {
        let Some(frame) = &mut self.tx.frame else { return };
        let Body::Reply(reply) = &mut frame.body else { return };
        if reply.grant.is_live() {
            return;
        }
        let mut bytes = vec![0; frame.left as usize];
        let (mut done, mut within) = (0, reply.within as usize);
        for piece in &reply.pieces[reply.next..] {
            let from = (piece.addr as usize + within) as *const u8;
            let into = &mut bytes[done..done + piece.len as usize - within];
            // SAFETY: `find` checked the pieces against the grant, which keeps their memory alive.
            // The reply holds the gate until it is dropped below. `into` is a private buffer.
            unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
            (done, within) = (done + into.len(), 0);
        }
        frame.body = Body::Bytes { bytes, done: 0 };
    }
}

impl Driver {
    /// Handles a read by the peer.
    pub(super) fn begin_read(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        named: &Named,
        runs: &[Run],
        total: u64,
    ) -> Step<()> {
        lane.rx.state = RecvState::Head;
        let Named { sequence, transfer, .. } = *named;
        if lane.tx.replies.len() >= WINDOW_FRAMES as usize {
            return Err(nonsense(FrameError::Order));
        }
        let found = self.find(s, lane, named, Access::READ, runs);
        match found {
            Ok((grant, pieces)) => {
                let (next, within, gate, staged, begun) = (0, 0, None, None, 0);
                lane.tx.replies.push_back(Reply {
                    sequence,
                    transfer,
                    grant,
                    pieces,
                    next,
                    within,
                    total,
                    gate,
                    staged,
                    begun,
                });
                lane.finish(sequence, Ok(()));
            }
            Err(error) => lane.finish(sequence, Err(error)),
        }
        Ok(())
    }

    /// Makes the frame that answers the peer's next read.
    pub(super) fn reply_frame(&mut self, s: &mut SessionDriver, lane: &mut Lane) -> bool {
        if !self.reply_is_ready(s, lane) {
            return false;
        }
        let Some(mut reply) = lane.tx.replies.pop_front() else { return false };
        if reply.staged.is_none() {
            let gate = reply.grant.gate();
            if !gate.enter() {
                lane.refuse(reply.sequence, TransferError::Revoked);
                return true;
            }
            reply.gate = Some(gate);
        }
        let head = Header::read_data(reply.sequence, reply.transfer, reply.total);
        lane.tx.head.clear();
        lane.tx.head.extend_from_slice(head.as_bytes());
        s.session.stats.bytes_served.fetch_add(reply.total, Ordering::Relaxed);
        let left = reply.total;
        let after = lane.tx.out.len();
        let sequence = 0;
        let body = match reply.staged.take() {
            Some(staged) => Body::StagedCopy { buffer: staged.into_buffer(), len: left, done: 0 },
            None => Body::Reply(reply),
        };
        lane.tx.frame = Some(OutFrame { after, sequence, head_sent: 0, left, body });
        true
    }

    /// Handles a pull by the peer.
    pub(super) fn begin_pull(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        named: &Named,
        runs: &[Run],
        total: u64,
    ) -> Step<()> {
        lane.rx.state = RecvState::Head;
        let Named { sequence, transfer, counts, .. } = *named;
        if s.session.pulls() > WINDOW_FRAMES as usize {
            return Err(nonsense(FrameError::Order));
        }
        let found = self.find(s, lane, named, Access::WRITE, runs);
        let link = s.session.link.as_ref();
        let memory = link.and_then(|link| link.memory(&s.session.reach)).cloned();
        let (grant, here, memory) = match (found, memory) {
            (Ok((grant, here)), Some(memory)) if grant.memory.gpu.is_none() => {
                (grant, here, memory)
            }
            (found, _) => {
                let error = found.err().unwrap_or(TransferError::RemoteAccess);
                lane.finish(sequence, Err(error));
                return Ok(());
            }
        };
        let mut there = lane.spare.pop().unwrap_or_default();
        there.clear();
        let filled = runs.iter().filter(|run| run.len > 0);
        there.extend(filled.map(|run| Piece { addr: run.source, len: run.len }));
        lane.applied.apply(sequence);
        if total <= INLINE_PULL {
            let result = pull::copy(&s.session, &grant, &memory, &here, &there);
            let result = result.and_then(|()| self.count(s, counts));
            // The answer replaces the acknowledgement of this frame, but not of the frames before
            // it.
            lane.applied.note_answered(sequence);
            lane.answer_pull(sequence, result);
            lane.keep(here);
            lane.keep(there);
            return Ok(());
        }
        s.session.pull_began();
        let job = Arc::new(PullJob {
            shard: self.shard.clone(),
            session: s.session.clone(),
            origin: PullOrigin { lane: lane.index, sequence, transfer, counts },
            grant,
            memory,
            here,
            there,
            state: Default::default(),
        });
        let shared: Arc<dyn Job> = job.clone();
        self.endpoint.copy_pool.offer(&shared, Haste::Now);
        self.pulls.push_back(job);
        Ok(())
    }

    /// Answers the frame of a pull that the copy pool has finished.
    pub(super) fn pulled(
        &mut self,
        session: &Arc<Session>,
        origin: PullOrigin,
        result: Result<(), TransferError>,
    ) {
        self.with(session, |driver, s| {
            let result = result.and_then(|()| driver.count(s, origin.counts));
            let Some(Some(lane)) = s.lanes.get_mut(origin.lane as usize) else { return };
            lane.answer_pull(origin.sequence, result);
            driver.flush(s);
        });
    }

    /// Stops the pulls of a transfer that the peer cancelled.
    pub(super) fn cancel_pulls(&self, s: &SessionDriver, transfer: u64) {
        for pull in &self.pulls {
            if Arc::ptr_eq(&pull.session, &s.session) && pull.origin.transfer == transfer {
                pull.cancel();
            }
        }
    }

    /// Handles the answer to one of our reads.
    pub(super) fn begin_read_data(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        sequence: u64,
        payload: usize,
    ) -> Step<()> {
        let Some(entry) = lane.sent.waiting(sequence).filter(|e| e.kind == Kind::Read).copied()
        else {
            return Err(nonsense(FrameError::Order));
        };
        if entry.part.left() != payload as u64 || lane.is_being_put(sequence) {
            return Err(nonsense(FrameError::Order));
        }
        match self.fill_buffer(entry.slot) {
            Ok(buffer) => {
                lane.rx.fill = buffer;
                lane.rx.state = RecvState::Fill { sequence, slot: entry.slot, part: entry.part };
            }
            Err(error) => {
                lane.sent.answer(sequence);
                self.answered(s, entry, Err(error));
                lane.rx.state = RecvState::Skip { left: payload, then: AfterSkip::Nothing };
            }
        }
        Ok(())
    }

    /// Receives the answer to a read into our memory.
    pub(super) fn fill_read(&mut self, s: &mut SessionDriver, lane: &mut Lane) -> Step<bool> {
        let RecvState::Fill { sequence, slot, mut part } = lane.rx.state else { return Ok(true) };
        if part.left() > 0 {
            let request =
                self.request(slot).filter(|f| !f.state.is_ending() && !f.state.is_unfenced());
            let Some(work) = request.and_then(|f| f.work.as_ref()) else {
                // The request was cancelled, so its memory must not be touched any more.
                lane.rx.fill = None;
                lane.sent.answer(sequence);
                lane.rx.state =
                    RecvState::Skip { left: part.left() as usize, then: AfterSkip::Nothing };
                return Ok(true);
            };
            hooks::about_to_copy();
            let mut pieces = std::mem::take(&mut lane.pieces);
            pieces.clear();
            let mut at = part;
            if let Some(buffer) = &lane.rx.fill {
                let whole = lane.sent.waiting(sequence).map_or(part, |entry| entry.part);
                let filled = whole.left() - part.left();
                pieces.push(Piece { addr: buffer.ptr() as u64 + filled, len: part.left() });
                at = Cursor::default();
            }
            while pieces.len() < LAND_PIECES
                && let Some(pair) = work.next(&mut at, u64::MAX)
            {
                pieces.push(Piece { addr: work.local_addr(&pair.local) as u64, len: pair.len });
            }
            // SAFETY: the request's work keeps the local regions of the pieces alive.
            let moved = unsafe {
                from_scratch_or_wire(
                    &mut *lane.wire,
                    &mut lane.rx.scratch,
                    (&mut lane.rx.start, &mut lane.rx.end),
                    &mut pieces,
                )
            };
            lane.pieces = pieces;
            let moved = moved?;
            if moved == 0 {
                return Ok(false);
            }
            let mut left = moved;
            while left > 0
                && let Some(pair) = work.next(&mut part, left)
            {
                left -= pair.len;
            }
            lane.rx.placed += moved;
            s.session.stats.bytes_read.fetch_add(moved, Ordering::Relaxed);
        }
        lane.rx.state = RecvState::Fill { sequence, slot, part };
        if part.left() == 0 {
            lane.rx.state = RecvState::Head;
            if let Some(buffer) = lane.rx.fill.take() {
                self.put_read(s, lane, sequence, buffer);
            } else if let Some(entry) = lane.sent.answer(sequence) {
                self.answered(s, entry, Ok(()));
            }
        }
        Ok(true)
    }
}
