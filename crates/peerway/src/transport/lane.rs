//! A lane: one wire to a peer, with what is half-sent, half-received and not yet answered on it.
//!
//! Only the driver touches lanes. Sequenced frames are numbered from 1; the peer applies them in
//! order, so the last applied number says everything about a lane that died.

use std::collections::VecDeque;
use std::sync::Arc;

use peerway_core::ids::SlotId;
use peerway_core::protocol::{AppliedFrames, SentFrames};
use peerway_core::wire::{Checked, Control, HEADER_LEN, Header, Kind, SEGMENT_LEN};
use peerway_core::work::Cursor;
use zerocopy::IntoBytes;

use super::Wire;
use crate::batch::Work;
use crate::gpu::staging::{Buffer, StagedCopy};
use crate::memory::gate::GateRef;
use crate::memory::grants::Grant;
use crate::os::Piece;

/// Unacknowledged bytes on a lane: about what a loopback socket buffers; on a network the product
/// of 100 Gbit/s and 0.6 ms.
const WINDOW_BYTES: u64 = 8 << 20;
/// Unacknowledged frames on a lane; also the most reads a peer may ask for at a time.
pub(crate) const WINDOW_FRAMES: u32 = 256;
/// Bytes of the receive buffer: the largest table and some small frames.
const SCRATCH: usize = 16 << 10;

/// What a lane is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Role {
    /// Control and liveness only: data has better lanes.
    Control,
    /// Control and small transfers.
    Latency,
    /// Large transfers.
    Bulk,
}

/// See the module.
pub(crate) struct Lane {
    pub(crate) wire: Box<dyn Wire>,
    pub(crate) index: u16,
    pub(crate) role: Role,
    pub(crate) heard: u64,
    pub(crate) blocked: bool,
    /// epoll watches for room to send.
    pub(crate) watched_out: bool,

    /// Small frames, complete, to be sent before the next data frame.
    pub(crate) out: Vec<u8>,
    pub(crate) out_done: usize,
    /// Bytes of `out` that answer the peer: a peer that asks and never reads is not waited for.
    pub(crate) owed: usize,
    pub(crate) frame: Option<OutFrame>,
    /// Header and table of `frame`.
    pub(crate) head: Vec<u8>,
    pub(crate) replies: VecDeque<Reply>,
    pub(crate) reply_next: bool,
    /// Our frames that wait for answers.
    pub(crate) sent: SentFrames,

    /// Lists kept for their memory, so that frames need not allocate: of the last call's pieces, of
    /// a table's runs, and of pieces of requests that are over.
    pub(crate) pieces: Vec<Piece>,
    pub(crate) runs: Vec<TableRun>,
    pub(crate) spare: Vec<Vec<Piece>>,

    pub(crate) rx: RecvState,
    pub(crate) scratch: Box<[u8]>,
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// The peer's frames that are dealt with.
    pub(crate) applied: AppliedFrames,
    /// Payload put where it belongs, of the peer's writes and of our reads.
    pub(crate) placed: u64,
    /// Received bytes on their way from pinned buffers into GPU memory.
    pub(crate) puts: VecDeque<GpuPut>,
    /// Where the answer to a read of ours into GPU memory is received.
    pub(crate) fill: Option<Buffer>,
    /// Set for a queue pair that is being shut: until when its last completions are waited for.
    pub(crate) draining: Option<u64>,
}

/// A data frame that is being sent.
pub(crate) struct OutFrame {
    /// Up to here `Lane::out` goes before the frame; what was queued later goes after it, since
    /// frames are numbered in the order in which they are made.
    pub(crate) after: usize,
    /// Its number, 0 when it has none.
    pub(crate) sequence: u64,
    pub(crate) head_sent: usize,
    pub(crate) left: u64,
    pub(crate) body: Body,
}

/// Where a frame's payload comes from.
pub(crate) enum Body {
    /// A transfer's local memory, from the cursor on. Its request keeps it: that stays while a frame of it is unanswered.
    Request { slot: SlotId, at: Cursor },
    /// Our own memory that the peer reads. The gate is held until the frame is out.
    Reply(Reply),
    /// A private copy: what is left of a frame whose transfer was cancelled.
    Bytes { bytes: Vec<u8>, done: usize },
    /// A copy of GPU memory.
    StagedCopy { buffer: Buffer, len: u64, done: u64 },
}

