//! Sends frames on a lane.
//!
//! Small frames wait in a buffer and go out in one call with the next data frame's header and
//! payload. The driver makes data frames one at a time, when the lane has room. It alternates
//! between the next queued request and the peer's reads.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;

use peerway_core::ids::SlotId;
use peerway_core::protocol::{CutFrame, FramePieces, Serves, max_frame};
use peerway_core::wire::{Control, HEADER_LEN, Header, Kind, MAX_SEGMENTS, SEGMENT_LEN};
use peerway_core::work::{Cursor, Pair};
use zerocopy::IntoBytes;

use super::driver::{Driver, TURN_BYTES};
use super::ending::LaneEnd;
use super::lane::Lane;
use super::replies::Reply;
use super::request::Fetched;
use super::sessions::SessionDriver;
use crate::bugs::{Bug, is_planted};
use crate::gpu::staging::Buffer;
use crate::os::Piece;
use crate::path::PathKind;
use crate::work::Work;

/// Limit of bytes in small frames that may wait before data. Above this the buffer is sent first.
const MAX_OUT: usize = 64 << 10;
/// Memory pieces per send call.
const SEND_PIECES: usize = MAX_SEGMENTS;
/// A lane with less window than this waits, rather than send tiny frames.
const MIN_ROOM: u64 = 64 << 10;

/// Limit of answer bytes that wait for a peer to read them: many times what a correct peer can
/// cause.
const MAX_OWED: usize = 1 << 20;

/// The frames that wait for the wire.
#[derive(Default)]
pub(crate) struct SendHalf {
    /// Complete small frames, which go out before the next data frame.
    pub(crate) out: Vec<u8>,
    pub(crate) out_done: usize,
    /// Bytes of `out` that answer the peer. The driver closes the lane of a peer that requests
    /// without reading the answers.
    pub(crate) owed: usize,
    pub(crate) frame: Option<OutFrame>,
    /// Header and table of `frame`.
    pub(crate) head: Vec<u8>,
    pub(crate) replies: VecDeque<Reply>,
    pub(crate) reply_next: bool,
}

impl SendHalf {
    pub(super) fn new() -> Self {
        Self {
            out: Vec::with_capacity(4096),
            head: Vec::with_capacity(HEADER_LEN + 256 * SEGMENT_LEN),
            ..Self::default()
        }
    }
}

/// A data frame that is being sent.
pub(crate) struct OutFrame {
    /// The part of `SendHalf::out` before this offset goes out before the frame. Later bytes go
    /// out after it, because frames are numbered in the order in which they are made.
    pub(crate) after: usize,
    /// Its sequence number, or 0 when it has none.
    pub(crate) sequence: u64,
    pub(crate) head_sent: usize,
    pub(crate) left: u64,
    pub(crate) body: Body,
}

/// Where a frame's payload comes from.
pub(crate) enum Body {
    /// A transfer's local memory, from the cursor on. The request keeps the memory alive: it stays
    /// in the table while one of its frames is unanswered.
    Request { slot: SlotId, at: Cursor },
    /// Our own memory that the peer reads. The reply holds the gate until the frame has been sent.
    Reply(Reply),
    /// A private copy of the rest of a frame whose transfer was cancelled.
    Bytes { bytes: Vec<u8>, done: usize },
    /// A staged copy of GPU memory.
    StagedCopy { buffer: Buffer, len: u64, done: u64 },
}

impl Lane {
    /// Queues a frame without payload.
    pub(crate) fn push(&mut self, header: &Header) {
        self.tx.out.extend_from_slice(header.as_bytes());
    }

    /// Queues a frame that answers a frame of the peer.
    pub(crate) fn push_answer(&mut self, header: &Header) {
        self.push(header);
        self.tx.owed += HEADER_LEN;
    }

    /// Queues a frame with a payload, which is copied now.
    pub(crate) fn push_with(&mut self, mut header: Header, payload: &[u8]) {
        header.set_body(0, 0, payload.len());
        self.push(&header);
        self.tx.out.extend_from_slice(payload);
    }

