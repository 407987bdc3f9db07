//! Reads and writes another process's memory without its help (cross-memory attach).
//!
//! `process_vm_readv` copies the bytes once, and names the process by its pid. The kernel reuses a
//! pid once its process has died and was reaped, and no check can be atomic with the copy. A thread
//! that is preempted just before the call may copy from or to another process that has the pid by
//! then. So:
//!
//! - **Writes** go through an open `/proc/PID/mem`, which is bound to the address space and not to
//!   the pid. Once the process has died or executes another program, a write copies nothing. The
//!   kernel copies these bytes twice, a page at a time. Measured (write, then `process_vm_writev`,
//!   µs): 256 B 0.51 and 0.55, 64 KiB 6.1 and 3.5.
//! - **Small reads** also go through the file, which is faster for them.
//! - **Large reads** use `process_vm_readv`. A read is valid only if the process and its address
//!   space still exist *after* the call, because then the pid belonged to that process during the
//!   call.
//!
//! The kernel requires the right to ptrace the other process. That depends on the user, Yama,
//! seccomp and the PID namespace, so [`ProcessMemory::open`] tries it instead of predicting it.
//!
//! **Local pieces.** Every `unsafe` function here requires of its caller that each piece of `local`
//! is valid memory for the length of the call: readable for a write; for a read, writable and not
//! referenced from this process. The kernel checks that the addresses in `remote` are mapped.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use super::Piece;
use super::process::Pidfd;

/// Pieces per call and side. It is below IOV_MAX (1024), and low enough that a call with small
/// pieces takes well under a millisecond.
const PIECES_PER_CALL: usize = 500;
/// Reads up to this size, with at most `SMALL_PIECES` pieces per side, go through the file.
const SMALL_READ: u64 = 8 << 10;
const SMALL_PIECES: usize = 2;

/// The memory of another process, bound to its address space.
#[derive(Debug)]
pub(crate) struct ProcessMemory {
    pid: libc::pid_t,
    mem: File,
    process: Arc<Pidfd>,
    /// An address that was mapped when the file was opened.
    probe: u64,
}

/// Direction of a copy, as seen from this process.
#[derive(Clone, Copy)]
enum Direction {
    Read,
    Write,
}

impl ProcessMemory {
    /// Opens the memory of process `pid` if it contains `secret` at `addr`.
    ///
    /// # Errors
    ///
    /// The kernel refuses access, or the process does not have the secret there.
    pub(crate) fn open(pid: u32, addr: u64, secret: &[u8; 16]) -> io::Result<Self> {
        let mem = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
        let process = Arc::new(Pidfd::open(pid)?);
        let pid = libc::pid_t::try_from(pid).map_err(|_| io::ErrorKind::InvalidInput)?;
        let memory = Self { pid, mem, process, probe: addr };
        // Try both methods after everything is open: then both refer to the process that has the
        // secret.
        for is_by_file in [true, false] {
            let mut bytes = [0; 16];
            let (local, remote) = ([Piece::of_mut(&mut bytes)], [Piece { addr, len: 16 }]);
            // SAFETY: the only local piece is `bytes`, and this function holds no reference to it
            // during the call.
            unsafe {
                match is_by_file {
                    true => memory.through_file(Direction::Read, &local, &remote)?,
                    false => memory.read_by_number(&local, &remote)?,
                }
            }
            if bytes != *secret {
                return Err(io::Error::other(
                    "the process with this pid does not have the handshake secret in its memory",
                ));
            }
        }
        Ok(memory)
    }

    pub(crate) fn process(&self) -> &Arc<Pidfd> {
        &self.process
    }

