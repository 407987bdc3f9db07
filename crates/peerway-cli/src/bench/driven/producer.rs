//! What pushes the commands: kernels, or CPU threads.

use std::time::Duration;

use peerway::Region;
use peerway::driven::Proxy;

use super::kernels::Kernels;
use super::simulated::Simulated;
use crate::bench::measure::Times;

/// The puts of one run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Puts {
    pub(super) peer: u16,
    pub(super) dst: u64,
    pub(super) src: u64,
    pub(super) len: u64,
    /// Places of `len` bytes that the puts use in rotation.
    pub(super) slots: u64,
    pub(super) warps: u32,
    /// Batches of 32 puts per warp.
    pub(super) batches: u64,
    pub(super) counter: Option<u16>,
}

/// One side of a ping-pong. Each message is answered by a message of the same length.
#[derive(Clone, Copy)]
pub(super) struct Talk<'a> {
    pub(super) peer: u16,
    /// The offset in the peer's windows that messages are written to.
    pub(super) dst: u64,
    /// The buffer that messages are sent from, and its offset in the local windows.
    pub(super) source: (&'a Region, u64),
    /// The buffer that the peer's messages arrive in.
    pub(super) landing: &'a Region,
    pub(super) len: u64,
    pub(super) counter: u16,
    /// The value of the counter before the first message.
    pub(super) first: u64,
    pub(super) rounds: u64,
}

/// Steps of a model that sends its layers.
#[derive(Clone, Copy)]
pub(super) struct Layers<'a> {
    pub(super) peer: u16,
    pub(super) dst: u64,
    /// The buffer of the layers, and its offset in the local windows. The sender writes the layers
    /// there; at the receiver they arrive there.
    pub(super) memory: (&'a Region, u64),
    pub(super) layers: u32,
    pub(super) len: u64,
    /// The counter of the first layer. The other layers have the following counters.
    pub(super) counter: u16,
    /// The sender's counter that the receiver raises after it has taken all layers of a step.
    pub(super) taken: u16,
    pub(super) steps: u64,
}

/// See the module.
pub(super) trait Producer {
    /// Times pushes of one command by one thread.
    fn push_one(&self, rounds: u64) -> anyhow::Result<Times>;
    /// Times pushes of 32 commands at once.
    fn push_many(&self, rounds: u64) -> anyhow::Result<Times>;
    /// Times a `quiet` until its answer.
    fn round_trip(&self, peer: u16, rounds: u64) -> anyhow::Result<Times>;
    /// Pushes at least `commands` commands without effect. Returns their number.
    fn flood(&self, warps: u32, commands: u64) -> anyhow::Result<u64>;
    /// Pushes the puts and a `quiet`. Returns the time until the answer to the `quiet`.
    fn puts(&self, puts: &Puts) -> anyhow::Result<Duration>;
    /// Fills a region with the pattern of `seed`.
    fn fill(&self, region: &Region, seed: u32) -> anyhow::Result<()>;
    /// Compares the first `len` bytes of a region with the pattern of `seed`.
    fn check(&self, region: &Region, len: u64, seed: u32) -> anyhow::Result<()>;
    /// Sends messages and waits for the answers. Returns the times of round trips.
    fn ping(&self, talk: &Talk<'_>) -> anyhow::Result<Times>;
    /// Answers the messages of [`Self::ping`].
    fn pong(&self, talk: &Talk<'_>) -> anyhow::Result<()>;
    /// Writes the layers of every step and sends them. Returns the time of all steps without
    /// sending and with sending.
    fn layers(&self, layers: &Layers<'_>) -> anyhow::Result<[Duration; 2]>;
    /// Receives the layers of every step and compares each.
    fn take_layers(&self, layers: &Layers<'_>) -> anyhow::Result<()>;
    /// Sends one put with a count at a time, and waits for the answer on another counter. Returns
    /// the times of round trips.
    fn relay(&self, talk: &Talk<'_>, answer: u16) -> anyhow::Result<Times>;
}

/// The producer for this proxy.
pub(super) fn of(proxy: &Proxy) -> anyhow::Result<Box<dyn Producer + '_>> {
    Ok(match proxy.gpu() {
        Some(gpu) => Box::new(Kernels::new(proxy, gpu)?),
        None => Box::new(Simulated::new(proxy)),
    })
}
