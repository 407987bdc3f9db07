//! The frames that a side has applied from a lane, and what it has told the peer about them.

use std::collections::VecDeque;

use crate::counter::HighWater;
use crate::outcome::TransferError;
use crate::wire::Header;

/// See the module.
#[derive(Debug)]
pub struct AppliedFrames {
    last: HighWater,
    /// The newest refusals. The peer must learn of them even if the lane is lost first.
    refused: VecDeque<(u64, u8)>,
    max_refused: usize,
    /// Everything up to this number was acknowledged to the peer.
    acknowledged: u64,
    /// Bytes applied since the last acknowledgement.
    unacknowledged_bytes: u64,
}

/// What was applied from a lane that is lost.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Applied {
    /// The last frame.
    pub last: u64,
    /// The frames that were refused, and why.
    pub refused: Vec<(u64, u8)>,
    /// The immediates that arrived on a queue pair.
    pub immediates: u64,
}

impl AppliedFrames {
    /// Nothing applied yet. A peer has at most `max_unanswered` unanswered frames, so no more
    /// refusals than that are of interest.
    pub fn new(max_unanswered: u32) -> Self {
        Self {
            last: HighWater::default(),
            refused: VecDeque::new(),
            max_refused: max_unanswered as usize,
            acknowledged: 0,
            unacknowledged_bytes: 0,
        }
    }

    /// Whether a frame of this number is due.
    #[inline]
    pub fn is_next(&self, sequence: u64) -> bool {
        sequence == self.next()
    }

    /// The number of the frame that is due.
    #[inline]
    pub fn next(&self) -> u64 {
        self.last.last().wrapping_add(1)
    }

    /// A frame was applied, or refused and passed over.
    #[inline]
    pub fn apply(&mut self, sequence: u64) {
        self.last.take(sequence);
    }

    /// A frame is refused. Returns the answer. The caller applies the number when the frame has
    /// passed.
    pub fn refuse(&mut self, sequence: u64, error: TransferError) -> Header {
        if self.refused.len() >= self.max_refused {
            self.refused.pop_front();
        }
        self.refused.push_back((sequence, error as u8));
        Header::nack(sequence, error as u8)
    }

    /// A pull is done, or has failed. Returns the answer.
    pub fn answer_pull(&mut self, sequence: u64, result: Result<(), TransferError>) -> Header {
        match result {
            Ok(()) => Header::pulled(sequence),
            Err(error) => self.refuse(sequence, error),
        }
    }

    /// Bytes of a frame are in place.
    #[inline]
    pub fn add_bytes(&mut self, bytes: u64) {
        self.unacknowledged_bytes += bytes;
    }

    /// Bytes applied since the last acknowledgement.
    #[inline]
    pub fn unacknowledged_bytes(&self) -> u64 {
        self.unacknowledged_bytes
    }

    /// The acknowledgement to send now, if any. The effect of frame `pending` is not in place yet
    /// (its bytes are on their way into GPU memory), so nothing from it on is acknowledged.
    #[inline]
    pub fn acknowledge(&mut self, pending: Option<u64>) -> Option<Header> {
        let applied = pending.map_or_else(|| self.last.last(), |sequence| sequence - 1);
        (applied > self.acknowledged).then(|| {
            self.acknowledged = applied;
            self.unacknowledged_bytes = 0;
            Header::ack(applied)
        })
    }

    /// The peer learns from another frame that `sequence` was applied. That frame says nothing
    /// about earlier numbers.
    pub fn note_answered(&mut self, sequence: u64) {
        if self.acknowledged + 1 == sequence {
            self.acknowledged = sequence;
        }
    }

    /// What was applied, of a lane that is lost.
    pub(super) fn summary(&self, immediates: u64) -> Applied {
        Applied {
            last: self.last.last(),
            refused: self.refused.iter().copied().collect(),
            immediates,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number that is acknowledged.
    fn acknowledged(frames: &mut AppliedFrames, pending: Option<u64>) -> Option<u64> {
        frames.acknowledge(pending).map(|ack| ack.sequence.get())
    }

    #[test]
    fn numbers_are_due_in_order_and_acknowledged_once() {
        let mut frames = AppliedFrames::new(4);
        assert!(frames.is_next(1) && !frames.is_next(2) && !frames.is_next(0));
        assert_eq!(acknowledged(&mut frames, None), None);
        frames.apply(1);
        frames.apply(2);
        frames.add_bytes(7);
        assert_eq!(frames.unacknowledged_bytes(), 7);
        assert_eq!(acknowledged(&mut frames, None), Some(2));
        assert_eq!((acknowledged(&mut frames, None), frames.unacknowledged_bytes()), (None, 0));
    }

    #[test]
    fn nothing_is_acknowledged_from_a_pending_frame_on() {
        let mut frames = AppliedFrames::new(4);
        (1..=3).for_each(|number| frames.apply(number));
        assert_eq!(acknowledged(&mut frames, Some(2)), Some(1));
        assert_eq!(acknowledged(&mut frames, Some(2)), None);
        assert_eq!(acknowledged(&mut frames, None), Some(3));
    }

    #[test]
    fn an_answer_acknowledges_its_own_number_only() {
        let mut frames = AppliedFrames::new(4);
        (1..=2).for_each(|number| frames.apply(number));
        frames.note_answered(2);
        assert_eq!(acknowledged(&mut frames, None), Some(2), "frame 1 was not answered");
        frames.apply(3);
        frames.note_answered(3);
        assert_eq!(acknowledged(&mut frames, None), None);
    }

    #[test]
    fn the_newest_refusals_are_kept() {
        let mut frames = AppliedFrames::new(2);
        let error = TransferError::Revoked;
        for number in 1..=3 {
            let answer = frames.refuse(number, error);
            assert_eq!((answer.sequence.get(), answer.status.get()), (number, error as u16));
        }
        let code = error as u8;
        assert_eq!(frames.summary(5).refused, [(2, code), (3, code)]);
    }
}
