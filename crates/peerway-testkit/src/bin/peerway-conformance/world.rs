//! The environment of a scenario: the transport, the profile, and matching endpoints and peers.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::{
    Access, DataProtection, Ended, Endpoint, Fence, PathKind, Peer, Pin, Reason, Region,
    RemoteRegion, Transfer, TransferError,
};
use peerway_testkit::memory;

use crate::args::Args;
use crate::options::Options;
use crate::profile::Profile;
use crate::remote::{Memory, Remote};
use crate::scenarios;

/// A path under test.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Transport {
    SameProcess,
    LocalMap,
    LocalCma,
    LocalRing,
    Tcp,
    /// TCP with `PEERWAY_DATA=integrity`.
    TcpIntegrity,
    /// TCP with `PEERWAY_DATA=encrypt`.
    TcpEncrypt,
    Verbs,
    Efa,
}

impl Transport {
    /// Transports that need no device.
    pub(crate) const ANYWHERE: [Self; 7] = [
        Self::SameProcess,
        Self::LocalMap,
        Self::LocalCma,
        Self::LocalRing,
        Self::Tcp,
        Self::TcpIntegrity,
        Self::TcpEncrypt,
    ];
    pub(crate) const ALL: [Self; 9] = [
        Self::SameProcess,
        Self::LocalMap,
        Self::LocalCma,
        Self::LocalRing,
        Self::Tcp,
        Self::TcpIntegrity,
        Self::TcpEncrypt,
        Self::Verbs,
        Self::Efa,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SameProcess => "same-process",
            Self::LocalMap => "local-map",
            Self::LocalCma => "local-cma",
            Self::LocalRing => "local-ring",
            Self::Tcp => "tcp",
            Self::TcpIntegrity => "tcp-integrity",
            Self::TcpEncrypt => "tcp-encrypt",
            Self::Verbs => "verbs",
            Self::Efa => "efa",
        }
    }

    pub(crate) fn pin(self) -> Pin {
        match self {
            Self::SameProcess => Pin::Auto,
            Self::LocalMap => Pin::LocalMap,
            Self::LocalCma => Pin::LocalCma,
            Self::LocalRing => Pin::LocalRing,
            Self::Tcp | Self::TcpIntegrity | Self::TcpEncrypt => Pin::Tcp,
            Self::Verbs => Pin::Ib,
            Self::Efa => Pin::Efa,
        }
    }

    pub(crate) fn kind(self) -> PathKind {
        match self {
            Self::SameProcess => PathKind::SameProcess,
            Self::LocalMap => PathKind::LocalMap,
            Self::LocalCma => PathKind::LocalCma,
            Self::LocalRing => PathKind::LocalRing,
            Self::Tcp | Self::TcpIntegrity | Self::TcpEncrypt => PathKind::Tcp,
            Self::Verbs => PathKind::Verbs,
            Self::Efa => PathKind::Efa,
        }
    }

    pub(crate) fn is_tcp(self) -> bool {
        self.kind() == PathKind::Tcp
    }

    /// How both endpoints protect TCP connections.
    pub(crate) fn data(self) -> DataProtection {
        match self {
            Self::TcpIntegrity => DataProtection::Integrity,
            Self::TcpEncrypt => DataProtection::Encrypt,
            _ => DataProtection::Off,
        }
    }

    /// Whether RDMA devices carry the transfers. They do not need the peer's processor, but the
    /// engine needs heartbeats: a stopped peer is reachable until the engine gives it up.
    pub(crate) fn is_device(self) -> bool {
        matches!(self, Self::Verbs | Self::Efa)
    }

    /// Whether a write completes without the target's processor.
    pub(crate) fn writes_alone(self) -> bool {
        matches!(self, Self::SameProcess | Self::LocalMap)
    }

    /// Whether payload travels in frames, which land piece by piece.
    pub(crate) fn is_framed(self) -> bool {
        self == Self::LocalRing || self.is_tcp()
    }

    /// Whether a read completes without the target's processor.
    pub(crate) fn reads_alone(self) -> bool {
        matches!(self, Self::SameProcess | Self::LocalMap | Self::LocalCma)
    }
}

/// The result of a scenario that did not fail.
pub(crate) enum Verdict {
    Ok(String),
    Skip(String),
}

/// A pass without a note.
pub(crate) fn fine() -> Result<Verdict> {
    Ok(Verdict::Ok(String::new()))
}

/// A pass with a note.
pub(crate) fn fine_with(note: impl Into<String>) -> Result<Verdict> {
    Ok(Verdict::Ok(note.into()))
}

