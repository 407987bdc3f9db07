//! A fuzz target for the state machine: a real driver, and a peer whose every move comes from an
//! input of bytes, with TLS left out.
//!
//! The input is decoded into operations: a frame of some kind with right or wrong fields, raw
//! bytes, half a frame, the end of a lane, time, and what the local program does (post, cancel,
//! revoke, close). So most inputs get past the header. Every input is checked for these properties:
//!
//! 1. Nothing panics, and every local transfer ends.
//! 2. Only bytes that a valid frame names change, and none in a region after its revoke, in the
//!    memory of an ended read, or after the lease.
//! 3. Every message and every count is seen at most once for a frame that was sent in order, and no
//!    count without a right.
//! 4. The driver sends no byte of memory that is not granted, and no frame that breaks the
//!    protocol.
//! 5. What the driver holds is bounded, refusals are no more than frames, and everything is
//!    released in the end.

mod heard;
mod input;
mod ops;
mod stream;

use std::collections::HashMap;
use std::ops::AddAssign;
use std::time::Duration;

use peerway_core::config::Config;
use peerway_core::descriptor::Descriptor;
use peerway_core::ids::{Incarnation, SlotId};
use peerway_core::wire::{Control, Kind};

use self::heard::Heard;
use self::input::Input;
use self::stream::{Sent, Stream};
use super::node::{DETECT, HOSTILE, Node};
use super::wire::SimulatedLane;
use crate::batch::Batch;
use crate::clock;
use crate::{Access, Direction, Ended, Fence, Region, Transfer};

/// What memory holds that no peer may read.
const SECRET: u8 = 0x5C;
/// What granted memory holds at first.
const GRANTED: u8 = 0x21;
/// What memory holds that must not change any more.
const FROZEN: u8 = 0x77;
/// Bytes of a transfer's place.
const PLACE: usize = 256;
/// Bytes that are compared at once.
const LINE: usize = 64;
/// Transfers of an input at most.
const TRANSFERS: usize = 8;
/// The lanes of a session at most.
const LANES: usize = 4;
const MS: u64 = 1_000_000;
/// The most bytes of small frames on a lane: what a peer may leave unread (`MAX_OWED` in
/// `progress/transmit.rs`), the answers of one turn, and the driver's own small frames.
const MOST_WAITING: usize = (1 << 20) + (192 << 10);
/// The most reads of a peer that wait on a lane.
const MOST_REPLIES: usize = 256;

/// What inputs reached, summed up. It shows that a target gets past the first check.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Tally {
    /// Frames that a receiver may accept.
    pub(crate) frames: u64,
    /// Bytes that the peer wrote into granted memory.
    pub(crate) landed: u64,
    /// Bytes of granted memory that the peer read.
    pub(crate) served: u64,
    /// Messages that arrived.
    pub(crate) notified: u64,
    /// Counts that arrived.
    pub(crate) counted: u64,
    /// Local transfers that were done, and those that ended otherwise.
    pub(crate) done: u64,
    /// See `done`.
    pub(crate) failed: u64,
    /// Revokes.
    pub(crate) revoked: u64,
    /// Inputs at whose end the session was still open.
    pub(crate) open: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, more: Self) {
        self.frames += more.frames;
        self.landed += more.landed;
        self.served += more.served;
        self.notified += more.notified;
        self.counted += more.counted;
        self.done += more.done;
        self.failed += more.failed;
        self.revoked += more.revoked;
        self.open += more.open;
    }
}

/// The fuzz target: fails by a panic.
pub fn session(input: &[u8]) {
    if let Err(why) = run(input) {
        panic!("{why}");
    }
}

/// Runs one input; the broken property where there is one.
pub(crate) fn run(input: &[u8]) -> Result<Tally, String> {
    let _clock = clock::simulate(1_000_000_000);
    let mut world = World::new(Input::new(input));
    let result = world.run();
    world.node.stop();
    result.map_err(|why| format!("{why}\n{}", world.trace.join("\n")))?;
    world.check_budgets()?;
    Ok(world.tally)
}

