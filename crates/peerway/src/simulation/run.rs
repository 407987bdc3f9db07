//! One run of a plan: the steps, and the checks of the promises.

use std::ops::AddAssign;
use std::time::Duration;

use super::node::{DETECT, Node, needed};
use super::plan::{BREAK, CANCEL, DISCONNECT, LIE, PAUSE, Plan, REVOKE, Random};
use super::wire::SimulatedLane;
use crate::batch::Batch;
use crate::clock;
use crate::identity::lanes::LaneAttempt;
use crate::{Access, Direction, Ended, Fence, Reason, Region, Transfer};

/// Transfers of a run at most. Each has a place of its own in the memories of both nodes.
const TRANSFERS: usize = 20;
/// Bytes of a place.
const PLACE: usize = 512;
/// Bytes of a node's memory that it grants to the other. Behind it lies as much that it does not.
const GRANTED: usize = TRANSFERS * PLACE;
const MS: u64 = 1_000_000;
/// What memory holds before anything is written to it.
const UNTOUCHED: u8 = 0xEE;

/// What became of the transfers of a run, or of many.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Tally {
    pub(super) done: u64,
    /// Ended without success and with a held fence.
    pub(super) held: u64,
    pub(super) open: u64,
    pub(super) lanes_lost: u64,
    /// Lanes that came back, on the side that opened the session.
    pub(super) lanes_reopened: u64,
    pub(super) revoked: u64,
    /// Stops that were longer than the lease.
    pub(super) lease_over: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, more: Self) {
        self.done += more.done;
        self.held += more.held;
        self.open += more.open;
        self.lanes_lost += more.lanes_lost;
        self.lanes_reopened += more.lanes_reopened;
        self.revoked += more.revoked;
        self.lease_over += more.lease_over;
    }
}

/// Runs a plan; the broken promise where there is one. `traced` adds the last steps to it, and
/// checks memory after every step instead of once at the end.
pub(super) fn run(plan: Plan, traced: bool) -> Result<Tally, String> {
    let _clock = clock::simulate(1_000_000_000);
    let mut world = World::new(plan, traced);
    let result = world.run();
    world.nodes.iter().for_each(Node::stop);
    result.map_err(|why| format!("plan {plan}: {why}\n{}", world.trace.join("\n")))?;
    Ok(world.tally)
}

/// The memory of a node: what it grants to the other node, and what only its own transfers use.
struct Memory {
    granted: Box<[u8]>,
    own: Box<[u8]>,
    region: Region,
    own_region: Region,
    /// Given to the other node; a revoke makes a new one.
    descriptor: [u8; crate::DESCRIPTOR_LEN],
}

/// A transfer and what is known of it.
struct Sent {
    node: usize,
    direction: Direction,
    len: usize,
    pattern: u8,
    transfer: Transfer,
    count: bool,
    notify: bool,
    notified: u32,
    /// It asks for more than it was granted, and must fail.
    lies: bool,
    ended: Option<Ended>,
    /// Its memory must not change any more, and holds this byte.
    frozen: Option<u8>,
}

struct World {
    plan: Plan,
    random: Random,
    lanes: Vec<SimulatedLane>,
    /// Attempts to replace lost lanes, with the connection once the peer has let it join.
    attempts: Vec<(LaneAttempt, Option<SimulatedLane>)>,
    nodes: [Node; 2],
    memories: [Memory; 2],
    sent: Vec<Sent>,
    /// Since when and until when a node is stopped.
    stopped: [Option<(u64, u64)>; 2],
    piece: u64,
    tally: Tally,
    traced: bool,
    trace: Vec<String>,
}

impl World {
    fn new(plan: Plan, traced: bool) -> Self {
        let mut random = Random::new(plan.seed);
        let (room, most) = (64 + random.below(2000) as usize, 1 + random.below(600) as usize);
        let lane = |at| SimulatedLane::new(room, most, if at % 2 == 1 { 300 } else { 0 });
        let lanes: Vec<_> = (0..plan.lanes).map(lane).collect();
        let nodes = Node::pair(&lanes, 1 + random.below(8) as u32);
        let memories = [0, 1].map(|at| Memory::new(&nodes[at]));
        let piece = 16 + random.below(200);
        let (sent, stopped, tally, trace) = (Vec::new(), [None; 2], Tally::default(), Vec::new());
        let attempts = Vec::new();
        Self {
            plan,
            random,
            lanes,
            attempts,
            nodes,
            memories,
            sent,
            stopped,
            piece,
            tally,
            traced,
            trace,
        }
    }

