//! A proxy thread: drains its rings, submits the commands and answers.
//!
//! Each ring belongs to one worker. While the proxy is armed, an idle worker polls, with growing
//! pauses. While the proxy is not armed and the worker has nothing in progress, the worker blocks
//! until the proxy is armed.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, RwLock, Weak};
use std::time::Duration;

use peerway_core::command::{Command, Op, peer_of};

use super::copiers::{Copiers, Set};
use super::counters::Counters;
use super::fault::{Fault, Faults};
use super::forward::{Forward, Forwarding};
use super::outgoing::{CommandOrigin, FaultSink, Locals, Outgoing};
use super::proxy_memory::ProxyMemory;
use super::ring::{CommandConsumer, RingWords};
use super::target::Targets;
use crate::clock;
use crate::progress::engine::Engine;
use crate::progress::shard::Shard;
use peerway_core::abi::FaultCode;

/// Commands taken from one ring before the worker turns to the next ring.
const BURST: usize = 256;
/// The first and the longest pause of an armed worker that finds nothing.
const SHORTEST_NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_millis(1);
/// Idle time after which the pauses grow.
const WATCHFUL: Duration = Duration::from_millis(5);
/// Idle turns between two reads of the clock. Reading it takes as long as half a turn.
const CLOCK_TURNS: u32 = 16;
/// Busy turns between two reads of the clock.
const BUSY_TURNS: u32 = 1024;
/// Interval between two checks of peers that the worker sends nothing to.
const ROUND: Duration = Duration::from_millis(1);

/// The state that the workers of a proxy share.
pub(crate) struct ProxyShared {
    pub(crate) endpoint: Weak<Engine>,
    pub(crate) memory: ProxyMemory,
    pub(crate) counters: Arc<Counters>,
    pub(crate) faults: Faults,
    pub(crate) locals: RwLock<Arc<Locals>>,
    pub(crate) targets: RwLock<Vec<Option<Targets>>>,
    pub(crate) forwards: RwLock<Vec<Arc<Forward>>>,
    /// New copiers with the number of their worker, until that worker takes them.
    pub(crate) copiers: Mutex<Vec<(usize, Set)>>,
    /// Rises when `locals`, `targets`, `forwards` or `copiers` change.
    pub(crate) generation: AtomicU64,
    /// The number of faults that the owner has taken with `Proxy::take_fault`.
    pub(crate) fault_epoch: AtomicU64,
    pub(crate) armed: AtomicUsize,
    pub(crate) stop: AtomicBool,
    pub(crate) sleepers: Mutex<()>,
    pub(crate) wake: Condvar,
    /// How long an idle worker polls without a pause.
    pub(crate) spin: Duration,
    pub(crate) stats: ProxyCounters,
}

/// Statistics of all workers together.
#[derive(Debug, Default)]
pub(crate) struct ProxyCounters {
    pub(crate) commands: AtomicU64,
    pub(crate) puts: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) counts: AtomicU64,
    pub(crate) requests: AtomicU64,
}

impl ProxyShared {
    fn fault_sink(&self) -> FaultSink<'_> {
        FaultSink { memory: &self.memory, faults: &self.faults, fault_epoch: &self.fault_epoch }
    }

    /// Wakes the workers that are blocked in `ProxyWorker::sleep`.
    pub(crate) fn rouse(&self) {
        // Taking the lock ensures that no worker is between its check and its wait.
        drop(self.sleepers.lock().unwrap());
        self.wake.notify_all();
    }
}

/// See the module.
pub(crate) struct ProxyWorker {
    shared: Arc<ProxyShared>,
    rings: Vec<(u32, CommandConsumer<RingWords>)>,
    /// Declared before `peers`, so it is dropped first. The drop waits for copies in progress.
    copiers: Copiers,
    peers: ProxyPeers,
    /// The forwarding rules of this worker.
    forwards: Vec<Forwarding>,
    /// Shards that this worker polls. `None` until lanes carry anything.
    shards: Option<Vec<Arc<Shard>>>,
    /// The number of this worker, and the number of workers.
    place: (usize, usize),
    last_round: u64,
}

