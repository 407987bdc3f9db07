//! The frames that a side has sent on a lane and that the peer has not answered.

use std::collections::VecDeque;

use crate::credit::Window;
use crate::ids::SlotId;
use crate::wire::Kind;
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

/// See the module.
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
}
