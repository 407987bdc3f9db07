//! What the hostile peer has sent on a lane: a model of the receiver that knows the frames and
//! nothing of the engine.
//!
//! The model follows the stream up to the first frame that no receiver may accept. What it counts
//! is the most that the driver may do: the driver may also refuse, or close the lane earlier.

use std::collections::HashMap;

use peerway_core::wire::{
    COUNTS, Checked, Control, HEADER_LEN, Header, Kind, SEGMENT_LEN, Segment,
};
use zerocopy::FromBytes;

/// Messages up to this length are compared, longer ones only counted.
const COMPARED: usize = 256;

/// A frame that a receiver may accept.
pub(super) struct Sent {
    pub(super) head: Header,
    pub(super) checked: Checked,
    /// The ranges that it names.
    pub(super) runs: Vec<(u64, u64)>,
    pub(super) control: Option<Control>,
}

#[derive(Default)]
pub(super) struct Stream {
    bytes: Vec<u8>,
    /// Bytes of a payload that are still to pass.
    skip: usize,
    /// The number of the last sequenced frame.
    pub(super) last: u64,
    pub(super) over: bool,
    /// Frames by kind.
    pub(super) frames: HashMap<u8, u64>,
    /// Whole short messages and how often each was sent.
    pub(super) notes: HashMap<Vec<u8>, u64>,
}

impl Stream {
    /// Takes bytes that were sent. Returns the frames whose headers and tables are whole.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Vec<Sent> {
        self.bytes.extend_from_slice(bytes);
        let (mut sent, mut start) = (Vec::new(), 0);
        while !self.over {
            let passed = self.skip.min(self.bytes.len() - start);
            (start, self.skip) = (start + passed, self.skip - passed);
            let Some((used, frame)) = self.next(start) else { break };
            start += used;
            sent.push(frame);
        }
        self.bytes.drain(..start);
        sent
    }

    /// The frame at `start`, and the bytes that it takes there. `None` if more must come, or
    /// nothing valid can.
    fn next(&mut self, start: usize) -> Option<(usize, Sent)> {
        let bytes = &self.bytes[start..];
        let head = Header::read_from_bytes(bytes.first_chunk::<HEADER_LEN>()?).ok()?;
        let Ok(checked) = head.check() else {
            self.over = true;
            return None;
        };
        let is_short = checked.kind == Kind::Notify && checked.payload <= COMPARED;
        let whole = checked.kind == Kind::Control || is_short;
        let need = HEADER_LEN + checked.table + if whole { checked.payload } else { 0 };
        let body = bytes.get(HEADER_LEN..need)?;
        let is_sequenced = checked.kind.is_sequenced();
        let control = (checked.kind == Kind::Control).then(|| Control::from_bytes(body));
        let Ok(control) = control.transpose() else {
            self.over = true;
            return None;
        };
        if is_sequenced && head.sequence.get() != self.last + 1 {
            self.over = true;
            return None;
        }
        let mut runs = Vec::new();
        if checked.kind == Kind::Write && checked.segments == 0 {
            runs.push((head.offset.get(), checked.payload as u64));
        } else if checked.kind != Kind::Pull {
            let table = body[..checked.table].chunks_exact(SEGMENT_LEN);
            let entries = table.flat_map(Segment::read_from_bytes);
            runs.extend(entries.map(|entry| (entry.offset.get(), entry.len.get().into())));
        }
        if is_short {
            *self.notes.entry(body.to_vec()).or_default() += 1;
        }
        self.last += u64::from(is_sequenced);
        *self.frames.entry(checked.kind as u8).or_default() += 1;
        self.skip = if whole { 0 } else { checked.payload };
        Some((need, Sent { head, checked, runs, control }))
    }

    pub(super) fn count(&self, kind: Kind) -> u64 {
        self.frames.get(&(kind as u8)).copied().unwrap_or(0)
    }
}

impl Sent {
    /// The counter that the frame raises, if it is applied.
    pub(super) fn counts(&self) -> Option<u32> {
        let with_bytes = matches!(self.checked.kind, Kind::Write | Kind::Pull)
            && self.head.status.get() == COUNTS;
        (with_bytes || self.checked.kind == Kind::Count).then(|| self.head.immediate.get())
    }
}
