//! The producer of a ring, for CPU threads that push in place of a kernel.

use peerway_core::abi::DEAD;
use peerway_core::command::phase;

use super::ClaimWords;

/// Pushes commands. Any number of producers can share a ring.
#[derive(Clone, Debug)]
pub(crate) struct CommandProducer<W> {
    pub(super) words: W,
    log2: u32,
}

/// The reason why a push failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PushError {
    /// The consumer made no room in time.
    #[error("the command ring stayed full until the push timed out; check that the proxy is armed")]
    Full,
    /// An earlier push abandoned its claim.
    #[error(
        "the command ring is dead because an earlier push timed out while the ring was full; \
         build a new proxy"
    )]
    Dead,
}

impl<W: ClaimWords> CommandProducer<W> {
    pub(crate) fn new(words: W, log2: u32) -> Self {
        Self { words, log2 }
    }

    /// Pushes commands to consecutive positions and returns the first position. While there is no
    /// room it calls `patient` repeatedly; `false` ends the wait.
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
        // Another producer may have cached a credit beyond our position, so the difference
        // saturates.
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
        // Producers behind this one wait for the same room and give their claims back first.
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
        // The ring stays dead. Giving the claim back only keeps the claim word from growing for
        // ever.
        self.words.unclaim(first, count);
        Err(PushError::Dead)
    }
}
