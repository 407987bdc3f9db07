//! The GPU-driven engine, with host threads in place of kernels: commands from rings, counters,
//! quiet, faults.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::Region;
use peerway::driven::{Command, FaultCode, HostProducer, HostProducerError, Op, Proxy, Window};
use peerway_testkit::hex;
use peerway_testkit::memory;
use peerway_testkit::random::Random;

use crate::healthy::Healthy;
use crate::world::{Pair, Verdict, World, fine, fine_with};

const LEN: u64 = 4 << 20;
/// Longest wait of a kernel.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A local proxy whose peer 3 is the other side of the pair, with one window on each side.
struct Driven {
    proxy: Proxy,
    ours: Region,
    from: Window,
    to: Window,
}

const PEER: u16 = 3;

impl Driven {
    fn new(world: &World, pair: &mut Pair, timeout: Duration) -> Result<Self> {
        pair.b.region("r", LEN, world.memory())?;
        let info = hex::decode(&pair.b.ask("proxy x e r")?)?;
        let ours = world.region(&pair.a, LEN)?;
        let builder = Proxy::builder(&pair.a).threads(2).rings(3).slots(64).peers(8);
        let proxy = builder.timeout(timeout).build()?;
        let from = proxy.window(&ours)?;
        let windows = proxy.add_peer(PEER, &pair.peer, &info)?;
        let [to] = windows[..] else { bail!("{} windows", windows.len()) };
        Ok(Self { proxy, ours, from, to })
    }

    fn host_producer(&self, ring: u32) -> Result<HostProducer> {
        Ok(self.proxy.host_producer(ring)?)
    }
}

pub(crate) fn puts(world: &World) -> Result<Verdict> {
    let mut pair = world.pair_with(&world.calm())?;
    let driven = Driven::new(world, &mut pair, TIMEOUT)?;
    let _armed = driven.proxy.arm();
    let (from, to) = (driven.from.base, driven.to.base);
    world.step("one put, quiet, and the bytes are there");
    memory::fill_all(&driven.ours, 1)?;
    pair.b.ask("fill r 9")?;
    let producer = driven.host_producer(0)?;
    producer.put(PEER, to + 4096, from + 64, 10_000)?;
    producer.quiet(PEER)?;
    pair.b.ask("check r 1 64 4096 10000")?;
    pair.b.ask("check r 9 0 0 4096")?;
    pair.b.ask("check r 9 14096 14096 1000")?;
    world.step("many puts of many sizes through small rings; each count follows its bytes");
    let rounds = 20u64;
    for round in 1..=rounds {
        memory::fill_all(&driven.ours, round)?;
        let mut random = Random::new(round);
        let mut at = 0;
        let mut counted = 0;
        while at < LEN {
            let len = (4 * random.below(1 + (LEN - at).min(256 << 10) / 4)).max(4).min(LEN - at);
            let producer = driven.host_producer(random.below(3) as u32)?;
            if random.below(2) == 0 {
                producer.put(PEER, to + at, from + at, len)?;
            } else {
                producer.put_with_count(PEER, to + at, from + at, len, 7)?;
                counted += 1;
            }
            at += len;
        }
        for ring in 0..3 {
            driven.host_producer(ring)?.quiet(PEER)?;
        }
        driven.host_producer(1)?.signal(PEER, 8)?;
        ensure!(
            pair.b.number(&format!("pcounter x 8 {round} 10000"))? == round,
            "a signal was lost"
        );
        pair.b.ask(&format!("check r {round} 0 0 {LEN}")).context("after quiet")?;
        let before: u64 = pair.b.number("pcounter x 9 0 0")?;
        ensure!(before == 0, "counter 9 rose, but no command names it");
        let seen = pair.b.number("pcounter x 7 0 0")?;
        ensure!(seen >= counted, "the peer saw {seen} counts, but this round alone sent {counted}");
    }
    world.step("when the count of a put is visible, its bytes are too");
    let base = pair.b.number("pcounter x 11 0 0")?;
    for round in 1..=50u64 {
        memory::fill_all(&driven.ours, 100 + round)?;
        driven.host_producer(0)?.put_with_count(PEER, to, from, 64 << 10, 11)?;
        ensure!(pair.b.number(&format!("pcounter x 11 {} 10000", base + round))? == base + round);
        pair.b.ask(&format!("check r {} 0 0 {}", 100 + round, 64 << 10))?;
    }
    let stats = driven.proxy.stats();
    ensure!(stats.faults == 0, "{:?}", driven.proxy.take_fault());
    fine_with(format!("{} puts in {} requests", stats.puts, stats.requests))
}

