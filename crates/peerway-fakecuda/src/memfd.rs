//! The files that hold device memory, and how another process knows them for what they are.
//!
//! All that an importer has to know of a file is in its name, which the kernel shows in `/proc`: whose
//! memory it is, and a number that no other file has. A file with another name is none of ours; one
//! with another number is a descriptor that was closed and used again.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::fs::{MemfdFlags, Mode, OFlags};

const PREFIX: &str = "peerway-fakecuda";

/// What a file is, as its name says it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Name {
    pub(crate) what: What,
    pub(crate) device: u32,
    /// The kinds of handle that the memory was made for.
    pub(crate) types: u32,
    /// Whether it was made for GPUDirect RDMA.
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
    /// No memory: it is there as long as an allocation that an IPC handle was made for.
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

    /// What the descriptor of a process is; none where it is nothing of ours.
    fn read(process: &str, fd: RawFd) -> Option<Self> {
        let link = std::fs::read_link(format!("/proc/{process}/fd/{fd}")).ok()?;
        Self::parse(link.to_str()?)
    }
}

/// A new file of this name and length.
pub(crate) fn create(name: Name, len: u64) -> Option<OwnedFd> {
    let fd = rustix::fs::memfd_create(name.to_string(), MemfdFlags::CLOEXEC).ok()?;
    rustix::fs::ftruncate(&fd, len).ok()?;
    Some(fd)
}

/// Another descriptor of a file of ours, which a number in this process stands for.
pub(crate) fn adopt(fd: RawFd) -> Option<(OwnedFd, Name)> {
    if fd < 0 {
        return None;
    }
    // SAFETY: a system call with numbers only; a number that is no descriptor gives an error.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 {
        return None;
    }
    // SAFETY: made above, and held by nobody else.
    let copy = unsafe { OwnedFd::from_raw_fd(copy) };
    let name = Name::read("self", copy.as_raw_fd())?;
    Some((copy, name))
}

/// The file that a descriptor of another process stands for, where it has this number.
pub(crate) fn open(process: u32, fd: RawFd, nonce: u64) -> Option<(OwnedFd, Name)> {
    let process = process.to_string();
    let expected = |name: &Name| name.nonce == nonce;
    // First by its name alone: opening something else could do anything.
    Name::read(&process, fd).filter(expected)?;
    let path = format!("/proc/{process}/fd/{fd}");
    let opened = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let name = Name::read("self", opened.as_raw_fd()).filter(expected)?;
    Some((opened, name))
}

/// Whether a descriptor of another process still stands for the file with this number.
pub(crate) fn is_there(process: u32, fd: RawFd, nonce: u64) -> bool {
    Name::read(&process.to_string(), fd).is_some_and(|name| name.nonce == nonce)
}

/// The same file, with a position of its own.
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
    // SAFETY: writes into these bytes.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    (got == 8).then_some(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_what_it_is() {
        let nonce = nonce().expect("there is randomness");
        let name = Name { what: What::Created, device: 3, types: 9, rdma: true, nonce };
        let file = create(name, 4096).expect("it can be made");
        let (copy, read) = adopt(file.as_raw_fd()).expect("it is ours");
        assert_eq!(read, name);
        let (number, process) = (copy.as_raw_fd(), std::process::id());
        assert!(is_there(process, number, nonce) && !is_there(process, number, nonce ^ 1));
        let (again, read) = open(process, number, nonce).expect("it is there");
        assert_eq!((read, len(rustix::fd::AsFd::as_fd(&again))), (name, Some(4096)));
        assert!(open(process, number, nonce ^ 1).is_none());
    }

    #[test]
    fn other_files_are_not_ours() {
        let flags = MemfdFlags::CLOEXEC;
        let other = rustix::fs::memfd_create("peerway-fakecuda:x", flags).expect("it can be made");
        assert!(adopt(other.as_raw_fd()).is_none());
        assert!(adopt(-1).is_none() && adopt(1 << 20).is_none());
        for text in ["/memfd:peerway-fakecuda:created:0:0:0:zz", "/memfd:peerway-fakecuda", "/x"] {
            assert_eq!(Name::parse(text), None);
        }
    }
}