/// A range of memory that is advertised, and that the peer may reach or not.
struct Granted {
    descriptor: Descriptor,
    /// 0 for `shared`, 1 for `lent`.
    region: usize,
    start: usize,
    len: usize,
    /// What this peer may do.
    access: Option<Access>,
}

/// Registered memory, what may have changed in it, and what it held before.
struct Memory {
    bytes: Box<[u8]>,
    region: Region,
    /// The bytes that valid frames have named.
    named: Vec<bool>,
    before: Vec<u8>,
}

/// A local transfer.
struct Posted {
    transfer: Transfer,
    direction: Direction,
    len: usize,
    ended: Option<Ended>,
}

struct World<'a> {
    input: Input<'a>,
    /// How often the peer makes a mistake: of 256 choices.
    wildness: u8,
    /// The peer reads all answers at once, and answers heartbeats.
    reads: bool,
    beats: bool,
    /// The peer acknowledges what it reads.
    acknowledges: bool,
    node: Node,
    is_initiator: bool,
    lanes: Vec<SimulatedLane>,
    streams: Vec<Stream>,
    heard: Vec<Heard>,
    /// Bytes that the peer has made and not sent, by lane.
    held: Vec<Vec<u8>>,
    /// `shared`, which is advertised in parts, and `lent`, which is revoked.
    memories: [Memory; 2],
    granted: Vec<Granted>,
    /// Local memory of transfers.
    own: Box<[u8]>,
    own_region: Region,
    posted: Vec<Posted>,
    /// Counts by id that frames may have raised.
    counts: HashMap<u32, u64>,
    /// The peer may have shown a valid token.
    has_right: bool,
    is_revoked: bool,
    /// The values of the driver's clock that the peer has echoed.
    echoes: Vec<u64>,
    notes: HashMap<Vec<u8>, u64>,
    tally: Tally,
    trace: Vec<String>,
}

impl<'a> World<'a> {
    fn new(mut input: Input<'a>) -> Self {
        let shape = input.byte();
        let count = 1 + usize::from(shape) % LANES;
        let is_initiator = shape & 0x10 != 0;
        let (reads, beats) = (shape & 0x20 != 0, shape & 0x40 != 0);
        let acknowledges = shape & 0x80 != 0;
        let wildness = [0, 4, 12, 48][input.below(4)];
        let room = [200, 5000, 1 << 16, 1 << 30][input.below(4)];
        let most = 1 + input.below(3000);
        let lanes: Vec<_> = (0..count).map(|_| SimulatedLane::new(room, most, 0)).collect();
        let node = Node::alone(&lanes, 1 + input.below(16) as u32, is_initiator);
        let memories = [Memory::new(&node, 4096), Memory::new(&node, 1024)];
        let mut own = vec![SECRET; TRANSFERS * PLACE].into_boxed_slice();
        let own_region = node.register(&mut own);
        let mut world = Self {
            input,
            wildness,
            reads,
            beats,
            acknowledges,
            node,
            is_initiator,
            lanes,
            streams: (0..count).map(|_| Stream::default()).collect(),
            heard: (0..count).map(|_| Heard::default()).collect(),
            held: vec![Vec::new(); count],
            memories,
            granted: Vec::new(),
            own,
            own_region,
            posted: Vec::new(),
            counts: HashMap::new(),
            has_right: is_initiator,
            is_revoked: false,
            echoes: vec![clock::now()],
            notes: HashMap::new(),
            tally: Tally::default(),
            trace: Vec::new(),
        };
        let other = Incarnation([9; 16]);
        world.advertise(0, 256, 1024, Access::READ_WRITE, None);
        world.advertise(0, 1536, 512, Access::READ, None);
        world.advertise(0, 2304, 512, Access::WRITE, Some(HOSTILE));
        world.advertise(0, 3072, 512, Access::READ_WRITE, Some(other));
        world.advertise(1, 0, 512, Access::READ_WRITE, None);
        world.memories.iter_mut().for_each(Memory::settle);
        world
    }

