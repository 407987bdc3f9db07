//! Receives frames on a lane.
//!
//! A state machine over an ordered stream: header, table, payload. `peerway_core::protocol` reads
//! headers and tables and limits every length. After the checks, the payload of a write goes
//! straight to its destination. The driver takes every address from its own tables. Reads and pulls
//! are in `replies`, notifications and control messages in `messages`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use peerway_core::ids::SlotId;
use peerway_core::outcome::TransferError;
use peerway_core::protocol::{Arrival, Asked, GrantName, Named, Run, TableAhead};
use peerway_core::region::Access;
use peerway_core::wire::{FrameError, HEADER_LEN, Kind, MAX_CONTROL};
use peerway_core::work::Cursor;

use super::driver::{Driver, TURN_BYTES};
use super::ending::LaneEnd;
use super::lane::{Lane, WINDOW_FRAMES};
use super::messages::IncomingMessage;
use super::request::release_source;
use super::sessions::SessionDriver;
use super::staging::{GpuPut, GpuPutOwner};
use crate::bugs::{Bug, in_order, is_planted};
use crate::clock;
use crate::gpu::staging::Buffer;
use crate::hooks;
use crate::limits::RefusalReason;
use crate::memory::grants::Grant;
use crate::os::Piece;
use crate::os::copy::{CopyKind, copy};
use crate::os::gate::GateRef;

/// Bytes to receive when a header is expected. That covers a few small frames but little of a large
/// one, whose payload should not pass through the scratch buffer.
pub(super) const HEAD_READ: usize = 4096;
/// The cost of a step in the turn's budget besides its payload bytes, so that a flood of empty
/// frames ends a turn too.
const STEP_BYTES: u64 = 4096;
/// Destination pieces per receive call.
pub(super) const LAND_PIECES: usize = 64;
/// Payload bytes after which an acknowledgement is due even though more is coming.
const ACK_EVERY: u64 = 1 << 20;

/// Bytes of the receive buffer: it holds the largest table or control message, and some small
/// frames.
const SCRATCH: usize = 16 << 10;
const _: () = assert!(SCRATCH >= MAX_CONTROL);
pub(super) type Step<T> = Result<T, LaneEnd>;

/// The frame that is being received.
pub(crate) struct ReceiveHalf {
    pub(crate) state: RecvState,
    /// Received bytes, of which those from `start` to `end` are not yet parsed.
    pub(crate) scratch: Box<[u8]>,
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// The runs of a table, kept for their allocation.
    pub(crate) runs: Vec<Run>,
    /// Payload bytes stored at their destination, for the peer's writes and for our reads.
    pub(crate) placed: u64,
    /// Received bytes that the GPU is copying from pinned buffers into GPU memory.
    pub(crate) puts: VecDeque<GpuPut>,
    /// The buffer that receives the answer to one of our reads into GPU memory.
    pub(crate) fill: Option<Buffer>,
}

impl ReceiveHalf {
    pub(super) fn new() -> Self {
        Self {
            state: RecvState::Head,
            scratch: vec![0; SCRATCH].into_boxed_slice(),
            start: 0,
            end: 0,
            runs: Vec::with_capacity(WINDOW_FRAMES as usize),
            placed: 0,
            puts: VecDeque::new(),
            fill: None,
        }
    }
}

/// The item that the lane is receiving.
pub(crate) enum RecvState {
    /// A header.
    Head,
    /// A table, once its header is known.
    Table(TableAhead),
    /// Payload that a peer writes into our memory.
    Land(IncomingWrite),
    /// Payload that answers one of our reads.
    Fill { sequence: u64, slot: SlotId, part: Cursor },
    /// Payload to discard.
    Skip { left: usize, then: AfterSkip },
    /// A control message of this length. It is parsed in the scratch buffer, once it is whole.
    Control { need: usize },
    /// A notification, which is collected whole.
    Gather(IncomingMessage),
}

/// What follows when discarded payload has passed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AfterSkip {
    /// Nothing.
    Nothing,
    /// Counts the sequenced frame as applied. It has been refused already.
    Count(u64),
}

/// A write being applied.
pub(crate) struct IncomingWrite {
    pub(crate) sequence: u64,
    /// Keeps the memory alive.
    pub(crate) grant: Arc<Grant>,
    pub(crate) gate: GateRef,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) next: usize,
    pub(crate) within: u64,
    pub(crate) left: u64,
    /// The counter to increment when all bytes are in place.
    pub(crate) counts: Option<u32>,
    /// For GPU memory: the staging buffer that receives the bytes first, and their destination.
    /// `pieces` then describes the staging buffer.
    pub(crate) staged: Option<(Buffer, Vec<Piece>)>,
}