    /// Queues a control message.
    pub(crate) fn push_control(&mut self, message: &Control) {
        self.push_with(Header::new(Kind::Control), &message.to_bytes());
    }

    /// Queues a control message that answers a message of the peer.
    pub(crate) fn push_control_answer(&mut self, message: &Control) {
        let before = self.tx.out.len();
        self.push_control(message);
        self.tx.owed += self.tx.out.len() - before;
    }

    /// Whether the peer leaves more answers unread than a correct peer can cause.
    pub(crate) fn owes_too_much(&self) -> bool {
        self.tx.owed > MAX_OWED && !is_planted(Bug::OwedIgnored)
    }

    /// Whether the lane has nothing left to send.
    pub(crate) fn has_sent_all(&self) -> bool {
        self.tx.frame.is_none()
            && self.tx.out.is_empty()
            && self.tx.replies.is_empty()
            && !self.unsent
    }
}

impl Driver {
    /// Sends until the lane is full or the turn's budget is used up. Returns true when anything was
    /// sent.
    pub(super) fn transmit(
        &mut self,
        s: &mut SessionDriver,
        lane: &mut Lane,
    ) -> Result<bool, LaneEnd> {
        let mut budget = TURN_BYTES;
        let mut progress = false;
        lane.blocked = false;
        loop {
            while lane.tx.frame.is_none()
                && lane.tx.out.len() - lane.tx.out_done < MAX_OUT
                && self.next_frame(s, lane)
            {}
            let sent = self.send_some(lane)?;
            if sent == 0 {
                break;
            }
            progress = true;
            budget = budget.saturating_sub(sent);
            if lane.has_sent_all() && s.has_framed_all() {
                break;
            }
            if budget == 0 {
                s.dirty = true;
                break;
            }
        }
        Ok(progress)
    }

    /// Makes the next frame. Returns false when there is none to make now.
    fn next_frame(&mut self, s: &mut SessionDriver, lane: &mut Lane) -> bool {
        if lane.tx.replies.is_empty() {
            return self.request_frame(s, lane);
        }
        lane.tx.reply_next = !lane.tx.reply_next;
        if lane.tx.reply_next && self.reply_frame(s, lane) {
            return true;
        }
        self.request_frame(s, lane) || self.reply_frame(s, lane)
    }

    /// Makes a frame of the next queued request.
    fn request_frame(&mut self, s: &mut SessionDriver, lane: &mut Lane) -> bool {
        if s.has_framed_all() {
            return false;
        }
        let Serves { latency, bulk } = s.serves(lane.role);
        loop {
            let from_latency = latency && !s.latency.is_empty();
            let queue = match (from_latency, bulk) {
                (true, _) => &mut s.latency,
                (false, true) => &mut s.bulk,
                _ => return false,
            };
            let Some(&slot) = queue.front() else { return false };
            let Some(request) = self.requests.get_mut(slot) else {
                queue.pop_front();
                continue;
            };
            if !request.state.has_more() {
                request.queued = false;
                queue.pop_front();
                continue;
            }
            if request.is_staged() && !self.fetch(s, slot) {
                return false;
            }
            let Some(request) = self.requests.get_mut(slot) else { continue };
            let queue = if from_latency { &mut s.latency } else { &mut s.bulk };
            let room = lane.sent.room();
            let (next, least) = match request.gpu.as_ref().and_then(|gpu| gpu.fetched.front()) {
                // A fetched part is cut to size already, and is sent whole.
                Some(fetched) => (fetched.part.left(), u64::MAX),
                None => (request.state.next_len(), MIN_ROOM),
            };
            if room < least.min(next) {
                return false;
            }
            queue.pop_front();
            let made = self.make_frame(lane, slot, room);
            if let Some(request) = self.request(slot) {
                if request.state.has_more() {
                    let queue = if from_latency { &mut s.latency } else { &mut s.bulk };
                    queue.push_back(slot);
                } else {
                    request.queued = false;
                }
            }
            if made {
                return true;
            }
        }
    }