    /// Copies `remote` of the process into `local`, in order, until all bytes are copied.
    ///
    /// The two sides may be cut into pieces differently, but their total lengths must be equal.
    /// After an error, an unknown part of `local` is overwritten. ESRCH means that the process no
    /// longer exists.
    ///
    /// # Safety
    ///
    /// Every piece of `local` must be writable memory that no reference in this process covers
    /// during the call. `remote` needs no trust: a bad address there is an error.
    pub(crate) unsafe fn read(&self, local: &[Piece], remote: &[Piece]) -> io::Result<()> {
        if remote.len() <= SMALL_PIECES
            && local.len() <= SMALL_PIECES
            && total(remote) <= SMALL_READ
        {
            // SAFETY: the caller upholds "Local pieces" (see the head of this file).
            return unsafe { self.through_file(Direction::Read, local, remote) };
        }
        // SAFETY: the caller upholds "Local pieces".
        unsafe { self.read_by_number(local, remote) }
    }

    /// Copies `local` into `remote` of the process, in order, until all bytes are copied. ESRCH
    /// means that the process no longer exists; part of the bytes may already be written.
    ///
    /// # Safety
    ///
    /// Every piece of `local` must be readable memory during the call. `remote` must be memory that
    /// its owner allows this process to write: the kernel checks that it is mapped, but not its
    /// protection.
    pub(crate) unsafe fn write(&self, local: &[Piece], remote: &[Piece]) -> io::Result<()> {
        // SAFETY: the caller upholds "Local pieces".
        unsafe { self.through_file(Direction::Write, local, remote) }
    }

    /// # Safety
    ///
    /// As for [`Self::read`] or [`Self::write`], according to `direction`.
    unsafe fn through_file(
        &self,
        direction: Direction,
        local: &[Piece],
        remote: &[Piece],
    ) -> io::Result<()> {
        debug_assert_eq!(total(local), total(remote), "both sides of a copy must be of one size");
        let (mut here, mut there) = (Cursor::new(local), Cursor::new(remote));
        while let (Some(ours), Some(theirs)) = (here.first(), there.first()) {
            let len = ours.len.min(theirs.len) as usize;
            let (fd, at, there_at) = (self.mem.as_raw_fd(), ours.addr, theirs.addr as i64);
            // SAFETY: the bytes lie in a piece of `local`, and the caller upholds "Local pieces".
            let moved = unsafe {
                match direction {
                    Direction::Read => libc::pread64(fd, at as *mut _, len, there_at),
                    Direction::Write => libc::pwrite64(fd, at as *const _, len, there_at),
                }
            };
            match moved {
                1.. => {
                    here.advance(moved as u64);
                    there.advance(moved as u64);
                }
                // The address space has no users left.
                0 => return Err(gone()),
                _ => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`Self::read`].
    unsafe fn read_by_number(&self, local: &[Piece], remote: &[Piece]) -> io::Result<()> {
        debug_assert_eq!(total(local), total(remote), "both sides of a copy must be of one size");
        let (mut here, mut there) = (Cursor::new(local), Cursor::new(remote));
        while here.first().is_some() && there.first().is_some() {
            let (mut here_cut, mut there_cut) = (UNCUT, UNCUT);
            let (ours, theirs) = (here.window(&mut here_cut), there.window(&mut there_cut));
            // SAFETY: a `Piece` has the layout of an iovec, and both windows outlive the call. The
            // kernel writes only to pieces of `local`, for which the caller upholds "Local pieces",
            // and checks the remote addresses.
            let moved = unsafe {
                libc::process_vm_readv(
                    self.pid,
                    ours.as_ptr().cast(),
                    ours.len() as libc::c_ulong,
                    theirs.as_ptr().cast(),
                    theirs.len() as libc::c_ulong,
                    0,
                )
            };
            match moved {
                // A fault or signal part-way shows as a short count. The next call reports the
                // error.
                1.. => {
                    here.advance(moved as u64);
                    there.advance(moved as u64);
                }
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    // The call may have failed on another process's memory.
                    error => return Err(if self.is_there() { error } else { gone() }),
                },
            }
        }
        if self.is_there() { Ok(()) } else { Err(gone()) }
    }

    /// Whether the process is alive and still executes the program that it did when it was opened.
    fn is_there(&self) -> bool {
        let mut byte = 0u8;
        // SAFETY: the kernel writes one byte, to `byte`. `pread64` returns 0 if the address space
        // has no users. It returns an error if the address is no longer mapped in an address space
        // that still exists.
        let moved = unsafe {
            libc::pread64(self.mem.as_raw_fd(), (&raw mut byte).cast(), 1, self.probe as i64)
        };
        moved != 0 && !self.process.is_dead()
    }
}

fn gone() -> io::Error {
    io::Error::from_raw_os_error(libc::ESRCH)
}

/// Space for the pieces of one call. It stays uninitialized, because clearing it would cost as much
/// as a small read.
type Cut = [MaybeUninit<Piece>; PIECES_PER_CALL];

const UNCUT: Cut = [const { MaybeUninit::uninit() }; PIECES_PER_CALL];

/// The progress of a copy in a list of pieces: `into` bytes of the first piece are done.
struct Cursor<'a> {
    rest: &'a [Piece],
    into: u64,
}

