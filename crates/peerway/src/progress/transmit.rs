//! Sends frames on a lane.
//!
//! Small frames wait in a buffer and go out in one call with the next data frame's header and
//! payload. The driver makes data frames one at a time, when the lane has room. It alternates
//! between the next queued request and the peer's reads.

use std::io;
use std::sync::atomic::Ordering;

use peerway_core::ids::SlotId;
use peerway_core::protocol::{Route, Serves};
use peerway_core::wire::{
    COUNTS, HEADER_LEN, Header, Kind, MAX_PAYLOAD, MAX_PULL, MAX_SEGMENTS, PULL_SEGMENT_LEN,
    PullSegment, SEGMENT_LEN, Segment,
};
use zerocopy::IntoBytes;

use super::driver::{Driver, SessionDriver, TURN_BYTES};
use super::ending::LaneEnd;
use super::request::Fetched;
use crate::os::Piece;
use crate::path::PathKind;
use crate::progress::lane::{Body, Lane, OutFrame};
use crate::work::Work;

/// Limit of bytes in small frames that may wait before data. Above this the buffer is sent first.
const MAX_OUT: usize = 64 << 10;
/// Memory pieces per send call.
const SEND_PIECES: usize = MAX_SEGMENTS;
/// A lane with less window than this waits, rather than send tiny frames.
const MIN_ROOM: u64 = 64 << 10;

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
        lane.tx.reply_next = !lane.tx.reply_next;
        if lane.tx.reply_next && self.reply_frame(s, lane) {
            return true;
        }
        self.request_frame(s, lane) || self.reply_frame(s, lane)
    }

    /// Makes the frame that answers the peer's next read.
    fn reply_frame(&mut self, s: &mut SessionDriver, lane: &mut Lane) -> bool {
        if !self.reply_is_ready(s, lane) {
            return false;
        }
        let Some(mut reply) = lane.tx.replies.pop_front() else { return false };
        if reply.staged.is_none() {
            let gate = reply.grant.gate();
            if !gate.enter() {
                let error = peerway_core::outcome::TransferError::Revoked;
                lane.push_nack(reply.sequence, error as u8);
                return true;
            }
            reply.gate = Some(gate);
        }
        let mut head = Header::new(Kind::ReadData);
        head.sequence = reply.sequence.into();
        head.transfer = reply.transfer.into();
        head.set_body(0, 0, reply.total as usize);
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
            let request = self.requests[slot.index as usize].as_mut();
            let Some(request) = request.filter(|f| f.slot == slot) else {
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
            let Some(request) = self.requests[slot.index as usize].as_mut() else { continue };
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

    fn make_frame(&mut self, lane: &mut Lane, slot: SlotId, room: u64) -> bool {
        let Some(request) = &mut self.requests[slot.index as usize] else { return false };
        let Some(work) = &request.work else { return false };
        let fetched = request.gpu.as_mut().and_then(|gpu| gpu.fetched.pop_front());
        let kind = match request.state.route() {
            Route::Write => Kind::Write,
            Route::Read => Kind::Read,
            Route::Pull => Kind::Pull,
            Route::SignalOnly => return false,
        };
        let (cut, start, staged) = match fetched {
            Some(Fetched { part, staged, .. }) => (None, part, Some(staged.into_buffer())),
            None => {
                let cut = request.state.begin_cut();
                (Some(cut), cut.start, None)
            }
        };
        let mut at = start;
        let max = match kind {
            Kind::Pull => MAX_PULL,
            _ if staged.is_some() => start.left(),
            _ => request.piece.min(room).min(MAX_PAYLOAD),
        };
        // The table follows the header. The header is written when the table is known.
        lane.tx.head.clear();
        lane.tx.head.resize(HEADER_LEN, 0);
        let mut head = Header::new(kind);
        let (mut count, mut total) = (0usize, 0u64);
        let mut region = None;
        while count < MAX_SEGMENTS
            && let Some(pair) = work.shape.peek(&at, max - total)
        {
            let remote = work.remote(&pair.remote);
            if region.is_some_and(|r| r != pair.remote.region) {
                break;
            }
            if region.is_none() {
                region = Some(pair.remote.region);
                head.grant = remote.grant.index.into();
                head.generation = remote.grant.generation.into();
                head.token = remote.token;
                head.offset = pair.remote.offset.into();
            }
            let (offset, len) = (pair.remote.offset.into(), (pair.len as u32).into());
            if kind == Kind::Pull {
                let source = (work.local_addr(&pair.local) as u64).into();
                lane.tx.head.extend_from_slice(PullSegment { offset, len, source }.as_bytes());
            } else {
                lane.tx.head.extend_from_slice(Segment { offset, len }.as_bytes());
            }
            count += 1;
            total += pair.len;
            work.shape.advance(&mut at, pair.len);
        }
        let part = match cut {
            Some(cut) => request.state.end_cut(cut, at),
            None => {
                request.state.fetch_ended();
                start
            }
        };
        if let Some(id) = request.state.frame_made() {
            (head.status, head.immediate) = (COUNTS.into(), id.into());
        }
        let sent_at = &self.endpoint.slots.slot(slot).sent_at;
        if sent_at.load(Ordering::Relaxed) == 0 {
            sent_at.store(self.now.max(request.posted), Ordering::Relaxed);
        }
        if request.by_device && lane.wire.queue().is_none() {
            // No queue pair is left. Report the path that is used instead.
            self.endpoint.slots.set_path(slot, PathKind::Tcp);
        }
        let window = if kind == Kind::Pull { 0 } else { total };
        head.sequence = lane.sent.push(kind, slot, part, window).into();
        head.transfer = slot.to_bits().into();
        let body = match staged {
            Some(buffer) => Body::StagedCopy { buffer, len: total, done: 0 },
            None => Body::Request { slot, at: part },
        };
        finish_frame(lane, head, kind, count, total, body);
        true
    }
}

/// Stores a frame's header where it is sent from, with its body if it has one.
fn finish_frame(
    lane: &mut Lane,
    mut head: Header,
    kind: Kind,
    count: usize,
    total: u64,
    body: Body,
) {
    match kind {
        Kind::Write => {
            if count == 1 {
                // One run needs no table: the header has its offset and the body its length.
                lane.tx.head.truncate(HEADER_LEN);
                head.set_body(0, 0, total as usize);
            } else {
                head.set_body(count, count * SEGMENT_LEN, total as usize);
            }
            lane.tx.head[..HEADER_LEN].copy_from_slice(head.as_bytes());
            let after = lane.tx.out.len();
            let sequence = head.sequence.get();
            lane.tx.frame = Some(OutFrame { after, sequence, head_sent: 0, left: total, body });
        }
        _ => {
            let entry = if kind == Kind::Pull { PULL_SEGMENT_LEN } else { SEGMENT_LEN };
            head.set_body(count, count * entry, 0);
            lane.tx.head[..HEADER_LEN].copy_from_slice(head.as_bytes());
            lane.tx.out.extend_from_slice(&lane.tx.head);
        }
    }
}

impl Driver {
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
        let request = self.requests[slot.index as usize].as_ref().filter(|f| f.slot == slot);
        let gone = || LaneEnd::Broken(io::Error::other("the transfer of a queued frame is gone"));
        request.and_then(|request| request.work.as_ref()).ok_or_else(gone)
    }
}
