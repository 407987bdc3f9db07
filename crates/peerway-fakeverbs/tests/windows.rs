//! Keys for one queue pair each: a hostile peer that knows or guesses the key of another peer
//! reaches nothing, and everything else works as with keys for all peers.
//!
//! The owner has one device, and two queue pairs with each peer. The hostile peer uses regions that
//! it forges: its own session, with the address and the keys of another peer's import.

mod support;

use std::thread;
use std::time::{Duration, Instant};

use peerway::{
    Access, Batch, Endpoint, Fence, Peer, Pin, Reason, Region, RemoteRegion, TransferError,
};
use peerway_sys::verbs::next_rkey;

use support::{WATCHDOG, scripted_with, stats};

const LEN: usize = 8192;
const CANARY: u8 = 0xC7;
const ONE_PAIR: (&str, &str) = ("PEERWAY_RDMA_QUEUE_PAIRS", "1");
const OFF: (&str, &str) = ("PEERWAY_RDMA_WINDOWS", "off");
const REQUIRE: (&str, &str) = ("PEERWAY_RDMA_WINDOWS", "require");

fn endpoint() -> Endpoint {
    let builder = Endpoint::builder().transport(Pin::Ib).detect(Duration::from_secs(30));
    let built = builder.connect_timeout(WATCHDOG).deadline(WATCHDOG).build();
    built.expect("the fake has devices")
}

fn filled(endpoint: &Endpoint, byte: u8) -> Region {
    endpoint.register(vec![byte; LEN]).expect("memory can be registered")
}

fn bytes(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len() as usize];
    region.read_at(0, &mut bytes).expect("the range lies inside the region");
    bytes
}

fn holds(region: &Region, byte: u8) -> bool {
    bytes(region).iter().all(|b| *b == byte)
}

/// Waits until `over` holds.
fn wait_until(what: &str, over: impl Fn() -> bool) {
    let begun = Instant::now();
    while !over() {
        assert!(begun.elapsed() < WATCHDOG, "{what}: {:?}", stats());
        thread::sleep(Duration::from_millis(1));
    }
}

/// An owner with a peer that it trusts and a hostile one.
struct Three {
    _owner: Endpoint,
    friend: Endpoint,
    thief: Endpoint,
    of_friend: Peer,
    of_thief: Peer,
    /// The owner's memory for the friend, and the friend's import of it.
    secret: Region,
    friends: RemoteRegion,
    /// The hostile peer's import of other memory.
    thiefs: RemoteRegion,
    _other: Region,
}

impl Three {
    fn new() -> Self {
        let (owner, friend, thief) = (endpoint(), endpoint(), endpoint());
        let of_friend = friend.connect(&owner.metadata()).expect("the devices connect");
        let of_thief = thief.connect(&owner.metadata()).expect("the devices connect");
        let (secret, other) = (filled(&owner, CANARY), filled(&owner, 0));
        let import = |peer: &Peer, region: &Region| {
            peer.import(&region.advertise(Access::READ_WRITE).unwrap()).expect("an import")
        };
        let friends = import(&of_friend, &secret);
        let thiefs = import(&of_thief, &other);
        Self {
            _owner: owner,
            friend,
            thief,
            of_friend,
            of_thief,
            secret,
            friends,
            thiefs,
            _other: other,
        }
    }

    /// Writes and reads with a forged key. Returns whether either changed or got a byte.
    fn steal(&self, key: Option<u32>) -> bool {
        let forged = self.thiefs.forge(&self.friends, key);
        let (loot, mark) = (filled(&self.thief, 0), filled(&self.thief, 0x11));
        let read = self.of_thief.run(&Batch::read(&loot.all(), &forged.all()).unwrap()).unwrap();
        let write = self.of_thief.run(&Batch::write(&mark.all(), &forged.all()).unwrap()).unwrap();
        let refused = Reason::Failed(TransferError::Revoked);
        let opened = !holds(&self.secret, CANARY) || !holds(&loot, 0);
        assert!(opened || (read.reason, write.reason) == (refused, refused), "{read:?} {write:?}");
        opened
    }

    /// The friend writes and reads the memory, which holds the canary again afterwards.
    fn friend_works(&self) {
        let (ours, back) = (filled(&self.friend, 0x77), filled(&self.friend, 0));
        let write = Batch::write(&ours.all(), &self.friends.all()).unwrap();
        assert_eq!(self.of_friend.run(&write).unwrap().reason, Reason::Done);
        assert!(holds(&self.secret, 0x77));
        let read = Batch::read(&back.all(), &self.friends.all()).unwrap();
        assert_eq!(self.of_friend.run(&read).unwrap().reason, Reason::Done);
        assert!(holds(&back, 0x77));
        self.secret.fill(0, LEN as u64, CANARY).unwrap();
    }

