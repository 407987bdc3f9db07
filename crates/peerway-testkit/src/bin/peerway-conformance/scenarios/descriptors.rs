//! A process without free file descriptors.

use anyhow::{Context, Result, bail, ensure};
use peerway::{Access, Batch, Fence, Pin, Reason};
use peerway_testkit::{memory, procfs};

use crate::options::Options;
use crate::remote::Memory;
use crate::world::{Verdict, World, fine};

/// The process cannot receive the descriptor that an import brings. The import fails; the session
/// survives.
///
/// Meanwhile the peer slowly pulls a write. If the engine took the truncated message for the peer's
/// goodbye, that write would end as fenced while the peer still copies.
pub(crate) fn cut_message(world: &World) -> Result<Verdict> {
    let deadline = world.profile.limit;
    let options = Options { pin: Pin::Auto, deadline, ..world.options() };
    let a = options.build()?;
    let mut b = world.remote(&options)?;
    let peer = a.connect(&b.metadata)?;
    let len = world.profile.big / 2;
    let addr = b.region("r", len, Memory::Private)?;
    b.ask("fill r 1")?;
    let remote = peer.import(&b.advertise("r", Access::READ_WRITE)?)?;
    let ours = a.register(vec![0u8; len as usize])?;
    memory::fill_all(&ours, 2)?;
    b.region("s", 4096, Memory::Shareable)?;
    let shared = b.advertise("s", Access::READ_WRITE)?;

    b.ask("hook slow 10000")?;
    let transfer = peer.post(&Batch::write(&ours.all(), &remote.all())?)?;
    ensure!(world.in_flight(&transfer)?, "the write was over before the import");
    let limits = no_more_descriptors()?;
    let imported = peer.import(&shared);
    let early = transfer.poll();
    limits.restore()?;
    let Err(error) = imported else { bail!("an import succeeded without a descriptor") };
    world.step(format!("the import failed: {error}"));
    ensure!(error.to_string().contains("descriptor"), "the error does not say why: {error}");
    if let Some(ended) = early {
        let read = || procfs::memory_of(b.pid(), addr, len as usize);
        let before = read()?;
        std::thread::sleep(world.profile.watch);
        let late = before.iter().zip(&read()?).filter(|(a, b)| a != b).count();
        ensure!(ended.fence == Fence::Open || late == 0, "{ended:?}, then {late} bytes changed");
    }
    ensure!(peer.is_alive(), "the session did not survive");
    b.ask("hook off")?;
    let ended = world.ends(&transfer, deadline)?;
    ensure!(ended.reason == Reason::Done, "the write ended as {ended:?}");
    b.ask(&format!("check r 2 0 0 {len}"))?;
    peer.import(&shared).context("importing again, with descriptors left")?;
    fine()
}

/// The saved limits of this process.
struct Limits(libc::rlimit);

/// Lowers the limit of this process until it can open no file descriptor.
fn no_more_descriptors() -> Result<Limits> {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limits` is a valid rlimit that outlives the call, which fills it.
    let got = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limits) };
    ensure!(got == 0, "getrlimit: {}", std::io::Error::last_os_error());
    let saved = Limits(limits);
    saved.set(0)?;
    ensure!(std::fs::File::open("/dev/null").is_err(), "a descriptor could still be opened");
    Ok(saved)
}

impl Limits {
    fn restore(self) -> Result<()> {
        self.set(self.0.rlim_cur)
    }

    fn set(&self, to: u64) -> Result<()> {
        let lower = libc::rlimit { rlim_cur: to, ..self.0 };
        // SAFETY: `lower` is a valid rlimit that outlives the call, which only reads it.
        let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const lower) };
        ensure!(set == 0, "setrlimit: {}", std::io::Error::last_os_error());
        Ok(())
    }
}