/// Runs the one scenario that the arguments name.
pub(crate) fn run(args: &Args) -> ExitCode {
    let scenario = scenarios::ALL.iter().find(|s| args.only.iter().any(|only| only == s.name));
    let (Some(scenario), Some(&transport)) = (scenario, args.transports.first()) else {
        println!("verdict fail no such scenario");
        return ExitCode::FAILURE;
    };
    let world = World { transport, profile: args.profile };
    let (word, text) = match (scenario.run)(&world) {
        Ok(Verdict::Ok(note)) => ("ok", note),
        Ok(Verdict::Skip(why)) => ("skip", why),
        Err(error) if is_too_late(&error) => ("again", format!("{error:#}")),
        Err(error) => ("fail", format!("{error:#}")),
    };
    println!("verdict {word} {}", text.replace('\n', " | "));
    // Exit without clean-up: a stopped or parked peer must not keep this process alive.
    std::process::exit(i32::from(word != "ok" && word != "skip"));
}

/// Whether a scenario came too late: the transfer that it meant to catch had not begun or was over,
/// because this process was not scheduled. Every scenario uses one of these two phrases for that,
/// and no other error may contain them.
fn is_too_late(error: &anyhow::Error) -> bool {
    let said = format!("{error:#}");
    said.contains(" was over before ") || said.contains(" in flight")
}

/// RDMA devices of this side and of its peers, from a variable such as `rxe0,rxe2/rxe1,rxe3`.
fn devices() -> (Option<String>, Option<String>) {
    let Ok(both) = std::env::var("CONFORMANCE_DEVICES") else { return (None, None) };
    match both.split_once('/') {
        Some((ours, theirs)) => (Some(ours.to_owned()), Some(theirs.to_owned())),
        None => (Some(both), None),
    }
}

pub(crate) struct World {
    pub(crate) transport: Transport,
    pub(crate) profile: Profile,
}

/// A local endpoint, a peer, and the session between them.
pub(crate) struct Pair {
    pub(crate) a: Endpoint,
    pub(crate) b: Remote,
    pub(crate) peer: Peer,
}

impl World {
    /// Logs the current step, so that the watchdog can report where a scenario hangs.
    pub(crate) fn step(&self, what: impl AsRef<str>) {
        eprintln!("- {}", what.as_ref());
    }

    pub(crate) fn options(&self) -> Options {
        let Profile { detect, fence, deadline, connect, .. } = self.profile;
        Options {
            pin: self.transport.pin(),
            data: self.transport.data(),
            bind: SocketAddr::from(([127, 0, 0, 1], 0)),
            interfaces: None,
            devices: devices().0,
            detect,
            fence,
            deadline,
            connect,
            lanes: 1,
            notify_bytes: 16 << 20,
        }
    }

    /// Settings for scenarios without faults: the deadline is far away.
    pub(crate) fn calm(&self) -> Options {
        Options { deadline: self.profile.limit, ..self.options() }
    }

    pub(crate) fn remote(&self, options: &Options) -> Result<Remote> {
        let devices = devices().1.or_else(|| options.devices.clone());
        Remote::start(self.transport, &Options { devices, ..options.clone() })
    }

    /// The kind of memory that a scenario uses on this transport.
    pub(crate) fn memory(&self) -> Memory {
        // The mapped path reaches only shareable memory. For the others private memory is the
        // harder case.
        if self.transport == Transport::LocalMap { Memory::Shareable } else { Memory::Private }
    }

    pub(crate) fn region(&self, endpoint: &Endpoint, len: u64) -> Result<Region> {
        Ok(match self.memory() {
            Memory::Shareable => endpoint.allocate(len as usize)?,
            Memory::Private => endpoint.register(vec![0u8; len as usize])?,
        })
    }

    pub(crate) fn pair(&self) -> Result<Pair> {
        self.pair_with(&self.options())
    }

    pub(crate) fn pair_with(&self, options: &Options) -> Result<Pair> {
        let a = options.build()?;
        let b = self.remote(options)?;
        let peer = self.connect(&a, &b)?;
        Ok(Pair { a, b, peer })
    }

    /// Connects and checks that the path is the one under test.
    pub(crate) fn connect(&self, a: &Endpoint, b: &Remote) -> Result<Peer> {
        let peer = a.connect(&b.metadata).context("connecting")?;
        let (kind, data) = (self.transport.kind(), self.transport.data());
        ensure!(peer.path().kind == kind, "the path is {}, not {kind}", peer.path());
        ensure!(peer.path().data == data, "the path is {}, its data is not {data}", peer.path());
        Ok(peer)
    }

    /// The longest time within which a transfer with this deadline must end.
    pub(crate) fn bound(&self, deadline: Duration) -> Duration {
        deadline + self.profile.fence + self.profile.slack
    }