    fn close(self) {
        drop(self);
        wait_until("everything is given back", || {
            let now = stats();
            now.windows == 0 && now.queue_pairs == 0 && now.registrations == now.deregistrations
        });
    }
}

#[test]
fn the_key_of_another_peer_opens_nothing() {
    let test = "the_key_of_another_peer_opens_nothing";
    if !scripted_with(test, "devices=1", &[ONE_PAIR]) {
        return;
    }
    let three = Three::new();
    assert!(
        three.of_friend.path().why.ends_with("for one queue pair"),
        "{}",
        three.of_friend.path()
    );
    assert!(stats().windows >= 4, "a window for each queue pair and import: {:?}", stats());
    three.friend_works();
    for _ in 0..3 {
        assert!(!three.steal(None), "the key of the friend opens the memory to another peer");
        three.friend_works();
    }
    // The hostile peer's own import still works.
    let mine = filled(&three.thief, 5);
    let write = Batch::write(&mine.all(), &three.thiefs.all()).unwrap();
    assert_eq!(three.of_thief.run(&write).unwrap().reason, Reason::Done);
    drop((mine, write));
    assert_eq!(three.secret.revoke(), Fence::Held);
    assert!(holds(&three.secret, CANARY));
    three.close();
}

/// Every key that the owner's device has given out so far: of registrations, and of bound windows.
/// The device numbers them from 1.
fn guesses() -> impl Iterator<Item = u32> {
    let given = (1..=14u32).map(|made| (made << 8) | (made.wrapping_mul(0x9d) & 0xff));
    given.flat_map(|key| [key, next_rkey(key)])
}

#[test]
fn no_key_of_the_device_opens_memory_to_another_peer() {
    let test = "no_key_of_the_device_opens_memory_to_another_peer";
    if !scripted_with(test, "devices=1", &[ONE_PAIR]) {
        return;
    }
    let three = Three::new();
    for key in guesses() {
        assert!(!three.steal(Some(key)), "the key {key:#x} opens the memory");
    }
    three.friend_works();
    three.close();
}

#[test]
fn without_windows_a_guessed_key_opens_memory() {
    let test = "without_windows_a_guessed_key_opens_memory";
    // This shows that the guesses of the test above are good ones.
    if !scripted_with(test, "devices=1", &[ONE_PAIR, OFF]) {
        return;
    }
    let three = Three::new();
    assert!(three.of_friend.path().why.contains("no memory windows"), "{}", three.of_friend.path());
    assert_eq!(stats().windows, 0);
    assert!(guesses().any(|key| three.steal(Some(key))), "no guess hits");
    three.close();
}

#[test]
fn a_queue_pair_that_replaces_a_lost_one_gets_keys() {
    let test = "a_queue_pair_that_replaces_a_lost_one_gets_keys";
    if !scripted_with(test, "devices=1,seed=3,flush_after=40", &[ONE_PAIR]) {
        return;
    }
    let (owner, peer) = (endpoint(), endpoint());
    let of_peer = peer.connect(&owner.metadata()).expect("the devices connect");
    let theirs: Vec<Region> = (0..5).map(|_| filled(&owner, 0)).collect();
    let import = |region: &Region| {
        of_peer.import(&region.advertise(Access::READ_WRITE).unwrap()).expect("an import")
    };
    let mut remotes: Vec<RemoteRegion> = theirs.iter().map(import).collect();
    for round in 0..400u32 {
        let at = round as usize % theirs.len();
        let ours = filled(&peer, round as u8);
        let write = Batch::write(&ours.all(), &remotes[at].all()).unwrap();
        let ended = of_peer.run(&write).unwrap();
        assert_eq!((ended.reason, ended.fence), (Reason::Done, Fence::Held), "round {round}");
        assert!(holds(&theirs[at], round as u8), "round {round}");
        if round % 50 == 0 {
            // The owner sends the keys again to a peer that has forgotten them.
            remotes.clear();
            remotes.extend(theirs.iter().map(import));
        }
    }
    assert!(of_peer.stats().lanes_lost > 3, "no queue pair failed: {:?}", of_peer.stats());
    drop((remotes, theirs, of_peer, owner, peer));
    wait_until("everything is given back", || stats().windows == 0 && stats().queue_pairs == 0);
}

