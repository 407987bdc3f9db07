//! A lane: one wire to a peer, with the state of its half-sent, half-received and unanswered
//! frames.
//!
//! `transmit` has the half that sends, `receive` the half that receives. Only the driver touches
//! lanes. Sequenced frames are numbered from 1 and the peer applies them in order. So the number of
//! the last applied frame describes completely how far a failed lane got.

use peerway_core::protocol::{AppliedFrames, Role, SentFrames};

use super::receive::ReceiveHalf;
use super::transmit::SendHalf;
use crate::os::Piece;
use crate::progress::windows::LaneWindows;
use crate::transport::Wire;
use crate::transport::device::{DeviceQueue, KeyTable, QueueEnds};

/// Limit of unacknowledged bytes on a lane. It is about what a loopback socket buffers, and on a
/// network the product of 100 Gbit/s and 0.6 ms.
const WINDOW_BYTES: u64 = 8 << 20;
/// Limit of unacknowledged frames on a lane, and of reads that a peer may have outstanding.
pub(crate) const WINDOW_FRAMES: u32 = 256;
/// See the module.
pub(crate) struct Lane {
    /// Keys to our memory for the peer of a device queue. Closed before the queue is destroyed.
    pub(crate) windows: LaneWindows,
    pub(crate) wire: Box<dyn Wire>,
    pub(crate) index: u16,
    /// How many attempts were made to replace a lane of this index. 0 for the first one.
    pub(crate) generation: u32,
    pub(crate) role: Role,
    /// When the lane joined its session.
    pub(crate) since: u64,
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
            generation: 0,
            role,
            since: now,
            heard: now,
            blocked: false,
            watched_out: false,
            unsent: false,
            sent: SentFrames::new(WINDOW_BYTES, WINDOW_FRAMES),
            applied: AppliedFrames::new(WINDOW_FRAMES),
            tx: SendHalf::new(),
            rx: ReceiveHalf::new(),
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

    /// Keeps a piece list for reuse.
    pub(crate) fn keep(&mut self, pieces: Vec<Piece>) {
        if self.spare.len() < 8 {
            self.spare.push(pieces);
        }
    }

    /// Whether the peer has applied a frame of the lane, or this side one of the peer's.
    pub(crate) fn has_carried(&self) -> bool {
        self.sent.has_answers() || self.applied.next() > 1
    }
}
