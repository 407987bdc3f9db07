//! Shared memory: sealed memfds, and mappings of them.
//!
//! A file that can shrink turns every access beyond its new end into SIGBUS, so memory we share is a memfd
//! sealed against it, and a peer's descriptor is believed only after [`check_memfd`]. The bytes behind a
//! mapping may change at any time at the other process's whim: a [`ShmMapping`] hands out a raw pointer, never
//! a slice. Called by the memory registry and the local transports.

use std::ffi::c_void;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{FileType, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// A shared mapping of a file, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct ShmMapping {
    base: NonNull<u8>,
    len: usize,
}

impl ShmMapping {
    /// Maps the first `len` bytes of `fd`, shared; for reading only when not `writable`.
    pub(crate) fn of_fd(fd: BorrowedFd<'_>, len: usize, writable: bool) -> io::Result<Self> {
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: with no address hint and no MAP_FIXED the kernel picks unused addresses, so no existing
        // object is disturbed; what is mapped is reached through raw pointers only.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0)? };
        let base =
            NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { base, len })
    }

    /// The first byte; page-aligned, and valid as long as the mapping lives.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// How many bytes were mapped.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for ShmMapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `of_fd` and belongs to this value alone; whoever used `ptr()`
        // promised not to outlive it.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
    }
}

// SAFETY: a mapping is an address range of the process, tied to no thread.
unsafe impl Send for ShmMapping {}
// SAFETY: `&ShmMapping` only tells where the range is; accesses through the pointer are the caller's to order.
unsafe impl Sync for ShmMapping {}

/// A memfd of `len` bytes (rounded up to whole pages) that can never change its size.
///
/// It is sparse: pages take memory when first touched. `name` shows in `/proc/PID/maps` and nowhere else.
pub(crate) fn create_memfd(name: &str, len: usize) -> io::Result<OwnedFd> {
    let len = len
        .checked_next_multiple_of(page_size())
        .filter(|len| *len > 0)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "shared memory of no size"))?;
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len as u64)?;
    // SEAL keeps the holder of a passed descriptor from adding F_SEAL_WRITE under us.
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Checks that a descriptor from a peer is a memfd that cannot shrink and holds at least `len` bytes.
///
/// Then no access to its first `len` bytes can fault, whatever the peer does to the file. The kernel's
/// other sealable file, a hugetlb memfd, is refused: it can fault when the host runs out of huge pages.
pub(crate) fn check_memfd(fd: BorrowedFd<'_>, len: usize) -> io::Result<()> {
    /// `statfs` type of tmpfs, which memfds are files of (linux/magic.h).
    const TMPFS_MAGIC: u32 = 0x0102_1994;

    let refuse = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidData, why));
    let stat = rustix::fs::fstat(fd)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
        || rustix::fs::fstatfs(fd)?.f_type as u32 != TMPFS_MAGIC
    {
        return refuse("not a memfd");
    }
    // A file on a mounted tmpfs reports F_SEAL_SEAL alone and can take no further seal.
    if !rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK) {
        return refuse("shared memory that can shrink");
    }
    // Read after the seals: from here on the size can only grow.
    let size = rustix::fs::fstat(fd)?.st_size;
    if u64::try_from(size).unwrap_or(0) < len as u64 {
        return refuse("shared memory shorter than announced");
    }
    Ok(())
}

/// Bytes in a page of memory.
pub(crate) fn page_size() -> usize {
    // SAFETY: asks for a constant of the system; always safe.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // It cannot fail on Linux; 4096 is the least any Linux has.
    usize::try_from(size).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn two_mappings_show_the_same_bytes() {
        let fd = create_memfd("peerway-test", 10).unwrap();
        check_memfd(fd.as_fd(), page_size()).unwrap();
        let one = ShmMapping::of_fd(fd.as_fd(), page_size(), true).unwrap();
        let two = ShmMapping::of_fd(fd.as_fd(), page_size(), false).unwrap();
        assert_eq!(one.len(), page_size());
        // SAFETY: both mappings are a page long and used by this thread alone.
        unsafe {
            one.ptr().add(page_size() - 1).write_volatile(7);
            assert_eq!(two.ptr().add(page_size() - 1).read_volatile(), 7);
        }
    }

    #[test]
    fn a_memfd_keeps_its_size_and_its_seals() {
        let fd = create_memfd("peerway-test", page_size()).unwrap();
        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
        assert!(rustix::fs::ftruncate(&fd, 2 * page_size() as u64).is_err());
        assert!(rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE).is_err());
        let flags = rustix::io::fcntl_getfd(&fd).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn what_cannot_be_trusted_is_refused() {
        let refused = |fd: BorrowedFd<'_>, len| check_memfd(fd, len).is_err();
        let sealed = create_memfd("peerway-test", page_size()).unwrap();
        assert!(refused(sealed.as_fd(), page_size() + 1), "too short");
        let open = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, 4096).unwrap();
        assert!(refused(open.as_fd(), 1), "can shrink");
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(refused(file.as_fd(), 1), "a file on disk");
        let (pipe, _) = rustix::pipe::pipe().unwrap();
        assert!(refused(pipe.as_fd(), 0), "a pipe");
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert!(create_memfd("peerway-test", 0).is_err());
        assert!(create_memfd("peerway-test", usize::MAX).is_err());
        let fd = create_memfd("peerway-test", 1).unwrap();
        assert!(ShmMapping::of_fd(fd.as_fd(), 0, true).is_err());
    }
}
