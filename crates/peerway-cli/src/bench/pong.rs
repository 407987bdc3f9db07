//! Ping-pong: an application thread answers every write with a write back.
//!
//! Both sides use only the public interface. A side detects an arrival by a counter that the write
//! raises, or by the last byte that the write changes, as `ib_write_lat` does.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use peerway::{Batch, Endpoint, Peer, Prepared, Region, Transfer};
use peerway_core::config::Config;
use serde::{Deserialize, Serialize};

/// The counter of the serving endpoint, which the client's writes raise.
const PING: u32 = 1;
/// The counter of the client's endpoint, which the answers raise.
const PONG: u32 = 2;

/// The longest wait for an answer. A failure of the other side is detected sooner.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often the answering thread checks whether it should end.
const LOOK: Duration = Duration::from_millis(100);

/// After this many writes their completions are polled together. One poll costs the same for one
/// completion as for many.
const UNDER_WAY: usize = 32;
/// Up to this size a write proceeds while its poster waits for the answer. The posting call posts
/// or copies it, or the waiting thread sends it.
const SMALL: u64 = 64 << 10;

/// Checks of the last byte between two reads of the clock.
const LOOKS: u32 = 4096;

/// How a side detects the arrival of a write.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) enum Seen {
    /// By its counter.
    Counted,
    /// By its last byte. This is correct if a device writes in order, without the help of a CPU.
    Watched,
}

impl Seen {
    /// The method for writes of `size` bytes on a path. Without `counted`, small writes on verbs
    /// are watched. Larger writes use several queue pairs, which are not ordered among each other.
    pub(crate) fn on(path: &str, size: u64, counted: bool) -> Self {
        let in_order = path == "verbs" && size <= SMALL;
        if in_order && !counted { Self::Watched } else { Self::Counted }
    }
}

/// The buffer that writes arrive in, and how arrivals are detected.
struct Arrivals {
    endpoint: Endpoint,
    seen: Seen,
    counter: u32,
    region: Region,
    last: u64,
}

impl Arrivals {
    /// For writes of `size` bytes. The buffer must be blank until the first write.
    fn new(endpoint: &Endpoint, seen: Seen, counter: u32, region: &Region, size: u64) -> Self {
        endpoint.reset_counter(counter);
        let (endpoint, region) = (endpoint.clone(), region.clone());
        Self { endpoint, seen, counter, region, last: size - 1 }
    }

    /// Waits for the write of this turn, at most `timeout`. Returns whether it arrived.
    fn wait(&self, turn: u64, timeout: Duration) -> bool {
        if self.seen == Seen::Counted {
            return self.endpoint.wait_counter(self.counter, turn, timeout) >= turn;
        }
        let (byte, awaited) = (last_byte(&self.region, self.last), mark(turn));
        let mut since = None;
        loop {
            for _ in 0..LOOKS {
                if byte.load(Ordering::Acquire) == awaited {
                    return true;
                }
            }
            if since.get_or_insert_with(Instant::now).elapsed() >= timeout {
                return false;
            }
        }
    }
}

/// The last byte of the write of this turn. It differs from the byte of the previous turn.
fn mark(turn: u64) -> u8 {
    (turn % 255) as u8 + 1
}

/// A byte of the region that a device may write concurrently.
fn last_byte(region: &Region, at: u64) -> &AtomicU8 {
    assert!(at < region.len(), "offset {at} is outside the buffer of {} bytes", region.len());
    let byte = std::ptr::with_exposed_provenance_mut((region.addr() + at) as usize);
    // SAFETY: the byte lies inside the region, and the reference cannot outlive the region. It is
    // host memory, because `Plan::new` allows ping-pong only with host memory. This process holds
    // no other reference to it, and all accesses are byte accesses.
    unsafe { AtomicU8::from_ptr(byte) }
}

/// The answering side of a ping-pong.
pub(crate) struct Pong {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<anyhow::Result<()>>,
}

