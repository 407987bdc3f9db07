//! A process without free file descriptors: its listeners rest, and recover by themselves.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway_testkit::procfs;
use peerway_testkit::random::Random;
use peerway_testkit::raw::{Raw, control};

use crate::world::{Verdict, World, fine_with};

/// How long the processor time of the starved process is watched.
const WINDOW: Duration = Duration::from_secs(3);
/// Longest wait for the listeners to recover.
const WATCHDOG: Duration = Duration::from_secs(30);

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut b = world.remote(&world.options())?;
    let addr = b.addr()?;
    let mut random = Random::new(0xfd);
    // Endpoints that are pinned to the network name no local socket, or refuse a hello.
    let greeted = Raw::connect(addr, &mut random)?.greet();
    let local = greeted.map(|welcome| welcome.local).unwrap_or_default();

    world.step("connections wait that the peer has no descriptors for");
    b.ask("descriptors 0")?;
    let mut waiting = Raw::connect(addr, &mut random)?;
    let hello = waiting.hello();
    waiting.send(&control(&hello))?;
    let waiting_local = if local.is_empty() { None } else { Some(knock(&local)?) };
    let (before, start) = (procfs::ticks(b.pid())?, Instant::now());
    std::thread::sleep(WINDOW);
    let used = Duration::from_millis(10 * (procfs::ticks(b.pid())? - before));
    let window = start.elapsed();
    ensure!(used < window / 3, "without descriptors the peer used {used:?} of {window:?}");

    world.step("descriptors are free again");
    b.ask("descriptors all")?;
    waiting.stream.set_read_timeout(Some(WATCHDOG))?;
    let answer = waiting.control().context("the connection that waited was not served")?;
    if let Some(socket) = waiting_local {
        // It sent no attach, so being served is being hung up on.
        ensure!(hangs_up(&socket)?, "the local connection that waited was not served");
    }
    drop((waiting, answer));
    let a = world.options().build()?;
    let peer = world.connect(&a, &b).context("connecting afterwards")?;
    peer.notify(b"served")?.join().ok()?;
    fine_with(format!("{used:?} of processor time in {window:?}"))
}

/// A connection to the local socket, with a packet that means nothing.
fn knock(name: &str) -> Result<OwnedFd> {
    use rustix::net::{
        AddressFamily, SendFlags, SocketAddrUnix, SocketType, connect, send, socket,
    };
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    send(&socket, b"nothing", SendFlags::NOSIGNAL)?;
    Ok(socket)
}

fn hangs_up(socket: &OwnedFd) -> Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let patience = Timespec { tv_sec: WATCHDOG.as_secs() as i64, tv_nsec: 0 };
    let mut ready = [PollFd::new(socket, PollFlags::RDHUP)];
    Ok(poll(&mut ready, Some(&patience))? > 0)
}