    fn advertise(
        &mut self,
        at: usize,
        start: usize,
        len: usize,
        access: Access,
        bound: Option<Incarnation>,
    ) {
        let memory = &mut self.memories[at];
        let may_read = access.allows(Access::READ) && bound.is_none_or(|peer| peer == HOSTILE);
        if may_read && !self.is_revoked {
            memory.bytes[start..start + len].fill(GRANTED);
        }
        let range = start as u64..(start + len) as u64;
        let descriptor = memory.region.advertise_bound(range, access, bound).unwrap();
        let descriptor = Descriptor::from_bytes(&descriptor).unwrap();
        let access = bound.is_none_or(|peer| peer == HOSTILE).then_some(access);
        self.granted.push(Granted { descriptor, region: at, start, len, access });
    }

    fn run(&mut self) -> Result<(), String> {
        while !self.input.is_empty() {
            self.operate()?;
        }
        self.check()?;
        self.tally.open += u64::from(self.node.is_connected());
        self.drain()?;
        self.check_signals()
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        // Formatting costs more than most operations, so only a run that is known to fail does it.
        if TRACED.get() {
            let now = clock::now() / MS;
            self.trace.push(format!("{now:>6} ms  {}", text()));
        }
    }

    /// The driver takes a turn.
    fn poll(&mut self) -> Result<(), String> {
        // See `peerway_core::lease`: three quarters of the detection time.
        let lease = DETECT.as_nanos() as u64 * 3 / 4;
        let now = clock::now();
        let echoed = self.echoes.iter().filter(|echo| **echo <= now).max();
        let is_over = echoed.is_none_or(|echoed| now - echoed > lease);
        let before = is_over.then(|| self.memories.each_ref().map(|memory| memory.bytes.to_vec()));
        self.node.poll();
        if let Some(before) = before
            && before.iter().zip(&self.memories).any(|(before, memory)| *before != *memory.bytes)
        {
            return Err("bytes were applied after the lease".into());
        }
        while let Some(message) = self.node.inner.inbox.take(None) {
            self.tally.notified += 1;
            *self.notes.entry(message.message).or_default() += 1;
        }
        self.check()?;
        self.look_for_ends()?;
        if self.reads { self.hear(usize::MAX) } else { Ok(()) }
    }

    /// The peer reads what the driver has sent, up to `most` bytes of each lane.
    fn hear(&mut self, most: usize) -> Result<(), String> {
        for at in 0..self.lanes.len() {
            let bytes = self.lanes[at].pipes[0].lock().unwrap().take(most);
            let heard = &mut self.heard[at];
            let (clock, last) = (heard.clock, heard.last);
            heard
                .take(&bytes, &self.streams[at])
                .map_err(|why| format!("the driver on lane {at}: {why}"))?;
            let mut answer = Vec::new();
            if self.beats && heard.clock > clock {
                answer.extend(ops::beat(1, heard.clock));
            }
            if self.acknowledges && heard.last > last {
                answer.extend(ops::acknowledgement(heard.last));
            }
            // An answer inside a frame that is held back would be its payload.
            if !answer.is_empty() && self.held[at].is_empty() {
                self.send(at, &answer);
            }
        }
        Ok(())
    }

    /// The peer sends bytes that it has held back, and these.
    fn send(&mut self, lane: usize, bytes: &[u8]) {
        let mut all = std::mem::take(&mut self.held[lane]);
        all.extend_from_slice(bytes);
        for sent in self.streams[lane].take(&all) {
            self.tally.frames += 1;
            self.expect(&sent);
        }
        self.lanes[lane].pipes[1].lock().unwrap().feed(&all);
    }

