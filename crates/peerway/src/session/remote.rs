//! Memory that a peer advertised, and the ways to access it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use peerway_core::ids::SlotId;
use peerway_core::region::{Access, MemoryKind, Span};
use peerway_core::work::Blocks;

use crate::gpu::device::Device;
use crate::gpu::pin::Pin;
use crate::gpu::share::Offered;
use crate::memory::grants::Grant;
use crate::memory::range_len;
use crate::os::cma;
use crate::os::gate::GateRef;
use crate::os::shm::ShmMapping;
use crate::path::PathKind;
use crate::session::Session;
use crate::transport::device::KeyTable;

/// Advertised memory of a peer. Cheap to clone.
#[derive(Clone)]
pub struct RemoteRegion {
    pub(crate) inner: Arc<RemoteInner>,
    /// The part of the advertisement that the descriptor's address and size name.
    pub(crate) window: Span,
}

pub(crate) struct RemoteInner {
    pub(crate) session: Arc<Session>,
    pub(crate) grant: SlotId,
    pub(crate) token: [u8; 16],
    /// The descriptor from which it was imported.
    pub(crate) descriptor: Vec<u8>,
    pub(crate) access: Access,
    pub(crate) len: u64,
    /// The kind of memory at its owner.
    pub(crate) kind: MemoryKind,
    pub(crate) direct: Direct,
    /// Address of the first byte in the owner.
    pub(crate) base: u64,
    /// Whether devices can access the memory, and the keys for that.
    pub(crate) by_device: bool,
    pub(crate) keys: Arc<KeyTable>,
    /// Bytes that devices wrote are visible only after a read of the memory.
    pub(crate) flush: bool,
}

/// How this process can access the memory by itself.
pub(crate) enum Direct {
    /// It cannot: all transfers use a lane.
    None,
    /// The memory belongs to this process.
    SameProcess { ptr: *mut u8, gate: GateRef, grant: Arc<Grant> },
    /// The memory is mapped here.
    Mapped { pin: Pin, mapping: Arc<ShmMapping>, offset: usize, gate: GateRef },
    /// The kernel copies to and from it on our behalf.
    Cma { memory: Arc<cma::ProcessMemory>, base: u64, gate: GateRef },
    /// GPU memory that this process may map.
    Gpu(Box<Offered>),
}

// SAFETY: the pointer of `SameProcess` refers to memory that is alive while the gate admits this
// process (the grant keeps it). It is only used for byte copies inside the gate.
unsafe impl Send for Direct {}
// SAFETY: as for `Send`.
unsafe impl Sync for Direct {}

impl Direct {
    /// The local address of byte 0 of the advertisement and the gate to enter, if plain copies can
    /// access the memory.
    #[inline]
    pub(crate) fn mapped(&self) -> Option<(*mut u8, &GateRef)> {
        match self {
            Self::SameProcess { ptr, gate, .. } => Some((*ptr, gate)),
            Self::Mapped { mapping, offset, gate, .. } => {
                // SAFETY: the import checked that the advertisement lies inside the mapping.
                Some((unsafe { mapping.ptr().add(*offset) }, gate))
            }
            Self::Cma { .. } | Self::Gpu(_) | Self::None => None,
        }
    }

    /// The path of direct accesses.
    pub(crate) fn kind(&self) -> Option<PathKind> {
        match self {
            Self::None => None,
            Self::SameProcess { .. } => Some(PathKind::SameProcess),
            Self::Mapped { .. } => Some(PathKind::LocalMap),
            Self::Cma { .. } => Some(PathKind::LocalCma),
            Self::Gpu(_) => Some(PathKind::GpuIpc),
        }
    }
}

impl RemoteInner {
    /// Whether it is GPU memory.
    #[inline]
    pub(crate) fn is_of_gpu(&self) -> bool {
        self.kind != MemoryKind::Host
    }

    /// The gate for direct access.
    pub(crate) fn gate(&self) -> Option<&GateRef> {
        match &self.direct {
            Direct::None => None,
            Direct::SameProcess { gate, .. }
            | Direct::Mapped { gate, .. }
            | Direct::Cma { gate, .. } => Some(gate),
            Direct::Gpu(offered) => Some(&offered.gate),
        }
    }

    /// Maps GPU memory if possible. Returns whether a GPU's copy can access the memory.
    pub(crate) fn open_for_gpu(&self) -> bool {
        match &self.direct {
            Direct::Gpu(offered) => offered.open(&self.session.opens, self.session.addr).is_some(),
            Direct::SameProcess { .. } | Direct::Mapped { .. } => true,
            Direct::Cma { .. } | Direct::None => false,
        }
    }

