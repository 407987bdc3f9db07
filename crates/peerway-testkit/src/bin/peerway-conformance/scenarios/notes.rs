//! Notifications and counters: they follow the bytes, arrive exactly once, and their queue is
//! bounded.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use peerway::{Access, Batch, Fence, MAX_NOTIFICATION, PostError, Reason, TransferError};
use peerway_testkit::hex;
use peerway_testkit::memory;
use peerway_testkit::random::pattern;

use crate::options::Options;
use crate::world::{Verdict, World, fine, fine_with};

const SOON: Duration = Duration::from_secs(10);

pub(crate) fn follow(world: &World) -> Result<Verdict> {
    let mut pair = world.pair_with(&world.calm())?;
    pair.b.accept()?;
    let len = 3 << 20;
    let ours = world.region(&pair.a, len)?;
    let seen = ours.advertise(Access::WRITE)?;
    pair.b.import("x", &seen)?;
    pair.b.region("r", len, world.memory())?;
    world.step("when a notification is visible, its bytes are too");
    let rounds = 30u64;
    for round in 1..=rounds {
        pair.b.ask(&format!("fill r {round}"))?;
        let note = hex::encode(&round.to_le_bytes());
        pair.b.ask(&format!("post t{round} p write r 0 x 0 {len} notify={note} count=9"))?;
        if round % 2 == 0 {
            ensure!(pair.a.wait_counter(9, round, SOON) == round, "a counter did not arrive");
            memory::check(&ours, round, 0, 0, len).context("a counter came before its bytes")?;
        }
        let got = pair.a.notification(SOON).context("no notification")?;
        ensure!(got.message == round.to_le_bytes(), "the notification differs from the one sent");
        memory::check(&ours, round, 0, 0, len).context("a notification came before its bytes")?;
        let ended = pair.b.ask(&format!("wait t{round} 10000"))?;
        ensure!(ended == "Done Held", "{ended}");
    }
    ensure!(pair.a.wait_counter(9, rounds, SOON) == rounds, "a counter rose twice or not at all");

    world.step("sizes");
    for size in [0, 1, 63, 4096, 65_537, MAX_NOTIFICATION] {
        let mut message = vec![0; size];
        pattern(size as u64, 0, &mut message);
        pair.peer.notify(&message)?.join().ok().with_context(|| format!("{size} bytes"))?;
        let got = pair.b.ask("notification e 5000")?;
        ensure!(
            got == hex::encode(&message),
            "a notification of {size} bytes arrived with other bytes"
        );
    }
    match pair.peer.notify(&vec![0; MAX_NOTIFICATION + 1]) {
        Err(PostError::NotificationTooLong { .. }) => {}
        other => bail!("a notification over the size limit: {:?}", other.map(|t| t.join())),
    }
    world.step("many notifications arrive in order, once");
    let many = 500u32;
    let sent: Vec<_> =
        (0..many).map(|i| pair.peer.notify(&i.to_le_bytes())).collect::<Result<_, _>>()?;
    for transfer in sent {
        transfer.join().ok()?;
    }
    for i in 0..many {
        let got = pair.b.ask("notification e 5000")?;
        ensure!(got == hex::encode(&i.to_le_bytes()), "number {i} arrived as {got}");
    }
    ensure!(pair.b.ask("notification e 100")? == "none", "a notification was delivered twice");
    for _ in 0..100 {
        pair.peer.count(77)?.join().ok()?;
    }
    ensure!(pair.b.number("counter e 77")? == 100, "a counter rose twice or not at all");
    // A transfer of no bytes still notifies.
    let remote = pair.peer.import(&pair.b.advertise("r", Access::WRITE)?)?;
    let empty = Batch::write(&ours.slice(0..0), &remote.slice(0..0))?.notify(b"nothing")?;
    pair.peer.run(&empty)?.ok()?;
    ensure!(
        pair.b.ask("notification e 5000")? == hex::encode(b"nothing"),
        "a transfer of no bytes did not notify"
    );
    fine()
}

pub(crate) fn full(world: &World) -> Result<Verdict> {
    let mut pair = world.pair_with(&Options { notify_bytes: 1 << 20, ..world.calm() })?;
    let message = vec![5; 10_000];
    let (mut taken, mut refused) = (0, 0);
    let full = Reason::Failed(TransferError::NotificationsFull);
    for _ in 0..300 {
        match pair.peer.notify(&message)?.join().reason {
            Reason::Done => taken += 1,
            reason if reason == full => refused += 1,
            other => bail!("a notification to a full queue ended as {other:?}"),
        }
    }
    ensure!(taken > 0 && refused > 0, "{taken} taken, {refused} refused: the queue has no bound");
    world.step("a write with a refused notification says so, and its bytes are there");
    let len = 100_000;
    let remote = pair.theirs("r", len, world.memory(), 1)?;
    let ours = world.region(&pair.a, len)?;
    memory::fill_all(&ours, 2)?;
    let write = Batch::write(&ours.all(), &remote.all())?.notify(&[6; 10_000])?;
    let ended = pair.peer.run(&write)?;
    ensure!(ended.reason == full, "a write with a refused notification ended as {ended:?}");
    ensure!(ended.fence == Fence::Held, "its notification was refused, but bytes may land late");
    pair.b.ask(&format!("check r 2 0 0 {len}"))?;
    world.step("draining makes room, and each accepted notification is there once");
    for _ in 0..taken {
        ensure!(
            pair.b.ask("notification e 5000")? == hex::encode(&message),
            "an accepted notification is missing"
        );
    }
    ensure!(pair.b.ask("notification e 100")? == "none", "a refused notification was delivered");
    pair.peer.notify(b"again")?.join().ok()?;
    ensure!(pair.b.ask("notification e 5000")? == hex::encode(b"again"), "no room after draining");
    fine_with(format!("{taken} taken, {refused} refused"))
}
