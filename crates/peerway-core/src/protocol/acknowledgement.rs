//! Acknowledgements: what a sender keeps until it is answered, and what a receiver answers.

use std::collections::VecDeque;

use crate::counter::HighWater;
use crate::credit::Window;
use crate::ids::SlotId;
use crate::outcome::TransferError;
use crate::wire::{Header, Kind};
use crate::work::Cursor;

/// A frame that waits for its answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SentFrame {
    /// What it is.
    pub kind: Kind,
    /// The transfer that it belongs to.
    pub slot: SlotId,
    /// The part of the transfer's work that it carries, so that another lane can repeat it.
    pub part: Cursor,
    /// The bytes that it takes of the window.
    pub window: u64,
    /// Whether the answer has come. Frames before it may still wait.
    pub is_answered: bool,
}

/// The frames that a side has sent on a lane and that the peer has not answered.
#[derive(Debug)]
pub struct SentFrames {
    last_sequence: u64,
    /// The oldest unanswered frame and all after it.
    frames: VecDeque<SentFrame>,
    /// Everything up to this number was acknowledged.
    acknowledged: u64,
    window: Window,
}

impl SentFrames {
    /// No frames yet, and room for this many bytes and frames.
    pub fn new(max_bytes: u64, max_frames: u32) -> Self {
        let frames = VecDeque::with_capacity(max_frames as usize);
        let window = Window::new(max_bytes, max_frames);
        Self { last_sequence: 0, frames, acknowledged: 0, window }
    }

    /// The number of bytes that the next frame may carry; see [`Window::room`].
    #[inline]
    pub fn room(&self) -> u64 {
        self.window.room()
    }

    /// Numbers a frame and keeps it until it is answered.
    #[inline]
    pub fn push(&mut self, kind: Kind, slot: SlotId, part: Cursor, window: u64) -> u64 {
        self.last_sequence += 1;
        self.window.take(window);
        self.frames.push_back(SentFrame { kind, slot, part, window, is_answered: false });
        self.last_sequence
    }

    /// The unanswered frame of this number.
    #[inline]
    pub fn waiting(&self, sequence: u64) -> Option<&SentFrame> {
        let at = sequence.checked_sub(self.first())?;
        self.frames.get(usize::try_from(at).ok()?).filter(|frame| !frame.is_answered)
    }

    /// Whether a frame of this transfer waits for its answer.
    pub fn is_waiting_for(&self, slot: SlotId) -> bool {
        self.frames.iter().any(|frame| frame.slot == slot && !frame.is_answered)
    }

    /// Takes the answer to a frame. `None` if it was answered before or never sent.
    #[inline]
    pub fn answer(&mut self, sequence: u64) -> Option<SentFrame> {
        let at = sequence.checked_sub(self.first())?;
        let frame = self.frames.get_mut(usize::try_from(at).ok()?)?;
        if frame.is_answered {
            return None;
        }
        frame.is_answered = true;
        let answered = *frame;
        self.window.put_back(answered.window);
        while self.frames.front().is_some_and(|frame| frame.is_answered) {
            self.frames.pop_front();
        }
        Some(answered)
    }

    /// Takes the answer to a pull. `None` if no pull of this number waits for one.
    pub fn answer_pull(&mut self, sequence: u64) -> Option<SentFrame> {
        self.waiting(sequence).filter(|frame| frame.kind == Kind::Pull)?;
        self.answer(sequence)
    }

    /// Takes the answers that an acknowledgement of everything up to `sequence` gives. Reads and
    /// pulls have answers of their own. `None` if the peer acknowledges what it cannot have
    /// received: a frame that was not sent, or frame `sending`, which is half-sent (0 for none).
    #[inline]
    pub fn acknowledge(
        &mut self,
        sequence: u64,
        sending: u64,
    ) -> Option<impl Iterator<Item = SentFrame>> {
        if sequence > self.last_sequence || (1..=sequence).contains(&sending) {
            return None;
        }
        let from = self.first().max(self.acknowledged + 1);
        self.acknowledged = self.acknowledged.max(sequence);
        Some((from..=sequence).filter_map(|sequence| {
            let frame = self.waiting(sequence)?;
            if matches!(frame.kind, Kind::Read | Kind::Pull) {
                return None;
            }
            self.answer(sequence)
        }))
    }

    /// Whether the peer has answered any frame.
    pub fn has_answers(&self) -> bool {
        self.first() > 1
    }

    /// The unanswered frames with their numbers, of a lane that is lost.
    pub(super) fn unanswered(&self) -> Vec<(u64, SentFrame)> {
        let numbered = (self.first()..).zip(self.frames.iter().copied());
        numbered.filter(|(_, frame)| !frame.is_answered).collect()
    }

    /// The number of the first frame in `frames`.
    fn first(&self) -> u64 {
        self.last_sequence + 1 - self.frames.len() as u64
    }
}

/// The frames that a side has applied from a lane, and what it has told the peer about them.
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

    const SLOT: SlotId = SlotId { index: 3, generation: 1 };

    fn frames(count: u64) -> SentFrames {
        let mut frames = SentFrames::new(1000, 8);
        for number in 1..=count {
            assert_eq!(frames.push(Kind::Write, SLOT, Cursor::default(), 10), number);
        }
        frames
    }

    #[test]
    fn each_frame_is_answered_once_in_any_order() {
        let mut frames = frames(4);
        for number in [2, 1, 4, 3] {
            assert!(frames.waiting(number).is_some());
            assert!(frames.answer(number).is_some());
            assert!(frames.waiting(number).is_none() && frames.answer(number).is_none());
        }
        assert!(frames.answer(0).is_none() && frames.answer(5).is_none());
        assert!(!frames.is_waiting_for(SLOT));
        assert_eq!(frames.room(), u64::MAX, "the window is empty again");
    }

    #[test]
    fn an_acknowledgement_answers_each_frame_once() {
        let mut frames = frames(5);
        let answered = |frames: &mut SentFrames, sequence| {
            frames.acknowledge(sequence, 0).map(|answered| answered.count())
        };
        assert_eq!(answered(&mut frames, 2), Some(2));
        assert_eq!(answered(&mut frames, 2), Some(0));
        assert!(frames.answer(4).is_some());
        assert_eq!(answered(&mut frames, 5), Some(2), "frame 4 was answered before");
    }

    #[test]
    fn reads_and_pulls_wait_for_their_own_answers() {
        let mut frames = SentFrames::new(1000, 8);
        for kind in [Kind::Read, Kind::Write, Kind::Pull] {
            frames.push(kind, SLOT, Cursor::default(), 10);
        }
        let answered: Vec<Kind> = frames.acknowledge(3, 0).unwrap().map(|f| f.kind).collect();
        assert_eq!(answered, [Kind::Write]);
        assert!(frames.answer_pull(1).is_none(), "frame 1 is a read");
        assert!(frames.answer_pull(3).is_some() && frames.answer_pull(3).is_none());
        assert!(frames.answer(1).is_some());
    }

    #[test]
    fn an_impossible_acknowledgement_is_refused() {
        let mut frames = frames(3);
        assert!(frames.acknowledge(4, 0).is_none(), "frame 4 was not sent");
        assert!(frames.acknowledge(3, 3).is_none(), "frame 3 is half-sent");
        assert_eq!(frames.acknowledge(2, 3).map(|answered| answered.count()), Some(2));
    }

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