    /// The address of byte 0 for a GPU's copy, and whether the GPU's threads can access it.
    pub(crate) fn by_gpu(&self, device: &Device) -> Option<(u64, bool)> {
        match &self.direct {
            Direct::SameProcess { ptr, grant, .. } => {
                Some((*ptr as u64, grant.memory.is_reached_by(device)))
            }
            Direct::Mapped { mapping, offset, .. } => {
                Some((mapping.ptr() as u64 + *offset as u64, false))
            }
            Direct::Gpu(offered) => {
                let (address, of) = offered.mapped()?;
                Some((address, of.index() == device.index()))
            }
            Direct::Cma { .. } | Direct::None => None,
        }
    }

    /// See [`RegionInner::pin_for`](crate::memory::RegionInner::pin_for).
    pub(crate) fn pin_for(&self, device: &Arc<Device>) {
        match &self.direct {
            Direct::SameProcess { grant, .. } => grant.memory.pin_for(device),
            // SAFETY: the mapping outlives the pin, which is dropped before it.
            Direct::Mapped { pin, mapping, .. } => unsafe {
                pin.used(device, mapping.ptr(), mapping.len());
            },
            Direct::Gpu(_) | Direct::Cma { .. } | Direct::None => {}
        }
    }

    /// The GPU that accesses it, if it is GPU memory.
    pub(crate) fn device(&self) -> Option<&Arc<Device>> {
        match &self.direct {
            Direct::SameProcess { grant, .. } => grant.memory.device(),
            Direct::Gpu(offered) => offered.mapped().map(|(_, device)| device),
            _ => None,
        }
    }
}

impl RemoteRegion {
    /// Length in bytes of the memory that the descriptor names.
    pub fn len(&self) -> u64 {
        self.window.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.window.len == 0
    }

    /// The access that the owner allows.
    pub fn access(&self) -> Access {
        self.inner.access
    }

    /// A part of it. Offsets are relative to the address in the descriptor.
    pub fn slice(&self, range: Range<u64>) -> RemoteSlice {
        // An overflowing offset becomes one that no region contains.
        let offset = self.window.offset.saturating_add(range.start);
        let len = range_len(&range);
        let fits =
            Span { offset: 0, len: self.window.len }.contains(Span { offset: range.start, len });
        RemoteSlice { region: self.clone(), offset: if fits { offset } else { u64::MAX }, len }
    }

    /// All of it.
    pub fn all(&self) -> RemoteSlice {
        self.slice(0..self.len())
    }

    /// Blocks of equal length: block `i` of the list starts at `base + indices[i] * stride`.
    pub fn blocks(&self, base: u64, stride: u64, len: u64, indices: &[u32]) -> RemoteBlocks {
        let base = self.window.offset.saturating_add(base);
        let indices = indices.into();
        let kind = self.inner.kind;
        RemoteBlocks {
            region: self.clone(),
            blocks: Blocks { region: 0, base, stride, len, indices, kind },
        }
    }

    /// Whether the owner is known to have revoked it. This is known only for memory that this
    /// process accesses directly. Other memory reports it when it is used.
    pub fn is_revoked(&self) -> bool {
        self.inner.gate().is_some_and(|gate| !gate.is_open())
    }

    /// A region as a hostile peer would make it, for tests: this region's session and rights with
    /// the address and the keys of another one. With `key`, every key is that one.
    #[doc(hidden)]
    pub fn forge(&self, of: &Self, key: Option<u32>) -> Self {
        let (own, other) = (&self.inner, &of.inner);
        let inner = RemoteInner {
            session: own.session.clone(),
            grant: own.grant,
            token: own.token,
            descriptor: own.descriptor.clone(),
            access: Access::READ_WRITE,
            len: other.len,
            kind: own.kind,
            direct: Direct::None,
            base: other.base,
            by_device: true,
            keys: Arc::new(other.keys.with(key)),
            flush: false,
        };
        Self { inner: Arc::new(inner), window: of.window }
    }

    /// The path of reads and writes; `None` if only lanes can access the memory.
    pub fn direct_path(&self) -> Option<PathKind> {
        self.inner.direct.kind()
    }
}

impl fmt::Debug for RemoteRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteRegion({} bytes, {:?})", self.window.len, self.inner.access)
    }
}

/// A part of a peer's memory.
#[derive(Clone, Debug)]
pub struct RemoteSlice {
    pub(crate) region: RemoteRegion,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl RemoteSlice {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Blocks of equal length in a peer's memory.
#[derive(Clone, Debug)]
pub struct RemoteBlocks {
    pub(crate) region: RemoteRegion,
    pub(crate) blocks: Blocks,
}
