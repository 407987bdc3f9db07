//! Profiles: the same scenarios with more or fewer bytes, rounds and patience.

use std::time::Duration;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Profile {
    pub(crate) name: &'static str,
    /// Bytes of a transfer that is to be caught in flight.
    pub(crate) big: u64,
    /// Connect, transfer, remove.
    pub(crate) rounds: u32,
    /// Repetitions of what is random.
    pub(crate) tries: u32,
    /// Peers of the incast.
    pub(crate) peers: u32,
    /// Silence after which a peer is dead, in endpoints whose peers misbehave.
    pub(crate) detect: Duration,
    pub(crate) fence: Duration,
    pub(crate) deadline: Duration,
    /// How long connecting may take, and how long a connection that says nothing is kept.
    pub(crate) connect: Duration,
    /// How late a busy machine may be. Only scenarios that fail wait for as long.
    pub(crate) slack: Duration,
    /// How long memory is watched after its fence.
    pub(crate) watch: Duration,
    /// How many times longer than on a real machine a processor takes for the same.
    pub(crate) slower: u32,
    /// A scenario that takes longer hangs.
    pub(crate) limit: Duration,
}

/// Two cores that others share, a few minutes for everything.
pub(crate) const CI: Profile = Profile {
    name: "ci",
    big: 64 << 20,
    rounds: 500,
    tries: 200,
    peers: 64,
    detect: Duration::from_millis(800),
    fence: Duration::from_millis(400),
    deadline: Duration::from_millis(3000),
    connect: Duration::from_millis(3000),
    slack: Duration::from_millis(10_000),
    watch: Duration::from_millis(300),
    slower: 1,
    limit: Duration::from_secs(180),
};

/// An emulated machine: everything is several times slower.
pub(crate) const GUEST: Profile = Profile {
    name: "guest",
    big: 32 << 20,
    rounds: 100,
    tries: 50,
    peers: 16,
    detect: Duration::from_millis(3000),
    fence: Duration::from_millis(1000),
    deadline: Duration::from_millis(8000),
    connect: Duration::from_millis(15_000),
    slack: Duration::from_millis(15_000),
    watch: Duration::from_millis(1000),
    slower: 10,
    limit: Duration::from_secs(300),
};

/// Hours are no matter.
pub(crate) const SOAK: Profile = Profile {
    name: "soak",
    big: 256 << 20,
    rounds: 10_000,
    tries: 5000,
    peers: 64,
    detect: Duration::from_millis(800),
    fence: Duration::from_millis(400),
    deadline: Duration::from_millis(5000),
    connect: Duration::from_millis(4000),
    slack: Duration::from_millis(10_000),
    watch: Duration::from_millis(2000),
    slower: 1,
    limit: Duration::from_secs(1800),
};

pub(crate) const ALL: [Profile; 3] = [CI, GUEST, SOAK];