/// Quiet waits for a stopped target, and does not wait for other peers.
pub(crate) fn quiet(world: &World) -> Result<Verdict> {
    let mut pair = world.pair_with(&world.calm())?;
    let driven = Driven::new(world, &mut pair, TIMEOUT)?;
    let mut other = world.remote(&world.calm())?;
    let other_peer = world.connect(&pair.a, &other)?;
    other.region("r", 4096, world.memory())?;
    let info = hex::decode(&other.ask("proxy x e r")?)?;
    let there = driven.proxy.add_peer(5, &other_peer, &info)?[0];
    let _armed = driven.proxy.arm();
    memory::fill_all(&driven.ours, 2)?;
    pair.b.child()?.stop()?;
    let (from, to) = (driven.from.base, driven.to.base);
    let producer = driven.host_producer(0)?;
    // Larger than a write that the initiator copies itself on paths where the owner copies large
    // ones.
    let len = 2 << 20;
    producer.put(PEER, to, from, len)?;
    let (tell, told) = channel();
    let waiter = std::thread::spawn({
        let producer = producer.clone();
        move || {
            let quiet = producer.quiet(PEER);
            // The receiver is gone if the scenario has already failed.
            let _ = tell.send(quiet);
        }
    });
    // On paths that do not need the target's processor, the bytes are already there.
    let alone = world.transport.writes_alone() || world.transport.is_device();
    let patience = match world.transport.writes_alone() {
        true => world.profile.slack,
        false => Duration::from_millis(100).min(world.profile.detect / 4),
    };
    let early = told.recv_timeout(patience);
    match early {
        Ok(quiet) => {
            ensure!(alone && quiet == Ok(()), "quiet returned before the bytes arrived: {quiet:?}")
        }
        Err(_) => ensure!(
            !world.transport.writes_alone(),
            "quiet waits for a stopped peer whose memory is mapped"
        ),
    }
    world.step("puts to another peer are not delayed");
    producer.put(5, there.base, from, 4096)?;
    producer.quiet(5)?;
    other.ask("check r 2 0 0 4096")?;
    pair.b.child()?.go_on()?;
    if early.is_err() {
        ensure!(told.recv_timeout(TIMEOUT)? == Ok(()), "quiet failed");
    }
    waiter.join().map_err(|_| anyhow::anyhow!("the waiter panicked"))?;
    pair.b.ask(&format!("check r 2 0 0 {len}")).context("after quiet")?;
    fine()
}

/// The remote process is killed while a kernel waits for it.
pub(crate) fn kill(world: &World) -> Result<Verdict> {
    let mut pair = world.pair()?;
    let driven = Driven::new(world, &mut pair, TIMEOUT)?;
    let healthy = Healthy::start(world, &pair.a)?;
    let _armed = driven.proxy.arm();
    let producer = driven.host_producer(2)?;
    producer.put(PEER, driven.to.base, driven.from.base, 4096)?;
    producer.quiet(PEER)?;
    let waiter = std::thread::spawn({
        let producer = producer.clone();
        move || {
            let waited = producer.wait_counter(1, 1, Some(PEER));
            (waited, Instant::now())
        }
    });
    std::thread::sleep(Duration::from_millis(50));
    let start = Instant::now();
    pair.b.child()?.kill()?;
    let (waited, when) = waiter.join().map_err(|_| anyhow::anyhow!("the waiter panicked"))?;
    ensure!(waited == Err(HostProducerError::Failed), "the wait for a killed peer: {waited:?}");
    let took = when.duration_since(start);
    ensure!(
        took < world.profile.detect + world.profile.slack,
        "the waiting kernel learned of the death after {took:?}"
    );
    world.step("commands to the dead peer fail at once; other peers are served");
    producer.put(PEER, driven.to.base, driven.from.base, 4096)?;
    ensure!(producer.quiet(PEER) == Err(HostProducerError::Failed), "quiet to a dead peer");
    let fault = driven.proxy.take_fault().context("no fault was raised")?;
    ensure!((fault.code, fault.peer) == (FaultCode::PeerGone, PEER), "{fault}");
    ensure!(
        producer.quiet(PEER) == Err(HostProducerError::Failed),
        "a dead peer fails in every fault epoch"
    );
    healthy.finish(world)?;
    world.step("a new peer takes the dead peer's number");
    let mut next = world.remote(&world.options())?;
    let peer = world.connect(&pair.a, &next)?;
    next.region("r", LEN, world.memory())?;
    let info = hex::decode(&next.ask("proxy x e r")?)?;
    let to = driven.proxy.add_peer(PEER, &peer, &info)?[0];
    memory::fill_all(&driven.ours, 5)?;
    producer.put_with_count(PEER, to.base, driven.from.base, 4096, 1)?;
    producer.quiet(PEER)?;
    ensure!(next.number("pcounter x 1 1 10000")? == 1, "no count");
    next.ask("check r 5 0 0 4096")?;
    let waited = producer.wait_counter_for(1, 1, Some(PEER), Duration::from_millis(50));
    ensure!(waited == Err(HostProducerError::TimedOut), "a wait on the new peer: {waited:?}");
    fine_with(format!("the kernel learned of the death within {} ms", took.as_millis()))
}

