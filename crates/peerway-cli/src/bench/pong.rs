//! Ping-pong: an application thread that answers every write with a write back.
//!
//! Both sides use nothing but what an application has: a write that counts its arrival, and a wait for
//! a counter.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use peerway::{Batch, Endpoint, Prepared, Region};

/// Counter of the serving endpoint that the asking one raises.
const PING: u32 = 1;
/// Counter of the asking endpoint that the serving one raises.
const PONG: u32 = 2;

/// How long an answer may take; the other side's own failure is found sooner.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often the answering thread looks whether it should end.
const LOOK: Duration = Duration::from_millis(100);

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
    ) -> anyhow::Result<Self> {
        let peer = endpoint.connect(metadata)?;
        let remote = peer.import(descriptor)?;
        let batch = Batch::write(&region.slice(0..size), &remote.slice(0..size))?.count(PONG);
        let answer = peer.prepare(batch)?;
        endpoint.reset_counter(PING);
        let stop = Arc::new(AtomicBool::new(false));
        let (endpoint, its) = (endpoint.clone(), stop.clone());
        let thread = thread::Builder::new()
            .name("bench-pong".to_owned())
            .spawn(move || answers(&endpoint, &answer, &its))?;
        Ok(Self { stop, thread })
    }

    /// Ends the thread and says how it fared.
    pub(crate) fn stop(self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the answering thread panicked"))?
    }
}

fn answers(endpoint: &Endpoint, answer: &Prepared, stop: &AtomicBool) -> anyhow::Result<()> {
    let mut awaited = 1;
    while !stop.load(Ordering::Relaxed) {
        if endpoint.wait_counter(PING, awaited, LOOK) >= awaited {
            awaited += 1;
            answer.run()?.ok().context("the write back")?;
        }
    }
    Ok(())
}

/// The asking side.
pub(crate) struct Ping<'a> {
    endpoint: &'a Endpoint,
    ask: Prepared,
    awaited: u64,
}

impl<'a> Ping<'a> {
    /// Pings by `batch`, a write, to a side that runs [`Pong`].
    pub(crate) fn new(
        endpoint: &'a Endpoint,
        peer: &peerway::Peer,
        batch: Batch,
    ) -> anyhow::Result<Self> {
        endpoint.reset_counter(PONG);
        Ok(Self { endpoint, ask: peer.prepare(batch.count(PING))?, awaited: 0 })
    }

    /// There and back once.
    pub(crate) fn once(&mut self) -> anyhow::Result<()> {
        self.awaited += 1;
        // The answer says that the question arrived; its own end is looked at after that.
        let asked = self.ask.begin()?;
        let seen = self.endpoint.wait_counter(PONG, self.awaited, PATIENCE);
        asked.join().ok()?;
        ensure!(seen >= self.awaited, "no answer within {} s", PATIENCE.as_secs());
        Ok(())
    }
}