/// The outgoing state of a worker, by peer number.
struct ProxyPeers {
    all: Vec<Option<Outgoing>>,
    /// Peers that are gone and whose numbers belong to other peers now, until their work is
    /// finished.
    leaving: Vec<Outgoing>,
    /// Numbers of the peers with work to do.
    busy: Vec<u16>,
    is_busy: Vec<bool>,
    generation: u64,
}

impl ProxyWorker {
    /// Creates the worker of every `step`th ring, starting at ring `first`.
    pub(crate) fn new(shared: Arc<ProxyShared>, first: usize, step: usize) -> Self {
        let shape = shared.memory.shape();
        let rings = (first..shape.rings).step_by(step).map(|ring| {
            (ring as u32, CommandConsumer::new(shared.memory.ring(ring), shape.log2_slots))
        });
        let peers = ProxyPeers {
            all: (0..shape.peers).map(|_| None).collect(),
            leaving: Vec::new(),
            busy: Vec::with_capacity(shape.peers),
            is_busy: vec![false; shape.peers],
            generation: 0,
        };
        let place = (first, step);
        let (rings, copiers) = (rings.collect(), Copiers::default());
        let forwards = Vec::new();
        Self { rings, copiers, peers, forwards, shards: None, place, last_round: 0, shared }
    }

    /// Runs until the proxy stops.
    pub(crate) fn run(mut self) {
        let shared = self.shared.clone();
        let (mut idle_since, mut nap, mut turns) = (None, SHORTEST_NAP, 0u32);
        let mut busy_turns = 0u32;
        self.sleep();
        while !shared.stop.load(Ordering::Acquire) {
            if self.turn() {
                (idle_since, nap, turns) = (None, SHORTEST_NAP, 0);
                busy_turns = busy_turns.wrapping_add(1);
                if busy_turns.is_multiple_of(BUSY_TURNS) {
                    self.look_after(clock::now());
                }
                continue;
            }
            turns += 1;
            if !turns.is_multiple_of(CLOCK_TURNS) {
                continue;
            }
            let now = clock::now();
            self.look_after(now);
            let since = *idle_since.get_or_insert(now);
            let idle = Duration::from_nanos(now.saturating_sub(since));
            if idle < shared.spin {
                continue;
            }
            // From here on every turn reads the clock: a sleep takes longer than reading it.
            turns = CLOCK_TURNS - 1;
            if self.is_busy() || shared.armed.load(Ordering::Acquire) > 0 {
                std::thread::sleep(nap);
                if idle > WATCHFUL {
                    nap = (nap * 2).min(LONGEST_NAP);
                }
            } else {
                self.sleep();
                idle_since = None;
            }
        }
    }

    /// Detects peers that are gone while the worker sends nothing to them, once per `ROUND`.
    fn look_after(&mut self, now: u64) {
        if now.saturating_sub(self.last_round) > ROUND.as_nanos() as u64 {
            self.last_round = now;
            self.peers.look_after(&self.copiers, self.shared.fault_sink());
        }
    }

    /// Whether work is in progress.
    fn is_busy(&self) -> bool {
        let peers = &self.peers;
        !peers.busy.is_empty()
            || !peers.leaving.is_empty()
            || self.forwards.iter().any(Forwarding::is_busy)
    }

    /// Blocks until the proxy is armed or stopped.
    fn sleep(&self) {
        let shared = &self.shared;
        let mut guard = shared.sleepers.lock().unwrap();
        while shared.armed.load(Ordering::Acquire) == 0 && !shared.stop.load(Ordering::Acquire) {
            guard = shared.wake.wait(guard).unwrap();
        }
    }

