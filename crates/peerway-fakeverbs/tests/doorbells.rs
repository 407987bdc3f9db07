//! Counts the doorbells, requests and completions that the engine needs for a transfer.
//!
//! These numbers do not depend on the machine, and each is a cost on hardware. A doorbell is a
//! write across PCIe. A signalled request causes a completion that is written and polled.

mod support;

use std::time::{Duration, Instant};

use peerway::{Access, Batch, Endpoint, Peer, Pin, Reason, Region, RemoteRegion};
use peerway_fakeverbs::Stats;

use support::{WATCHDOG, scripted, stats};

/// Most requests that the engine posts with one doorbell.
const GROUP: u64 = 32;
/// Most bytes of one request.
const PART: u64 = 1 << 20;

/// Two endpoints, memory of both, and no traffic except the transfers of a test.
struct World {
    peer: Peer,
    ours: Region,
    theirs: RemoteRegion,
    _kept: (Endpoint, Endpoint, Region),
}

impl World {
    fn new(pin: Pin, len: usize) -> Self {
        // As few heartbeats as possible: one in 10 s.
        let make = || Endpoint::builder().transport(pin).detect(Duration::from_secs(600)).build();
        let (a, b) = (make().expect("the fake has devices"), make().expect("the fake has devices"));
        let peer = a.connect(&b.metadata()).expect("devices reach each other");
        let (ours, owned) = (a.allocate(len).expect("memory"), b.allocate(len).expect("memory"));
        let descriptor = owned.advertise(Access::READ_WRITE).expect("the region can be advertised");
        let theirs = peer.import(&descriptor).expect("the region can be imported");
        let world = Self { peer, ours, theirs, _kept: (a, b, owned) };
        // Registrations and the first messages of the session happen before the count.
        world.run(&world.range(len as u64));
        settle();
        world
    }

    fn range(&self, len: u64) -> Batch {
        Batch::write(&self.ours.slice(0..len), &self.theirs.slice(0..len))
            .expect("the batch is valid")
    }

    fn run(&self, batch: &Batch) {
        assert_eq!(self.peer.run(batch).expect("the transfer is posted").reason, Reason::Done);
    }

    /// Checks the counts that a transfer adds. A heartbeat between two counts adds to them, but not
    /// in every try.
    #[track_caller]
    fn costs(&self, batch: &Batch, expected: Stats) {
        let mut counted = Stats::default();
        let is_so = (0..5).any(|_| {
            counted = self.count(batch);
            counted == expected
        });
        assert!(is_so, "expected {expected:?}, lastly counted {counted:?}");
    }

    /// The counts that a transfer adds, with those of other messages meanwhile.
    fn count(&self, batch: &Batch) -> Stats {
        let before = stats();
        self.run(batch);
        let after = settle();
        Stats {
            doorbells: after.doorbells - before.doorbells,
            requests: after.requests - before.requests,
            signalled: after.signalled - before.signalled,
            inlined: after.inlined - before.inlined,
            ..Stats::default()
        }
    }
}

/// Waits until no more requests are posted, and returns the counts.
fn settle() -> Stats {
    let begun = Instant::now();
    loop {
        let before = stats();
        std::thread::sleep(Duration::from_millis(100));
        let now = stats();
        if (before.requests, before.completions) == (now.requests, now.completions) {
            return now;
        }
        assert!(begun.elapsed() < WATCHDOG, "the device does not become idle: {now:?}");
    }
}

fn counts(doorbells: u64, requests: u64, signalled: u64, inlined: u64) -> Stats {
    Stats { doorbells, requests, signalled, inlined, ..Stats::default() }
}

#[test]
fn a_small_write_is_one_inline_request() {
    if !scripted("a_small_write_is_one_inline_request", "") {
        return;
    }
    let world = World::new(Pin::Ib, 4096);
    world.costs(&world.range(100), counts(1, 1, 1, 1));
    world.costs(&world.range(256), counts(1, 1, 1, 0));
}

#[test]
fn a_small_datagram_is_one_request() {
    if !scripted("a_small_datagram_is_one_request", "efa") {
        return;
    }
    let world = World::new(Pin::Efa, 4096);
    world.costs(&world.range(256), counts(1, 1, 1, 0));
}

/// 64 blocks of 256 B, none adjacent to another.
fn blocks(world: &World) -> Batch {
    let every_second: Vec<u32> = (0..64).map(|i| 2 * i).collect();
    let local = world.ours.blocks(0, 256, 256, &every_second);
    let remote = world.theirs.blocks(0, 256, 256, &every_second);
    Batch::write_blocks(local, remote).expect("the batch is valid")
}

#[test]
fn blocks_share_doorbells_and_completions() {
    if !scripted("blocks_share_doorbells_and_completions", "") {
        return;
    }
    let world = World::new(Pin::Ib, 128 * 256);
    let groups = 64 / GROUP;
    world.costs(&blocks(&world), counts(groups, 64, groups, 0));
}

#[test]
fn blocks_as_datagrams_share_doorbells() {
    if !scripted("blocks_as_datagrams_share_doorbells", "efa") {
        return;
    }
    // Datagrams complete in any order, so each needs its own completion.
    let world = World::new(Pin::Efa, 128 * 256);
    world.costs(&blocks(&world), counts(64 / GROUP, 64, 64, 0));
}

#[test]
fn a_large_write_is_cut_into_parts() {
    if !scripted("a_large_write_is_cut_into_parts", "") {
        return;
    }
    let len = 16 << 20;
    let world = World::new(Pin::Ib, len as usize);
    let parts = len / PART;
    world.costs(&world.range(len), counts(parts, parts, parts, 0));
}