/// Received bytes on their way into GPU memory.
pub(crate) struct GpuPut {
    pub(crate) sequence: u64,
    /// Dropped first: it waits for the copy.
    pub(crate) staged: StagedCopy,
    pub(crate) begun: u64,
    pub(crate) of: GpuPutOwner,
}

/// Whose bytes they are. Keeps their memory.
pub(crate) enum GpuPutOwner {
    /// A write of the peer's.
    Write { _grant: Arc<Grant>, gate: GateRef, counts: Option<u32> },
    /// A read of ours.
    Read { slot: SlotId, _work: Work },
}

impl Drop for GpuPutOwner {
    fn drop(&mut self) {
        if let Self::Write { gate, .. } = self {
            gate.leave();
        }
    }
}

/// A read of the peer's that we answer.
pub(crate) struct Reply {
    pub(crate) sequence: u64,
    pub(crate) transfer: u64,
    pub(crate) grant: Arc<Grant>,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) next: usize,
    pub(crate) within: u64,
    pub(crate) total: u64,
    pub(crate) gate: Option<GateRef>,
    /// Its bytes on their way out of GPU memory, and since when.
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

/// A run of granted memory that a request names, and for a pull where its bytes are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TableRun {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) source: u64,
}

/// What is being received.
pub(crate) enum RecvState {
    /// A header.
    Head,
    /// A table, once its header is known.
    Table { head: Header, checked: Checked },
    /// Payload for memory of ours that a peer writes.
    Land(IncomingWrite),
    /// Payload for a read of ours.
    Fill { sequence: u64, slot: SlotId, part: Cursor },
    /// Payload nobody wants.
    Skip { left: usize, then: AfterSkip },
    /// A body that is kept whole: a message.
    Gather { head: Header, kind: Kind, bytes: Vec<u8>, need: usize },
}

/// What to do when unwanted payload has passed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AfterSkip {
    /// Nothing.
    Nothing,
    /// The frame was sequenced and has been refused already.
    Count(u64),
}

/// A write being applied.
pub(crate) struct IncomingWrite {
    pub(crate) sequence: u64,
    /// Keeps the memory.
    pub(crate) grant: Arc<Grant>,
    pub(crate) gate: GateRef,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) next: usize,
    pub(crate) within: u64,
    pub(crate) left: u64,
    /// The counter to raise when all of it is there.
    pub(crate) counts: Option<u32>,
    /// For memory of a GPU: what receives it first, and where it belongs. `pieces` is the buffer then.
    pub(crate) staged: Option<(Buffer, Vec<Piece>)>,
}

impl Lane {
    pub(crate) fn new(wire: Box<dyn Wire>, index: u16, role: Role, now: u64) -> Self {
        Self {
            wire,
            index,
            role,
            heard: now,
            blocked: false,
            watched_out: false,
            out: Vec::with_capacity(4096),
            out_done: 0,
            owed: 0,
            frame: None,
            head: Vec::with_capacity(HEADER_LEN + 256 * SEGMENT_LEN),
            replies: VecDeque::new(),
            reply_next: false,
            sent: SentFrames::new(WINDOW_BYTES, WINDOW_FRAMES),
            pieces: Vec::with_capacity(2 * WINDOW_FRAMES as usize),
            runs: Vec::with_capacity(WINDOW_FRAMES as usize),
            spare: Vec::new(),
            rx: RecvState::Head,
            scratch: vec![0; SCRATCH].into_boxed_slice(),
            start: 0,
            end: 0,
            applied: AppliedFrames::new(WINDOW_FRAMES),
            placed: 0,
            puts: VecDeque::new(),
            fill: None,
            draining: None,
        }
    }

    /// Whether it is a queue pair that takes work requests.
    pub(crate) fn is_queue(&mut self) -> bool {
        self.draining.is_none() && self.wire.queue().is_some()
    }

