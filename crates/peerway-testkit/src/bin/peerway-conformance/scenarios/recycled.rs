//! A peer dies while a copy to or from it is parked, and an unrelated process ("the stranger") gets
//! its process number.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use peerway::{Access, Batch, Direction};
use peerway_testkit::memory;

use crate::hooks;
use crate::world::{GONE, Verdict, World, fine};

/// The byte that fills the stranger's memory.
const STRANGE: u8 = 0x5A;
/// Sizes that this process copies itself, small and large.
const LENGTHS: [u64; 3] = [256, 16 << 10, 64 << 10];
/// The number of the process created last. The next process gets the following number.
const LAST_NUMBER: &str = "/proc/sys/kernel/ns_last_pid";

pub(crate) fn run(world: &World) -> Result<Verdict> {
    if std::fs::OpenOptions::new().write(true).open(LAST_NUMBER).is_err() {
        return Ok(Verdict::Skip(format!(
            "cannot choose process numbers: {LAST_NUMBER} is not writable"
        )));
    }
    for len in LENGTHS {
        for direction in [Direction::Write, Direction::Read] {
            copied_here(world, len, direction)
                .with_context(|| format!("{direction:?} of {len} bytes by this process"))?;
        }
    }
    pulled_here(world).context("a write by the dead peer, which this process pulls")?;
    fine()
}

/// The copy of this process is parked between the gate and the copy.
fn copied_here(world: &World, len: u64, direction: Direction) -> Result<()> {
    let mut pair = world.pair_with(&world.calm())?;
    let pid = pair.b.pid();
    let addr = pair.b.region("r", len, world.memory())?;
    pair.b.ask("fill r 1")?;
    let remote = pair.peer.import(&pair.b.advertise("r", Access::READ_WRITE)?)?;
    let ours = world.region(&pair.a, len)?;
    memory::fill_all(&ours, 2)?;
    let batch = match direction {
        Direction::Write => Batch::write(&ours.all(), &remote.all())?,
        Direction::Read => Batch::read(&ours.all(), &remote.all())?,
    };
    hooks::park_in(1);
    let (ended, stranger) = std::thread::scope(|scope| {
        let copy = scope.spawn(|| pair.peer.run(&batch));
        let stranger = wait_parked().and_then(|()| {
            pair.b.child()?.kill()?;
            Stranger::with_number(pid, addr, len as usize)
        });
        hooks::off();
        (copy.join(), stranger)
    });
    let ended = ended.map_err(|_| anyhow::anyhow!("the copy panicked"))??;
    let untouched = stranger?.is_untouched()?;
    ensure!(untouched, "the stranger's memory was overwritten, and the copy ended as {ended:?}");
    ensure!(ended.reason == GONE, "the peer was dead, yet the copy ended as {ended:?}");
    Ok(())
}

/// This process pulls the peer's write and is parked between the gate and the copy.
fn pulled_here(world: &World) -> Result<()> {
    let len = 4 << 20;
    let mut pair = world.pair_with(&world.calm())?;
    pair.b.accept()?;
    let pid = pair.b.pid();
    let region = world.region(&pair.a, len)?;
    pair.b.import("x", &region.advertise(Access::READ_WRITE)?)?;
    let addr = pair.b.region("r", len, world.memory())?;
    hooks::park_in(1);
    let stranger = pair
        .b
        .ask(&format!("post t p write r 0 x 0 {len} count=7"))
        .and_then(|_| wait_parked())
        .and_then(|()| pair.b.child()?.kill())
        .and_then(|()| Stranger::with_number(pid, addr, len as usize));
    hooks::off();
    let _stranger = stranger?;
    std::thread::sleep(world.profile.watch);
    ensure!(pair.a.counter(7) == 0, "bytes of the stranger were counted as the peer's write");
    Ok(())
}

fn wait_parked() -> Result<()> {
    let until = Instant::now() + Duration::from_secs(20);
    while !hooks::is_parked() {
        ensure!(Instant::now() < until, "no copy reached the parking hook");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// A process with a chosen process number and memory at a chosen address.
struct Stranger {
    pid: i32,
    orders: std::fs::File,
    answers: std::fs::File,
}

impl Stranger {
    /// Forks until a child gets the number `pid`.
    fn with_number(pid: u32, addr: u64, len: usize) -> Result<Self> {
        let until = Instant::now() + Duration::from_secs(20);
        while Instant::now() < until {
            std::fs::write(LAST_NUMBER, (pid - 1).to_string()).context(LAST_NUMBER)?;
            let stranger = Self::fork(addr, len)?;
            if stranger.pid as u32 == pid {
                ensure!(stranger.answer()? == b'r', "the stranger could not map its memory");
                return Ok(stranger);
            }
            // Another process took the number in between; try again.
        }
        anyhow::bail!("no child got the number {pid} within 20 s")
    }

    fn fork(addr: u64, len: usize) -> Result<Self> {
        let (there, orders) = pipe()?;
        let (answers, here) = pipe()?;
        // SAFETY: the child makes only system calls and leaves by `_exit`.
        match unsafe { libc::fork() } {
            // SAFETY: this is the forked child, as `be_strange` requires.
            0 => unsafe { be_strange(addr, len, there.as_raw_fd(), here.as_raw_fd()) },
            -1 => Err(std::io::Error::last_os_error().into()),
            pid => Ok(Self { pid, orders, answers }),
        }
    }

    fn answer(&self) -> Result<u8> {
        let mut byte = [0];
        (&self.answers).read_exact(&mut byte).context("the stranger does not answer")?;
        Ok(byte[0])
    }

    /// Whether the stranger's memory is unchanged.
    fn is_untouched(&self) -> Result<bool> {
        (&self.orders).write_all(b"?")?;
        Ok(self.answer()? == b'y')
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        // SAFETY: `self.pid` is the child that `fork` created. It is not reaped yet, so the number
        // is still its own.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

/// The child: maps memory around `addr`, reports that, and on request reports whether the memory
/// changed.
///
/// # Safety
///
/// Call it only in a forked child: it replaces the mappings at `addr` and never returns.
unsafe fn be_strange(addr: u64, len: usize, orders: i32, answers: i32) -> ! {
    let page = 4096;
    let start = addr as usize & !(page - 1);
    let whole = (addr as usize + len - start).next_multiple_of(page);
    // SAFETY: the caller guarantees a forked child, so the parent's memory is safe. The address
    // comes from another process's heap and normally misses this child's stack and code. A child
    // that hits them dies and the test fails.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let wanted = start as *mut libc::c_void;
        let got = libc::mmap(wanted, whole, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        // The parent may have mapped part of this range. MAP_FIXED then replaces it, in the child
        // alone.
        let memory = std::slice::from_raw_parts_mut(addr as *mut u8, len);
        if got == libc::MAP_FAILED {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            libc::mmap(wanted, whole, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        }
        memory.fill(STRANGE);
        let mut byte = 0u8;
        libc::write(answers, b"r".as_ptr().cast(), 1);
        while libc::read(orders, (&raw mut byte).cast(), 1) == 1 {
            let same = memory.iter().all(|byte| *byte == STRANGE);
            libc::write(answers, if same { b"y" } else { b"n" }.as_ptr().cast(), 1);
        }
        libc::_exit(0)
    }
}

fn pipe() -> Result<(std::fs::File, std::fs::File)> {
    let mut fds = [0; 2];
    // SAFETY: the call fills the array with two new descriptors. The files take ownership of them.
    unsafe {
        ensure!(libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) == 0, "no pipe");
        Ok((std::fs::File::from_raw_fd(fds[0]), std::fs::File::from_raw_fd(fds[1])))
    }
}