    /// Makes a frame of this request. Returns false when it has no bytes to send.
    fn make_frame(&mut self, lane: &mut Lane, slot: SlotId, room: u64) -> bool {
        let Some(request) = self.requests.get_mut(slot) else { return false };
        let Some(work) = &request.work else { return false };
        let Some(kind) = request.state.route().frame() else { return false };
        let fetched = request.gpu.as_mut().and_then(|gpu| gpu.fetched.pop_front());
        let (cut, start, staged) = match fetched {
            Some(Fetched { part, staged, .. }) => (None, part, Some(staged.into_buffer())),
            None => {
                let cut = request.state.begin_cut();
                (Some(cut), cut.start, None)
            }
        };
        let max = match staged {
            Some(_) => start.left(),
            None => max_frame(kind, request.piece, room),
        };
        let mut at = start;
        let name = |pair: &Pair| {
            let remote = work.remote(&pair.remote);
            (remote.grant, &remote.token)
        };
        let source = |pair: &Pair| work.local_addr(&pair.local) as u64;
        let pieces = FramePieces::new(&work.shape, &mut at, max);
        let frame = CutFrame::cut(kind, pieces, name, source, &mut lane.tx.head);
        let part = match cut {
            Some(cut) => request.state.end_cut(cut, at),
            None => {
                request.state.fetch_ended();
                start
            }
        };
        let counts = request.state.frame_made();
        let sent_at = &self.endpoint.slots.slot(slot).sent_at;
        if sent_at.load(Ordering::Relaxed) == 0 {
            sent_at.store(self.now.max(request.posted), Ordering::Relaxed);
        }
        if request.by_device && lane.ends.is_none() {
            // No queue pair is left. Report the path that is used instead.
            self.endpoint.slots.set_path(slot, PathKind::Tcp);
        }
        let sequence = lane.sent.push(kind, slot, part, frame.window());
        let left = frame.finish(sequence, slot.to_bits(), counts, &mut lane.tx.head);
        if kind == Kind::Write {
            let body = match staged {
                Some(buffer) => Body::StagedCopy { buffer, len: left, done: 0 },
                None => Body::Request { slot, at: part },
            };
            let after = lane.tx.out.len();
            lane.tx.frame = Some(OutFrame { after, sequence, head_sent: 0, left, body });
        } else {
            lane.tx.out.extend_from_slice(&lane.tx.head);
        }
        true
    }

    /// Makes one send call with everything that is ready. Returns 0 when nothing is ready or the
    /// lane is full.
    fn send_some(&mut self, lane: &mut Lane) -> Result<u64, LaneEnd> {
        let mut pieces = std::mem::take(&mut lane.pieces);
        pieces.clear();
        let mut put = |piece: Piece| {
            if piece.len > 0 {
                pieces.push(piece);
            }
        };
        let first = lane.tx.frame.as_ref().map_or(lane.tx.out.len(), |frame| frame.after);
        put(Piece::of(&lane.tx.out[lane.tx.out_done..first]));
        if let Some(frame) = &lane.tx.frame {
            put(Piece::of(&lane.tx.head[frame.head_sent..]));
            match &frame.body {
                Body::Request { slot, at } => {
                    let work = self.work_of(*slot)?;
                    let mut at = *at;
                    for _ in 0..SEND_PIECES {
                        let Some(pair) = work.next(&mut at, u64::MAX) else { break };
                        put(Piece { addr: work.local_addr(&pair.local) as u64, len: pair.len });
                    }
                }
                Body::Reply(reply) => {
                    let mut within = reply.within;
                    for piece in reply.pieces[reply.next..].iter().take(SEND_PIECES) {
                        put(Piece { addr: piece.addr + within, len: piece.len - within });
                        within = 0;
                    }
                }
                Body::Bytes { bytes, done } => put(Piece::of(&bytes[*done..])),
                Body::StagedCopy { buffer, len, done } => {
                    put(Piece { addr: buffer.ptr() as u64 + done, len: len - done });
                }
            }
        }
        let is_empty = pieces.is_empty();
        if is_empty && !lane.unsent {
            lane.pieces = pieces;
            return Ok(0);
        }
        // SAFETY: the pieces are the lane's own buffers, local memory that a request's work keeps
        // alive, or granted memory behind a gate that the reply holds.
        let sent = unsafe { lane.wire.send(&pieces) };
        lane.pieces = pieces;
        let sent = sent.map_err(LaneEnd::Broken)? as u64;
        lane.unsent = lane.wire.has_unsent();
        if sent == 0 {
            lane.blocked = !is_empty || lane.unsent;
            return Ok(0);
        }
        self.consume(lane, sent)?;
        Ok(sent)
    }