    /// Allows fewer unacknowledged frames, and fewer parts under way, than the lane's own bound.
    pub(crate) fn limit_frames(&mut self, frames: u32) {
        self.sent = SentFrames::new(WINDOW_BYTES, frames.clamp(1, WINDOW_FRAMES));
        if let Some(queue) = self.wire.queue() {
            queue.limit_parts(frames);
        }
    }

    /// Whether the answer to a read of this number has come, and is on its way into GPU memory.
    pub(crate) fn is_being_put(&self, sequence: u64) -> bool {
        let of_read = |put: &GpuPut| matches!(put.of, GpuPutOwner::Read { .. });
        self.puts.iter().any(|put| put.sequence == sequence && of_read(put))
    }

    /// Queues a frame without payload.
    pub(crate) fn push(&mut self, header: &Header) {
        self.out.extend_from_slice(header.as_bytes());
    }

    /// Queues a frame that answers one of the peer's.
    pub(crate) fn push_answer(&mut self, header: &Header) {
        self.push(header);
        self.owed += HEADER_LEN;
    }

    /// Queues a frame with a payload that is copied now.
    pub(crate) fn push_with(&mut self, mut header: Header, payload: &[u8]) {
        header.set_body(0, 0, payload.len());
        self.push(&header);
        self.out.extend_from_slice(payload);
    }

    /// Queues a control message.
    pub(crate) fn push_control(&mut self, message: &Control) {
        self.push_with(Header::new(Kind::Control), &message.to_bytes());
    }

    /// Queues a control message that answers one of the peer's.
    pub(crate) fn push_control_answer(&mut self, message: &Control) {
        let before = self.out.len();
        self.push_control(message);
        self.owed += self.out.len() - before;
    }

    /// Queues an acknowledgement of all that has been applied. What is still on its way into GPU memory has
    /// not, and holds up those after it.
    pub(crate) fn push_ack(&mut self) {
        let writes = self.puts.iter().filter(|put| matches!(put.of, GpuPutOwner::Write { .. }));
        let pending = writes.map(|put| put.sequence).next();
        if let Some(applied) = self.applied.next_acknowledgement(pending) {
            let mut ack = Header::new(Kind::Ack);
            ack.sequence = applied.into();
            self.push_answer(&ack);
        }
    }

    /// Refuses a frame.
    pub(crate) fn push_nack(&mut self, sequence: u64, code: u8) {
        let mut nack = Header::new(Kind::Nack);
        nack.sequence = sequence.into();
        nack.status = u16::from(code).into();
        self.push_answer(&nack);
        self.applied.refuse(sequence, code);
    }

    /// Has the frame that is being sent go on from a private copy if it carries granted memory that
    /// has been barred since, and leaves the gate.
    pub(crate) fn copy_barred_reply(&mut self) {
        let Some(frame) = &mut self.frame else { return };
        let Body::Reply(reply) = &mut frame.body else { return };
        if reply.grant.is_live() {
            return;
        }
        let mut bytes = vec![0; frame.left as usize];
        let (mut done, mut within) = (0, reply.within as usize);
        for piece in &reply.pieces[reply.next..] {
            let from = (piece.addr as usize + within) as *const u8;
            let into = &mut bytes[done..done + piece.len as usize - within];
            // SAFETY: the pieces were checked against the grant, which keeps their memory; the reply
            // holds the gate until it is dropped below. `into` is memory of our own.
            unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
            (done, within) = (done + into.len(), 0);
        }
        frame.body = Body::Bytes { bytes, done: 0 };
    }

    /// Gives a piece list back.
    pub(crate) fn keep(&mut self, pieces: Vec<Piece>) {
        if self.spare.len() < 8 {
            self.spare.push(pieces);
        }
    }

    /// Whether nothing waits to be sent on it.
    pub(crate) fn has_sent_all(&self) -> bool {
        self.frame.is_none() && self.out.is_empty() && self.replies.is_empty()
    }

    /// Bytes received and not yet looked at.
    pub(crate) fn unread(&self) -> usize {
        self.end - self.start
    }
}
