//! A lane: one wire to a peer, with the state of its half-sent, half-received and unanswered
//! frames.
//!
//! Only the driver touches lanes. Sequenced frames are numbered from 1 and the peer applies them in
//! order. So the number of the last applied frame describes completely how far a failed lane got.

use std::collections::VecDeque;
use std::sync::Arc;

use peerway_core::ids::SlotId;
use peerway_core::outcome::TransferError;
use peerway_core::protocol::{AppliedFrames, Role, Run, SentFrames, TableAhead};
use peerway_core::wire::{Control, HEADER_LEN, Header, Kind, MAX_CONTROL, SEGMENT_LEN};
use peerway_core::work::Cursor;
use zerocopy::IntoBytes;

use crate::bugs::{Bug, is_planted};
use crate::gpu::staging::{Buffer, StagedCopy};
use crate::limits::MessageCharge;
use crate::memory::grants::Grant;
use crate::os::Piece;
use crate::os::gate::GateRef;
use crate::progress::windows::LaneWindows;
use crate::transport::Wire;
use crate::transport::device::{DeviceQueue, KeyTable, QueueEnds};
use crate::work::Work;

/// Limit of unacknowledged bytes on a lane. It is about what a loopback socket buffers, and on a
/// network the product of 100 Gbit/s and 0.6 ms.
const WINDOW_BYTES: u64 = 8 << 20;
/// Limit of unacknowledged frames on a lane, and of reads that a peer may have outstanding.
pub(crate) const WINDOW_FRAMES: u32 = 256;
/// Bytes of the receive buffer: it holds the largest table or control message, and some small
/// frames.
const SCRATCH: usize = 16 << 10;
const _: () = assert!(SCRATCH >= MAX_CONTROL);
/// Limit of answer bytes that wait for a peer to read them: many times what a correct peer can
/// cause.
const MAX_OWED: usize = 1 << 20;

/// See the module.
pub(crate) struct Lane {
    /// Keys to our memory for the peer of a device queue. Closed before the queue is destroyed.
    pub(crate) windows: LaneWindows,
    pub(crate) wire: Box<dyn Wire>,
    pub(crate) index: u16,
    pub(crate) role: Role,
    pub(crate) heard: u64,
    pub(crate) blocked: bool,
    /// epoll watches this wire for room to send.
    pub(crate) watched_out: bool,
    /// What [`Wire::has_unsent`] said after the last call. Asking each time would cost the wires
    /// that never have any.
    pub(crate) unsent: bool,

    /// Frames sent to the peer that are not yet answered.
    pub(crate) sent: SentFrames,
    /// Frames of the peer that have been handled.
    pub(crate) applied: AppliedFrames,
    pub(crate) tx: SendHalf,
    pub(crate) rx: ReceiveHalf,

    /// Lists kept for their allocations, so that frames need not allocate: the pieces of the last
    /// call, and piece lists of finished frames.
    pub(crate) pieces: Vec<Piece>,
    pub(crate) spare: Vec<Vec<Piece>>,
    /// Set if the wire is a device queue.
    pub(crate) ends: Option<QueueEnds>,
    /// Set while a device queue shuts down: the latest time to wait for its last completions.
    pub(crate) draining: Option<u64>,
}

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

/// A notification that is arriving.
pub(crate) struct IncomingMessage {
    pub(crate) sequence: u64,
    pub(crate) bytes: Vec<u8>,
    pub(crate) need: usize,
    /// When its header arrived.
    pub(crate) since: u64,
    /// Its bytes in the budgets, unless it arrived whole.
    pub(crate) _charge: Option<MessageCharge>,
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
    /// Makes a lane from a queue pair.
    pub(crate) fn of_queue(index: u16, queue: Box<dyn DeviceQueue>, now: u64) -> Self {
        let role = if queue.is_for_latency() { Role::Latency } else { Role::Bulk };
        let ends = Some(queue.ends(index));
        Self { ends, ..Self::new(queue, index, role, now) }
    }

    pub(crate) fn new(wire: Box<dyn Wire>, index: u16, role: Role, now: u64) -> Self {
        Self {
            windows: LaneWindows::default(),
            wire,
            index,
            role,
            heard: now,
            blocked: false,
            watched_out: false,
            unsent: false,
            sent: SentFrames::new(WINDOW_BYTES, WINDOW_FRAMES),
            applied: AppliedFrames::new(WINDOW_FRAMES),
            tx: SendHalf {
                out: Vec::with_capacity(4096),
                head: Vec::with_capacity(HEADER_LEN + 256 * SEGMENT_LEN),
                ..SendHalf::default()
            },
            rx: ReceiveHalf {
                state: RecvState::Head,
                scratch: vec![0; SCRATCH].into_boxed_slice(),
                start: 0,
                end: 0,
                runs: Vec::with_capacity(WINDOW_FRAMES as usize),
                placed: 0,
                puts: VecDeque::new(),
                fill: None,
            },
            pieces: Vec::with_capacity(2 * WINDOW_FRAMES as usize),
            spare: Vec::new(),
            ends: None,
            draining: None,
        }
    }

    /// Whether the wire is a queue pair that accepts work requests.
    #[inline]
    pub(crate) fn is_queue(&self) -> bool {
        self.draining.is_none() && self.ends.is_some()
    }

    /// Whether the wire is a queue pair with keys of its own to the peer's memory.
    pub(crate) fn is_keyed(&self) -> bool {
        let index = KeyTable::of_lane(self.index);
        self.is_queue() && self.ends.is_some_and(|ends| ends.key_index == index)
    }

    /// Lowers the limit of unacknowledged frames, and of parts in progress, below the lane's
    /// default.
    pub(crate) fn limit_frames(&mut self, frames: u32) {
        self.sent = SentFrames::new(WINDOW_BYTES, frames.clamp(1, WINDOW_FRAMES));
        if let Some(queue) = self.wire.queue() {
            queue.limit_parts(frames);
        }
    }

    /// Whether the answer to the read of this number has arrived and is being copied into GPU
    /// memory.
    pub(crate) fn is_being_put(&self, sequence: u64) -> bool {
        let of_read = |put: &GpuPut| matches!(put.of, GpuPutOwner::Read { .. });
        self.rx.puts.iter().any(|put| put.sequence == sequence && of_read(put))
    }

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

    /// Whether a message has been arriving since before `time`.
    pub(crate) fn has_message_since(&self, time: u64) -> bool {
        matches!(&self.rx.state, RecvState::Gather(message) if message.since < time)
    }

    /// Keeps a piece list for reuse.
    pub(crate) fn keep(&mut self, pieces: Vec<Piece>) {
        if self.spare.len() < 8 {
            self.spare.push(pieces);
        }
    }

    /// Whether the lane has nothing left to send.
    pub(crate) fn has_sent_all(&self) -> bool {
        self.tx.frame.is_none()
            && self.tx.out.is_empty()
            && self.tx.replies.is_empty()
            && !self.unsent
    }

    /// Bytes received and not yet parsed.
    pub(crate) fn unread(&self) -> usize {
        self.rx.end - self.rx.start
    }
}

#[cfg(test)]
mod tests {
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
