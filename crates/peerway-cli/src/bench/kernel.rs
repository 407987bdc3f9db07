//! The bound of the CMA path: the kernel's copy between processes, `process_vm_readv`.
//!
//! The kernel stores through the caches and pins pages as it copies, so it is much slower than the
//! plain copies that are the baseline of every local path. It is measured in the same rounds. The
//! result shows how much of the distance to the baseline is due to the kernel, and how much to
//! Peerway.
//!
//! The copy is measured with two threads that take quanta in turn, as the path does, and with one
//! thread. On a busy machine, waiting for the second thread can cost more than it gains. The better
//! result counts.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::Duration;

use super::clock::Stopwatch;
use super::copies::{Mate, Work};
use super::measure::{Baseline, Times, timed};

/// The smallest row with this bound. Messages and system calls bound shorter rows, not the copy.
pub(crate) const FROM: u64 = 1 << 20;

/// Bytes that a thread copies at a time. The path uses the same quantum.
const QUANTUM: usize = 512 << 10;

/// Memory of another process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Theirs {
    pub(crate) pid: u32,
    pub(crate) addr: u64,
}

impl Theirs {
    /// Reads the first bytes. Fails if the kernel forbids it, or if the process has another id in
    /// this PID namespace.
    pub(crate) fn first(self, bytes: &mut [u8]) -> io::Result<()> {
        // SAFETY: the target is an exclusively borrowed slice.
        unsafe { self.read(0, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Reads `len` bytes from `offset` on.
    ///
    /// # Safety
    ///
    /// `target` must be writable for `len` bytes, and no other code may use them during the call.
    unsafe fn read(self, offset: usize, target: *mut u8, len: usize) -> io::Result<()> {
        let pid = libc::pid_t::try_from(self.pid).map_err(io::Error::other)?;
        let mut done = 0;
        while done < len {
            let source = self.addr as usize + offset + done;
            let remote = libc::iovec { iov_base: source as *mut _, iov_len: len - done };
            let here = target.wrapping_add(done).cast();
            let local = libc::iovec { iov_base: here, iov_len: len - done };
            // SAFETY: the kernel writes only to the rest of the target, which the caller guarantees
            // to be writable. The kernel checks the other process's addresses.
            match unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) } {
                moved @ 1.. => done += moved as usize,
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ => return Err(io::Error::last_os_error()),
            }
        }
        Ok(())
    }
}

/// A read of all bytes, shared by any number of threads.
struct Reading {
    theirs: Theirs,
    target: usize,
    len: usize,
    /// The offset of the next quantum.
    next: AtomicUsize,
    /// The error number of the last failure, or 0.
    failed: AtomicI32,
}

impl Work for Reading {
    fn part(&self, _: usize) {
        loop {
            // `Relaxed` is enough: the counter only assigns each quantum to one thread. The counts
            // of `Mate` order the accesses to the bytes.
            let start = self.next.fetch_add(QUANTUM, Ordering::Relaxed);
            let Some(left) = self.len.checked_sub(start).filter(|left| *left > 0) else { return };
            let target = std::ptr::with_exposed_provenance_mut(self.target + start);
            // SAFETY: the caller of `Kernel::new` guarantees a target of `len` bytes that no other
            // code uses, and the counter assigns each quantum to one thread.
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
    /// The times with one thread and with two.
    times: [Times; 2],
}

impl<'a> Kernel<'a> {
    /// Prepares reads of `len` bytes to `target`, also with the second thread if there is one.
    ///
    /// # Safety
    ///
    /// Until the value is dropped, `target` must be the address of `len` writable bytes with
    /// exposed provenance. No other code may use them during a round.
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

impl Baseline for Kernel<'_> {
    fn round(&mut self, budget: Duration, watch: &Stopwatch) -> anyhow::Result<f64> {
        let Self { mate, reading, work, times } = self;
        let [one, two] = times;
        let mut best = f64::INFINITY;
        for (times, mate) in [(one, None), (two, *mate)] {
            let awake = mate.map(|mate| mate.wake());
            let mut round = Times::new();
            timed(budget / 2, watch, 1, &mut round, || {
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
            times.add(&round);
            best = best.min(round.p50());
        }
        Ok(reading.len as f64 / best)
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
        // Whole quanta, and a length with a remainder.
        for len in [QUANTUM, 2 * QUANTUM, 5 * QUANTUM + 77] {
            let source: Vec<u8> = (0..len).map(|i| (i * 7 % 251 + 1) as u8).collect();
            let mut target = vec![0u8; len];
            let theirs = Theirs { pid: std::process::id(), addr: source.as_ptr() as u64 };
            let to = target.as_mut_ptr().expose_provenance();
            // SAFETY: `target` has `len` bytes, and no other code uses it until `kernel` is
            // dropped.
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
        // SAFETY: no other code uses the eight bytes until `kernel` is dropped.
        let mut kernel = unsafe { Kernel::new(mate.as_ref(), theirs, to, bytes.len()) };
        assert!(kernel.round(Duration::from_micros(100), &Stopwatch::new()).is_err());
    }
}
