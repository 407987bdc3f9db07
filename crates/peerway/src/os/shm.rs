//! Shared memory: sealed memfds, and mappings of them.
//!
//! If a file shrinks, every access beyond its new end raises SIGBUS. So Peerway shares memory as a
//! memfd that is sealed against shrinking, and trusts a peer's file descriptor only after
//! [`check_memfd`]. The other process may change the bytes of a mapping at any time, so a
//! [`ShmMapping`] gives out a raw pointer, never a slice. Used by the memory registry and the local
//! transports.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{FileType, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// A shared mapping of a file. Drop unmaps it.
#[derive(Debug)]
pub(crate) struct ShmMapping {
    base: NonNull<u8>,
    len: usize,
}

impl ShmMapping {
    /// Maps the first `len` bytes of `fd`, shared; read-only unless `writable`.
    pub(crate) fn of_fd(fd: BorrowedFd<'_>, len: usize, writable: bool) -> io::Result<Self> {
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: without an address hint and MAP_FIXED the kernel picks unused addresses, so the
        // call affects no existing object. The mapped bytes are accessed through raw pointers only.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0)? };
        let base = NonNull::new(base.cast())
            .ok_or_else(|| io::Error::other("the kernel mapped shared memory at address 0"))?;
        Ok(Self { base, len })
    }

    /// The first byte, page-aligned. Valid while the mapping lives.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Length of the mapping in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for ShmMapping {
    fn drop(&mut self) {
        // SAFETY: `of_fd` mapped the range, and only this value owns it. Users of `ptr()` do not
        // use the pointer after the value is dropped.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
    }
}

// SAFETY: a mapping is an address range of the process, tied to no thread.
unsafe impl Send for ShmMapping {}
// SAFETY: `&ShmMapping` only gives the address of the range. Callers must order their accesses
// through the pointer.
unsafe impl Sync for ShmMapping {}

/// Bytes of memory and swap that the machine has.
pub(crate) fn memory_of_machine() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64)
        .saturating_add(info.totalswap as u64)
        .saturating_mul(u64::from(info.mem_unit))
}

/// Creates a memfd of `len` bytes (rounded up to whole pages) whose size can never change.
///
/// It is sparse: a page takes memory when it is first accessed. `name` shows only in
/// `/proc/PID/maps`.
pub(crate) fn create_memfd(name: &str, len: usize) -> io::Result<OwnedFd> {
    let len = len
        .checked_next_multiple_of(page_size())
        .filter(|len| *len > 0)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "invalid shared memory size"))?;
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len as u64)?;
    // SEAL prevents a peer that holds the file descriptor from adding F_SEAL_WRITE.
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Opens a memfd again, for reading only. The kernel then refuses a writable mapping of it. Another
/// process of the same user could open it a third time for writing, through `/proc`.
pub(crate) fn read_only(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let name = format!("/proc/self/fd/{}", fd.as_raw_fd());
    Ok(rustix::fs::open(name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Checks that a peer's file descriptor is a memfd that cannot shrink and has at least `len` bytes.
///
/// Then no access to its first `len` bytes can fault, whatever the peer does to the file. The other
/// sealable kind of file, a hugetlb memfd, is refused: it can fault when the host runs out of huge
/// pages.
pub(crate) fn check_memfd(fd: BorrowedFd<'_>, len: usize) -> io::Result<()> {
    /// `statfs` type of tmpfs, the file system of memfds (linux/magic.h).
    const TMPFS_MAGIC: u32 = 0x0102_1994;

    let refuse = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidData, why));
    let stat = rustix::fs::fstat(fd)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
        || rustix::fs::fstatfs(fd)?.f_type as u32 != TMPFS_MAGIC
    {
        return refuse("the peer's shared memory is not a memfd on tmpfs");
    }
    // A file on a mounted tmpfs has F_SEAL_SEAL only, and accepts no other seal.
    if !rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK) {
        return refuse("the peer's shared memory is not sealed against shrinking");
    }
    // Read the size after the seals: from here on it can only grow.
    let size = rustix::fs::fstat(fd)?.st_size;
    if u64::try_from(size).unwrap_or(0) < len as u64 {
        return refuse("the peer's shared memory is shorter than announced");
    }
    Ok(())
}

/// Bytes in a page of memory.
pub(crate) fn page_size() -> usize {
    // SAFETY: `sysconf` reads a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // `sysconf` does not fail for this on Linux; 4096 is the smallest page size.
    usize::try_from(size).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_read_only_descriptor_maps_for_reading_alone() {
        let fd = create_memfd("peerway-test", 1).unwrap();
        let writable = ShmMapping::of_fd(fd.as_fd(), 1, true).unwrap();
        let narrow = read_only(fd.as_fd()).unwrap();
        check_memfd(narrow.as_fd(), 1).unwrap();
        assert!(ShmMapping::of_fd(narrow.as_fd(), 1, true).is_err());
        let mapping = ShmMapping::of_fd(narrow.as_fd(), 1, false).unwrap();
        // SAFETY: both mappings are live and one byte long, and no other thread uses them.
        let seen = unsafe {
            writable.ptr().write_volatile(7);
            mapping.ptr().read_volatile()
        };
        assert_eq!(seen, 7);
    }

    #[test]
    fn two_mappings_show_the_same_bytes() {
        let fd = create_memfd("peerway-test", 10).unwrap();
        check_memfd(fd.as_fd(), page_size()).unwrap();
        let one = ShmMapping::of_fd(fd.as_fd(), page_size(), true).unwrap();
        let two = ShmMapping::of_fd(fd.as_fd(), page_size(), false).unwrap();
        assert_eq!(one.len(), page_size());
        // SAFETY: both mappings are one page long, and only this thread uses them.
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
    fn untrusted_files_are_refused() {
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