impl Lane {
    /// Queues an acknowledgement of all applied frames. A frame whose bytes are still being copied
    /// into GPU memory is not applied, and delays the acknowledgement of later frames.
    pub(crate) fn push_ack(&mut self) {
        let writes = self.rx.puts.iter().filter(|put| matches!(put.of, GpuPutOwner::Write { .. }));
        let pending = writes.map(|put| put.sequence).next();
        if let Some(ack) = self.applied.acknowledge(pending) {
            self.push_answer(&ack);
        }
    }

    /// Refuses a frame.
    pub(crate) fn refuse(&mut self, sequence: u64, error: TransferError) {
        let nack = self.applied.refuse(sequence, error);
        self.push_answer(&nack);
    }

    /// Completes a sequenced frame: counts it as applied, and refuses it on an error.
    pub(crate) fn finish(&mut self, sequence: u64, result: Result<(), TransferError>) {
        if let Err(error) = result {
            self.refuse(sequence, error);
        }
        self.applied.apply(sequence);
    }

    /// Bytes received and not yet parsed.
    pub(crate) fn unread(&self) -> usize {
        self.rx.end - self.rx.start
    }
}

impl Driver {
    /// Receives until no input is left or the turn's budget is used up.
    ///
    /// Returns true when the budget ended the turn. The caller must then call again without waiting
    /// for an event.
    pub(super) fn receive(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        now: u64,
    ) -> Step<bool> {
        let mut budget = TURN_BYTES;
        let mut again = false;
        loop {
            let placed = lane.rx.placed;
            let more = match &mut lane.rx.state {
                RecvState::Head => self.head(s, lane, now)?,
                RecvState::Table(_) => self.table(s, lane)?,
                RecvState::Land(_) => self.land(s, lane)?,
                RecvState::Fill { .. } => self.fill_read(s, lane)?,
                RecvState::Skip { .. } => skip(lane)?,
                RecvState::Control { need } => {
                    let need = *need;
                    self.control_message(s, lane, need)?
                }
                RecvState::Gather(_) => self.gather(s, lane)?,
            };
            if !more {
                break;
            }
            let cost = STEP_BYTES + (lane.rx.placed - placed);
            if lane.applied.unacknowledged_bytes() >= ACK_EVERY {
                lane.push_ack();
            }
            budget = budget.saturating_sub(cost);
            if budget == 0 {
                again = true;
                break;
            }
        }
        lane.heard = now.max(lane.heard);
        lane.push_ack();
        Ok(again)
    }

    fn head(&mut self, s: &mut SessionDriver, lane: &mut Lane, now: u64) -> Step<bool> {
        if lane.owes_too_much() {
            return Err(nonsense(FrameError::Order));
        }
        if lane.unread() < HEADER_LEN {
            // For a memory wire, checking for input is cheaper than a receive call that finds none.
            let silent =
                lane.wire.is_memory() && !lane.wire.has_input().map_err(LaneEnd::Broken)?;
            return if silent { Ok(false) } else { refill(lane, HEAD_READ) };
        }
        let unread = &lane.rx.scratch[lane.rx.start..lane.rx.end];
        let Some(header) = unread.first_chunk() else { return Ok(false) };
        let arrival = match Arrival::read(header, &lane.applied) {
            Err(FrameError::Order) if is_planted(Bug::SequenceIgnored) => {
                Arrival::read(&in_order(header, &lane.applied), &lane.applied)
            }
            arrival => arrival,
        };
        let arrival = arrival.map_err(nonsense)?;
        lane.rx.start += HEADER_LEN;
        match arrival {
            Arrival::Write(named, run) => self.begin_write(s, lane, &named, run.len, &[run]),
            Arrival::Table(ahead) => lane.rx.state = RecvState::Table(ahead),
            Arrival::ReadData { sequence, payload } => {
                self.begin_read_data(s, lane, sequence, payload)?;
            }
            Arrival::Control(need) => lane.rx.state = RecvState::Control { need },
            Arrival::Notify { sequence, len, totals } => {
                s.session.stats.told(totals);
                self.begin_message(s, lane, sequence, len, now);
            }
            Arrival::Count { sequence, id, totals } => {
                s.session.stats.told(totals);
                let result = self.count_alone(s, id);
                lane.finish(sequence, result);
            }
            Arrival::Ack(sequence) => self.acked(s, lane, sequence)?,
            Arrival::Nack(sequence, error) => self.refused(s, lane, sequence, error)?,
            Arrival::Pulled(sequence) => {
                let entry = lane.sent.answer_pull(sequence);
                let entry = entry.ok_or_else(|| nonsense(FrameError::Order))?;
                s.session.stats.bytes_written.fetch_add(entry.part.left(), Ordering::Relaxed);
                self.answered(s, entry, Ok(()));
            }
            Arrival::Beat(beat, totals) => {
                s.session.stats.told(totals);
                s.liveness.heard(beat, now);
            }
            Arrival::Cancel { sequence, transfer } => {
                self.cancel_pulls(s, transfer);
                lane.finish(sequence, Ok(()));
            }
        }
        Ok(true)
    }

