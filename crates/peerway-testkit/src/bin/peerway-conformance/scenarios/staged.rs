//! Stages released one by one, classes, transfer deadlines, and transfers as futures.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context as Task, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::{Batch, Class, Ended, Fence, PostError, Reason, Transfer};
use peerway_testkit::memory;

use crate::world::{Verdict, World, fine};

const SOON: Duration = Duration::from_secs(10);

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut pair = world.pair_with(&world.calm())?;
    let (layers, part) = (6u64, 700_000u64);
    let len = layers * part;
    let remote = pair.theirs("r", len, world.memory(), 1)?;
    let ours = world.region(&pair.a, len)?;
    memory::fill_all(&ours, 2)?;

    world.step("stages");
    let stages = (0..layers)
        .map(|i| {
            let range = i * part..(i + 1) * part;
            let batch = Batch::write(&ours.slice(range.clone()), &remote.slice(range))?;
            Ok(batch.count(100 + i as u32))
        })
        .collect::<Result<Vec<_>, PostError>>()?;
    let staged = pair.peer.stage(stages)?;
    ensure!(staged.len() == layers as usize, "{} stages", staged.len());
    for i in [3, 0, 5] {
        staged.release(i)?;
        let counted = pair.b.number(&format!("wait_counter e {} 1 10000", 100 + i))?;
        ensure!(counted == 1, "stage {i} counted {counted} times");
        let at = i as u64 * part;
        pair.b
            .ask(&format!("check r 2 {at} {at} {part}"))
            .context("a stage's counter came early")?;
    }
    for i in [1, 2, 4] {
        let at = i * part;
        pair.b
            .ask(&format!("check r 1 {at} {at} {part}"))
            .context("a stage ran without being released")?;
        ensure!(staged.poll(i as usize).is_none(), "stage {i} has ended without being released");
    }
    match (staged.release(3), staged.release(99)) {
        (Err(PostError::AlreadyReleased(3)), Err(PostError::NoSuchStage { stage: 99, .. })) => {}
        other => bail!("a stage released twice and an unknown stage: {other:?}"),
    }
    for i in [1, 2, 4] {
        staged.release(i)?;
    }
    ensure!(staged.join() == Ended::DONE, "{:?}", staged.join());
    pair.b.ask(&format!("check r 2 0 0 {len}"))?;

    world.step("classes");
    for class in [Class::Auto, Class::Latency, Class::Bulk] {
        for size in [0, 100, 100_000, len] {
            memory::fill_all(&ours, 3)?;
            let batch = Batch::write(&ours.slice(0..size), &remote.slice(0..size))?.class(class);
            let transfer = pair.peer.post(&batch)?;
            ensure!(transfer.join() == Ended::DONE, "{class:?}, {size} bytes");
            pair.b.ask(&format!("check r 3 0 0 {size}"))?;
            let stats = transfer.stats();
            ensure!(stats.bytes_done == size && stats.bytes_total == size, "{stats:?}");
            ensure!(
                transfer.path() == world.transport.kind(),
                "the transfer took the path {}",
                transfer.path()
            );
        }
    }

    world.step("deadlines");
    let batch = Batch::write(&ours.all(), &remote.all())?.deadline(Duration::from_nanos(1));
    let ended = world.ends(&pair.peer.post(&batch)?, Duration::ZERO)?;
    ensure!(
        matches!(ended, Ended { reason: Reason::TimedOut, fence: Fence::Held })
            || ended == Ended::DONE,
        "a deadline in the past: {ended:?}"
    );

    world.step("futures");
    for size in [0, 64, 100_000, len] {
        memory::fill_all(&ours, 5)?;
        let batch = Batch::write(&ours.slice(0..size), &remote.slice(0..size))?;
        let ended = block_on(pair.peer.post(&batch)?).with_context(|| format!("{size} bytes"))?;
        ensure!(ended == Ended::DONE, "a future of {size} bytes: {ended:?}");
        pair.b.ask(&format!("check r 5 0 0 {size}"))?;
    }
    let note = block_on(pair.peer.notify(b"future")?)?;
    ensure!(note == Ended::DONE, "a notification's future: {note:?}");
    ensure!(pair.b.ask("notification e 5000")? != "none", "the notification did not arrive");
    fine()
}

/// Awaits a transfer as a future, on a thread that only sleeps meanwhile.
fn block_on(transfer: Transfer) -> Result<Ended> {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut task = Task::from_waker(&waker);
    let mut transfer = pin!(transfer);
    let until = Instant::now() + SOON;
    loop {
        if let Poll::Ready(ended) = transfer.as_mut().poll(&mut task) {
            return Ok(ended);
        }
        ensure!(Instant::now() < until, "a future was never woken");
        std::thread::park_timeout(Duration::from_secs(2));
    }
}
