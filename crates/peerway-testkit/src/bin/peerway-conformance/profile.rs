//! Profiles: the same scenarios with different sizes, rounds and time limits.

use std::time::Duration;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Profile {
    pub(crate) name: &'static str,
    /// Bytes of a transfer that a scenario must catch in flight.
    pub(crate) big: u64,
    /// Rounds of connect, transfer and remove.
    pub(crate) rounds: u32,
    /// Repetitions of randomized steps.
    pub(crate) tries: u32,
    /// Number of peers in the incast scenario.
    pub(crate) peers: u32,
    /// Silence after which an endpoint declares a peer dead, in scenarios whose peers misbehave.
    pub(crate) detect: Duration,
    pub(crate) fence: Duration,
    pub(crate) deadline: Duration,
    /// The connect time-out. An endpoint also keeps a silent connection for this long.
    pub(crate) connect: Duration,
    /// Extra time that a busy machine may take. Only a failing scenario waits for all of it.
    pub(crate) slack: Duration,
    /// How long a scenario watches memory after its fence.
    pub(crate) watch: Duration,
    /// How many times slower this machine's processor is than real hardware.
    pub(crate) slower: u32,
    /// A scenario that runs longer than this counts as hung.
    pub(crate) limit: Duration,
}

/// For two shared cores. A full run takes a few minutes.
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

/// For an emulated machine, on which everything is several times slower.
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

/// For runs that may take hours.
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