    fn run(&mut self) -> Result<(), String> {
        for at in 0..self.plan.steps {
            self.step(at)?;
        }
        self.drain()?;
        self.tally.lanes_reopened = self.nodes[0].lanes_reopened();
        self.check_memory()?;
        self.check_signals()
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        if self.traced {
            let now = clock::now() / MS;
            self.trace.push(format!("{now:>6} ms  {}", text()));
            if self.trace.len() > 60 {
                self.trace.remove(0);
            }
        }
    }

    fn step(&mut self, at: u32) -> Result<(), String> {
        let faults = self.plan.faults;
        let chosen = self.random.below(1000);
        match chosen {
            0..360 => self.deliver(),
            360..400 => self.reconnect(),
            400..700 => {
                let node = self.random.below(2) as usize;
                self.note(|| format!("node {node} polls"));
                self.poll(node)?;
            }
            700..800 => self.pass(50),
            800..810 => self.pass(1500),
            810..900 => self.post(false),
            900..910 if faults & LIE != 0 => self.post(true),
            910..930 if faults & BREAK != 0 => self.break_lane(),
            930..950 if faults & PAUSE != 0 => self.pause(),
            950..980 if faults & CANCEL != 0 => self.cancel()?,
            980..990 if faults & REVOKE != 0 => self.revoke(),
            990..992 if faults & DISCONNECT != 0 && at > 50 => {
                let node = self.random.below(2) as usize;
                self.note(|| format!("node {node} closes the session"));
                self.nodes[node].disconnect();
            }
            _ => {}
        }
        if self.traced {
            self.check_memory()?;
        }
        Ok(())
    }

    fn deliver(&mut self) {
        let lane = self.random.below(self.lanes.len() as u64) as usize;
        let way = self.random.below(2) as usize;
        let most =
            if self.random.chance(30) { usize::MAX } else { self.random.below(300) as usize };
        let mut pipe = self.lanes[lane].pipes[way].lock().unwrap();
        let before = pipe.in_flight();
        pipe.deliver(most);
        let arrived = before - pipe.in_flight();
        drop(pipe);
        if arrived > 0 {
            self.note(|| format!("{arrived} bytes arrive at node {} on lane {lane}", 1 - way));
        }
    }

    fn pass(&mut self, most_ms: u64) {
        let time = self.random.below(most_ms * MS);
        clock::advance(Duration::from_nanos(time));
        self.note(|| format!("{} ms pass", time / MS));
    }

    /// A node's driver takes a turn, unless the node is stopped.
    fn poll(&mut self, node: usize) -> Result<(), String> {
        if let Some((since, until)) = self.stopped[node] {
            if clock::now() < until {
                return Ok(());
            }
            self.stopped[node] = None;
            return self.poll_after_stop(node, clock::now() - since);
        }
        self.nodes[node].poll();
        self.look(node)
    }

    /// The first turn of a node that was stopped.
    fn poll_after_stop(&mut self, node: usize, time: u64) -> Result<(), String> {
        self.note(|| format!("node {node} goes on after {} ms", time / MS));
        // See `peerway_core::lease`: three quarters of the detection time.
        let is_over = u128::from(time) > DETECT.as_nanos() * 3 / 4;
        let before = is_over.then(|| self.memories[node].granted.to_vec());
        self.nodes[node].poll();
        if let Some(before) = before {
            self.tally.lease_over += 1;
            if self.memories[node].granted[..] != before[..] {
                return Err(format!("promise 2: node {node} applied bytes after its lease"));
            }
        }
        self.look(node)
    }