    /// Handles an acknowledgement: the peer has applied all frames up to `sequence`.
    fn acked(&mut self, s: &mut SessionDriver, lane: &mut Lane, sequence: u64) -> Step<()> {
        let sending = lane.tx.frame.as_ref().map_or(0, |frame| frame.sequence);
        let answered = lane.sent.acknowledge(sequence, sending);
        for entry in answered.ok_or_else(|| nonsense(FrameError::Order))? {
            if entry.kind == Kind::Write {
                s.session.stats.bytes_written.fetch_add(entry.part.left(), Ordering::Relaxed);
            }
            self.answered(s, entry, Ok(()));
        }
        Ok(())
    }

    /// Handles the refusal of a frame.
    fn refused(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        sequence: u64,
        error: TransferError,
    ) -> Step<()> {
        if lane.is_being_put(sequence) {
            return Err(nonsense(FrameError::Order));
        }
        let entry = lane.sent.answer(sequence).ok_or_else(|| nonsense(FrameError::Order))?;
        // The peer may refuse a frame at its header, while the frame is still being sent.
        if let Some(work) = self.request(entry.slot).and_then(|f| f.work.as_ref()) {
            release_source(lane, entry.slot, work);
        }
        self.answered(s, entry, Err(error));
        Ok(())
    }

    fn table(&mut self, s: &mut SessionDriver, lane: &mut Lane) -> Step<bool> {
        let RecvState::Table(ahead) = lane.rx.state else { return Ok(true) };
        if lane.unread() < ahead.len() {
            return refill(lane, ahead.len().max(HEAD_READ));
        }
        let mut runs = std::mem::take(&mut lane.rx.runs);
        let table = &lane.rx.scratch[lane.rx.start..lane.rx.start + ahead.len()];
        let asked = ahead.read(table, &mut runs).map_err(nonsense)?;
        lane.rx.start += ahead.len();
        let begun = match asked {
            Asked::Write(payload) => {
                self.begin_write(s, lane, &ahead.named, payload, &runs);
                Ok(())
            }
            Asked::Read(total) => self.begin_read(s, lane, &ahead.named, &runs, total),
            Asked::Pull(total) => self.begin_pull(s, lane, &ahead.named, &runs, total),
        };
        lane.rx.runs = runs;
        begun.map(|()| true)
    }

    /// Finds the grant that a request names and the pieces of our memory for its runs. Checks every
    /// run.
    pub(super) fn find(
        &self,
        s: &SessionDriver,
        lane: &mut Lane,
        named: &Named,
        access: Access,
        runs: &[Run],
    ) -> Result<(Arc<Grant>, Vec<Piece>), TransferError> {
        let GrantName { id, token } = &named.grant;
        let who = &s.session.incarnation;
        let grant = self.endpoint.grants.find(*id, token, access, who)?;
        self.endpoint.peers.give_right(&s.session);
        if grant.memory.is_freed() {
            return Err(TransferError::Fault);
        }
        let base = grant.memory.ptr() as u64 + grant.span.offset;
        let mut pieces = lane.spare.pop().unwrap_or_default();
        pieces.clear();
        for run in runs {
            let beyond = if is_planted(Bug::BoundsIgnored) { 32 } else { 0 };
            run.check(grant.span.len + beyond)?;
            // An empty piece would look like a receive call that finds nothing.
            if run.len > 0 {
                pieces.push(Piece { addr: base + run.offset, len: run.len });
            }
        }
        Ok((grant, pieces))
    }