    /// Waits for a transfer to end, which it must within its deadline, the fence time and some
    /// slack.
    pub(crate) fn ends(&self, transfer: &Transfer, deadline: Duration) -> Result<Ended> {
        let bound = self.bound(deadline);
        let ended = transfer.wait(bound);
        ended.with_context(|| format!("a transfer has not ended after {bound:?}"))
    }

    /// Waits for a cancelled transfer to end.
    pub(crate) fn ends_soon(&self, transfer: &Transfer) -> Result<Ended> {
        self.ends(transfer, Duration::ZERO)
    }

    /// Waits until an open fence has closed. It must close once the peer has resumed or died,
    /// because the memory is unusable until then. After the engine gives a remote peer up, it never
    /// hears from that peer again. The fence then stays open, which concerns only the peer's
    /// memory.
    pub(crate) fn closes(&self, peer: &Peer, transfer: &Transfer) -> Result<Duration> {
        let far = self.transport.is_tcp() || self.transport.is_device();
        if far && !peer.is_alive() {
            return Ok(Duration::ZERO);
        }
        let bound = self.profile.detect * 2 + self.profile.slack;
        let start = Instant::now();
        while transfer.poll().is_none_or(|ended| ended.fence == Fence::Open) {
            ensure!(
                start.elapsed() < bound,
                "a fence is still open {bound:?} after its peer resumed"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(start.elapsed())
    }

    /// Waits until bytes of a transfer have arrived, so that it is in flight. Returns false if it
    /// ended first.
    pub(crate) fn in_flight(&self, transfer: &Transfer) -> Result<bool> {
        let until = Instant::now() + self.profile.deadline;
        while transfer.stats().bytes_done == 0 {
            ensure!(Instant::now() < until, "no byte of a transfer arrived within its deadline");
            std::thread::yield_now();
        }
        let stats = transfer.stats();
        Ok(stats.bytes_done < stats.bytes_total)
    }
}

impl Pair {
    /// Memory of the peer, filled with the pattern of `seed` and imported here.
    pub(crate) fn theirs(
        &mut self,
        name: &str,
        len: u64,
        memory: Memory,
        seed: u64,
    ) -> Result<RemoteRegion> {
        self.b.region(name, len, memory)?;
        self.b.ask(&format!("fill {name} {seed}"))?;
        let descriptor = self.b.advertise(name, Access::READ_WRITE)?;
        Ok(self.peer.import(&descriptor)?)
    }

    /// Memory of ours with the pattern of 1, which the peer imports as `x`, and memory `r` of the
    /// peer with the pattern of 2.
    pub(crate) fn lend(&mut self, world: &World, len: u64) -> Result<Region> {
        let region = world.region(&self.a, len)?;
        memory::fill_all(&region, 1)?;
        self.b.import("x", &region.advertise(Access::READ_WRITE)?)?;
        self.b.region("r", len, world.memory())?;
        self.b.ask("fill r 2")?;
        Ok(region)
    }

    /// Waits until a session to the peer works after a fault, the old session or a new one.
    pub(crate) fn works_again(&mut self, world: &World) -> Result<()> {
        let until = Instant::now() + world.profile.slack + 2 * world.profile.detect;
        loop {
            match self.try_it(world) {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() >= until => {
                    return Err(error.context("the pair does not work again after the fault"));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    fn try_it(&mut self, world: &World) -> Result<()> {
        if !self.peer.is_alive() {
            self.peer = self.a.connect(&self.b.metadata)?;
        }
        let remote = self.theirs("again", 100_000, world.memory(), 1)?;
        let ours = world.region(&self.a, 100_000)?;
        peerway_testkit::memory::fill_all(&ours, 77)?;
        self.peer.write(&ours.all(), &remote.all())?;
        self.b.ask("check again 77 0 0 100000")?;
        ours.fill(0, 100_000, 0)?;
        self.peer.read(&ours.all(), &remote.all())?;
        peerway_testkit::memory::check(&ours, 77, 0, 0, 100_000)
    }
}

/// Fails unless the transfer ended for one of `reasons`, with a held fence if it is done.
pub(crate) fn allowed(ended: Ended, reasons: &[Reason]) -> Result<()> {
    ensure!(reasons.contains(&ended.reason), "a transfer ended as {ended:?}, not as {reasons:?}");
    if ended.reason == Reason::Done && ended.fence == Fence::Open {
        bail!("a transfer is done, but its fence is open");
    }
    Ok(())
}

pub(crate) const GONE: Reason = Reason::Failed(TransferError::PeerGone);
pub(crate) const SILENT: Reason = Reason::Failed(TransferError::PeerSilent);
pub(crate) const REVOKED: Reason = Reason::Failed(TransferError::Revoked);
