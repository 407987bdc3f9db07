//! Reading and writing another process's memory with one system call and one copy (cross-memory attach).
//!
//! The kernel asks for the right to ptrace the other process; whether we have it (same user, Yama, seccomp, PID
//! namespace) is found by [`probe`], not guessed, and it is the same for both directions. A pid can be reused: the caller
//! holds a pidfd and checks it after the call. Called by the CMA transport.

use std::io;
use std::mem::MaybeUninit;

use super::Piece;

/// Pieces per call and side: under IOV_MAX (1024), and few enough that a call of small pieces stays well
/// under a millisecond.
const PIECES_PER_CALL: usize = 500;

/// Copies `remote` of process `pid` into `local`, in order, until all of it is there.
///
/// The two sides may be cut differently but must add up to the same number of bytes. On an error an
/// unknown part of `local` has been overwritten.
///
/// # Safety
///
/// Every piece of `local` must be writable memory that nothing in this process holds a reference to while
/// the call runs. `remote` needs no trust: a bad address there is an error.
pub(crate) unsafe fn pull(pid: u32, local: &[Piece], remote: &[Piece]) -> io::Result<()> {
    // SAFETY: the caller's promise.
    unsafe { copy(libc::process_vm_readv, pid, local, remote) }
}

/// Copies `local` into `remote` of process `pid`, as [`pull`] does the other way.
///
/// # Safety
///
/// Every piece of `local` must be readable memory while the call runs, and `remote` memory that its owner lets us write: the kernel
/// checks only that it is mapped.
pub(crate) unsafe fn push(pid: u32, local: &[Piece], remote: &[Piece]) -> io::Result<()> {
    // SAFETY: the caller's promise.
    unsafe { copy(libc::process_vm_writev, pid, local, remote) }
}

/// One of the two system calls, which have the same arguments: the local side comes first.
type Call = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> libc::ssize_t;

/// # Safety
///
/// As for [`pull`] or [`push`], whichever the call is.
unsafe fn copy(call: Call, pid: u32, local: &[Piece], remote: &[Piece]) -> io::Result<()> {
    debug_assert_eq!(total(local), total(remote), "both sides of a copy must be of one size");
    let pid =
        libc::pid_t::try_from(pid).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let (mut here, mut there) = (Cursor::new(local), Cursor::new(remote));
    while here.skip_empty() && there.skip_empty() {
        let (mut here_cut, mut there_cut) = (UNCUT, UNCUT);
        let (ours, theirs) = (here.window(&mut here_cut), there.window(&mut there_cut));
        // SAFETY: pieces are laid out as iovecs and both windows outlive the call; the kernel touches only
        // pieces of `local`, which the caller vouches for, and checks the remote ones itself.
        let moved = unsafe {
            call(
                pid,
                ours.as_ptr().cast(),
                ours.len() as libc::c_ulong,
                theirs.as_ptr().cast(),
                theirs.len() as libc::c_ulong,
                0,
            )
        };
        match moved {
            // A fault or signal part-way shows as a short count; the next call says what it was.
            1.. => {
                here.advance(moved as u64);
                there.advance(moved as u64);
            }
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
    Ok(())
}

/// Reads the 16 bytes at `addr` of process `pid`: when they are what the peer said it put there, this
/// works, and `pid` is indeed that peer.
pub(crate) fn probe(pid: u32, addr: u64) -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    let (local, remote) = (Piece::of_mut(&mut bytes), Piece { addr, len: 16 });
    // SAFETY: the only local piece is `bytes`, which nothing else refers to.
    unsafe { pull(pid, &[local], &[remote])? };
    Ok(bytes)
}

/// Room for the pieces of one call; left uninitialised, since clearing it would cost as much as a small pull.
type Cut = [MaybeUninit<Piece>; PIECES_PER_CALL];

const UNCUT: Cut = [const { MaybeUninit::uninit() }; PIECES_PER_CALL];

/// Where a copy stands in a list of pieces: `into` bytes of the first one are done.
struct Cursor<'a> {
    rest: &'a [Piece],
    into: u64,
}

impl<'a> Cursor<'a> {
    fn new(pieces: &'a [Piece]) -> Self {
        Self { rest: pieces, into: 0 }
    }

    /// Drops pieces with nothing left to do, so that each call moves at least a byte; false at the end.
    fn skip_empty(&mut self) -> bool {
        while let Some((first, rest)) = self.rest.split_first() {
            if self.into < first.len {
                return true;
            }
            (self.rest, self.into) = (rest, 0);
        }
        false
    }

    /// The pieces for the next call: the caller's own list, or a copy in `cut` when the first is part-done.
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
        debug_assert_eq!(by, 0, "the kernel moved more than was asked");
    }
}

fn total(pieces: &[Piece]) -> u64 {
    pieces.iter().fold(0, |sum, piece| sum.wrapping_add(piece.len))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here() -> u32 {
        std::process::id()
    }

    /// `bytes` cut into pieces of the given lengths, over and over, to its end.
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
        // With 1 or 7 bytes a piece this takes many calls, which end in the middle of the other's pieces.
        for to in [&[1usize, 0, 2][..], &[7], &[4096, 1], &[200_000]] {
            for from in [&[3usize, 0, 0, 5][..], &[64, 1000], &[200_000]] {
                let mut target = vec![0u8; source.len()];
                let all = Piece::of_mut(&mut target);
                let local: Vec<Piece> = cut(&target, to);
                assert_eq!(total(&local), all.len);
                // SAFETY: the local pieces are the whole of `target`, which is not used meanwhile.
                unsafe { pull(here(), &local, &cut(&source, from)).unwrap() };
                assert!(target == source, "{to:?} {from:?}");
                target.fill(0);
                // SAFETY: as above, the other way round.
                unsafe { push(here(), &cut(&source, from), &local).unwrap() };
                assert!(target == source, "{from:?} {to:?}");
            }
        }
    }

    #[test]
    fn nothing_to_do_is_done() {
        let empty = [Piece { addr: 0, len: 0 }; 3];
        // SAFETY: no byte is written.
        unsafe {
            pull(here(), &[], &[]).unwrap();
            pull(here(), &empty, &empty[..1]).unwrap();
        }
    }

    #[test]
    fn a_probe_reads_what_was_put_there() {
        let secret: [u8; 16] = std::array::from_fn(|i| i as u8 * 3);
        assert_eq!(probe(here(), secret.as_ptr() as u64).unwrap(), secret);
    }

    #[test]
    fn bad_addresses_and_processes_are_errors() {
        let fault = probe(here(), 8).unwrap_err();
        assert_eq!(fault.raw_os_error(), Some(libc::EFAULT));
        // Beyond the largest pid there can be (2^22).
        let gone = probe(5_000_000, 4096).unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::ESRCH));
        assert!(probe(u32::MAX, 4096).is_err());
    }

    #[test]
    fn a_fault_part_way_is_an_error_after_a_short_count() {
        let page = 4096;
        let fd = super::super::shm::create_memfd("peerway-test", page).unwrap();
        let mapping =
            super::super::shm::Mapping::of_fd(std::os::fd::AsFd::as_fd(&fd), page, true).unwrap();
        let mut target = vec![0u8; 32];
        let remote = [
            Piece { addr: mapping.ptr() as u64, len: 16 },
            // Nothing is mapped in the first page.
            Piece { addr: 64, len: 16 },
        ];
        // SAFETY: the local piece is the whole of `target`.
        let fault = unsafe { pull(here(), &[Piece::of_mut(&mut target)], &remote) }.unwrap_err();
        assert_eq!(fault.raw_os_error(), Some(libc::EFAULT));
    }
}