    /// Notes the most that the driver may do about a frame.
    fn expect(&mut self, sent: &Sent) {
        let (head, kind) = (&sent.head, sent.checked.kind);
        let id = SlotId { index: head.grant.get(), generation: head.generation.get() };
        let needed = match kind {
            Kind::Write | Kind::Pull => Some(Access::WRITE),
            Kind::Read => Some(Access::READ),
            _ => None,
        };
        let found = needed.and_then(|needed| {
            self.granted.iter().find(|granted| {
                granted.descriptor.grant == id
                    && granted.descriptor.token == head.token
                    && granted.access.is_some_and(|access| access.allows(needed))
            })
        });
        self.has_right |= found.is_some();
        let mut is_valid = kind == Kind::Count;
        if let (Kind::Write, Some(granted)) = (kind, found) {
            let is_inside = |(offset, len): &(u64, u64)| {
                offset.checked_add(*len).is_some_and(|end| end <= granted.len as u64)
            };
            is_valid = sent.runs.iter().all(is_inside);
            if is_valid {
                for &(offset, len) in &sent.runs {
                    let start = granted.start + offset as usize;
                    self.memories[granted.region].named[start..start + len as usize].fill(true);
                }
            }
        }
        if let Some(id) = sent.counts().filter(|_| is_valid) {
            *self.counts.entry(id).or_default() += 1;
        }
        if kind == Kind::Beat {
            self.echoes.push(head.transfer.get());
        }
        if let Some(Control::Import { descriptor, .. }) = &sent.control
            && let Ok(descriptor) = Descriptor::from_bytes(descriptor)
        {
            let is_it = |granted: &Granted| {
                granted.descriptor.token == descriptor.token && granted.access.is_some()
            };
            self.has_right |= self.granted.iter().any(is_it);
        }
    }

    /// The local program posts a transfer with the peer.
    fn post(&mut self) {
        let at = self.posted.len();
        let choice = self.input.byte();
        if at == TRANSFERS || !self.node.is_connected() {
            return;
        }
        let direction = if choice & 1 == 0 { Direction::Write } else { Direction::Read };
        let (len, start) = (1 + self.input.below(PLACE), at * PLACE);
        self.own[start..start + PLACE].fill(match direction {
            Direction::Write => GRANTED,
            Direction::Read => FROZEN,
        });
        let grant = SlotId { index: 1, generation: 1 };
        let theirs = Descriptor::new(&HOSTILE, grant, [3; 16], Access::READ_WRITE, 0, PLACE as u64);
        let remote = self.node.import(&theirs.to_bytes(), Access::READ_WRITE, PLACE as u64);
        let local = self.own_region.slice(start as u64..(start + len) as u64);
        let remote = remote.slice(0..len as u64);
        let batch = match direction {
            Direction::Write => Batch::write(&local, &remote),
            Direction::Read => Batch::read(&local, &remote),
        };
        let mut batch = batch.unwrap();
        if choice & 2 != 0 {
            batch = batch.count(at as u32);
        }
        if choice & 4 != 0 {
            batch = batch.notify(&[at as u8; 40]).unwrap();
        }
        let deadline = clock::now() + 100 * MS + u64::from(self.input.byte()) * 20 * MS;
        let piece = 16 + self.input.below(200) as u64;
        let Some(transfer) = self.node.post(batch, piece, choice & 8 != 0, deadline) else {
            return;
        };
        self.note(|| format!("posts transfer {at}: {direction:?} of {len} bytes"));
        self.posted.push(Posted { transfer, direction, len, ended: None });
    }

    fn look_for_ends(&mut self) -> Result<(), String> {
        for (at, posted) in self.posted.iter_mut().enumerate() {
            if posted.ended.is_some_and(|ended| ended.fence == Fence::Held) {
                continue;
            }
            let Some(ended) = posted.transfer.ended() else { continue };
            if posted.ended.replace(ended).is_none() {
                let is_done = ended == Ended::DONE;
                self.tally.done += u64::from(is_done);
                self.tally.failed += u64::from(!is_done);
            }
            if posted.direction == Direction::Read && ended.fence == Fence::Open {
                return Err(format!("read {at} ended with an open fence: {ended:?}"));
            }
            if ended.fence == Fence::Held {
                // The memory belongs to the program again.
                let byte = match posted.direction {
                    Direction::Write => SECRET,
                    Direction::Read => FROZEN,
                };
                self.own[at * PLACE..(at + 1) * PLACE].fill(byte);
            }
        }
        Ok(())
    }

