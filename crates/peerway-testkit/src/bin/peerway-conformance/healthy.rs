//! The third peer. The endpoint under test must serve it during and after every fault.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use peerway::{Access, Endpoint};
use peerway_testkit::memory;

use crate::remote::Remote;
use crate::world::World;

/// Bytes of each transfer: more than an inline copy, few enough to be served without a pause.
const LEN: u64 = 200_000;

pub(crate) struct Healthy {
    over: Arc<AtomicBool>,
    thread: JoinHandle<Result<(u64, Duration)>>,
    /// Keeps the third peer alive.
    _remote: Option<Remote>,
}

impl Healthy {
    /// Starts writing to and reading from a third peer, through the endpoint under test.
    pub(crate) fn start(world: &World, endpoint: &Endpoint) -> Result<Self> {
        let mut remote = world.remote(&world.options())?;
        let healthy = Self::with(world, endpoint, &mut remote)?;
        Ok(Self { _remote: Some(remote), ..healthy })
    }

    /// Does the same with an existing peer.
    pub(crate) fn with(world: &World, endpoint: &Endpoint, remote: &mut Remote) -> Result<Self> {
        let peer = world.connect(endpoint, remote).context("the third peer")?;
        remote.region("healthy", LEN, world.memory())?;
        let there = peer.import(&remote.advertise("healthy", Access::READ_WRITE)?)?;
        let (out, back) = (world.region(endpoint, LEN)?, world.region(endpoint, LEN)?);
        let over = Arc::new(AtomicBool::new(false));
        let stop = over.clone();
        let thread = std::thread::spawn(move || {
            let (mut rounds, mut longest) = (0, Duration::ZERO);
            while !stop.load(Ordering::SeqCst) || rounds == 0 {
                memory::fill_all(&out, rounds)?;
                let start = Instant::now();
                peer.write(&out.all(), &there.all())?;
                peer.read(&back.all(), &there.all())?;
                longest = longest.max(start.elapsed());
                memory::check(&back, rounds, 0, 0, LEN)?;
                rounds += 1;
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok((rounds, longest))
        });
        Ok(Self { over, thread, _remote: None })
    }

    /// Fails unless the third peer was served all the time.
    pub(crate) fn finish(self, world: &World) -> Result<()> {
        self.over.store(true, Ordering::SeqCst);
        let done = self.thread.join().map_err(|_| anyhow!("the third peer's thread panicked"))?;
        let (rounds, longest) = done.context("the third, healthy peer was not served")?;
        ensure!(rounds > 0, "the third peer completed no round");
        let bound = world.profile.slack;
        ensure!(longest < bound, "the third peer waited {longest:?} for one round");
        Ok(())
    }
}