impl Pong {
    /// Answers each arrival in `region` by a write of its first `size` bytes to the memory of
    /// `descriptor`.
    pub(crate) fn start(
        endpoint: &Endpoint,
        region: &Region,
        metadata: &[u8],
        descriptor: &[u8],
        size: u64,
        seen: Seen,
    ) -> anyhow::Result<Self> {
        ensure!(size > 0, "a ping-pong needs at least one byte");
        let peer = endpoint.connect(metadata)?;
        let remote = peer.import(descriptor)?;
        let batch = Batch::write(&region.slice(0..size), &remote.slice(0..size))?;
        let answer = peer.prepare(if seen == Seen::Counted { batch.count(PONG) } else { batch })?;
        let pings = Arrivals::new(endpoint, seen, PING, region, size);
        let stop = Arc::new(AtomicBool::new(false));
        let its = stop.clone();
        let thread = thread::Builder::new()
            .name("bench-pong".to_owned())
            .spawn(move || answers(&pings, Writes::new(answer), &its))?;
        Ok(Self { stop, thread })
    }

    /// Stops the thread and returns its result.
    pub(crate) fn stop(self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the answering thread panicked"))?
    }
}

fn answers(pings: &Arrivals, mut writes: Writes, stop: &AtomicBool) -> anyhow::Result<()> {
    let mut awaited = 1;
    while !stop.load(Ordering::Relaxed) {
        if pings.wait(awaited, LOOK) {
            awaited += 1;
            writes.next().context("the write back failed")?;
        }
    }
    writes.end().context("the write back failed")
}

/// A sequence of writes. The answer to a small write proves that the write arrived, so completions
/// of small writes are polled in groups. Large writes are waited for, because this thread copies
/// them.
struct Writes {
    prepared: Prepared,
    /// Small writes whose completion is not known yet.
    under_way: VecDeque<Transfer>,
    /// The number of such writes at which completions are polled. Zero for large writes.
    most: usize,
}

impl Writes {
    fn new(prepared: Prepared) -> Self {
        let most = if prepared.total() <= SMALL { under_way() } else { 0 };
        Self { prepared, under_way: VecDeque::with_capacity(2 * most), most }
    }

    fn next(&mut self) -> anyhow::Result<()> {
        self.under_way.push_back(self.prepared.begin()?);
        if self.under_way.len() < self.most {
            return Ok(());
        }
        while let Some(first) = self.under_way.front()
            && let Some(ended) = first.poll()
        {
            ended.ok()?;
            self.under_way.pop_front();
        }
        // An acknowledgement may arrive after the answer, but the backlog rarely grows this long.
        if self.under_way.len() < 2 * self.most { Ok(()) } else { self.end() }
    }

    fn end(&mut self) -> anyhow::Result<()> {
        self.under_way.drain(..).try_for_each(|write| Ok(write.join().ok()?))
    }
}

/// How many writes may be in flight under the engine's configuration.
fn under_way() -> usize {
    let read = Config::from_env(|name| std::env::var(name).ok());
    let config = read.map(|(config, _)| config).unwrap_or_default();
    let most = config.max_inflight_ops.map_or(UNDER_WAY, |most| UNDER_WAY.min(most as usize));
    most.min(config.slots as usize / 4)
}

/// The client side of a ping-pong.
pub(crate) struct Ping {
    pongs: Arrivals,
    local: Region,
    asks: Writes,
    turn: u64,
}

impl Ping {
    /// Prepares pings with `batch`, a write of the first `size` bytes of `local`. The other side
    /// runs [`Pong`] and answers into `echo`.
    pub(crate) fn new(
        endpoint: &Endpoint,
        peer: &Peer,
        (batch, local, echo): (Batch, &Region, &Region),
        size: u64,
        seen: Seen,
    ) -> anyhow::Result<Self> {
        ensure!(size > 0, "a ping-pong needs at least one byte");
        let pongs = Arrivals::new(endpoint, seen, PONG, echo, size);
        let ask = peer.prepare(if seen == Seen::Counted { batch.count(PING) } else { batch })?;
        Ok(Self { pongs, local: local.clone(), asks: Writes::new(ask), turn: 0 })
    }

    /// One round trip.
    pub(crate) fn once(&mut self) -> anyhow::Result<()> {
        self.turn += 1;
        if self.pongs.seen == Seen::Watched {
            last_byte(&self.local, self.pongs.last).store(mark(self.turn), Ordering::Release);
        }
        self.asks.next()?;
        let answered = self.pongs.wait(self.turn, PATIENCE);
        ensure!(answered, "the other side sent no answer within {} s", PATIENCE.as_secs());
        Ok(())
    }
}
