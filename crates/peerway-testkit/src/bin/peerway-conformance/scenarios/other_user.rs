//! A process of another user holds connections to the local socket. They must take no place.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway_testkit::random::Random;
use peerway_testkit::raw::Raw;
use rustix::net::{RecvFlags, SocketAddrUnix};
use rustix::process::{Resource, getrlimit};

use crate::options::Options;
use crate::world::{Verdict, World, fine_with};

/// More connections than the acceptor has places for. Each must be closed, so fewer test as well.
const MANY: u64 = 1_100;
/// Descriptors that this process needs for other purposes.
const OTHERS: u64 = 100;
/// The user that every Linux has for those without rights.
const NOBODY: libc::uid_t = 65_534;

pub(crate) fn run(world: &World) -> Result<Verdict> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Verdict::Skip("only root can become another user".into()));
    }
    // A place that is taken stays taken for the whole scenario.
    // At most what the setting allows.
    let patience = (10 * world.profile.limit).min(Duration::from_secs(3600));
    let options = Options { connect: patience, ..world.options() };
    let b = world.remote(&options)?;
    let mut random = Random::new(0x07e4);
    let name = Raw::connect(b.addr()?, &mut random)?.greet()?.local;
    ensure!(!name.is_empty(), "the victim offers no local socket");
    world.step("another user connects");
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let many = MANY.min(allowed.saturating_sub(OTHERS)).max(1);
    let stranger = std::thread::spawn(move || -> Result<Vec<OwnedFd>> {
        become_nobody()?;
        (0..many).map(|_| connect(&name)).collect()
    });
    let held = stranger.join().ok().context("the stranger panicked")??;
    world.step("the victim closes the connections");
    let until = Instant::now() + world.profile.limit / 2;
    for (at, socket) in held.iter().enumerate() {
        while !is_closed(socket)? {
            ensure!(Instant::now() < until, "connection {at} of another user keeps its place");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    world.step("a peer of the same user gets the local path");
    let a = world.options().build()?;
    let peer = world.connect(&a, &b)?;
    peer.notify(b"local")?.join().ok()?;
    fine_with(format!("{many} connections"))
}

/// Gives this thread, and no other, the user `nobody`.
fn become_nobody() -> Result<()> {
    // SAFETY: the call takes three numbers. The libc wrapper would change all threads.
    let rc = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
    ensure!(rc == 0, "cannot become another user: {}", std::io::Error::last_os_error());
    Ok(())
}

fn connect(name: &str) -> Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketType};
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    Ok(socket)
}

/// Whether the other side has closed the connection.
fn is_closed(socket: &OwnedFd) -> Result<bool> {
    let mut byte = [0; 1];
    match rustix::net::recv(socket, &mut byte[..], RecvFlags::DONTWAIT) {
        Ok((0, _)) | Err(rustix::io::Errno::CONNRESET) => Ok(true),
        Ok(_) => anyhow::bail!("the victim sent something to another user"),
        Err(rustix::io::Errno::AGAIN) => Ok(false),
        Err(error) => Err(error).context("receiving from the victim"),
    }
}
