//! The frames that a side has applied from a lane, and what it has told the peer about them.

use std::collections::VecDeque;

use crate::counter::HighWater;

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
        sequence == self.last.last().wrapping_add(1)
    }

    /// A frame was applied, or refused and passed over.
    #[inline]
    pub fn apply(&mut self, sequence: u64) {
        self.last.take(sequence);
    }

    /// A frame is refused. The caller tells the peer, and applies its number when it has passed.
    pub fn refuse(&mut self, sequence: u64, code: u8) {
        if self.refused.len() >= self.max_refused {
            self.refused.pop_front();
        }
        self.refused.push_back((sequence, code));
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

    /// The number to acknowledge now, if any. The effect of frame `pending` is not in place yet
    /// (its bytes are on their way into GPU memory), so nothing from it on is acknowledged.
    #[inline]
    pub fn next_acknowledgement(&mut self, pending: Option<u64>) -> Option<u64> {
        let applied = pending.map_or_else(|| self.last.last(), |sequence| sequence - 1);
        (applied > self.acknowledged).then(|| {
            self.acknowledged = applied;
            self.unacknowledged_bytes = 0;
            applied
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

    #[test]
    fn numbers_are_due_in_order_and_acknowledged_once() {
        let mut frames = AppliedFrames::new(4);
        assert!(frames.is_next(1) && !frames.is_next(2) && !frames.is_next(0));
        assert_eq!(frames.next_acknowledgement(None), None);
        frames.apply(1);
        frames.apply(2);
        frames.add_bytes(7);
        assert_eq!(frames.unacknowledged_bytes(), 7);
        assert_eq!(frames.next_acknowledgement(None), Some(2));
        assert_eq!((frames.next_acknowledgement(None), frames.unacknowledged_bytes()), (None, 0));
    }

    #[test]
    fn nothing_is_acknowledged_from_a_pending_frame_on() {
        let mut frames = AppliedFrames::new(4);
        (1..=3).for_each(|number| frames.apply(number));
        assert_eq!(frames.next_acknowledgement(Some(2)), Some(1));
        assert_eq!(frames.next_acknowledgement(Some(2)), None);
        assert_eq!(frames.next_acknowledgement(None), Some(3));
    }

    #[test]
    fn an_answer_acknowledges_its_own_number_only() {
        let mut frames = AppliedFrames::new(4);
        (1..=2).for_each(|number| frames.apply(number));
        frames.note_answered(2);
        assert_eq!(frames.next_acknowledgement(None), Some(2), "frame 1 was not answered");
        frames.apply(3);
        frames.note_answered(3);
        assert_eq!(frames.next_acknowledgement(None), None);
    }

    #[test]
    fn the_newest_refusals_are_kept() {
        let mut frames = AppliedFrames::new(2);
        (1..=3).for_each(|number| frames.refuse(number, 9));
        assert_eq!(frames.summary(5).refused, [(2, 9), (3, 9)]);
    }
}