/// Invalid commands fail alone. The proxy counts and reports each of them.
pub(crate) fn bad_commands(world: &World) -> Result<Verdict> {
    let mut pair = world.pair_with(&world.calm())?;
    let driven = Driven::new(world, &mut pair, Duration::from_millis(300))?;
    let armed = driven.proxy.arm();
    memory::fill_all(&driven.ours, 1)?;
    pair.b.ask("fill r 9")?;
    let producer = driven.host_producer(1)?;
    let (from, to) = (driven.from.base, driven.to.base);
    let good = Command { op: Op::PutCount, peer: PEER, counter: 2, src: from, dst: to, len: 64 };
    let cases = [
        ("an unknown peer", Command { peer: 4, ..good }, FaultCode::Peer),
        ("a source outside the window", Command { src: from + LEN, ..good }, FaultCode::Source),
        (
            "a source that overruns the window",
            Command { src: from + LEN - 60, ..good },
            FaultCode::Source,
        ),
        (
            "a destination outside the window",
            Command { dst: to + LEN, ..good },
            FaultCode::Destination,
        ),
        (
            "a destination that overruns the window",
            Command { dst: to + LEN - 60, ..good },
            FaultCode::Destination,
        ),
        ("a counter out of range", Command { counter: 64, ..good }, FaultCode::Counter),
    ];
    for (what, command, code) in cases {
        world.step(what);
        let before = driven.proxy.stats().faults;
        let position = producer.push(command)?;
        let quiet = producer.quiet(command.peer);
        ensure!(quiet == Err(HostProducerError::Failed), "{what}: quiet said {quiet:?}");
        let fault = driven.proxy.take_fault().with_context(|| format!("{what}: no fault"))?;
        let named = (fault.code, fault.peer, fault.ring, fault.position);
        ensure!(named == (code, command.peer, 1, position), "{what}: {fault}");
        let after = driven.proxy.stats().faults;
        ensure!(after > before, "{what}: the fault was not counted");
    }
    world.step("an unknown operation");
    let [first, second] = good.encode()?;
    producer.push_words(&[[first | 0xf, second]])?;
    producer.quiet(PEER).context("an unknown operation must not fail a peer's quiet")?;
    let fault = driven.proxy.take_fault().context("no fault")?;
    ensure!(fault.code == FaultCode::Operation, "{fault}");
    world.step("values that a ring refuses");
    for (what, refused) in [
        ("a rank out of range", producer.put(8, to, from, 4)),
        ("an odd length", producer.put(PEER, to, from, 5)),
        ("too long", producer.put(PEER, to, from, 16 << 20)),
    ] {
        ensure!(refused.is_err(), "{what} was pushed");
    }
    world.step("no failed command had an effect, and valid commands work");
    pair.b.ask(&format!("check r 9 0 0 {LEN}"))?;
    ensure!(pair.b.number("pcounter x 2 0 0")? == 0, "a failed command raised its counter");
    producer.push(good)?;
    producer.quiet(PEER)?;
    ensure!(
        pair.b.number("pcounter x 2 1 10000")? == 1,
        "a valid command did not raise its counter"
    );
    pair.b.ask("check r 1 0 0 64")?;
    world.step("a full ring that no worker drains");
    drop(armed);
    // A worker that is still awake takes new commands; wait until it sleeps.
    std::thread::sleep(Duration::from_millis(100));
    let mut pushed = 0u32;
    let full = loop {
        match producer.put(PEER, to, from, 64) {
            Ok(()) => pushed += 1,
            Err(error) => break error,
        }
        ensure!(pushed < 10_000, "a ring of 64 slots accepted {pushed} commands");
    };
    ensure!(matches!(full, HostProducerError::Push(_)), "{full:?}");
    let _armed = driven.proxy.arm();
    producer.quiet(PEER).context("after the proxy was armed again")?;
    fine()
}
