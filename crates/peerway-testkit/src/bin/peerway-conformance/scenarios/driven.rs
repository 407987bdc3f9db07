//! The GPU-driven engine with processors in the kernels' place: commands from rings, counters, quiet, faults.

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
/// Kernels wait for this long at most.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A proxy of ours whose peer 3 is the pair's other side, with one window on each.
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
    world.step("many puts of many sizes through small rings, with counts: each after its bytes");
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
            "a signal is lost"
        );
        pair.b.ask(&format!("check r {round} 0 0 {LEN}")).context("after quiet")?;
        let before: u64 = pair.b.number("pcounter x 9 0 0")?;
        ensure!(before == 0, "a counter rose that nobody named");
        let seen = pair.b.number("pcounter x 7 0 0")?;
        ensure!(seen >= counted, "{seen} counts of {counted} in this round alone");
    }
    world.step("the last of a batch counted: its bytes are there when the count is");
    let base = pair.b.number("pcounter x 11 0 0")?;
    for round in 1..=50u64 {
        memory::fill_all(&driven.ours, 100 + round)?;
        driven.host_producer(0)?.put_with_count(PEER, to, from, 64 << 10, 11)?;
        ensure!(pair.b.number(&format!("pcounter x 11 {} 10000", base + round))? == base + round);
        pair.b.ask(&format!("check r {} 0 0 {}", 100 + round, 64 << 10))?;
    }
    let stats = driven.proxy.stats();
    ensure!(stats.faults == 0, "{:?}", driven.proxy.take_fault());
    fine_with(format!("{} puts in {} flights", stats.puts, stats.requests))
}

/// Quiet waits for a target that stands, and not for another peer's.
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
    // More than the writer puts there by itself where it is the owner that copies what is large.
    let len = 2 << 20;
    producer.put(PEER, to, from, len)?;
    let (tell, told) = channel();
    let waiter = std::thread::spawn({
        let producer = producer.clone();
        move || {
            let quiet = producer.quiet(PEER);
            // Nobody listens any more where the scenario has failed.
            let _ = tell.send(quiet);
        }
    });
    // Where no processor of the target's is needed, the bytes are there already.
    let alone = world.transport.writes_alone() || world.transport.is_device();
    let patience = match world.transport.writes_alone() {
        true => world.profile.slack,
        false => Duration::from_millis(100).min(world.profile.detect / 4),
    };
    let early = told.recv_timeout(patience);
    match early {
        Ok(quiet) => {
            ensure!(alone && quiet == Ok(()), "quiet before the bytes were there: {quiet:?}")
        }
        Err(_) => ensure!(!world.transport.writes_alone(), "quiet waits for a mapped peer"),
    }
    world.step("another peer is not held up");
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

/// The far process is killed while a kernel waits for it.
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
    ensure!(took < world.profile.detect + world.profile.slack, "told after {took:?}");
    world.step("its commands fail at once, others go on");
    producer.put(PEER, driven.to.base, driven.from.base, 4096)?;
    ensure!(producer.quiet(PEER) == Err(HostProducerError::Failed), "quiet to a dead peer");
    let fault = driven.proxy.take_fault().context("no fault was raised")?;
    ensure!((fault.code, fault.peer) == (FaultCode::PeerGone, PEER), "{fault}");
    ensure!(
        producer.quiet(PEER) == Err(HostProducerError::Failed),
        "a dead peer fails in every fault epoch"
    );
    healthy.finish(world)?;
    world.step("another takes its number");
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
    ensure!(waited == Err(HostProducerError::TimedOut), "a wait for the new one: {waited:?}");
    fine_with(format!("told within {} ms", took.as_millis()))
}

/// Commands that make no sense fail alone, are counted and named.
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
        ("a peer that is not there", Command { peer: 4, ..good }, FaultCode::Peer),
        ("a source that is not ours", Command { src: from + LEN, ..good }, FaultCode::Source),
        ("a source that runs over", Command { src: from + LEN - 60, ..good }, FaultCode::Source),
        ("a destination outside", Command { dst: to + LEN, ..good }, FaultCode::Destination),
        ("a destination over", Command { dst: to + LEN - 60, ..good }, FaultCode::Destination),
        ("a counter too many", Command { counter: 64, ..good }, FaultCode::Counter),
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
        ensure!(after > before, "{what}: it was not counted");
    }
    world.step("an operation that there is not");
    let [first, second] = good.encode()?;
    producer.push_words(&[[first | 0xf, second]])?;
    producer.quiet(PEER).context("a command of no operation is nobody's")?;
    let fault = driven.proxy.take_fault().context("no fault")?;
    ensure!(fault.code == FaultCode::Operation, "{fault}");
    world.step("numbers that a ring does not take");
    for (what, refused) in [
        ("a rank out of range", producer.put(8, to, from, 4)),
        ("an odd length", producer.put(PEER, to, from, 5)),
        ("too long", producer.put(PEER, to, from, 16 << 20)),
    ] {
        ensure!(refused.is_err(), "{what} was pushed");
    }
    world.step("nothing of it was done, and the rest works");
    pair.b.ask(&format!("check r 9 0 0 {LEN}"))?;
    ensure!(pair.b.number("pcounter x 2 0 0")? == 0, "a failed command counted");
    producer.push(good)?;
    producer.quiet(PEER)?;
    ensure!(pair.b.number("pcounter x 2 1 10000")? == 1, "a good command did not count");
    pair.b.ask("check r 1 0 0 64")?;
    world.step("a full ring, with nobody to drain it");
    drop(armed);
    // A worker that is awake takes what comes; soon it sleeps.
    std::thread::sleep(Duration::from_millis(100));
    let mut pushed = 0u32;
    let full = loop {
        match producer.put(PEER, to, from, 64) {
            Ok(()) => pushed += 1,
            Err(error) => break error,
        }
        ensure!(pushed < 10_000, "a ring of 64 took {pushed}");
    };
    ensure!(matches!(full, HostProducerError::Push(_)), "{full:?}");
    let _armed = driven.proxy.arm();
    producer.quiet(PEER).context("after it was armed again")?;
    fine()
}