    /// Looks for what a node's turn has ended and received.
    fn look(&mut self, node: usize) -> Result<(), String> {
        while let Some(message) = self.nodes[node].inner.inbox.take(None) {
            let at = usize::from(message.message[0]);
            self.sent[at].notified += 1;
            self.check_arrival(at, "notification")?;
        }
        for at in 0..self.sent.len() {
            let sent = &self.sent[at];
            if sent.node != node && sent.count && self.counter(at) > 0 {
                self.check_arrival(at, "count")?;
            }
            if self.sent[at].node == node {
                self.look_for_end(at)?;
            }
        }
        Ok(())
    }

    fn counter(&self, at: usize) -> u64 {
        self.nodes[1 - self.sent[at].node].inner.inbox.counter(at as u32)
    }

    /// A signal has come: the bytes of a write are there, if nothing is known to have ended it.
    fn check_arrival(&self, at: usize, what: &str) -> Result<(), String> {
        let sent = &self.sent[at];
        let is_open = sent.ended.is_none() && sent.frozen.is_none();
        if is_open && sent.direction == Direction::Write && !self.has_bytes(at) {
            return Err(format!("promise 3: the {what} of transfer {at} came before its bytes"));
        }
        Ok(())
    }

    /// Whether all bytes of a transfer are in place.
    fn has_bytes(&self, at: usize) -> bool {
        let sent = &self.sent[at];
        self.target(at)[..sent.len].iter().all(|byte| *byte == sent.pattern)
    }

    /// The place that a transfer writes.
    fn target(&self, at: usize) -> &[u8] {
        let sent = &self.sent[at];
        let place = at * PLACE..(at + 1) * PLACE;
        match sent.direction {
            Direction::Write => &self.memories[1 - sent.node].granted[place],
            Direction::Read => &self.memories[sent.node].own[place],
        }
    }

    fn look_for_end(&mut self, at: usize) -> Result<(), String> {
        let is_settled = |sent: &Sent| sent.ended.is_some() && sent.frozen.is_some();
        let Some(ended) = self.sent[at].transfer.ended().filter(|_| !is_settled(&self.sent[at]))
        else {
            return Ok(());
        };
        let is_new = self.sent[at].ended.replace(ended).is_none();
        if is_new {
            self.note(|| format!("transfer {at} ends: {ended:?}"));
            match (ended.reason, ended.fence) {
                (Reason::Done, _) => self.tally.done += 1,
                (_, Fence::Held) => self.tally.held += 1,
                (_, Fence::Open) => self.tally.open += 1,
            }
        }
        let sent = &self.sent[at];
        // Memory that was revoked meanwhile holds something else.
        if ended.reason == Reason::Done && sent.frozen.is_none() {
            if sent.lies {
                return Err(format!("promise 4: transfer {at} reached what was not granted"));
            }
            if !self.has_bytes(at) {
                return Err(format!("promise 3: transfer {at} is done without its bytes"));
            }
            if sent.count && self.counter(at) != 1 {
                return Err(format!(
                    "promise 3: transfer {at} is done, counted {} times",
                    self.counter(at)
                ));
            }
        }
        if ended.fence == Fence::Held && sent.frozen.is_none() {
            self.freeze(at);
        }
        Ok(())
    }

    /// The memory of a transfer belongs to its owner again, who writes something else there.
    fn freeze(&mut self, at: usize) {
        let sent = &mut self.sent[at];
        let byte = 0x80 | sent.pattern;
        sent.frozen = Some(byte);
        let place = at * PLACE..(at + 1) * PLACE;
        match sent.direction {
            Direction::Write => self.memories[1 - sent.node].granted[place].fill(byte),
            Direction::Read => self.memories[sent.node].own[place].fill(byte),
        }
    }

