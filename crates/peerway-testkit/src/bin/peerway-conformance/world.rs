//! Where a scenario takes place: the transport, the profile, endpoints and peers made to fit.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use peerway::{
    Access, Ended, Endpoint, Fence, PathKind, Peer, Pin, Reason, Region, RemoteRegion, Transfer,
    TransferError,
};

use crate::args::Args;
use crate::options::Options;
use crate::profile::Profile;
use crate::remote::{Memory, Remote};
use crate::scenarios;

/// A path to be tested.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Transport {
    SameProcess,
    LocalMap,
    LocalCma,
    LocalRing,
    Tcp,
    Verbs,
    Efa,
}

impl Transport {
    /// Those that need no device.
    pub(crate) const ANYWHERE: [Self; 5] =
        [Self::SameProcess, Self::LocalMap, Self::LocalCma, Self::LocalRing, Self::Tcp];
    pub(crate) const ALL: [Self; 7] = [
        Self::SameProcess,
        Self::LocalMap,
        Self::LocalCma,
        Self::LocalRing,
        Self::Tcp,
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
            Self::Tcp => Pin::Tcp,
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
            Self::Tcp => PathKind::Tcp,
            Self::Verbs => PathKind::Verbs,
            Self::Efa => PathKind::Efa,
        }
    }

    /// Whether RDMA devices carry it out. They need no peer's processor, but its word that it lives:
    /// a peer that stands still is reached until it is given up.
    pub(crate) fn is_device(self) -> bool {
        matches!(self, Self::Verbs | Self::Efa)
    }

    /// Whether a write is carried out without the target's processor.
    pub(crate) fn writes_alone(self) -> bool {
        matches!(self, Self::SameProcess | Self::LocalMap)
    }

    /// Whether payload travels in frames, which land piece by piece.
    pub(crate) fn is_framed(self) -> bool {
        matches!(self, Self::LocalRing | Self::Tcp)
    }

    /// Whether a read is.
    pub(crate) fn reads_alone(self) -> bool {
        matches!(self, Self::SameProcess | Self::LocalMap | Self::LocalCma)
    }
}

/// What a scenario says of itself when nothing failed.
pub(crate) enum Verdict {
    Ok(String),
    Skip(String),
}

/// The plain good end.
pub(crate) fn fine() -> Result<Verdict> {
    Ok(Verdict::Ok(String::new()))
}

/// The good end with something to tell.
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
    // Peers that a scenario left stopped or parked must not keep the process from ending.
    std::process::exit(i32::from(word != "ok" && word != "skip"));
}

/// Whether a scenario could not do what it is about, because the transfer that it meant to catch had not begun or was
/// over: this process was not let run in between. All scenarios say so in these words.
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

/// An endpoint here, a peer elsewhere, and the session between the two.
pub(crate) struct Pair {
    pub(crate) a: Endpoint,
    pub(crate) b: Remote,
    pub(crate) peer: Peer,
}

impl World {
    /// Says what is being done, for whoever finds the scenario hanging.
    pub(crate) fn step(&self, what: impl AsRef<str>) {
        eprintln!("- {}", what.as_ref());
    }

    pub(crate) fn options(&self) -> Options {
        let Profile { detect, fence, deadline, connect, .. } = self.profile;
        Options {
            pin: self.transport.pin(),
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

    /// Settings for scenarios that fault nothing: deadlines far away.
    pub(crate) fn calm(&self) -> Options {
        Options { deadline: self.profile.limit, ..self.options() }
    }

    pub(crate) fn remote(&self, options: &Options) -> Result<Remote> {
        let devices = devices().1.or_else(|| options.devices.clone());
        Remote::start(self.transport, &Options { devices, ..options.clone() })
    }

    /// Memory that this transport can reach best.
    pub(crate) fn memory(&self) -> Memory {
        // The mapped path has no other; for the rest private memory is the harder case.
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
        let kind = self.transport.kind();
        ensure!(peer.path().kind == kind, "the path is {}, not {kind}", peer.path());
        Ok(peer)
    }

    /// The longest a transfer may take to end once it has this deadline.
    pub(crate) fn bound(&self, deadline: Duration) -> Duration {
        deadline + self.profile.fence + self.profile.slack
    }

    /// Waits for a transfer to end, which it must within its deadline, the fence and some slack.
    pub(crate) fn ends(&self, transfer: &Transfer, deadline: Duration) -> Result<Ended> {
        let bound = self.bound(deadline);
        let ended = transfer.wait(bound);
        ended.with_context(|| format!("a transfer has not ended after {bound:?}"))
    }

    /// Waits for a cancelled transfer.
    pub(crate) fn ends_soon(&self, transfer: &Transfer) -> Result<Ended> {
        self.ends(transfer, Duration::ZERO)
    }

    /// Waits until an open fence has closed, which it must once the peer has gone on or died: until
    /// then memory is lost to us. Of a far peer that was given up nobody hears again; there the
    /// fence stays open, and only the peer's memory is concerned.
    pub(crate) fn closes(&self, peer: &Peer, transfer: &Transfer) -> Result<Duration> {
        let far = self.transport == Transport::Tcp || self.transport.is_device();
        if far && !peer.is_alive() {
            return Ok(Duration::ZERO);
        }
        let bound = self.profile.detect * 2 + self.profile.slack;
        let start = Instant::now();
        while transfer.poll().is_none_or(|ended| ended.fence == Fence::Open) {
            ensure!(
                start.elapsed() < bound,
                "a fence is still open {bound:?} after its peer went on"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(start.elapsed())
    }

    /// Waits until bytes of a transfer have arrived, so that it is in flight; true unless it ended
    /// first.
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
    /// Memory of the peer's, filled with the pattern of `seed`, as seen from here.
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

    /// Whether a session to the peer works, the old one or a new one: after a fault has passed.
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

/// Fails unless the end is one of those that a peer's misfortune may cause.
pub(crate) fn allowed(ended: Ended, reasons: &[Reason]) -> Result<()> {
    ensure!(reasons.contains(&ended.reason), "a transfer ended as {ended:?}, not as {reasons:?}");
    if ended.reason == Reason::Done && ended.fence == Fence::Open {
        bail!("done, with an open fence");
    }
    Ok(())
}

pub(crate) const GONE: Reason = Reason::Failed(TransferError::PeerGone);
pub(crate) const SILENT: Reason = Reason::Failed(TransferError::PeerSilent);
pub(crate) const REVOKED: Reason = Reason::Failed(TransferError::Revoked);
