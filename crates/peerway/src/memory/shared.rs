//! Memory that local peers can map, which is the fastest path.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::error::RegisterError;
use crate::os::shm::{self, ShmMapping};

/// Zeroed memory in its own file, which local peers can map. Cheap to clone. The memory lives as
/// long as the last clone and the regions registered from it.
///
/// Use it to allocate memory before there is an endpoint, or for several endpoints.
/// [`crate::Endpoint::allocate`] allocates and registers in one step.
///
/// ```
/// # use peerway::{Endpoint, SharedMemory};
/// let memory = SharedMemory::allocate(1 << 20)?;
/// let (a, b) = (Endpoint::new()?, Endpoint::new()?);
/// let cache = a.register_shared(&memory, 0..1 << 19)?;
/// let rest = b.register_shared(&memory, 1 << 19..1 << 20)?;
/// assert!(cache.is_shareable() && rest.addr() == memory.addr() + (1 << 19));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct SharedMemory {
    file: Arc<File>,
}

struct File {
    fd: OwnedFd,
    mapping: ShmMapping,
    len: usize,
}

impl SharedMemory {
    /// Allocates `len` zeroed bytes. A page takes memory when it is first accessed.
    pub fn allocate(len: usize) -> Result<Self, RegisterError> {
        let fail = |source| RegisterError::Allocate { len, source };
        // The file is sparse, so the kernel would agree to any length and fail at an access.
        let most = shm::memory_of_machine();
        if len as u64 > most {
            let why = format!("this machine has {} MiB of memory and swap", most >> 20);
            return Err(fail(io::Error::new(io::ErrorKind::OutOfMemory, why)));
        }
        // Map one page even for zero bytes.
        let fd = shm::create_memfd("peerway-region", len.max(1)).map_err(fail)?;
        let mapping = ShmMapping::of_fd(fd.as_fd(), len.max(1), true).map_err(fail)?;
        Ok(Self { file: Arc::new(File { fd, mapping, len }) })
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.file.len as u64
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.file.len == 0
    }

    /// Address of the first byte in this process.
    pub fn addr(&self) -> u64 {
        self.file.mapping.ptr() as u64
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.file.mapping.ptr()
    }

    /// The file that a peer maps.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.fd.as_fd()
    }

    /// Length of the mapping in bytes.
    pub(crate) fn mapped_len(&self) -> u64 {
        self.file.mapping.len() as u64
    }
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedMemory({:#x}, {} bytes)", self.addr(), self.len())
    }
}
