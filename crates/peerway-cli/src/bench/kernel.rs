//! What bounds the CMA path: the kernel's own copy between processes, here `process_vm_readv`.
//!
//! It stores through the caches and pins pages as it goes, so it stays well under the plain copies that
//! are the limit of every local path. Measured in the same rounds, it tells how much of the distance to
//! the limit is the kernel's and how much is ours. Quanta are taken in turn by two threads, as the path
//! does, and by one: where others use the machine, waiting for the second thread can cost more than it
//! brings. The better of the two counts.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::Duration;

use super::clock::Stopwatch;
use super::copies::{Mate, Work};
use super::measure::{Limit, Times, timed};

/// Rows shorter than this are bounded by messages and system calls rather than by the copy.
pub(crate) const FROM: u64 = 1 << 20;

/// What a thread takes at a time: the quantum of the path itself.
const QUANTUM: usize = 512 << 10;

/// Memory of another process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Theirs {
    pub(crate) pid: u32,
    pub(crate) addr: u64,
}

impl Theirs {
    /// Its first bytes; an error where the kernel does not let us, or the process has another number here.
    pub(crate) fn first(self, bytes: &mut [u8]) -> io::Result<()> {
        // SAFETY: the target is a slice that we hold alone.
        unsafe { self.read(0, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Reads `len` bytes from `offset` on.
    ///
    /// # Safety
    ///
    /// `target` must be writable for `len` bytes that nobody else uses meanwhile.
    unsafe fn read(self, offset: usize, target: *mut u8, len: usize) -> io::Result<()> {
        let pid = libc::pid_t::try_from(self.pid).map_err(io::Error::other)?;
        let mut done = 0;
        while done < len {
            let source = self.addr as usize + offset + done;
            let remote = libc::iovec { iov_base: source as *mut _, iov_len: len - done };
            let here = target.wrapping_add(done).cast();
            let local = libc::iovec { iov_base: here, iov_len: len - done };
            // SAFETY: the kernel writes only to the rest of the target, which the caller vouches for,
            // and checks the other process's addresses itself.
            match unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) } {
                moved @ 1.. => done += moved as usize,
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ => return Err(io::Error::last_os_error()),
            }
        }
        Ok(())
    }
}

/// A read of all bytes by however many threads come along.
struct Reading {
    theirs: Theirs,
    target: usize,
    len: usize,
    /// Where the next quantum starts.
    next: AtomicUsize,
    /// The last failure's number, or 0.
    failed: AtomicI32,
}

impl Work for Reading {
    fn part(&self, _: usize) {
        loop {
            // Which bytes are whose is all that is agreed here; they are handed over by the mate's counts.
            let start = self.next.fetch_add(QUANTUM, Ordering::Relaxed);
            let Some(left) = self.len.checked_sub(start).filter(|left| *left > 0) else { return };
            let target = std::ptr::with_exposed_provenance_mut(self.target + start);
            // SAFETY: `Kernel::new` was promised a target of that length that nobody else uses, and the
            // counter gives each quantum to one thread.
            if let Err(error) = unsafe { self.theirs.read(start, target, left.min(QUANTUM)) } {
                self.failed.store(error.raw_os_error().unwrap_or(libc::EIO), Ordering::Relaxed);
                return;
            }
        }
    }
}

/// The bound of one row.
pub(crate) struct Kernel<'a> {
    mate: Option<&'a Mate>,
    reading: Arc<Reading>,
    work: Arc<dyn Work>,
    /// By one thread, and by two.
    times: [Times; 2],
}

impl<'a> Kernel<'a> {
    /// Reads `len` bytes to `target`, also with the second thread if there is one.
    ///
    /// # Safety
    ///
    /// `target` must be the address, of exposed provenance, of `len` writable bytes that nobody else
    /// uses while a round lasts, until the value is dropped.
    pub(crate) unsafe fn new(
        mate: Option<&'a Mate>,
        theirs: Theirs,
        target: usize,
        len: usize,
    ) -> Self {
        let (next, failed) = (AtomicUsize::new(0), AtomicI32::new(0));
        let reading = Arc::new(Reading { theirs, target, len, next, failed });
        Self { mate, work: reading.clone(), reading, times: [Times::new(), Times::new()] }
    }
}

impl Limit for Kernel<'_> {
    fn round(&mut self, budget: Duration, watch: &Stopwatch) -> anyhow::Result<()> {
        let Self { mate, reading, work, times } = self;
        let [one, two] = times;
        for (times, mate) in [(one, None), (two, *mate)] {
            let awake = mate.map(|mate| mate.wake());
            timed(budget / 2, watch, 1, times, || {
                reading.next.store(0, Ordering::Relaxed);
                match &awake {
                    Some(awake) => awake.share(work),
                    None => work.part(0),
                }
                match reading.failed.load(Ordering::Relaxed) {
                    0 => Ok(()),
                    code => Err(io::Error::from_raw_os_error(code).into()),
                }
            })?;
        }
        Ok(())
    }

    fn gbps(&self) -> f64 {
        let [one, two] = &self.times;
        self.reading.len as f64 / one.p50().min(two.p50())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_read() {
        let mate = Mate::start();
        // Whole quanta, and one with a rest.
        for len in [QUANTUM, 2 * QUANTUM, 5 * QUANTUM + 77] {
            let source: Vec<u8> = (0..len).map(|i| (i * 7 % 251 + 1) as u8).collect();
            let mut target = vec![0u8; len];
            let theirs = Theirs { pid: std::process::id(), addr: source.as_ptr() as u64 };
            let to = target.as_mut_ptr().expose_provenance();
            // SAFETY: a vector of that length, which nobody touches until `kernel` is dropped.
            let mut kernel = unsafe { Kernel::new(mate.as_ref(), theirs, to, len) };
            kernel.round(Duration::from_micros(100), &Stopwatch::new()).unwrap();
            assert!(kernel.gbps() > 0.0);
            drop(kernel);
            assert!(target == source, "{len}");
            target.fill(0);
            // SAFETY: as above.
            let mut alone = unsafe { Kernel::new(None, theirs, to, len) };
            alone.round(Duration::from_micros(100), &Stopwatch::new()).unwrap();
            drop(alone);
            assert!(target == source, "{len}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_an_error() {
        let mut bytes = [0; 8];
        // Nothing is mapped in the first page; no pid is larger than 2^22.
        for theirs in [
            Theirs { pid: std::process::id(), addr: 8 },
            Theirs { pid: 5_000_000, addr: 4096 },
            Theirs { pid: u32::MAX, addr: 4096 },
        ] {
            assert!(theirs.first(&mut bytes).is_err(), "{theirs:?}");
        }
        let mate = Mate::start();
        let theirs = Theirs { pid: std::process::id(), addr: 8 };
        let to = bytes.as_mut_ptr().expose_provenance();
        // SAFETY: eight bytes that nobody touches until `kernel` is dropped.
        let mut kernel = unsafe { Kernel::new(mate.as_ref(), theirs, to, bytes.len()) };
        assert!(kernel.round(Duration::from_micros(100), &Stopwatch::new()).is_err());
    }
}
