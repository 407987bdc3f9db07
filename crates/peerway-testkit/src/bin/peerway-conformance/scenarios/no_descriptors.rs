//! A process without free file descriptors: its listeners pause, and recover by themselves.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway_testkit::procfs;
use peerway_testkit::random::Random;
use peerway_testkit::raw::Raw;

use crate::world::{Verdict, World, fine_with};

/// How long the scenario measures the processor time of the process without descriptors.
const WINDOW: Duration = Duration::from_secs(3);
/// Longest wait for the listeners to recover.
const WATCHDOG: Duration = Duration::from_secs(30);

pub(crate) fn run(world: &World) -> Result<Verdict> {
    let mut b = world.remote(&world.options())?;
    let addr = b.addr()?;
    let mut random = Random::new(0xfd);
    // Endpoints pinned to the network offer no local socket, or refuse a hello.
    let greeted = Raw::connect(addr, &mut random)?.greet();
    let local = greeted.map(|welcome| welcome.local).unwrap_or_default();

    world.step("connections wait because the peer has no free descriptors");
    b.ask("descriptors 0")?;
    let mut waiting = Raw::connect(addr, &mut random)?;
    let waiting_local = if local.is_empty() { None } else { Some(knock(&local)?) };
    let (before, start) = (procfs::ticks(b.pid())?, Instant::now());
    std::thread::sleep(WINDOW);
    let used = Duration::from_millis(10 * (procfs::ticks(b.pid())? - before));
    let window = start.elapsed();
    ensure!(used < window / 3, "without descriptors the peer used {used:?} of {window:?}");

    world.step("descriptors are free again");
    b.ask("descriptors all")?;
    waiting.stream.set_read_timeout(Some(WATCHDOG))?;
    waiting.secure().context("the waiting connection was not served")?;
    if let Some(socket) = waiting_local {
        // The socket sent no attach, so the peer serves it by closing the connection.
        ensure!(hangs_up(&socket)?, "the waiting local connection was not served");
    }
    drop(waiting);
    let a = world.options().build()?;
    let peer = world.connect(&a, &b).context("connecting afterwards")?;
    peer.notify(b"served")?.join().ok()?;
    fine_with(format!("{used:?} of processor time in {window:?}"))
}

/// Connects to the local socket and sends an invalid packet.
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
