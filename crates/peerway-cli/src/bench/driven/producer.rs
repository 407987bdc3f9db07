//! Who pushes commands: kernels, or processors in their place.

use std::time::Duration;

use peerway::Region;
use peerway::driven::Proxy;

use super::kernels::Kernels;
use super::simulated::Simulated;
use crate::bench::measure::Times;

/// Puts of one run: where they go, and how many.
#[derive(Clone, Copy, Debug)]
pub(super) struct Puts {
    pub(super) peer: u16,
    pub(super) dst: u64,
    pub(super) src: u64,
    pub(super) len: u64,
    /// Slots of `len` bytes that they go round.
    pub(super) slots: u64,
    pub(super) warps: u32,
    /// Of 32, by each warp.
    pub(super) batches: u64,
    pub(super) counter: Option<u16>,
}

/// One side of a conversation: each message is answered by one of the same length.
#[derive(Clone, Copy)]
pub(super) struct Talk<'a> {
    pub(super) peer: u16,
    /// Where ours goes.
    pub(super) dst: u64,
    /// What it is sent from.
    pub(super) source: (&'a Region, u64),
    /// Where the other side's arrives.
    pub(super) landing: &'a Region,
    pub(super) len: u64,
    pub(super) counter: u16,
    /// Messages on the counter so far.
    pub(super) first: u64,
    pub(super) rounds: u64,
}

/// Steps through the layers of a model.
#[derive(Clone, Copy)]
pub(super) struct Layers<'a> {
    pub(super) peer: u16,
    pub(super) dst: u64,
    /// Where the sender writes layers and sends them from, or where they arrive.
    pub(super) memory: (&'a Region, u64),
    pub(super) layers: u32,
    pub(super) len: u64,
    /// The first layer's; the others have those after it.
    pub(super) counter: u16,
    /// Of the sender: the receiver has taken all layers of a step.
    pub(super) taken: u16,
    pub(super) steps: u64,
}

/// See the module.
pub(super) trait Producer {
    /// Pushes by one thread.
    fn push_one(&self, rounds: u64) -> anyhow::Result<Times>;
    /// Pushes of 32 commands at once.
    fn push_many(&self, rounds: u64) -> anyhow::Result<Times>;
    /// Commands that are answered.
    fn round_trip(&self, peer: u16, rounds: u64) -> anyhow::Result<Times>;
    /// As many commands that do nothing as can be; how many.
    fn flood(&self, warps: u32, commands: u64) -> anyhow::Result<u64>;
    /// Puts, and quiet; until that was answered.
    fn puts(&self, puts: &Puts) -> anyhow::Result<Duration>;
    /// Writes a pattern over a region.
    fn fill(&self, region: &Region, seed: u32) -> anyhow::Result<()>;
    /// Compares the first bytes of a region with that pattern.
    fn check(&self, region: &Region, len: u64, seed: u32) -> anyhow::Result<()>;
    /// Speaks first; the times of whole rounds.
    fn ping(&self, talk: &Talk<'_>) -> anyhow::Result<Times>;
    /// Answers.
    fn pong(&self, talk: &Talk<'_>) -> anyhow::Result<()>;
    /// Writes layer after layer, and sends each; the time of all steps without sending, and with.
    fn layers(&self, layers: &Layers<'_>) -> anyhow::Result<[Duration; 2]>;
    /// Takes layer after layer, and compares each.
    fn take_layers(&self, layers: &Layers<'_>) -> anyhow::Result<()>;
    /// Sends one put at a time with a count, and waits for an answer on another counter; the times of whole rounds.
    fn relay(&self, talk: &Talk<'_>, answer: u16) -> anyhow::Result<Times>;
}

/// The producer for this proxy.
pub(super) fn of(proxy: &Proxy) -> anyhow::Result<Box<dyn Producer + '_>> {
    Ok(match proxy.gpu() {
        Some(gpu) => Box::new(Kernels::new(proxy, gpu)?),
        None => Box::new(Simulated::new(proxy)),
    })
}
