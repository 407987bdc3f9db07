//! The files that hold device memory, and how another process recognizes them.
//!
//! The name of a file, which the kernel shows in `/proc`, holds everything that an importer must
//! know: the owning device, and a unique number. A file with another name does not belong to this
//! library. A file with another number means that the descriptor was closed and reused.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::fs::{MemfdFlags, Mode, OFlags};

const PREFIX: &str = "peerway-fakecuda";

/// The facts about a file that its name holds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Name {
    pub(crate) what: What,
    pub(crate) device: u32,
    /// The handle types that the memory was created for.
    pub(crate) types: u32,
    /// Whether it was created for GPUDirect RDMA.
    pub(crate) rdma: bool,
    /// A random number.
    pub(crate) nonce: u64,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum What {
    /// Memory of `cuMemCreate`.
    Created,
    /// A segment of `cuMemAlloc` memory.
    Segment,
    /// No memory: it exists as long as an allocation for which an IPC handle was created.
    Ticket,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.what {
            What::Created => "created",
            What::Segment => "segment",
            What::Ticket => "ticket",
        };
        let Self { device, types, rdma, nonce, .. } = self;
        write!(f, "{PREFIX}:{what}:{device}:{types}:{}:{nonce:016x}", u8::from(*rdma))
    }
}

impl Name {
    fn parse(link: &str) -> Option<Self> {
        let text = link.strip_prefix("/memfd:")?;
        let text = text.strip_suffix(" (deleted)").unwrap_or(text);
        let mut words = text.strip_prefix(PREFIX)?.strip_prefix(':')?.split(':');
        let what = match words.next()? {
            "created" => What::Created,
            "segment" => What::Segment,
            "ticket" => What::Ticket,
            _ => return None,
        };
        let device = words.next()?.parse().ok()?;
        let types = words.next()?.parse().ok()?;
        let rdma = words.next()? == "1";
        let nonce = u64::from_str_radix(words.next()?, 16).ok()?;
        words.next().is_none().then_some(Self { what, device, types, rdma, nonce })
    }

    /// The name of a process's descriptor; `None` if the file does not belong to this library.
    fn read(process: &str, fd: RawFd) -> Option<Self> {
        let link = std::fs::read_link(format!("/proc/{process}/fd/{fd}")).ok()?;
        Self::parse(link.to_str()?)
    }
}

/// Creates a file with this name and length.
pub(crate) fn create(name: Name, len: u64) -> Option<OwnedFd> {
    let fd = rustix::fs::memfd_create(name.to_string(), MemfdFlags::CLOEXEC).ok()?;
    rustix::fs::ftruncate(&fd, len).ok()?;
    Some(fd)
}

/// Duplicates a descriptor of this process, if its file belongs to this library.
pub(crate) fn adopt(fd: RawFd) -> Option<(OwnedFd, Name)> {
    if fd < 0 {
        return None;
    }
    // SAFETY: fcntl takes only numbers here; an invalid descriptor gives an error.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 {
        return None;
    }
    // SAFETY: fcntl has just created the descriptor, and no other value owns it.
    let copy = unsafe { OwnedFd::from_raw_fd(copy) };
    let name = Name::read("self", copy.as_raw_fd())?;
    Some((copy, name))
}

/// Opens the file of another process's descriptor, if it has this nonce.
pub(crate) fn open(process: u32, fd: RawFd, nonce: u64) -> Option<(OwnedFd, Name)> {
    let process = process.to_string();
    let expected = |name: &Name| name.nonce == nonce;
    // Check the name first: opening an unknown file could have side effects.
    Name::read(&process, fd).filter(expected)?;
    let path = format!("/proc/{process}/fd/{fd}");
    let opened = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let name = Name::read("self", opened.as_raw_fd()).filter(expected)?;
    Some((opened, name))
}

/// Whether another process's descriptor still refers to the file with this nonce.
pub(crate) fn is_there(process: u32, fd: RawFd, nonce: u64) -> bool {
    Name::read(&process.to_string(), fd).is_some_and(|name| name.nonce == nonce)
}

/// Opens the same file again, with its own position.
pub(crate) fn at(fd: &OwnedFd, position: u64) -> Option<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let opened = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
    rustix::fs::seek(&opened, rustix::fs::SeekFrom::Start(position)).ok()?;
    Some(opened)
}

pub(crate) fn len(fd: BorrowedFd<'_>) -> Option<u64> {
    u64::try_from(rustix::fs::fstat(fd).ok()?.st_size).ok()
}

/// A random number.
pub(crate) fn nonce() -> Option<u64> {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer has the given length, and the call writes to it.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    (got == 8).then_some(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_what_it_is() {
        let nonce = nonce().expect("the kernel has randomness");
        let name = Name { what: What::Created, device: 3, types: 9, rdma: true, nonce };
        let file = create(name, 4096).expect("the file can be created");
        let (copy, read) = adopt(file.as_raw_fd()).expect("the file belongs to this library");
        assert_eq!(read, name);
        let (number, process) = (copy.as_raw_fd(), std::process::id());
        assert!(is_there(process, number, nonce) && !is_there(process, number, nonce ^ 1));
        let (again, read) = open(process, number, nonce).expect("the file exists");
        assert_eq!((read, len(rustix::fd::AsFd::as_fd(&again))), (name, Some(4096)));
        assert!(open(process, number, nonce ^ 1).is_none());
    }

    #[test]
    fn other_files_are_not_ours() {
        let flags = MemfdFlags::CLOEXEC;
        let other =
            rustix::fs::memfd_create("peerway-fakecuda:x", flags).expect("the file can be created");
        assert!(adopt(other.as_raw_fd()).is_none());
        assert!(adopt(-1).is_none() && adopt(1 << 20).is_none());
        for text in ["/memfd:peerway-fakecuda:created:0:0:0:zz", "/memfd:peerway-fakecuda", "/x"] {
            assert_eq!(Name::parse(text), None);
        }
    }
}