    fn cancel(&mut self) -> Result<(), String> {
        if !self.posted.is_empty() {
            let at = self.input.below(self.posted.len());
            self.note(|| format!("cancels transfer {at}"));
            self.posted[at].transfer.cancel();
        }
        self.look_for_ends()
    }

    /// The local program takes `lent` back. A second call grants it anew, for reading only: so it
    /// must still not change.
    fn revoke(&mut self) -> Result<(), String> {
        if self.is_revoked {
            self.advertise(1, 0, 512, Access::READ, None);
            return Ok(());
        }
        if self.memories[1].region.revoke() != Fence::Held {
            return Err("a revoke on lanes is always held".into());
        }
        self.note(|| "revokes".into());
        self.is_revoked = true;
        self.tally.revoked += 1;
        let memory = &mut self.memories[1];
        memory.bytes[..512].fill(FROZEN);
        memory.named.fill(false);
        memory.settle();
        Ok(())
    }

    /// Lets time pass without a word from the peer, until everything must be over.
    fn drain(&mut self) -> Result<(), String> {
        self.acknowledges = false;
        // A peer that lives and answers nothing: the longest deadline is 5.2 s, a fence takes 1.
        let limit = clock::now() + 8_000 * MS;
        while self.beats && self.node.is_connected() && clock::now() < limit {
            self.poll()?;
            self.hear(usize::MAX)?;
            clock::advance(Duration::from_millis(100));
        }
        if let Some(at) = self.posted.iter().position(|posted| posted.ended.is_none())
            && clock::now() >= limit
        {
            return Err(format!("transfer {at} has not ended"));
        }
        self.beats = false;
        // The peer is silent when all that it has sent has been received.
        let mut left = usize::MAX;
        while self.node.is_connected() && self.unreceived() < left {
            left = self.unreceived();
            self.poll()?;
        }
        let began = clock::now();
        // The longest deadline is 5.2 s. Silence takes 2, a fence 1, and a lease 2.5.
        let limit = began + 12_000 * MS;
        while clock::now() < limit {
            self.poll()?;
            let is_over = self.posted.iter().all(|posted| posted.ended.is_some());
            if is_over && self.node.holdings().sessions == 0 {
                break;
            }
            clock::advance(Duration::from_millis(100));
        }
        self.check()?;
        if let Some(at) = self.posted.iter().position(|posted| posted.ended.is_none()) {
            return Err(format!("transfer {at} has not ended"));
        }
        let left = self.node.holdings();
        if left.sessions > 0 || left.requests > 0 || self.node.is_connected() {
            return Err(format!("a silent peer is kept: {left:?}"));
        }
        Ok(())
    }

    /// Bytes of the peer that the driver has not received.
    fn unreceived(&self) -> usize {
        self.lanes.iter().map(|lane| lane.pipes[1].lock().unwrap().arrived()).sum()
    }

    fn check(&self) -> Result<(), String> {
        for (name, memory) in ["shared", "lent"].into_iter().zip(&self.memories) {
            // Whole lines first: most of them never change.
            let lines = memory.bytes.chunks(LINE).zip(memory.before.chunks(LINE)).enumerate();
            for (line, (now, before)) in lines.filter(|(_, (now, before))| now != before) {
                let named = &memory.named[line * LINE..];
                if let Some(at) = (0..LINE).find(|at| now[*at] != before[*at] && !named[*at]) {
                    return Err(format!("byte {} of the {name} memory changed", line * LINE + at));
                }
            }
        }
        for (at, posted) in self.posted.iter().enumerate() {
            let place = &self.own[at * PLACE..(at + 1) * PLACE];
            let is_held = posted.ended.is_some_and(|ended| ended.fence == Fence::Held);
            let (from, byte) = match posted.direction {
                Direction::Write if is_held => (0, SECRET),
                Direction::Write => (0, GRANTED),
                Direction::Read if is_held => (0, FROZEN),
                Direction::Read => (posted.len, FROZEN),
            };
            if place[from..].iter().any(|found| *found != byte) {
                let (direction, ended) = (posted.direction, posted.ended);
                return Err(format!("memory of transfer {at} ({direction:?}, {ended:?}) changed"));
            }
        }
        let held = self.node.holdings();
        let is_bounded = held.waiting <= MOST_WAITING
            && held.replies <= MOST_REPLIES
            && held.again <= self.lanes.len()
            && held.copied <= 1 << 20
            && held.requests <= self.posted.len();
        if is_bounded { Ok(()) } else { Err(format!("the driver holds too much: {held:?}")) }
    }

