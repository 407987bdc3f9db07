//! A processor's end of a ring, where it stands in for a kernel.

use peerway_core::abi::DEAD;
use peerway_core::command::phase;

use super::ClaimWords;

/// Pushes commands. Any number of them share a ring.
#[derive(Clone, Debug)]
pub(crate) struct CommandProducer<W> {
    pub(super) words: W,
    log2: u32,
}

/// A command that was not pushed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PushError {
    /// Nobody made room in time.
    #[error("the command ring was full for longer than its bound: is the proxy armed?")]
    Full,
    /// A claim was abandoned earlier.
    #[error("the command ring is dead: a push was abandoned while it was full")]
    Dead,
}

impl<W: ClaimWords> CommandProducer<W> {
    pub(crate) fn new(words: W, log2: u32) -> Self {
        Self { words, log2 }
    }

    /// Pushes commands of consecutive positions, the first of which is returned. `patient` is asked again and again while
    /// there is no room.
    pub(crate) fn push(
        &self,
        commands: &[[u64; 2]],
        patient: impl FnMut() -> bool,
    ) -> Result<u64, PushError> {
        let count = commands.len() as u64;
        let first = self.words.claim(count);
        let cached = self.words.cached();
        if cached & DEAD != 0 {
            return self.abandon(first, count);
        }
        // A wrapping difference: another producer may have read a credit beyond our position already.
        if (first + count).saturating_sub(cached) > 1 << self.log2 {
            self.wait_for_room(first, count, patient)?;
        }
        let mask = (1u64 << self.log2) - 1;
        for (position, words) in (first..).zip(commands) {
            let phase = phase(position, self.log2);
            self.words.set_slot((position & mask) as usize, words.map(|word| word | phase));
        }
        Ok(first)
    }

    #[cold]
    fn wait_for_room(
        &self,
        first: u64,
        count: u64,
        mut patient: impl FnMut() -> bool,
    ) -> Result<(), PushError> {
        loop {
            let credit = self.words.credit();
            if (first + count).saturating_sub(credit) <= 1 << self.log2 {
                self.words.raise_cached(credit);
                return Ok(());
            }
            if self.words.cached() & DEAD != 0 {
                return self.abandon(first, count).map(drop);
            }
            if !patient() {
                break;
            }
        }
        // Those behind us wait for the same room and give their claims back first.
        loop {
            if self.words.unclaim(first, count) {
                return Err(PushError::Full);
            }
            let credit = self.words.credit();
            if (first + count).saturating_sub(credit) <= 1 << self.log2 {
                self.words.raise_cached(credit);
                return Ok(());
            }
            if !patient() {
                self.words.die();
                return Err(PushError::Full);
            }
        }
    }

    fn abandon(&self, first: u64, count: u64) -> Result<u64, PushError> {
        // Only so that claims do not grow for ever.
        self.words.unclaim(first, count);
        Err(PushError::Dead)
    }
}
