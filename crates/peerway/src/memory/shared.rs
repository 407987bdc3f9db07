//! Memory that local peers can map: the fastest path there is.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::error::RegisterError;
use crate::os::shm::{self, ShmMapping};

/// Zeroed memory in a file of its own, which local peers map. Cheap to clone; the memory lives as long
/// as the last clone and whatever was registered of it.
///
/// Made before there is an endpoint, or for several of them; [`crate::Endpoint::allocate`] does both steps
/// at once.
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
    /// `len` zeroed bytes. Pages take memory when they are first touched.
    pub fn allocate(len: usize) -> Result<Self, RegisterError> {
        let fail = |source| RegisterError::Allocate { len, source };
        // Even no bytes have a page to map.
        let fd = shm::create_memfd("peerway-region", len.max(1)).map_err(fail)?;
        let mapping = ShmMapping::of_fd(fd.as_fd(), len.max(1), true).map_err(fail)?;
        Ok(Self { file: Arc::new(File { fd, mapping, len }) })
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.file.len as u64
    }

    /// Whether there are none.
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

    /// The file, for a peer to map.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.fd.as_fd()
    }

    /// Bytes of the mapping.
    pub(crate) fn mapped_len(&self) -> u64 {
        self.file.mapping.len() as u64
    }
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedMemory({:#x}, {} bytes)", self.addr(), self.len())
    }
}