    fn begin_write(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
        named: &Named,
        left: u64,
        runs: &[Run],
    ) {
        let Named { sequence, counts, .. } = *named;
        let begun = self.find(s, lane, named, Access::WRITE, runs).and_then(|(grant, pieces)| {
            let gate = grant.gate();
            let (next, within, staged) = (0, 0, None);
            let mut incoming =
                IncomingWrite { sequence, grant, gate, pieces, next, within, left, counts, staged };
            self.land_in_buffer(s, lane, &mut incoming)?;
            Ok(incoming)
        });
        lane.rx.state = match begun {
            Ok(incoming) => RecvState::Land(incoming),
            Err(error) => {
                lane.refuse(sequence, error);
                RecvState::Skip { left: left as usize, then: AfterSkip::Count(sequence) }
            }
        };
    }

    /// Receives payload into its destination.
    fn land(&mut self, s: &mut SessionDriver, lane: &mut Lane) -> Step<bool> {
        let RecvState::Land(incoming) = &mut lane.rx.state else { return Ok(true) };
        if incoming.left > 0 {
            // Check the lease before every call: the process may have been stopped in between.
            if !s.is_local()
                && !s.liveness.may_apply(clock::now())
                && !is_planted(Bug::LeaseIgnored)
            {
                return Err(LaneEnd::LeaseOver);
            }
            let is_inside = incoming.gate.enter();
            if !is_inside && !is_planted(Bug::GateIgnored) {
                let (left, sequence) = (incoming.left as usize, incoming.sequence);
                lane.refuse(sequence, TransferError::Revoked);
                lane.rx.state = RecvState::Skip { left, then: AfterSkip::Count(sequence) };
                return Ok(true);
            }
            hooks::about_to_copy();
            let mut pieces = std::mem::take(&mut lane.pieces);
            rest_of(incoming, &mut pieces);
            // SAFETY: `find` checked the pieces against the grant, which keeps their memory alive.
            // This function is inside the grant's gate.
            let moved = unsafe {
                from_scratch_or_wire(
                    &mut *lane.wire,
                    &mut lane.rx.scratch,
                    (&mut lane.rx.start, &mut lane.rx.end),
                    &mut pieces,
                )
            };
            if is_inside {
                incoming.gate.leave();
            }
            lane.pieces = pieces;
            let moved = moved?;
            if moved == 0 {
                return Ok(false);
            }
            advance(incoming, moved);
            lane.rx.placed += moved;
            lane.applied.add_bytes(moved);
            s.session.stats.bytes_landed.fetch_add(moved, Ordering::Relaxed);
        }
        if incoming.left == 0 {
            let RecvState::Land(mut incoming) =
                std::mem::replace(&mut lane.rx.state, RecvState::Head)
            else {
                return Ok(true);
            };
            lane.keep(std::mem::take(&mut incoming.pieces));
            if let Some((buffer, target)) = incoming.staged.take() {
                self.put_incoming(s, lane, incoming, buffer, target);
            } else {
                lane.finish(incoming.sequence, self.count(s, incoming.counts));
            }
        }
        Ok(true)
    }

    /// Increments the counter of a frame, if it names one. The frame's bytes are in place, so the
    /// peer has shown a grant.
    pub(super) fn count(
        &mut self,
        s: &SessionDriver,
        counts: Option<u32>,
    ) -> Result<(), TransferError> {
        let Some(id) = counts else { return Ok(()) };
        self.endpoint.inbox.count(id, &s.session.incarnation).inspect_err(|error| {
            if *error == TransferError::CountersFull {
                self.endpoint.refusals.note(RefusalReason::Counters, &s.session.addr);
            }
        })
    }

    /// Increments a counter for a frame or an immediate that names no grant. The peer needs a
    /// right. Otherwise any stranger could raise what kernels and programs wait for.
    pub(super) fn count_alone(&mut self, s: &SessionDriver, id: u32) -> Result<(), TransferError> {
        if !self.endpoint.peers.has_right(&s.session) && !is_planted(Bug::RightIgnored) {
            self.endpoint.refusals.note(RefusalReason::CountWithoutRight, &s.session.addr);
            return Err(TransferError::RemoteAccess);
        }
        self.count(s, Some(id))
    }
}

pub(super) fn nonsense(error: FrameError) -> LaneEnd {
    LaneEnd::Misbehaved(error)
}