    fn check_signals(&mut self) -> Result<(), String> {
        let inbox = &self.node.inner.inbox;
        for (id, most) in &self.counts {
            let counted = inbox.counter(*id);
            if counted > if self.has_right { *most } else { 0 } {
                return Err(format!(
                    "counter {id} has {counted}; {most} frames may have raised it, right: {}",
                    self.has_right
                ));
            }
            self.tally.counted += counted;
        }
        // Ids that operations use and no valid frame has named.
        for id in (0..ops::COUNTERS).filter(|id| !self.counts.contains_key(id)) {
            if inbox.counter(id) > 0 {
                return Err(format!("counter {id} rose without a frame"));
            }
        }
        for (message, seen) in &self.notes {
            let sent = |stream: &Stream| stream.notes.get(message).copied().unwrap_or(0);
            let sent: u64 = self.streams.iter().map(sent).sum();
            if *seen > sent && message.len() <= 256 {
                return Err(format!("message {message:?} was seen {seen} times, sent {sent}"));
            }
        }
        let total = |kind: Kind| self.streams.iter().map(|stream| stream.count(kind)).sum::<u64>();
        let stats = self.node.inner.refusals.stats();
        let refused = stats.message_bytes + stats.notifications;
        if self.tally.notified + refused > total(Kind::Notify)
            || stats.counts_without_right > total(Kind::Count)
            || stats.slow_messages > self.lanes.len() as u64
            || (self.is_initiator && stats.counts_without_right > 0)
            || stats.handshakes + stats.sessions + stats.lanes + stats.descriptors > 0
        {
            return Err(format!("refusals without a frame: {stats:?}"));
        }
        self.tally.landed += self.memories.iter().map(Memory::changed).sum::<u64>();
        self.tally.served += self.heard.iter().map(|heard| heard.served).sum::<u64>();
        Ok(())
    }

    /// The budgets of half-received messages are whole again: all peers together have 16 shares,
    /// and strangers have 8 of them.
    fn check_budgets(&self) -> Result<(), String> {
        let budgets = &self.node.inner.messages;
        let share = Config::default().limits.message_bytes / 16;
        let charge = |at| budgets.charge(&budgets.of_session(), at < 8, share);
        let charges: Vec<_> = (0..16).map(charge).collect();
        match charges.iter().position(Option::is_none) {
            Some(at) => Err(format!("share {at} of the message budget is lost")),
            None => Ok(()),
        }
    }
}

impl Memory {
    fn new(node: &Node, len: usize) -> Self {
        let mut bytes = vec![SECRET; len].into_boxed_slice();
        let region = node.register(&mut bytes);
        Self { bytes, region, named: vec![false; len], before: Vec::new() }
    }

    /// What is there now is what stays where no frame writes.
    fn settle(&mut self) {
        self.before = self.bytes.to_vec();
    }

    fn changed(&self) -> u64 {
        self.bytes.iter().zip(&self.before).filter(|(now, before)| now != before).count() as u64
    }
}

thread_local! {
    static TRACED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Makes runs in this thread describe their operations in their errors.
#[cfg(test)]
pub(super) fn trace(on: bool) {
    TRACED.set(on);
}
