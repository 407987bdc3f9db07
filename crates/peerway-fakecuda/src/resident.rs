//! The resident copy kernel `peerway_copy_resident`, executed by the CPU.
//!
//! One thread executes all of its blocks in turns. The words in host memory are the same as for the
//! kernel on GPUs, and so are the rules for taking tasks and leaving. The random generator decides
//! how many tasks a block takes at once and how late it looks again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use peerway_sys::cuda::ffi::*;

use crate::calls::{Answer, valid};
use crate::stream::rest;
use crate::work::Engine;
use peerway_fakescript::Dice;

const LINE: u64 = 128;
const SLOT: u64 = 32;
/// The bit of a word that holds its phase.
const PHASE: u32 = 63;
/// In the length word: the host asks the launch to end.
const LEAVE: u64 = 1 << 62;
/// Most tasks that a warp reads at once.
const MOST: u64 = 32;

/// `peerway_copy_resident(u64 base, Together *together, u32 slots, u32 launch, u64 idle, u64 stay)`
#[derive(Debug)]
pub(crate) struct Resident {
    pub(crate) base: u64,
    /// The state that the blocks share; it must be memory of the device.
    pub(crate) together: u64,
    pub(crate) slots: u32,
    pub(crate) launch: u32,
    pub(crate) idle: Duration,
    pub(crate) stay: Duration,
    pub(crate) blocks: u32,
}

/// The state that all blocks share.
struct Together {
    start: Instant,
    active: Instant,
    leaving: bool,
}

/// One block.
struct Block {
    line: u64,
    ring: u64,
    position: u64,
    /// Whether the host has asked the launch to end.
    asked: bool,
    first: bool,
    gone: bool,
}

impl Resident {
    pub(crate) fn perform(&self, engine: &Engine<'_>, dice: &mut Dice) -> Answer {
        valid(self.slots.is_power_of_two() && u64::from(self.slots) >= MOST)?;
        let mut blocks = Vec::new();
        for index in 0..u64::from(self.blocks) {
            let line = self.base + index * LINE;
            let ring = u64::from(self.slots) * SLOT;
            let ring = self.base + u64::from(self.blocks) * LINE + index * ring;
            let position = engine.load(line)?;
            blocks.push(Block { line, ring, position, asked: false, first: true, gone: false });
        }
        let now = Instant::now();
        let mut together = Together { start: now, active: now, leaving: false };
        while blocks.iter().any(|block| !block.gone) {
            if engine.failed() {
                return Ok(());
            }
            let before = together.active;
            for block in blocks.iter_mut().filter(|block| !block.gone) {
                self.turn(engine, dice, block, &mut together)?;
            }
            if together.active == before {
                rest(Duration::from_nanos(1000 + dice.below(20_000)));
            }
        }
        Ok(())
    }

    /// Executes one turn of a block: it copies ready tasks, leaves, or does nothing.
    fn turn(
        &self,
        engine: &Engine<'_>,
        dice: &mut Dice,
        block: &mut Block,
        together: &mut Together,
    ) -> Answer {
        let late = together.start.elapsed() > self.stay;
        let over = !std::mem::take(&mut block.first) && (block.asked || late);
        let most = 1 + dice.below(MOST);
        let tasks = if over { Vec::new() } else { self.ready(engine, block, most)? };
        if tasks.is_empty() {
            let quiet = together.active.elapsed() > self.idle;
            if over || late || quiet || together.leaving {
                together.leaving = true;
                engine.write_value(self.together + 8, u64::from(self.launch))?;
                block.gone = true;
                return engine.write_value(block.line + 8, u64::from(self.launch));
            }
            return Ok(());
        }
        for [src, dst, len] in &tasks {
            if len & LEAVE != 0 {
                block.asked |= *src == u64::from(self.launch);
            } else {
                engine.pace(*len);
                engine.copy(*dst, *src, *len)?;
            }
        }
        block.position += tasks.len() as u64;
        together.active = Instant::now();
        engine.write_value(block.line, block.position)
    }

    /// The ready tasks from the block's position on, without a gap.
    fn ready(
        &self,
        engine: &Engine<'_>,
        block: &Block,
        most: u64,
    ) -> Result<Vec<[u64; 3]>, CUresult> {
        let slots = u64::from(self.slots);
        let mut tasks = Vec::new();
        engine.with_words(block.ring, slots * SLOT / 8, |words: &[AtomicU64]| {
            for at in block.position..block.position + most {
                let phase = ((at / slots) & 1) ^ 1;
                let slot = ((at & (slots - 1)) * SLOT / 8) as usize;
                // Pairs with the host's stores of the words.
                let task = [0, 1, 2].map(|word| words[slot + word].load(Ordering::Acquire));
                if task.iter().any(|word| word >> PHASE != phase) {
                    break;
                }
                tasks.push(task.map(|word| word & !(1 << PHASE)));
            }
        })?;
        Ok(tasks)
    }
}
