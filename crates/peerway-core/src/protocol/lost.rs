//! Lost lanes: what each side keeps of them until both agree on what became of their frames.
//!
//! The sender asks (`LaneLost`), the receiver answers with what it applied (`LaneFenced`). The
//! answer also promises that nothing more of that lane is applied. Questions and answers travel on
//! other lanes, which may be lost too, so both sides repeat theirs whenever a lane is lost.
//!
//! A lane may come back: a replacement has the same number and a higher generation. It may join
//! when both sides have the answers about the lane that it replaces. Repeated questions and answers
//! may arrive later, on another lane, so each names its generation.

use std::collections::HashMap;

use super::{Applied, AppliedFrames, SentFrame, SentFrames};
use crate::wire::Kind;

/// See the module.
#[derive(Debug, Default)]
pub struct LostLanes {
    /// Unanswered frames, by lane, with their numbers.
    sent: HashMap<u16, (u32, Vec<(u64, SentFrame)>)>,
    /// What was applied, by lane, of its newest generation that is lost.
    applied: HashMap<u16, (u32, Applied)>,
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
    pub fn add(
        &mut self,
        lane: u16,
        generation: u32,
        sent: &SentFrames,
        applied: &AppliedFrames,
        immediates: u64,
    ) {
        self.sent.insert(lane, (generation, sent.unanswered()));
        self.applied.insert(lane, (generation, applied.summary(immediates)));
    }

    /// Whether the peer's answer about a lane is still due.
    pub fn is_awaiting(&self, lane: u16) -> bool {
        self.sent.contains_key(&lane)
    }

    /// The lanes to ask the peer about, with their generations.
    pub fn questions(&self) -> impl Iterator<Item = (u16, u32)> {
        self.sent.iter().map(|(lane, (generation, _))| (*lane, *generation))
    }

    /// The peer asks about a lane.
    pub fn note_question(&mut self, lane: u16) {
        if !self.asked.contains(&lane) {
            self.asked.push(lane);
        }
    }

    /// The peer asks about a generation that never was on this side: its connection was lost before
    /// this side had it. From now on it cannot join.
    pub fn note_unknown(&mut self, lane: u16, generation: u32) {
        if self.applied.get(&lane).is_none_or(|(newest, _)| *newest < generation) {
            self.applied.insert(lane, (generation, Applied::default()));
        }
    }

    /// The lanes to answer the peer about, with their generations and what was applied.
    pub fn answers(&self) -> impl Iterator<Item = (u16, u32, Applied)> {
        self.asked.iter().filter_map(|lane| {
            let (generation, applied) = self.applied.get(lane)?;
            Some((*lane, *generation, applied.clone()))
        })
    }

    /// What was applied from a lane of this generation. Nothing, for one that never was. `None` if
    /// the lane has been replaced since: the peer has had the answer.
    pub fn applied(&self, lane: u16, generation: u32) -> Option<Applied> {
        match self.applied.get(&lane) {
            Some((newest, _)) if *newest > generation => None,
            Some((newest, applied)) if *newest == generation => Some(applied.clone()),
            _ => Some(Applied::default()),
        }
    }

    /// Whether a replacement of this generation may join, as far as this side knows.
    pub fn may_join(&self, lane: u16, generation: u32) -> bool {
        !self.is_awaiting(lane)
            && self.applied.get(&lane).is_none_or(|(newest, _)| *newest < generation)
    }

    /// A new lane takes the place of a lost one.
    pub fn replaced(&mut self, lane: u16) {
        self.applied.remove(&lane);
        self.asked.retain(|asked| *asked != lane);
    }

    /// The peer has answered: what becomes of each unanswered frame of the lane. Empty for a lane
    /// that no answer is due for.
    pub fn resolve(
        &mut self,
        lane: u16,
        generation: u32,
        answer: &Applied,
    ) -> Vec<(SentFrame, Verdict)> {
        if self.sent.get(&lane).is_none_or(|(asked, _)| *asked != generation) {
            return Vec::new();
        }
        let (_, frames) = self.sent.remove(&lane).unwrap_or_default();
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
        lanes.add(2, 1, &sent, &AppliedFrames::new(16), 0);
        lanes
    }

    fn verdicts(kinds: &[Kind], answer: &Applied) -> Vec<Verdict> {
        lost(kinds).resolve(2, 1, answer).into_iter().map(|(_, verdict)| verdict).collect()
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
        assert_eq!(lanes.questions().collect::<Vec<_>>(), [(2, 1)]);
        assert_eq!(lanes.resolve(2, 1, &Applied::default()).len(), 1);
        assert_eq!(lanes.resolve(2, 1, &Applied::default()).len(), 0);
        assert_eq!(lanes.answers().count(), 0);
        lanes.note_question(2);
        lanes.note_question(2);
        assert_eq!(lanes.answers().count(), 1);
        lanes.replaced(2);
        assert_eq!(lanes.answers().count(), 0);
    }
    #[test]
    fn questions_and_answers_about_another_generation_are_late() {
        let mut lanes = lost(&[Kind::Write]);
        let stale = Applied { last: 7, ..Applied::default() };
        assert_eq!(lanes.resolve(2, 0, &stale), [], "an answer about the lane before");
        assert_eq!(lanes.resolve(2, 2, &stale), []);
        assert!(lanes.is_awaiting(2));
        assert_eq!(lanes.applied(2, 0), None, "the peer has had this answer");
        assert_eq!(lanes.applied(2, 1), Some(Applied::default()));
    }

    #[test]
    fn a_replacement_joins_when_the_answer_has_come_and_not_after_its_own_end() {
        let mut lanes = lost(&[Kind::Write]);
        assert!(!lanes.may_join(2, 2), "the answer is due");
        lanes.resolve(2, 1, &Applied::default());
        assert!(lanes.may_join(2, 2));
        assert!(!lanes.may_join(2, 1), "it is the lost lane itself");
        // The peer had generation 2, lost it and asks before this side had it.
        lanes.note_question(2);
        lanes.note_unknown(2, 2);
        assert!(!lanes.may_join(2, 2), "nothing of it may be applied after the answer");
        assert!(lanes.may_join(2, 3));
        assert_eq!(lanes.answers().collect::<Vec<_>>(), [(2, 2, Applied::default())]);
        lanes.note_unknown(2, 1);
        assert!(!lanes.may_join(2, 2), "an older question changes nothing");
    }
}
