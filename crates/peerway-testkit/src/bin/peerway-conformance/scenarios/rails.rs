//! Peers in network namespaces that are joined only by virtual links.

use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use peerway::{Access, Batch, ConnectError, Endpoint, PathKind, Peer, Pin, Reason};
use peerway_testkit::cables::{Cables, End};
use peerway_testkit::{hex, memory};

use crate::options::Options;
use crate::remote::{Memory, Remote};
use crate::world::{Verdict, World, allowed, fine_with};

/// Links between the two namespaces.
const LINKS: u8 = 2;
/// Rate of a link: far below what a processor can send, so that a transfer needs both links.
const RATE: &str = "2gbit";
/// Delay of every landing at the peer, so that a transfer lasts until a link is down.
const SLOW_US: u64 = 1000;

/// Two processes of one host that share only a network link. Local paths start with a socket that
/// belongs to the network namespace. The engine therefore uses TCP, and the path says why.
pub(crate) fn netns(world: &World) -> Result<Verdict> {
    let (_cables, mut b) = match cabled() {
        Ok(both) => both,
        Err(why) => return Ok(Verdict::Skip(format!("{why:#}"))),
    };
    let mut notes = Vec::new();
    for pin in [Pin::Auto, Pin::Tcp, Pin::Local, Pin::LocalRing] {
        world.step(pin.to_string());
        let at =
            |end: End| Options { pin, bind: SocketAddr::new(end.addr(0), 0), ..world.options() };
        let a = at(End::Near).build()?;
        b.endpoint(&at(End::Far))?;
        let peer = match a.connect(&b.metadata) {
            Ok(peer) => peer,
            Err(ConnectError::PathUnavailable { why, .. }) if pin.is_local() => {
                ensure!(
                    why.contains("network namespace"),
                    "the error does not name the network namespace: {why}"
                );
                notes.push(format!("{pin}: refused"));
                continue;
            }
            Err(other) => bail!("{pin}: {other:?}"),
        };
        let path = peer.path();
        ensure!(!pin.is_local(), "connected over {path}, though the endpoint is pinned to {pin}");
        ensure!(
            path.kind == PathKind::Tcp,
            "the path to another network namespace is {path}, not TCP"
        );
        let reason = if pin == Pin::Auto { "network namespace" } else { "pinned" };
        ensure!(path.why.contains(reason), "the path does not say why: {path}");
        b.accept()?;
        let theirs = b.ask("path p")?;
        ensure!(theirs.contains(reason), "the peer's path does not say why: {theirs}");
        for memory in [Memory::Shareable, Memory::Private] {
            there_and_back(world, &a, &peer, &mut b, memory)?;
        }
        peer.notify(b"hello")?.join().ok()?;
        ensure!(b.ask("notification e 5000")? == hex::encode(b"hello"), "no notification");
        notes.push(path.to_string());
    }
    fine_with(notes.join("; "))
}

/// Several interfaces form several rails. Each rail carries a share, and a transfer survives the
/// loss of one.
pub(crate) fn run(world: &World) -> Result<Verdict> {
    let (cables, mut b) = match cabled() {
        Ok(both) => both,
        Err(why) => return Ok(Verdict::Skip(format!("{why:#}"))),
    };
    // A peer that lands slowly on a busy machine must not count as silent. This scenario loses
    // links, not peers.
    let on = |end: End| Options {
        interfaces: Some(end.name().into()),
        lanes: LINKS.into(),
        detect: world.profile.detect * 2,
        deadline: world.profile.deadline * 2,
        ..world.options()
    };
    let a = on(End::Near).build()?;
    b.endpoint(&on(End::Far))?;
    // If the links cannot be slowed down, the receiving processor limits the rate, and the kernel
    // decides which socket gets most of it. One uneven try is then chance; three are not.
    let (tries, links) = match cables.slow_down(LINKS, RATE) {
        Ok(()) => (1, format!("links of {RATE}")),
        Err(why) => (3, format!("links at full speed ({why:#})")),
    };
    let mut rails = Rails { world, cables, tries, a, b };
    let mut notes = vec![links, rails.shared()?];
    // The first connection, which also carries control, uses link 0. A link that is down at the
    // near end raises an error here. A link that is down at the far end is only silent.
    for (end, at) in [(End::Near, 1), (End::Near, 0), (End::Far, 1), (End::Far, 0)] {
        world.step(format!("{}{at} goes down", end.name()));
        let note = rails.cut(end, at).with_context(|| format!("{}{at} down", end.name()))?;
        notes.push(format!("{}{at}: {note}", end.name()));
    }
    fine_with(notes.join("; "))
}

struct Rails<'a> {
    world: &'a World,
    cables: Cables,
    tries: u32,
    a: Endpoint,
    b: Remote,
}