    fn post(&mut self, lies: bool) {
        let at = self.sent.len();
        let node = self.random.below(2) as usize;
        let is_stopped = self.stopped[node].is_some();
        if at == TRANSFERS || is_stopped || !self.nodes[node].is_connected() {
            return;
        }
        let direction = if self.random.chance(60) { Direction::Write } else { Direction::Read };
        let len = 1 + self.random.below(PLACE as u64) as usize;
        let pattern = 1 + (at as u8);
        let (place, offset) = (at * PLACE..(at + 1) * PLACE, (at * PLACE) as u64);
        let (source, target) = match direction {
            Direction::Write => {
                let [first, second] = &mut self.memories;
                let (ours, theirs) = if node == 0 { (first, second) } else { (second, first) };
                (&mut ours.own[place.clone()], &mut theirs.granted[place])
            }
            Direction::Read => {
                let [first, second] = &mut self.memories;
                let (ours, theirs) = if node == 0 { (first, second) } else { (second, first) };
                (&mut theirs.granted[place.clone()], &mut ours.own[place])
            }
        };
        source.fill(pattern);
        target.fill(UNTOUCHED);
        let theirs = &self.memories[1 - node];
        let whole = 2 * GRANTED as u64;
        let remote = self.nodes[node].import(&theirs.descriptor, needed(direction), whole);
        let from = if lies { offset + GRANTED as u64 } else { offset };
        let remote = remote.slice(from..from + len as u64);
        let local = self.memories[node].own_region.slice(offset..offset + len as u64);
        let batch = match direction {
            Direction::Write => Batch::write(&local, &remote),
            Direction::Read => Batch::read(&local, &remote),
        };
        let mut batch = batch.unwrap();
        let (count, notify) = (self.random.chance(40), self.random.chance(30));
        if count {
            batch = batch.count(at as u32);
        }
        if notify {
            batch = batch.notify(&[at as u8]).unwrap();
        }
        let deadline = clock::now() + (200 + self.random.below(6000)) * MS;
        let bulk = self.random.chance(50);
        let posted = self.nodes[node].post(batch, self.piece, bulk, deadline);
        let Some(transfer) = posted else { return };
        self.note(|| {
            let lie = if lies { ", beyond the grant" } else { "" };
            format!(
                "node {node} posts transfer {at}: {direction:?} of {len} bytes{lie}, \
                     count {count}, notify {notify}"
            )
        });
        self.sent.push(Sent {
            node,
            direction,
            len,
            pattern,
            transfer,
            count,
            notify,
            notified: 0,
            lies,
            ended: None,
            frozen: None,
        });
    }

    fn break_lane(&mut self) {
        let lane = self.random.below(self.lanes.len() as u64) as usize;
        let node = self.random.below(2) as usize;
        let more = self.random.below(400) as usize;
        self.note(|| format!("lane {lane} breaks at node {node}"));
        self.lanes[lane].break_at(node, more);
        self.tally.lanes_lost += 1;
    }

    /// An attempt to replace a lost lane goes on: it fails, the acceptor lets it join, or the
    /// opener learns that.
    fn reconnect(&mut self) {
        self.attempts.extend(self.nodes[0].take_attempts().into_iter().map(|it| (it, None)));
        if self.attempts.is_empty() {
            return;
        }
        let at = self.random.below(self.attempts.len() as u64) as usize;
        let (attempt, joined) = self.attempts[at].clone();
        let fails = self.random.chance(20);
        let LaneAttempt { lane, generation } = attempt;
        if joined.is_none() && !fails && self.stopped[1].is_none() {
            let new = self.lanes[usize::from(lane)].renewed();
            if self.nodes[1].join(attempt, &new) {
                self.note(|| format!("lane {lane} joins again, generation {generation}"));
                self.lanes[usize::from(lane)] = new.clone();
                self.attempts[at].1 = Some(new);
                return;
            }
        }
        // A stopped node has its threads stopped too.
        if self.stopped[0].is_some() {
            return;
        }
        let opened = joined.filter(|_| !fails);
        self.note(|| match opened {
            Some(_) => format!("lane {lane} is back, generation {generation}"),
            None => format!("lane {lane} is not replaced, generation {generation}"),
        });
        self.nodes[0].end_attempt(attempt, opened.as_ref());
        if opened.is_none()
            && let Some(lane) = &self.attempts[at].1
        {
            lane.break_at(0, 0);
        }
        self.attempts.swap_remove(at);
    }