impl<'a> Cursor<'a> {
    fn new(pieces: &'a [Piece]) -> Self {
        Self { rest: pieces, into: 0 }
    }

    /// The rest of the first unfinished piece; `None` at the end.
    fn first(&mut self) -> Option<Piece> {
        while let Some((first, rest)) = self.rest.split_first() {
            if self.into < first.len {
                let addr = first.addr.wrapping_add(self.into);
                return Some(Piece { addr, len: first.len - self.into });
            }
            (self.rest, self.into) = (rest, 0);
        }
        None
    }

    /// The pieces for the next call: the caller's list, or a copy in `cut` if the first piece is
    /// partly done.
    fn window<'w>(&self, cut: &'w mut Cut) -> &'w [Piece]
    where
        'a: 'w,
    {
        let now = &self.rest[..self.rest.len().min(PIECES_PER_CALL)];
        if self.into == 0 {
            return now;
        }
        let cut = cut[..now.len()].write_copy_of_slice(now);
        if let Some(first) = cut.first_mut() {
            first.addr = first.addr.wrapping_add(self.into);
            first.len -= self.into;
        }
        cut
    }

    fn advance(&mut self, mut by: u64) {
        while let Some((first, rest)) = self.rest.split_first() {
            let left = first.len - self.into;
            if by < left {
                self.into += by;
                return;
            }
            by -= left;
            (self.rest, self.into) = (rest, 0);
        }
        debug_assert_eq!(by, 0, "the kernel copied more bytes than requested");
    }
}

