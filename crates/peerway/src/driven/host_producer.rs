//! A processor in a kernel's place: the calls of `peerway_device.cuh` from Rust, on rings in host memory.

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

/// What a kernel would be told.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum HostProducerError {
    /// The rings lie in a GPU's reach and are its kernels' alone.
    #[error("the rings of this proxy are for kernels: make one without a GPU to push from here")]
    OfAGpu,
    /// There is no such ring, peer or counter.
    #[error("there is no {what} {number}: there are {count}")]
    NoSuch {
        /// Which of them.
        what: &'static str,
        /// Its number.
        number: u32,
        /// How many there are.
        count: u32,
    },
    /// The command cannot be written down.
    #[error("{0}")]
    Command(#[from] CommandError),
    /// It was not pushed.
    #[error("{0}")]
    Push(#[from] PushError),
    /// An answer or a counter did not come in time.
    #[error("no answer within the proxy's time-out")]
    TimedOut,
    /// Something before it failed.
    #[error("a command before this one failed: `Proxy::take_fault` says which")]
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

    /// Bytes of ours into the peer's memory.
    pub fn put(&self, peer: u16, dst: u64, src: u64, len: u64) -> Result<(), HostProducerError> {
        self.push(Command { op: Op::Put, peer, counter: 0, src, dst, len }).map(drop)
    }

    /// The same, and a counter of the peer goes up by one after them.
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

    /// A counter of the peer goes up by one. It is not held back for earlier puts: see [`Self::quiet`].
    pub fn signal(&self, peer: u16, counter: u16) -> Result<(), HostProducerError> {
        self.push(Command { op: Op::Signal, peer, counter, ..Command::NOP }).map(drop)
    }

    /// Waits until everything that was pushed here before for the peer is in its memory.
    pub fn quiet(&self, peer: u16) -> Result<(), HostProducerError> {
        let position = self.push(Command { op: Op::Quiet, peer, ..Command::NOP })?;
        self.wait_answer(peer, position, self.timeout())
    }

    /// Waits for the answer to an [`Op::Quiet`] that was pushed here and got that position, for so long: [`Self::quiet`] in
    /// two steps, of which this one can be done again after [`HostProducerError::TimedOut`].
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

    /// Waits until a counter of ours has come to a value. With a peer, its failure ends the wait.
    pub fn wait_counter(
        &self,
        counter: u16,
        value: u64,
        peer: Option<u16>,
    ) -> Result<(), HostProducerError> {
        self.wait_counter_for(counter, value, peer, self.timeout())
    }

    /// The same, for so long and not for the proxy's time-out.
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

    /// Pushes any command; its position.
    pub fn push(&self, command: Command) -> Result<u64, HostProducerError> {
        self.push_unless(command, || false)
    }

    /// The same; while it waits for room, `interrupted` is asked now and then, and ends the wait as the time-out does.
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
                // The claim is given back now, for which those behind it have the bound once more.
                start = Instant::now();
            }
            patient
        };
        Ok(self.producer.push(&[words], patient)?)
    }

    /// Pushes commands of consecutive positions, as a warp does, bits and all: for tests and benchmarks.
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

/// Looks until something is so, or for so long; whether it is. Spins at first, as a kernel would all the time.
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
