//! The proxy's end of a ring.

use std::ops::ControlFlow;

use peerway_core::command::{PHASE, phase};

use super::Words;

/// Takes commands in the order of their positions.
#[derive(Debug)]
pub(crate) struct CommandConsumer<W> {
    words: W,
    log2: u32,
    /// Positions consumed.
    position: u64,
    /// Of which producers were told.
    published: u64,
}

impl<W: Words> CommandConsumer<W> {
    /// The consuming end of a ring of `1 << log2` slots that is all zeros.
    pub(crate) fn new(words: W, log2: u32) -> Self {
        Self { words, log2, position: 0, published: 0 }
    }

    /// Gives up to `most` commands to `take`, by position and words, and says how many it took. `take` may refuse one: it
    /// is given again the next time.
    #[inline]
    pub(crate) fn drain(
        &mut self,
        most: usize,
        mut take: impl FnMut(u64, [u64; 2]) -> ControlFlow<()>,
    ) -> usize {
        let mask = (1u64 << self.log2) - 1;
        let start = self.position;
        while self.position - start < most as u64 {
            let words = self.words.slot((self.position & mask) as usize);
            let phase = phase(self.position, self.log2);
            // Both halves of this lap, or it is not all there yet.
            if ((words[0] ^ phase) | (words[1] ^ phase)) & PHASE != 0 {
                break;
            }
            if take(self.position, words).is_break() {
                break;
            }
            self.position += 1;
        }
        let taken = self.position - start;
        self.give_credit(taken == 0);
        taken as usize
    }

    /// Tells producers what is free: seldom while commands flow, as each time costs a line that producers look at, and at
    /// once when they have stopped.
    #[inline]
    fn give_credit(&mut self, idle: bool) {
        let unsaid = self.position - self.published;
        // Often enough that a producer finds room before the ring is full.
        let every = (1u64 << self.log2).div_ceil(8).min(64);
        if unsaid >= every || (idle && unsaid > 0) {
            self.words.set_credit(self.position);
            self.published = self.position;
        }
    }
}