fn total(pieces: &[Piece]) -> u64 {
    pieces.iter().fold(0, |sum, piece| sum.wrapping_add(piece.len))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    const SECRET: [u8; 16] = *b"sixteen of bytes";

    /// This process, opened as if it were another one.
    fn here() -> ProcessMemory {
        ProcessMemory::open(std::process::id(), SECRET.as_ptr() as u64, &SECRET).unwrap()
    }

    /// Cuts `bytes` into pieces of the given lengths. The lengths repeat until the end.
    fn cut(bytes: &[u8], lengths: &[usize]) -> Vec<Piece> {
        let (mut pieces, mut at) = (Vec::new(), 0);
        for len in lengths.iter().cycle() {
            if at == bytes.len() {
                break;
            }
            let end = bytes.len().min(at + len);
            pieces.push(Piece::of(&bytes[at..end]));
            at = end;
        }
        pieces
    }

    #[test]
    fn pieces_cut_differently_come_over_in_order() {
        let source: Vec<u8> = (0..200_000u32).map(|i| (i % 253) as u8).collect();
        let memory = here();
        // Pieces of 1 or 7 bytes take many calls, which end inside pieces of the other side.
        for to in [&[1usize, 0, 2][..], &[7], &[4096, 1], &[200_000]] {
            for from in [&[3usize, 0, 0, 5][..], &[64, 1000], &[200_000]] {
                let mut target = vec![0u8; source.len()];
                let all = Piece::of_mut(&mut target);
                let local: Vec<Piece> = cut(&target, to);
                assert_eq!(total(&local), all.len);
                // SAFETY: the local pieces cover `target`, which is not used during the call.
                unsafe { memory.read(&local, &cut(&source, from)).unwrap() };
                assert!(target == source, "{to:?} {from:?}");
                target.fill(0);
                // SAFETY: both sides are vectors of this test; `target` is not used during the
                // call.
                unsafe { memory.write(&cut(&source, from), &local).unwrap() };
                assert!(target == source, "{from:?} {to:?}");
            }
        }
    }

    #[test]
    fn a_few_bytes_come_over_too() {
        let (source, mut target) = ([7u8; 300], [0u8; 300]);
        // SAFETY: the local piece covers `target`, which is not used during the call.
        unsafe { here().read(&[Piece::of_mut(&mut target)], &[Piece::of(&source)]).unwrap() };
        assert_eq!(source, target);
    }

    #[test]
    fn nothing_to_do_is_done() {
        let empty = [Piece { addr: 0, len: 0 }; 3];
        // SAFETY: the pieces are empty, so no byte is written.
        unsafe {
            here().read(&[], &[]).unwrap();
            here().read(&empty, &empty[..1]).unwrap();
            here().write(&empty, &empty[..1]).unwrap();
        }
    }

    #[test]
    fn memory_is_opened_only_with_its_secret() {
        let (pid, at) = (std::process::id(), SECRET.as_ptr() as u64);
        assert!(ProcessMemory::open(pid, at, &[0; 16]).is_err(), "a wrong secret");
        assert!(ProcessMemory::open(pid, 8, &SECRET).is_err(), "a wrong address");
        // Above the largest possible pid (2^22).
        assert!(ProcessMemory::open(5_000_000, at, &SECRET).is_err());
        assert!(ProcessMemory::open(u32::MAX, at, &SECRET).is_err());
    }

    #[test]
    fn the_dead_are_neither_read_nor_written() {
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        let path = format!("/proc/{}/mem", child.id());
        let mem = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let process = Arc::new(Pidfd::open(child.id()).unwrap());
        let pid = child.id() as libc::pid_t;
        let memory = ProcessMemory { pid, mem, process, probe: 4096 };
        child.kill().unwrap();
        child.wait().unwrap();
        let mut bytes = vec![0u8; 1 << 20];
        for len in [256, 1 << 20] {
            let (local, remote) =
                ([Piece::of_mut(&mut bytes[..len])], [Piece { addr: 4096, len: len as u64 }]);
            // SAFETY: the local piece is `bytes`; the process of the remote pieces is dead.
            let results = unsafe { [memory.read(&local, &remote), memory.write(&local, &remote)] };
            for result in results {
                assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ESRCH));
            }
        }
    }

    #[test]
    fn a_fault_part_way_is_an_error_after_a_short_count() {
        let page = 4096;
        let fd = super::super::shm::create_memfd("peerway-test", page).unwrap();
        let mapping =
            super::super::shm::ShmMapping::of_fd(std::os::fd::AsFd::as_fd(&fd), page, true)
                .unwrap();
        let mut target = vec![0u8; 48];
        let remote = [
            Piece { addr: mapping.ptr() as u64, len: 16 },
            // The first page is never mapped.
            Piece { addr: 64, len: 16 },
            Piece { addr: mapping.ptr() as u64, len: 16 },
        ];
        let local = [Piece::of_mut(&mut target)];
        // SAFETY: the local piece covers `target`, which is not used during the call.
        let results = unsafe {
            [
                (here().read(&local, &remote), libc::EFAULT),
                (here().write(&local, &remote), libc::EIO),
            ]
        };
        for (result, expected) in results {
            assert_eq!(result.unwrap_err().raw_os_error(), Some(expected));
        }
    }
}