    /// Does one round and returns whether it made progress.
    pub(crate) fn turn(&mut self) -> bool {
        let shared = &self.shared;
        let sink = shared.fault_sink();
        if self.peers.refresh(shared, self.place.0, self.rings.len()) {
            renew_forwards(&mut self.forwards, shared, self.place);
            take_copiers(&mut self.copiers, shared, self.place.0);
        }
        let mut taken = 0;
        for (slot, (ring, consumer)) in self.rings.iter_mut().enumerate() {
            let ring = *ring;
            taken += consumer.drain(BURST, |position, words| {
                // The command may name a peer or window that was added after `refresh`. The next
                // round knows it.
                if self.peers.is_behind(shared) {
                    return ControlFlow::Break(());
                }
                self.peers.take(words, CommandOrigin { ring, slot, position }, sink)
            });
        }
        let mut moved = taken > 0;
        if moved {
            shared.stats.commands.fetch_add(taken as u64, Ordering::Relaxed);
        }
        // While the proxy is unarmed and idle, the endpoint's progress threads poll the lanes.
        let wanted = || shared.armed.load(Ordering::Relaxed) > 0 || !self.peers.busy.is_empty();
        if shared.counters.is_by_lanes() && wanted() {
            moved |= look_at_lanes(&mut self.shards, shared, self.place.0);
        }
        self.copiers.poll();
        moved |= self.peers.work(&mut self.copiers, sink, &shared.stats);
        // A rule that was removed while it copies leaves when its copies are finished.
        self.forwards.retain(|forwarding| !forwarding.is_over());
        for forwarding in &mut self.forwards {
            let target = |number: u16| {
                let outgoing = self.peers.all.get(usize::from(number))?.as_ref()?;
                Some(outgoing.target.clone())
            };
            match forwarding.step(shared, &mut self.copiers, target) {
                Ok(stepped) => moved |= stepped,
                Err((peer, code)) => {
                    let from = CommandOrigin { ring: u32::MAX, slot: 0, position: 0 };
                    let address = peer.and_then(|peer| self.peers.address(peer));
                    let peer = (peer.unwrap_or_default(), address);
                    refuse(sink, code, peer, Op::Nop as u8, from);
                }
            }
        }
        moved
    }
}

impl ProxyPeers {
    /// Picks up peers and windows that were added, and returns whether anything changed.
    #[inline]
    fn refresh(&mut self, shared: &ProxyShared, worker: usize, rings: usize) -> bool {
        let generation = shared.generation.load(Ordering::Acquire);
        let changed = generation != self.generation;
        if changed {
            self.generation = generation;
            self.renew(shared, worker, rings);
        }
        changed
    }

    /// Whether peers or windows were added since `refresh`. A worker that sees a command also sees
    /// every addition that came before the command.
    #[inline]
    fn is_behind(&self, shared: &ProxyShared) -> bool {
        shared.generation.load(Ordering::Acquire) != self.generation
    }

    #[cold]
    fn renew(&mut self, shared: &ProxyShared, worker: usize, rings: usize) {
        let locals = shared.locals.read().unwrap().clone();
        let targets = shared.targets.read().unwrap();
        for (number, (ours, targets)) in self.all.iter_mut().zip(targets.iter()).enumerate() {
            let Some(target) = targets.as_ref().map(|targets| targets.of(worker)) else { continue };
            match ours {
                Some(outgoing) if Arc::ptr_eq(&outgoing.target, target) => {
                    outgoing.set_locals(locals.clone());
                }
                // A new peer took the number of a peer that is gone.
                _ => {
                    let (target, locals) = (target.clone(), locals.clone());
                    let new = Outgoing::new(number as u16, target, locals, rings);
                    if let Some(mut old) = ours.replace(new) {
                        old.replace(shared.fault_sink());
                        self.leaving.push(old);
                    }
                }
            }
        }
    }

    /// The address of a numbered peer.
    #[cold]
    fn address(&self, number: u16) -> Option<SocketAddr> {
        let outgoing = self.all.get(usize::from(number))?.as_ref()?;
        Some(outgoing.target.session().addr)
    }

