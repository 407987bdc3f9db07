//! The consumer of a ring: the proxy.

use std::ops::ControlFlow;

use peerway_core::command::{PHASE, phase};

use super::Words;

/// Takes commands in position order.
#[derive(Debug)]
pub(crate) struct CommandConsumer<W> {
    words: W,
    log2: u32,
    /// Positions consumed.
    position: u64,
    /// Positions published as credit.
    published: u64,
}

impl<W: Words> CommandConsumer<W> {
    /// Creates the consumer of a ring of `1 << log2` slots. All slots must be zero.
    pub(crate) fn new(words: W, log2: u32) -> Self {
        Self { words, log2, position: 0, published: 0 }
    }

    /// Passes up to `most` commands to `take`, as position and words, and returns how many it took.
    /// When `take` refuses a command, the next call passes that command again.
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
            // The command is complete when both halves carry the phase bit of this lap.
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

    /// Publishes credit. While commands flow it publishes seldom, because each store invalidates a
    /// cache line that producers read. When the ring is idle it publishes at once.
    #[inline]
    fn give_credit(&mut self, idle: bool) {
        let unsaid = self.position - self.published;
        // Frequent enough that a producer finds room before the ring is full.
        let every = (1u64 << self.log2).div_ceil(8).min(64);
        if unsaid >= every || (idle && unsaid > 0) {
            self.words.set_credit(self.position);
            self.published = self.position;
        }
    }
}