    fn pause(&mut self) {
        let node = self.random.below(2) as usize;
        let time = self.random.below(3000) * MS;
        let now = clock::now();
        if self.stopped[node].is_none() {
            self.note(|| format!("node {node} stops for {} ms", time / MS));
            self.stopped[node] = Some((now, now + time));
        }
    }

    fn cancel(&mut self) -> Result<(), String> {
        if self.sent.is_empty() {
            return Ok(());
        }
        let at = self.random.below(self.sent.len() as u64) as usize;
        if self.stopped[self.sent[at].node].is_some() {
            return Ok(());
        }
        self.note(|| format!("transfer {at} is cancelled"));
        self.sent[at].transfer.cancel();
        self.look_for_end(at)
    }

    /// A node takes its memory back and grants it anew.
    fn revoke(&mut self) {
        let node = self.random.below(2) as usize;
        if self.stopped[node].is_some() {
            return;
        }
        let fence = self.memories[node].region.revoke();
        self.note(|| format!("node {node} revokes its memory: {fence:?}"));
        self.tally.revoked += 1;
        if fence == Fence::Held {
            for at in 0..self.sent.len() {
                let sent = &self.sent[at];
                let is_into = sent.node != node && sent.direction == Direction::Write;
                if is_into && sent.frozen.is_none() {
                    self.freeze(at);
                }
            }
        }
        self.memories[node].advertise();
    }

    /// Lets everything arrive and go on until every transfer has ended.
    fn drain(&mut self) -> Result<(), String> {
        let began = clock::now();
        loop {
            for lane in &self.lanes {
                lane.pipes.iter().for_each(|pipe| pipe.lock().unwrap().deliver(usize::MAX));
            }
            for node in [0, 1, 0, 1] {
                self.poll(node)?;
            }
            self.reconnect();
            let open = self.sent.iter().position(|sent| sent.ended.is_none());
            let took = clock::now() - began;
            match open {
                None if took > 500 * MS => return Ok(()),
                // The longest deadline is 6.2 s; a stop takes 3, silence 2 and a fence 1.
                Some(at) if took > 20_000 * MS => {
                    return Err(format!("promise 1: transfer {at} has not ended"));
                }
                _ => clock::advance(Duration::from_millis(25)),
            }
        }
    }

    fn check_memory(&self) -> Result<(), String> {
        for (node, memory) in self.memories.iter().enumerate() {
            if memory.granted[GRANTED..].iter().any(|byte| *byte != UNTOUCHED) {
                return Err(format!("promise 4: memory of node {node} outside its grant changed"));
            }
        }
        for at in 0..self.sent.len() {
            let Some(byte) = self.sent[at].frozen else { continue };
            if self.target(at).iter().any(|found| *found != byte) {
                let ended = self.sent[at].ended;
                return Err(format!("promise 2: memory of transfer {at} changed after {ended:?}"));
            }
        }
        Ok(())
    }

    fn check_signals(&self) -> Result<(), String> {
        for (at, sent) in self.sent.iter().enumerate() {
            let is_done = sent.ended.is_some_and(|ended| ended.reason == Reason::Done);
            let least = u64::from(is_done);
            let counted = if sent.count { self.counter(at) } else { least };
            let notified = if sent.notify { u64::from(sent.notified) } else { least };
            if counted < least || notified < least || counted > 1 || notified > 1 {
                return Err(format!(
                    "promise 3: transfer {at} ({:?}) was counted {counted} times and notified \
                     {notified} times",
                    sent.ended
                ));
            }
        }
        Ok(())
    }
}

impl Memory {
    fn new(node: &Node) -> Self {
        let mut granted = vec![UNTOUCHED; 2 * GRANTED].into_boxed_slice();
        let mut own = vec![UNTOUCHED; GRANTED].into_boxed_slice();
        let (region, own_region) = (node.register(&mut granted), node.register(&mut own));
        let mut memory =
            Self { granted, own, region, own_region, descriptor: [0; crate::DESCRIPTOR_LEN] };
        memory.advertise();
        memory
    }

    fn advertise(&mut self) {
        let range = 0..GRANTED as u64;
        self.descriptor = self.region.advertise_range(range, Access::READ_WRITE, None).unwrap();
    }
}
