//! Ping-pong: an application thread that answers every write with a write back.
//!
//! Both sides use nothing but what an application has: a write that counts its arrival and a wait for a
//! counter, or a write and a look at the last byte that it changes, as `ib_write_lat` does.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use peerway::{Batch, Endpoint, Peer, Prepared, Region, Transfer};
use peerway_core::config::Config;
use serde::{Deserialize, Serialize};

/// Counter of the serving endpoint that the asking one raises.
const PING: u32 = 1;
/// Counter of the asking endpoint that the serving one raises.
const PONG: u32 = 2;

/// How long an answer may take; the other side's own failure is found sooner.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often the answering thread looks whether it should end.
const LOOK: Duration = Duration::from_millis(100);

/// Writes after which their ends are looked at, all together: each look costs as much for one as for many.
const UNDER_WAY: usize = 32;
/// Up to this size a write goes on while its poster waits for the answer: it is posted or copied by the call, or sent by who waits.
const SMALL: u64 = 64 << 10;

/// Looks at a byte between two looks at the clock.
const LOOKS: u32 = 4096;

/// How a side learns that a write has arrived.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) enum Seen {
    /// Its counter has gone up.
    Counted,
    /// Its last byte has changed: right where a device writes in order and needs no processor for it.
    Watched,
}

impl Seen {
    /// What suits writes of `size` bytes on a path, unless counters are asked for. Larger ones go by several queue pairs, of which
    /// none answers for the others.
    pub(crate) fn on(path: &str, size: u64, counted: bool) -> Self {
        let in_order = path == "verbs" && size <= SMALL;
        if in_order && !counted { Self::Watched } else { Self::Counted }
    }
}

/// Where writes arrive, and how that is seen.
struct Arrivals {
    endpoint: Endpoint,
    seen: Seen,
    counter: u32,
    region: Region,
    last: u64,
}

impl Arrivals {
    /// Of writes of `size` bytes, blank until the first.
    fn new(endpoint: &Endpoint, seen: Seen, counter: u32, region: &Region, size: u64) -> Self {
        endpoint.reset_counter(counter);
        let (endpoint, region) = (endpoint.clone(), region.clone());
        Self { endpoint, seen, counter, region, last: size - 1 }
    }

    /// Waits for the write of this turn, for so long.
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

/// What the last byte of a turn's write is: never what it was the turn before, nor blank.
fn mark(turn: u64) -> u8 {
    (turn % 255) as u8 + 1
}

/// A byte that a device may write meanwhile.
fn last_byte(region: &Region, at: u64) -> &AtomicU8 {
    assert!(at < region.len(), "a byte outside the buffer");
    let byte = std::ptr::with_exposed_provenance_mut((region.addr() + at) as usize);
    // SAFETY: inside the region, which the reference cannot outlive; host memory, by the plan of such rows. Nobody
    // in this process has a reference to it, and whoever touches it does so as bytes.
    unsafe { AtomicU8::from_ptr(byte) }
}

/// The answering side.
pub(crate) struct Pong {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<anyhow::Result<()>>,
}

impl Pong {
    /// Answers each arrival in `region` by writing its first `size` bytes to where `descriptor` says.
    pub(crate) fn start(
        endpoint: &Endpoint,
        region: &Region,
        metadata: &[u8],
        descriptor: &[u8],
        size: u64,
        seen: Seen,
    ) -> anyhow::Result<Self> {
        ensure!(size > 0, "a ping has a byte at least");
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

    /// Ends the thread and says how it fared.
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
            writes.next().context("the write back")?;
        }
    }
    writes.end().context("the write back")
}

/// Writes one after the other. Whoever has seen the answer to a small one knows that it arrived, so their ends are not looked at
/// one by one; large ones are waited for, as it is this thread that copies them.
struct Writes {
    prepared: Prepared,
    /// Small ones of which no end is known.
    under_way: VecDeque<Transfer>,
    /// How many of these there are when their ends are looked at.
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
        // Acknowledgements come later than answers at times, but not by that much.
        if self.under_way.len() < 2 * self.most { Ok(()) } else { self.end() }
    }

    fn end(&mut self) -> anyhow::Result<()> {
        self.under_way.drain(..).try_for_each(|write| Ok(write.join().ok()?))
    }
}

/// Writes that may be under way, as the engine is configured.
fn under_way() -> usize {
    let read = Config::from_env(|name| std::env::var(name).ok());
    let config = read.map(|(config, _)| config).unwrap_or_default();
    let most = config.max_inflight_ops.map_or(UNDER_WAY, |most| UNDER_WAY.min(most as usize));
    most.min(config.slots as usize / 4)
}

/// The asking side.
pub(crate) struct Ping {
    pongs: Arrivals,
    local: Region,
    asks: Writes,
    turn: u64,
}

impl Ping {
    /// Pings by `batch`, a write of the first `size` bytes of `local`, to a side that runs [`Pong`] and answers into `echo`.
    pub(crate) fn new(
        endpoint: &Endpoint,
        peer: &Peer,
        (batch, local, echo): (Batch, &Region, &Region),
        size: u64,
        seen: Seen,
    ) -> anyhow::Result<Self> {
        ensure!(size > 0, "a ping has a byte at least");
        let pongs = Arrivals::new(endpoint, seen, PONG, echo, size);
        let ask = peer.prepare(if seen == Seen::Counted { batch.count(PING) } else { batch })?;
        Ok(Self { pongs, local: local.clone(), asks: Writes::new(ask), turn: 0 })
    }

    /// There and back once.
    pub(crate) fn once(&mut self) -> anyhow::Result<()> {
        self.turn += 1;
        if self.pongs.seen == Seen::Watched {
            last_byte(&self.local, self.pongs.last).store(mark(self.turn), Ordering::Release);
        }
        self.asks.next()?;
        let answered = self.pongs.wait(self.turn, PATIENCE);
        ensure!(answered, "no answer within {} s", PATIENCE.as_secs());
        Ok(())
    }
}
