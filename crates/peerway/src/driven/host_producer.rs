//! Pushes commands from a CPU thread in place of a kernel: the calls of `peerway_device.cuh` in
//! Rust, on rings in host memory.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use peerway_core::command::{Command, CommandError, Op};

use super::ring::{CommandProducer, HostMemory, PushError};
use super::worker::ProxyShared;

/// Pushes commands into one ring, from any thread.
#[derive(Clone)]
pub struct HostProducer {
    shared: Arc<ProxyShared>,
    ring: u32,
    producer: CommandProducer<HostMemory>,
}

/// The reason why a push or a wait failed. A kernel gets the same reasons.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum HostProducerError {
    /// The rings are mapped for a GPU, and only its kernels may push into them.
    #[error(
        "this proxy belongs to a GPU, so its rings are for kernels only; \
         build a proxy without a GPU to push commands from the CPU"
    )]
    OfAGpu,
    /// The proxy has no ring, peer or counter with this number.
    #[error("there is no {what} {number}: there are {count}, numbered from 0")]
    NoSuch {
        /// What the number names: "ring", "peer" or "counter".
        what: &'static str,
        /// The number.
        number: u32,
        /// How many the proxy has.
        count: u32,
    },
    /// The command does not fit the command format.
    #[error("{0}")]
    Command(#[from] CommandError),
    /// The ring did not accept the command.
    #[error("{0}")]
    Push(#[from] PushError),
    /// The answer or the counter value did not arrive within the time-out.
    #[error(
        "the answer or the counter value did not arrive within the time-out; \
         check that the proxy is armed and the peer is alive"
    )]
    TimedOut,
    /// An earlier command failed.
    #[error("an earlier command failed; call `Proxy::take_fault` to learn which one and why")]
    Failed,
}

impl HostProducer {
    pub(crate) fn new(shared: &Arc<ProxyShared>, ring: u32) -> Result<Self, HostProducerError> {
        let shape = shared.memory.shape();
        below("ring", ring, shape.rings)?;
        let words = shared.memory.host_ring(ring as usize).ok_or(HostProducerError::OfAGpu)?;
        let producer = CommandProducer::new(words, shape.log2_slots);
        Ok(Self { shared: shared.clone(), ring, producer })
    }

    /// Writes `len` bytes from offset `src` of the local windows to offset `dst` of the peer's
    /// windows.
    pub fn put(&self, peer: u16, dst: u64, src: u64, len: u64) -> Result<(), HostProducerError> {
        self.push(Command { op: Op::Put, peer, counter: 0, src, dst, len }).map(drop)
    }

    /// Does a [`Self::put`], then raises a counter of the peer by one after the bytes.
    pub fn put_with_count(
        &self,
        peer: u16,
        dst: u64,
        src: u64,
        len: u64,
        counter: u16,
    ) -> Result<(), HostProducerError> {
        self.push(Command { op: Op::PutCount, peer, counter, src, dst, len }).map(drop)
    }

    /// Raises a counter of the peer by one. The count does not wait for earlier puts: see
    /// [`Self::quiet`].
    pub fn signal(&self, peer: u16, counter: u16) -> Result<(), HostProducerError> {
        self.push(Command { op: Op::Signal, peer, counter, ..Command::NOP }).map(drop)
    }

    /// Waits until all commands that this ring got earlier for the peer are in the peer's memory.
    pub fn quiet(&self, peer: u16) -> Result<(), HostProducerError> {
        let position = self.push(Command { op: Op::Quiet, peer, ..Command::NOP })?;
        self.wait_answer(peer, position, self.timeout())
    }

    /// Waits up to `timeout` for the answer to an [`Op::Quiet`] that was pushed at `position` of
    /// this ring. This is the second step of [`Self::quiet`]. The caller can repeat it after
    /// [`HostProducerError::TimedOut`].
    pub fn wait_answer(
        &self,
        peer: u16,
        position: u64,
        timeout: Duration,
    ) -> Result<(), HostProducerError> {
        below("peer", peer.into(), self.shared.memory.shape().peers)?;
        let (ring, peer) = (self.ring as usize, usize::from(peer));
        let memory = &self.shared.memory;
        let want = position.saturating_add(1).saturating_mul(2);
        if !wait_for(timeout, || memory.answered(ring, peer) >= want) {
            return Err(HostProducerError::TimedOut);
        }
        if memory.answered(ring, peer) & 1 == 1 { Err(HostProducerError::Failed) } else { Ok(()) }
    }