/// Receives more bytes into the scratch buffer. Returns false when there are none.
pub(super) fn refill(lane: &mut Lane, want: usize) -> Step<bool> {
    if lane.rx.start == lane.rx.end {
        (lane.rx.start, lane.rx.end) = (0, 0);
    } else if lane.rx.start > 0 {
        lane.rx.scratch.copy_within(lane.rx.start..lane.rx.end, 0);
        (lane.rx.start, lane.rx.end) = (0, lane.rx.end - lane.rx.start);
    }
    let room = (lane.rx.scratch.len() - lane.rx.end).min(want);
    let piece = [Piece::of_mut(&mut lane.rx.scratch[lane.rx.end..lane.rx.end + room])];
    // SAFETY: the piece is the lane's own buffer.
    match unsafe { lane.wire.receive(&piece) }.map_err(LaneEnd::Broken)? {
        None => Ok(false),
        Some(0) => Err(LaneEnd::Closed),
        Some(n) => {
            lane.rx.end += n;
            Ok(true)
        }
    }
}

fn skip(lane: &mut Lane) -> Step<bool> {
    let RecvState::Skip { left, then } = &mut lane.rx.state else { return Ok(true) };
    if *left > 0 {
        if lane.rx.start == lane.rx.end {
            let want = lane.rx.scratch.len();
            return refill(lane, want);
        }
        let passed = (*left).min(lane.rx.end - lane.rx.start);
        *left -= passed;
        lane.rx.start += passed;
    }
    if *left == 0 {
        if let AfterSkip::Count(sequence) = *then {
            lane.applied.apply(sequence);
        }
        lane.rx.state = RecvState::Head;
    }
    Ok(true)
}

/// Collects the next pieces of an incoming write that are still to be filled.
fn rest_of(incoming: &IncomingWrite, into: &mut Vec<Piece>) {
    into.clear();
    let mut within = incoming.within;
    for piece in incoming.pieces[incoming.next..].iter().take(LAND_PIECES) {
        into.push(Piece { addr: piece.addr + within, len: piece.len - within });
        within = 0;
    }
}

fn advance(incoming: &mut IncomingWrite, mut bytes: u64) {
    incoming.left -= bytes;
    while let Some(piece) = incoming.pieces.get(incoming.next) {
        let room = piece.len - incoming.within;
        if bytes < room {
            incoming.within += bytes;
            return;
        }
        bytes -= room;
        (incoming.next, incoming.within) = (incoming.next + 1, 0);
    }
}

/// Truncates the pieces to their first `most` bytes.
fn cut(pieces: &mut Vec<Piece>, mut most: u64) {
    if most == u64::MAX {
        return;
    }
    for piece in &mut *pieces {
        piece.len = piece.len.min(most);
        most -= piece.len;
    }
    pieces.retain(|piece| piece.len > 0);
}

/// Moves bytes into the pieces, from the scratch buffer if it has any, or else from the wire. A
/// receive from the wire also takes the bytes that follow, into the scratch buffer. Returns how
/// many bytes went into the pieces; 0 means that none are available.
///
/// A call may take only part of a frame: callers check before every call whether the bytes are
/// still wanted.
///
/// # Safety
///
/// The pieces are writable memory.
pub(super) unsafe fn from_scratch_or_wire(
    wire: &mut dyn crate::transport::Wire,
    scratch: &mut [u8],
    (start, end): (&mut usize, &mut usize),
    pieces: &mut Vec<Piece>,
) -> Step<u64> {
    cut(pieces, hooks::most_to_land());
    if *start < *end {
        let mut moved = 0;
        for piece in &*pieces {
            let len = (piece.len as usize).min(*end - *start);
            let from = scratch[*start..*start + len].as_ptr();
            // SAFETY: `from` has `len` bytes by the slice. The caller vouches for the piece.
            unsafe { copy(CopyKind::Plain, piece.addr as *mut u8, from, len) };
            *start += len;
            moved += len as u64;
            if *start == *end {
                break;
            }
        }
        return Ok(moved);
    }
    (*start, *end) = (0, 0);
    let wanted: u64 = pieces.iter().map(|p| p.len).sum();
    pieces.push(Piece::of_mut(&mut scratch[..HEAD_READ]));
    // SAFETY: the caller vouches for the pieces. The last one is the scratch buffer.
    match unsafe { wire.receive(pieces) }.map_err(LaneEnd::Broken)? {
        None => Ok(0),
        Some(0) => Err(LaneEnd::Closed),
        Some(n) => {
            let n = n as u64;
            *end = n.saturating_sub(wanted) as usize;
            Ok(n.min(wanted))
        }
    }
}
