//! Lost lanes: what each side keeps of them until both agree on what became of their frames.
//!
//! The sender asks (`LaneLost`), the receiver answers with what it applied (`LaneFenced`). The
//! answer also promises that nothing more of that lane is applied. Questions and answers travel on
//! other lanes, which may be lost too, so both sides repeat theirs whenever a lane is lost.

use std::collections::HashMap;

use super::{Applied, AppliedFrames, SentFrame, SentFrames};
use crate::wire::Kind;

/// See the module.
#[derive(Debug, Default)]
pub struct LostLanes {
    /// Unanswered frames, by lane, with their numbers.
    sent: HashMap<u16, Vec<(u64, SentFrame)>>,
    /// What was applied, by lane.
    applied: HashMap<u16, Applied>,
    /// Lanes that the peer has asked about.
    asked: Vec<u16>,
}

/// What becomes of a frame of a lost lane.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// The peer applied it.
    Done,
    /// The peer refused it, with this code.
    Refused(u8),
    /// Another lane carries its part again. The peer did not apply it, or applying it twice
    /// changes nothing that the peer was told about.
    Repeat,
    /// It was a signal that the peer did not apply: it is sent again.
    RepeatSignal,
    /// Nothing waits for it.
    Drop,
}

impl LostLanes {
    /// A lane is lost on this side.
    pub fn add(&mut self, lane: u16, sent: &SentFrames, applied: &AppliedFrames, immediates: u64) {
        self.sent.insert(lane, sent.unanswered());
        self.applied.insert(lane, applied.summary(immediates));
    }

    /// Whether the peer's answer about a lane is still due.
    pub fn is_awaiting(&self, lane: u16) -> bool {
        self.sent.contains_key(&lane)
    }

    /// The lanes to ask the peer about.
    pub fn questions(&self) -> impl Iterator<Item = u16> {
        self.sent.keys().copied()
    }

    /// The peer asks about a lane.
    pub fn note_question(&mut self, lane: u16) {
        if !self.asked.contains(&lane) {
            self.asked.push(lane);
        }
    }

    /// The lanes to answer the peer about, with what was applied.
    pub fn answers(&self) -> impl Iterator<Item = (u16, Applied)> {
        self.asked.iter().filter_map(|lane| Some((*lane, self.applied.get(lane)?.clone())))
    }

    /// What was applied from a lane. Nothing, for one that never was.
    pub fn applied(&self, lane: u16) -> Applied {
        self.applied.get(&lane).cloned().unwrap_or_default()
    }

    /// A new lane takes the place of a lost one.
    pub fn replaced(&mut self, lane: u16) {
        self.applied.remove(&lane);
        self.asked.retain(|asked| *asked != lane);
    }

    /// The peer has answered: what becomes of each unanswered frame of the lane. Empty for a lane
    /// that no answer is due for.
    pub fn resolve(&mut self, lane: u16, answer: &Applied) -> Vec<(SentFrame, Verdict)> {
        let frames = self.sent.remove(&lane).unwrap_or_default();
        let verdict = |(sequence, frame)| (frame, Self::verdict(sequence, frame, answer));
        frames.into_iter().map(verdict).collect()
    }

    fn verdict(sequence: u64, frame: SentFrame, answer: &Applied) -> Verdict {
        if let Some((_, code)) = answer.refused.iter().find(|(number, _)| *number == sequence) {
            return Verdict::Refused(*code);
        }
        let is_applied = sequence <= answer.last;
        match frame.kind {
            Kind::Write | Kind::Notify | Kind::Count | Kind::Cancel if is_applied => Verdict::Done,
            // The answer to a read or a pull is a frame of its own, which is lost.
            Kind::Write | Kind::Read | Kind::Pull => Verdict::Repeat,
            Kind::Notify | Kind::Count => Verdict::RepeatSignal,
            _ => Verdict::Drop,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::SlotId;
    use crate::work::Cursor;

    const SLOT: SlotId = SlotId { index: 0, generation: 0 };

    fn lost(kinds: &[Kind]) -> LostLanes {
        let mut sent = SentFrames::new(1 << 20, 16);
        for kind in kinds {
            sent.push(*kind, SLOT, Cursor::default(), 0);
        }
        let mut lanes = LostLanes::default();
        lanes.add(2, &sent, &AppliedFrames::new(16), 0);
        lanes
    }

    fn verdicts(kinds: &[Kind], answer: &Applied) -> Vec<Verdict> {
        lost(kinds).resolve(2, answer).into_iter().map(|(_, verdict)| verdict).collect()
    }

    #[test]
    fn applied_frames_are_done_and_the_others_are_repeated() {
        let kinds = [Kind::Write, Kind::Count, Kind::Write, Kind::Notify, Kind::Cancel];
        let answer = Applied { last: 2, ..Applied::default() };
        use Verdict::{Done, Drop, Repeat, RepeatSignal};
        assert_eq!(verdicts(&kinds, &answer), [Done, Done, Repeat, RepeatSignal, Drop]);
    }

    #[test]
    fn a_refusal_counts_although_its_answer_is_lost() {
        let answer = Applied { last: 1, refused: vec![(1, 5)], immediates: 0 };
        assert_eq!(verdicts(&[Kind::Write], &answer), [Verdict::Refused(5)]);
    }

    #[test]
    fn reads_and_pulls_are_repeated_even_if_the_request_was_applied() {
        let answer = Applied { last: 2, ..Applied::default() };
        assert_eq!(verdicts(&[Kind::Read, Kind::Pull], &answer), [Verdict::Repeat; 2]);
    }

    #[test]
    fn an_answer_is_used_once_and_given_again() {
        let mut lanes = lost(&[Kind::Write]);
        assert!(lanes.is_awaiting(2));
        assert_eq!(lanes.questions().collect::<Vec<_>>(), [2]);
        assert_eq!(lanes.resolve(2, &Applied::default()).len(), 1);
        assert_eq!(lanes.resolve(2, &Applied::default()).len(), 0);
        assert_eq!(lanes.answers().count(), 0);
        lanes.note_question(2);
        lanes.note_question(2);
        assert_eq!(lanes.answers().count(), 1);
        lanes.replaced(2);
        assert_eq!(lanes.answers().count(), 0);
    }
}