    /// Removes sent bytes from the waiting data.
    fn consume(&mut self, lane: &mut Lane, mut sent: u64) -> Result<(), LaneEnd> {
        let first = lane.tx.frame.as_ref().map_or(lane.tx.out.len(), |frame| frame.after);
        let small = (first - lane.tx.out_done).min(sent as usize);
        lane.tx.out_done += small;
        sent -= small as u64;
        if lane.tx.out_done == lane.tx.out.len() {
            lane.tx.out.clear();
            lane.tx.out_done = 0;
            lane.tx.owed = 0;
            if let Some(frame) = &mut lane.tx.frame {
                frame.after = 0;
            }
        }
        let Some(frame) = &mut lane.tx.frame else { return Ok(()) };
        let head = (lane.tx.head.len() - frame.head_sent).min(sent as usize);
        frame.head_sent += head;
        sent -= head as u64;
        frame.left -= sent;
        match &mut frame.body {
            // The usual case: everything was sent, so the cursor is not needed any more.
            Body::Request { .. } if frame.left == 0 => {}
            Body::Request { slot, at } => {
                let work = self.work_of(*slot)?;
                while sent > 0
                    && let Some(pair) = work.next(at, sent)
                {
                    sent -= pair.len;
                }
            }
            Body::Reply(reply) => {
                while sent > 0 {
                    let left = reply.pieces[reply.next].len - reply.within;
                    let step = left.min(sent);
                    sent -= step;
                    reply.within += step;
                    if step == left {
                        (reply.next, reply.within) = (reply.next + 1, 0);
                    }
                }
            }
            Body::Bytes { done, .. } => *done += sent as usize,
            Body::StagedCopy { done, .. } => *done += sent,
        }
        if frame.left == 0 && frame.head_sent == lane.tx.head.len() {
            let frame = lane.tx.frame.take();
            if let Some(OutFrame { body: Body::Reply(mut reply), .. }) = frame {
                lane.keep(std::mem::take(&mut reply.pieces));
            }
        }
        Ok(())
    }

    /// The work whose bytes a frame carries. A request stays in the table while one of its frames
    /// is unanswered, and a frame that is being sent is unanswered.
    fn work_of(&self, slot: SlotId) -> Result<&Work, LaneEnd> {
        let request = self.requests.get(slot);
        let gone = || LaneEnd::Broken(io::Error::other("the transfer of a queued frame is gone"));
        request.and_then(|request| request.work.as_ref()).ok_or_else(gone)
    }
}

#[cfg(test)]
mod tests {
    use peerway_core::outcome::TransferError;
    use peerway_core::protocol::Role;

    use super::*;
    use crate::simulation::silent_wire;

    #[test]
    fn every_answer_to_a_pull_counts_as_owed() {
        let mut lane = Lane::new(silent_wire(), 0, Role::Latency, 0);
        lane.answer_pull(1, Ok(()));
        lane.answer_pull(2, Err(TransferError::Revoked));
        assert_eq!(lane.tx.owed, 2 * HEADER_LEN);
        for sequence in 3.. {
            if lane.owes_too_much() {
                assert!(lane.tx.out.len() < 2 << 20);
                return;
            }
            lane.answer_pull(sequence, Ok(()));
        }
    }
}