#[test]
fn a_revoke_under_traffic_is_held_and_nothing_lands() {
    let test = "a_revoke_under_traffic_is_held_and_nothing_lands";
    if !scripted_with(test, "devices=1,latency=20us", &[ONE_PAIR]) {
        return;
    }
    let (owner, peer) = (endpoint(), endpoint());
    let of_peer = peer.connect(&owner.metadata()).expect("the devices connect");
    for round in 0..10 {
        let theirs = filled(&owner, 0);
        let remote = of_peer.import(&theirs.advertise(Access::WRITE).unwrap()).unwrap();
        let ours = filled(&peer, 0x55);
        let write = Batch::write(&ours.all(), &remote.all()).unwrap();
        thread::scope(|scope| {
            let writing = scope.spawn(|| {
                loop {
                    let ended = of_peer.run(&write).unwrap();
                    if ended.reason != Reason::Done {
                        return ended.reason;
                    }
                }
            });
            thread::sleep(Duration::from_micros(300 * round));
            assert_eq!(theirs.revoke(), Fence::Held, "round {round}");
            theirs.fill(0, LEN as u64, CANARY).unwrap();
            let ended = writing.join().expect("no panic");
            assert_eq!(ended, Reason::Failed(TransferError::Revoked), "round {round}");
            assert!(holds(&theirs, CANARY), "round {round}: a byte landed after the revoke");
        });
    }
}

#[test]
fn memory_without_a_window_gets_a_key_for_all_peers() {
    let test = "memory_without_a_window_gets_a_key_for_all_peers";
    // Two windows for the first import, one for the second.
    if !scripted_with(test, "devices=1,windows=3", &[ONE_PAIR]) {
        return;
    }
    let (owner, peer) = (endpoint(), endpoint());
    let of_peer = peer.connect(&owner.metadata()).expect("the devices connect");
    for round in 0..6u8 {
        let theirs = filled(&owner, 0);
        let remote = of_peer.import(&theirs.advertise(Access::READ_WRITE).unwrap()).unwrap();
        let ours = filled(&peer, round + 1);
        let write = Batch::write(&ours.all(), &remote.all()).unwrap();
        assert_eq!(of_peer.run(&write).unwrap().reason, Reason::Done, "round {round}");
        assert!(holds(&theirs, round + 1));
        assert!(stats().windows <= 3);
        // Keep some of the memory, so that no window is left.
        if round % 2 == 0 {
            std::mem::forget((theirs, remote));
        } else {
            assert_eq!(theirs.revoke(), Fence::Held);
        }
    }
    let refused = owner.stats().refusals.windows;
    assert!(refused > 0, "keys for all peers are counted: {refused}");
}

#[test]
fn memory_without_a_window_gets_no_key_where_windows_are_required() {
    let test = "memory_without_a_window_gets_no_key_where_windows_are_required";
    if !scripted_with(test, "devices=1,windows=3", &[ONE_PAIR, REQUIRE]) {
        return;
    }
    let (owner, peer) = (endpoint(), endpoint());
    let of_peer = peer.connect(&owner.metadata()).expect("the devices connect");
    let (first, second) = (filled(&owner, 1), filled(&owner, 2));
    let import = |region: &Region| of_peer.import(&region.advertise(Access::READ).unwrap());
    let remote = import(&first).expect("there are two windows");
    let refused = import(&second).expect_err("one window is left").to_string();
    assert!(refused.contains("could not register it"), "{refused}");
    let back = filled(&peer, 0);
    let read = Batch::read(&back.all(), &remote.all()).unwrap();
    assert_eq!(of_peer.run(&read).unwrap().reason, Reason::Done);
    assert!(holds(&back, 1));
    assert_eq!(first.revoke(), Fence::Held);
    import(&second).expect("the windows of the first import are free again");
    assert_eq!(owner.stats().refusals.windows, 1);
}

#[test]
fn a_device_without_windows_is_refused_where_they_are_required() {
    let test = "a_device_without_windows_is_refused_where_they_are_required";
    if !scripted_with(test, "devices=1,windows=0", &[ONE_PAIR, REQUIRE]) {
        return;
    }
    let refused = Endpoint::builder().transport(Pin::Ib).build();
    let refused = refused.expect_err("the device has no windows").to_string();
    assert!(refused.contains("PEERWAY_RDMA_WINDOWS=require"), "{refused}");
    assert!(refused.contains("fake0") && !refused.contains('\n'), "{refused}");
}