impl Rails<'_> {
    /// Checks that a write and a read use both links.
    fn shared(&mut self) -> Result<String> {
        let mut tries = self.tries;
        loop {
            tries -= 1;
            match self.share() {
                Err(error) if tries > 0 && error.is::<Uneven>() => {}
                result => return result,
            }
        }
    }

    fn share(&mut self) -> Result<String> {
        let len = self.world.profile.big;
        let peer = self.a.connect(&self.b.metadata)?;
        ensure!(peer.path().kind == PathKind::Tcp, "the path is {}", peer.path());
        self.b.region("r", len, Memory::Private)?;
        let remote = peer.import(&self.b.advertise("r", Access::READ_WRITE)?)?;
        let ours = self.a.register(vec![0u8; len as usize])?;
        memory::fill_all(&ours, 5)?;
        let before = self.sent(End::Near)?;
        peer.write(&ours.all(), &remote.all())?;
        let out = self.shares("write", End::Near, before, len)?;
        self.b.ask(&format!("check r 5 0 0 {len}"))?;
        ours.fill(0, len, 0)?;
        let before = self.sent(End::Far)?;
        peer.read(&ours.all(), &remote.all())?;
        let back = self.shares("read", End::Far, before, len)?;
        memory::check(&ours, 5, 0, 0, len)?;
        Ok(format!("shares {out} of a write, {back} of a read"))
    }

    fn sent(&self, end: End) -> Result<Vec<u64>> {
        (0..LINKS).map(|at| self.cables.sent(end, at)).collect()
    }

    /// The share of `len` bytes that each link has carried since `before`. Each share must exceed a
    /// quarter.
    fn shares(&self, what: &str, end: End, before: Vec<u64>, len: u64) -> Result<String> {
        let mut words = Vec::new();
        for (at, (before, now)) in before.into_iter().zip(self.sent(end)?).enumerate() {
            let percent = (now - before) * 100 / len;
            if percent <= 25 {
                bail!(Uneven(format!("link {at} carried {percent} % of a {what} of {len} bytes")));
            }
            words.push(format!("{percent} %"));
        }
        Ok(words.join(" + "))
    }

    /// A link goes down under a write and a read. Both must complete, and later transfers use the
    /// other link.
    fn cut(&mut self, end: End, at: u8) -> Result<String> {
        let len = self.world.profile.big;
        let peer = self.a.connect(&self.b.metadata)?;
        self.b.region("w", len, Memory::Private)?;
        self.b.region("r", len, Memory::Private)?;
        self.b.ask("fill r 6")?;
        let there = peer.import(&self.b.advertise("w", Access::READ_WRITE)?)?;
        let source = peer.import(&self.b.advertise("r", Access::READ)?)?;
        let (ours, back) =
            (self.a.register(vec![0u8; len as usize])?, self.a.register(vec![0u8; len as usize])?);
        memory::fill_all(&ours, 7)?;
        self.b.ask(&format!("hook slow {SLOW_US}"))?;
        let write = peer.post(&Batch::write(&ours.all(), &there.all())?)?;
        ensure!(self.world.in_flight(&write)?, "the write was over before the link went down");
        let read = peer.post(&Batch::read(&back.all(), &source.all())?)?;
        self.cables.unplug(end, at)?;
        let start = Instant::now();
        // The other link keeps a lane alive, and the lost lanes' work moves to it.
        let written = self.world.ends(&write, self.world.profile.deadline * 2)?;
        allowed(written, &[Reason::Done]).context("the write")?;
        let was_read = self.world.ends(&read, self.world.profile.deadline * 2)?;
        allowed(was_read, &[Reason::Done]).context("the read")?;
        let took = start.elapsed();
        self.b.ask("hook off")?;
        self.b.ask(&format!("check w 7 0 0 {len}"))?;
        memory::check(&back, 6, 0, 0, len)?;
        self.world.step("the session continues over the other link, or a new one does");
        self.by_the_other(at, false)?;
        self.world.step("a new session while the link is down");
        self.by_the_other(at, true)?;
        self.world.step("plugged in again");
        self.cables.plug_in(end, at)?;
        self.anew();
        let shares = self.shared()?;
        Ok(format!("done after {} ms, then {shares}", took.as_millis()))
    }

    /// Checks that transfers work while link `down` is down, over the other link.
    fn by_the_other(&mut self, down: u8, anew: bool) -> Result<()> {
        if anew {
            self.anew();
        }
        let peer = self.a.connect(&self.b.metadata).context("connecting over the other link")?;
        let other = 1 - down;
        let before = self.cables.sent(End::Near, other)?;
        there_and_back(self.world, &self.a, &peer, &mut self.b, Memory::Private)?;
        let carried = self.cables.sent(End::Near, other)? - before;
        ensure!(carried > BYTES, "only {carried} bytes went over the other link");
        let gone = format!("no lane from {}", End::Near.addr(down));
        ensure!(
            !anew || peer.path().why.contains(&gone),
            "the path does not name the lost link: {}",
            peer.path()
        );
        Ok(())
    }

    /// Ends the session, so that the next connect opens a new one.
    fn anew(&self) {
        for peer in self.a.peers() {
            peer.remove();
        }
    }
}

/// A link carried too small a share of a transfer.
#[derive(Debug)]
struct Uneven(String);

impl std::fmt::Display for Uneven {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Uneven {}

/// Bytes of a transfer that only has to work.
const BYTES: u64 = 3 << 20;

fn there_and_back(
    world: &World,
    a: &Endpoint,
    peer: &Peer,
    b: &mut Remote,
    memory: Memory,
) -> Result<()> {
    b.region("tb", BYTES, memory)?;
    let remote = peer.import(&b.advertise("tb", Access::READ_WRITE)?)?;
    let ours = world.region(a, BYTES)?;
    memory::fill_all(&ours, 8)?;
    peer.write(&ours.all(), &remote.all()).context("write")?;
    b.ask(&format!("check tb 8 0 0 {BYTES}"))?;
    ours.fill(0, BYTES, 0)?;
    peer.read(&ours.all(), &remote.all()).context("read")?;
    memory::check(&ours, 8, 0, 0, BYTES)
}

/// Moves this process to its own network namespace, starts a peer in another, and joins the two by
/// links.
fn cabled() -> Result<(Cables, Remote)> {
    Cables::leave()?;
    let b = Remote::apart("net")?;
    let cables = Cables::join(b.pid(), LINKS)?;
    Ok((cables, b))
}