    /// Accepts a command from a ring, or leaves it there.
    #[inline]
    fn take(
        &mut self,
        words: [u64; 2],
        from: CommandOrigin,
        sink: FaultSink<'_>,
    ) -> ControlFlow<()> {
        let command = match Command::decode(words) {
            Ok(command) if command.op == Op::Nop => return ControlFlow::Continue(()),
            Ok(command) => command,
            Err(unknown) => {
                let peer = peer_of(words[0]);
                let peer = (peer, self.address(peer));
                refuse(sink, FaultCode::Operation, peer, unknown.0, from);
                return ControlFlow::Continue(());
            }
        };
        let number = usize::from(command.peer);
        let Some(Some(outgoing)) = self.all.get_mut(number) else {
            refuse(sink, FaultCode::Peer, (command.peer, None), command.op as u8, from);
            if command.op == Op::Quiet && number < self.all.len() {
                sink.memory.answer(from.ring as usize, number, (from.position + 1) << 1 | 1);
            }
            return ControlFlow::Continue(());
        };
        let taken = outgoing.take(command, from, sink);
        if !self.is_busy[number] && !outgoing.is_idle() {
            self.is_busy[number] = true;
            self.busy.push(command.peer);
        }
        taken
    }

    /// Submits commands and answers `quiet`s for every peer with work to do.
    #[inline]
    fn work(&mut self, copiers: &mut Copiers, sink: FaultSink<'_>, stats: &ProxyCounters) -> bool {
        let mut moved = false;
        let Self { all, busy, is_busy, leaving, .. } = self;
        leaving.retain_mut(|outgoing| {
            outgoing.poll(copiers, sink);
            !outgoing.is_idle()
        });
        busy.retain(|number| {
            let Some(outgoing) = &mut all[usize::from(*number)] else { return false };
            moved |= outgoing.submit(copiers, sink);
            moved |= outgoing.poll(copiers, sink);
            stats.add(std::mem::take(&mut outgoing.counts));
            let busy = !outgoing.is_idle();
            is_busy[usize::from(*number)] = busy;
            busy
        });
        moved
    }

    /// Detects peers that are gone while the worker sends nothing to them. Kernels may wait for
    /// their counts.
    fn look_after(&mut self, copiers: &Copiers, sink: FaultSink<'_>) {
        for outgoing in self.all.iter_mut().flatten() {
            outgoing.poll(copiers, sink);
        }
    }
}

/// Polls lanes for arrivals that kernels wait for. Waking a blocked progress thread would take
/// longer.
fn look_at_lanes(
    shards: &mut Option<Vec<Arc<Shard>>>,
    shared: &ProxyShared,
    worker: usize,
) -> bool {
    let shards = shards.get_or_insert_with(|| {
        let endpoint = shared.endpoint.upgrade();
        endpoint.map(|endpoint| endpoint.shards.of_worker(worker)).unwrap_or_default()
    });
    let now = clock::now();
    shards.iter().fold(false, |moved, shard| shard.poller.poll_once(now) | moved)
}

/// Picks up new rules. A rule belongs to the worker whose number is its counter modulo `step`.
#[cold]
fn renew_forwards(ours: &mut Vec<Forwarding>, shared: &ProxyShared, (first, step): (usize, usize)) {
    let rules = shared.forwards.read().unwrap();
    let share = rules.iter().filter(|rule| usize::from(rule.counter) % step == first);
    for rule in share {
        if !ours.iter().any(|ours| ours.is_for(rule)) {
            ours.push(Forwarding::new(rule.clone()));
        }
    }
}

#[cold]
fn take_copiers(ours: &mut Copiers, shared: &ProxyShared, worker: usize) {
    let mut made = shared.copiers.lock().unwrap();
    for (_, set) in made.extract_if(.., |(number, _)| *number == worker) {
        ours.add(set);
    }
}

/// Reports a command that no peer's queue can take. `peer` is the peer's number and address.
#[cold]
fn refuse(
    sink: FaultSink<'_>,
    code: FaultCode,
    (peer, address): (u16, Option<SocketAddr>),
    op: u8,
    from: CommandOrigin,
) {
    let CommandOrigin { ring, position, .. } = from;
    sink.faults.raise(sink.memory, Fault { code, peer, address, ring, op, position });
}

impl ProxyCounters {
    fn add(&self, tally: super::outgoing::Tally) {
        if tally.puts + tally.counts == 0 {
            return;
        }
        self.puts.fetch_add(tally.puts, Ordering::Relaxed);
        self.bytes.fetch_add(tally.bytes, Ordering::Relaxed);
        self.counts.fetch_add(tally.counts, Ordering::Relaxed);
        self.requests.fetch_add(tally.requests, Ordering::Relaxed);
    }
}