    /// Waits until a counter of this proxy reaches `value`. With `peer`, a fault of that peer ends
    /// the wait.
    pub fn wait_counter(
        &self,
        counter: u16,
        value: u64,
        peer: Option<u16>,
    ) -> Result<(), HostProducerError> {
        self.wait_counter_for(counter, value, peer, self.timeout())
    }

    /// Does [`Self::wait_counter`] with `timeout` instead of the proxy's time-out.
    pub fn wait_counter_for(
        &self,
        counter: u16,
        value: u64,
        peer: Option<u16>,
        timeout: Duration,
    ) -> Result<(), HostProducerError> {
        let shape = self.shared.memory.shape();
        below("counter", counter.into(), shape.counters)?;
        if let Some(peer) = peer {
            below("peer", peer.into(), shape.peers)?;
        }
        let there = || self.shared.counters.value(counter.into()) >= value;
        let failed = || {
            peer.is_some_and(|peer| {
                self.shared.memory.peer_fault(peer.into()).load(Ordering::Acquire) != 0
            })
        };
        if !wait_for(timeout, || there() || failed()) {
            return Err(HostProducerError::TimedOut);
        }
        if there() { Ok(()) } else { Err(HostProducerError::Failed) }
    }

    /// Pushes any command and returns its position.
    pub fn push(&self, command: Command) -> Result<u64, HostProducerError> {
        self.push_unless(command, || false)
    }

    /// Does [`Self::push`] with an interrupt. While it waits for room, it calls `interrupted` now
    /// and then; `true` ends the wait as the time-out does.
    pub fn push_unless(
        &self,
        command: Command,
        mut interrupted: impl FnMut() -> bool,
    ) -> Result<u64, HostProducerError> {
        below("peer", command.peer.into(), self.shared.memory.shape().peers)?;
        let words = command.encode()?;
        let mut start = Instant::now();
        let (timeout, mut looks, mut giving_back) = (self.timeout(), 0u32, false);
        let patient = || {
            looks += 1;
            if looks.is_multiple_of(64) {
                std::thread::yield_now();
            }
            if !looks.is_multiple_of(1024) {
                return true;
            }
            let patient = start.elapsed() < timeout && (giving_back || !interrupted());
            if !patient && !std::mem::replace(&mut giving_back, true) {
                // From here on `push` tries to give the claim back. It waits one more time-out for
                // the producers that claimed behind it, so the clock restarts.
                start = Instant::now();
            }
            patient
        };
        Ok(self.producer.push(&[words], patient)?)
    }

    /// Pushes words to consecutive positions, as a warp does, without encoding them: for tests and
    /// benchmarks.
    #[doc(hidden)]
    pub fn push_words(&self, commands: &[[u64; 2]]) -> Result<u64, HostProducerError> {
        Ok(self.producer.push(commands, || {
            std::hint::spin_loop();
            true
        })?)
    }

    /// The proxy's time-out.
    pub fn timeout(&self) -> Duration {
        Duration::from_nanos(self.shared.memory.shape().timeout_ns)
    }
}

impl fmt::Debug for HostProducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostProducer(ring {})", self.ring)
    }
}

fn below(what: &'static str, number: u32, count: usize) -> Result<(), HostProducerError> {
    let count = count as u32;
    if number < count { Ok(()) } else { Err(HostProducerError::NoSuch { what, number, count }) }
}

/// Polls `is_so` until it holds or `timeout` is over, and returns whether it holds. It spins at
/// first, then yields, and sleeps between polls after 1 ms.
pub(crate) fn wait_for(timeout: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    for looks in 0u64.. {
        if is_so() {
            return true;
        }
        if looks % 64 == 63 {
            let waited = start.elapsed();
            if waited >= timeout {
                return is_so();
            }
            if waited > Duration::from_millis(1) {
                std::thread::sleep(Duration::from_micros(50));
            } else {
                std::thread::yield_now();
            }
        }
        std::hint::spin_loop();
    }
    false
}
