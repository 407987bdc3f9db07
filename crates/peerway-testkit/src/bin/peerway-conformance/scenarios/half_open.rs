//! Half-open connections make room for a new peer.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway_core::wire::Control;
use peerway_testkit::limits;
use peerway_testkit::random::Random;
use peerway_testkit::raw::{Raw, control, ready};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::options::Options;
use crate::remote::Remote;
use crate::world::{Transport, Verdict, World, fine_with};

/// Connections of the crowd. An endpoint keeps fewer half-open connections, and fewer in its
/// backlog.
const CROWD: usize = 1500;
/// Descriptors that this process needs: the crowd, and as many again where the victim runs in this
/// process.
const NEEDED: u64 = 4096;
/// The descriptor limit of a victim with few descriptors.
const FEW: u64 = 400;
/// Longer than the scenario takes, so that the victim drops no connection for its age.
const AGES: Duration = Duration::from_secs(600);
/// Longest wait for a new peer to be served.
const WATCHDOG: Duration = Duration::from_secs(30);

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let most = limits::raise_descriptors()?;
    if most < NEEDED {
        return Ok(Verdict::Skip(format!("{most} descriptors are allowed, {NEEDED} are needed")));
    }
    let mut random = Random::new(0xc0d);
    world.step("a crowd of silent connections");
    let (victim, _crowd) = crowded(world, &mut random, |_| Ok(()))?;
    is_served(world, &victim)?;

    world.step("a crowd that begins TLS");
    let hello = |raw: &mut Raw| {
        let bytes = raw.client_hello()?;
        // A connection that is not established yet cannot send, which is no error.
        let _ = raw.stream.write(&bytes);
        Ok(())
    };
    let (victim, crowd) = crowded(world, &mut random, hello)?;
    is_served(world, &victim)?;
    drop((victim, crowd));

    world.step("a crowd from another address does not displace a slow peer");
    let victim = world.remote(&patient(world))?;
    let mut slow = Raw::connect(victim.addr()?, &mut random)?;
    // Endpoints pinned to devices refuse the hello.
    let greeted = slow.greet().is_ok();
    let elsewhere = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
    let crowd = gather(&victim, elsewhere, &mut random, |_| Ok(()))?;
    is_served(world, &victim)?;
    if greeted {
        answers(&mut slow).context("the slow peer was disconnected")?;
    }
    drop((victim, crowd));

    if world.transport != Transport::SameProcess {
        world.step("a crowd from another address that would exhaust the descriptors");
        let mut victim = world.remote(&patient(world))?;
        victim.ask(&format!("descriptors {FEW}"))?;
        let crowd = gather(&victim, elsewhere, &mut random, |_| Ok(()))?;
        is_served(world, &victim)?;
        drop((victim, crowd));
    }
    if is_local(world.transport) {
        world.step("a crowd on the local socket");
        let victim = world.remote(&patient(world))?;
        let welcome = Raw::connect(victim.addr()?, &mut random)?.greet()?;
        let _crowd = gather_local(&welcome.local)?;
        is_served(world, &victim)?;
    }
    fine_with(format!("crowds of {CROWD}"))
}

fn is_local(transport: Transport) -> bool {
    matches!(transport, Transport::LocalMap | Transport::LocalCma | Transport::LocalRing)
}

/// Settings of a victim with a connect time-out that never expires in this scenario.
fn patient(world: &World) -> Options {
    Options { connect: AGES, ..world.options() }
}

/// A victim, and a crowd of connections to it that do nothing but `say`.
fn crowded(
    world: &World,
    random: &mut Random,
    say: impl Fn(&mut Raw) -> Result<()>,
) -> Result<(Remote, Vec<Raw>)> {
    let mut victim = world.remote(&patient(world))?;
    victim.ask("descriptors all")?;
    let crowd = gather(&victim, Ipv4Addr::LOCALHOST.into(), random, say)?;
    Ok((victim, crowd))
}

fn gather(
    victim: &Remote,
    from: IpAddr,
    random: &mut Random,
    say: impl Fn(&mut Raw) -> Result<()>,
) -> Result<Vec<Raw>> {
    let addr = victim.addr()?;
    let mut crowd = Vec::with_capacity(CROWD);
    for _ in 0..CROWD {
        let stream = knock(addr, from).context("opening a connection of the crowd")?;
        let mut raw = Raw::over(stream, random)?;
        say(&mut raw)?;
        crowd.push(raw);
    }
    Ok(crowd)
}

/// Starts a connection without waiting for it: a victim with few descriptors leaves it in the
/// backlog.
fn knock(to: SocketAddr, from: IpAddr) -> Result<TcpStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, flags, None)?;
    rustix::net::bind(&socket, &SocketAddr::new(from, 0))?;
    match rustix::net::connect(&socket, &to) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    let stream = TcpStream::from(socket);
    Ok(stream)
}

/// Opens a crowd of connections on the local socket. Its backlog is short, so the loop retries.
fn gather_local(name: &str) -> Result<Vec<OwnedFd>> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let until = Instant::now() + WATCHDOG;
    let mut crowd = Vec::with_capacity(CROWD);
    while crowd.len() < CROWD {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = rustix::net::socket_with(family, kind, flags, None)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => crowd.push(socket),
            Err(rustix::io::Errno::AGAIN) => {
                ensure!(Instant::now() < until, "the local socket accepts no more connections");
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(crowd)
}

/// Checks that a new peer can connect over the path under test.
fn is_served(world: &World, victim: &Remote) -> Result<()> {
    let a = Options { connect: WATCHDOG, ..world.options() }.build()?;
    let peer = world.connect(&a, victim).context("connecting a new peer beside the crowd")?;
    peer.notify(b"served")?.join().ok()?;
    Ok(())
}

/// Continues the handshake of a peer that has sent its hello.
fn answers(slow: &mut Raw) -> Result<()> {
    slow.send(&control(&Control::Ready(ready())))?;
    slow.stream.set_read_timeout(Some(WATCHDOG))?;
    slow.control().map(drop)
}
