//! Memory that a peer advertised, and how it can be reached.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use peerway_core::ids::SlotId;
use peerway_core::region::{Access, MemoryKind, Span};
use peerway_core::work::Blocks;

use crate::gpu::device::Device;
use crate::gpu::pin::Pin;
use crate::gpu::share::Offered;
use crate::memory::gate::GateRef;
use crate::memory::grants::Grant;
use crate::memory::region::range_len;
use crate::os::cma;
use crate::os::shm::ShmMapping;
use crate::path::PathKind;
use crate::session::Session;

/// Advertised memory of a peer. Cheap to clone.
#[derive(Clone)]
pub struct RemoteRegion {
    pub(crate) inner: Arc<RemoteInner>,
    /// What the descriptor's address and size name in the advertisement.
    pub(crate) window: Span,
}

pub(crate) struct RemoteInner {
    pub(crate) session: Arc<Session>,
    pub(crate) grant: SlotId,
    pub(crate) token: [u8; 16],
    pub(crate) access: Access,
    pub(crate) len: u64,
    /// Where it lives, at its owner.
    pub(crate) kind: MemoryKind,
    pub(crate) direct: Direct,
    /// Address of the first byte in its owner, and its key on each of the owner's RDMA devices; no keys
    /// where devices do not reach it.
    pub(crate) base: u64,
    pub(crate) keys: Vec<u32>,
    /// What devices wrote into it is there only once some of it was read.
    pub(crate) flush: bool,
}

/// RegisteredAs this process can reach the memory by itself.
pub(crate) enum Direct {
    /// It cannot: everything goes over a lane.
    None,
    /// It is our own memory.
    SameProcess { ptr: *mut u8, gate: GateRef, grant: Arc<Grant> },
    /// It is mapped here.
    Mapped { pin: Pin, mapping: Arc<ShmMapping>, offset: usize, gate: GateRef },
    /// The kernel copies from it on our behalf.
    Cma { memory: Arc<cma::ProcessMemory>, base: u64, gate: GateRef },
    /// It is memory of a GPU that we may map.
    Gpu(Box<Offered>),
}

// SAFETY: the pointer of `SameProcess` refers to memory that is alive while the gate admits us
// (the grant keeps it); it is only used for byte copies inside the gate.
unsafe impl Send for Direct {}
// SAFETY: as above.
unsafe impl Sync for Direct {}

impl Direct {
    /// The address of byte 0 of the advertisement here, and the gate to pass, when plain copies
    /// reach it.
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

    /// The path that a direct access takes.
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
    /// Whether it is memory that only a GPU reaches.
    #[inline]
    pub(crate) fn is_of_gpu(&self) -> bool {
        self.kind != MemoryKind::Host
    }

    /// What guards direct access to it.
    pub(crate) fn gate(&self) -> Option<&GateRef> {
        match &self.direct {
            Direct::None => None,
            Direct::SameProcess { gate, .. }
            | Direct::Mapped { gate, .. }
            | Direct::Cma { gate, .. } => Some(gate),
            Direct::Gpu(offered) => Some(&offered.gate),
        }
    }

    /// Maps it here if it is memory of a GPU that can be; true when a GPU's copy can reach it.
    pub(crate) fn open_for_gpu(&self) -> bool {
        match &self.direct {
            Direct::Gpu(offered) => offered.open(&self.session.opens).is_some(),
            Direct::SameProcess { .. } | Direct::Mapped { .. } => true,
            Direct::Cma { .. } | Direct::None => false,
        }
    }

    /// The address of byte 0 for a GPU's copy, and whether its threads reach it.
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

    /// The GPU that reaches it, if it is memory of one.
    pub(crate) fn device(&self) -> Option<&Arc<Device>> {
        match &self.direct {
            Direct::SameProcess { grant, .. } => grant.memory.device(),
            Direct::Gpu(offered) => offered.mapped().map(|(_, device)| device),
            _ => None,
        }
    }
}

impl RemoteRegion {
    /// Bytes that the descriptor names.
    pub fn len(&self) -> u64 {
        self.window.len
    }

    /// Whether the descriptor names no bytes.
    pub fn is_empty(&self) -> bool {
        self.window.len == 0
    }

    /// What the owner allows.
    pub fn access(&self) -> Access {
        self.inner.access
    }

    /// A part of it, relative to where the descriptor points.
    pub fn slice(&self, range: Range<u64>) -> RemoteSlice {
        // An offset that overflows becomes one that no region contains.
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

    /// Equal blocks of it: block `i` of the list starts at `base + indices[i] * stride`.
    pub fn blocks(&self, base: u64, stride: u64, len: u64, indices: &[u32]) -> RemoteBlocks {
        let base = self.window.offset.saturating_add(base);
        let indices = indices.into();
        let kind = self.inner.kind;
        RemoteBlocks {
            region: self.clone(),
            blocks: Blocks { region: 0, base, stride, len, indices, kind },
        }
    }

    /// Whether its owner is known to have revoked it. Only memory that this process reaches directly
    /// tells; other memory tells when it is used.
    pub fn is_revoked(&self) -> bool {
        self.inner.gate().is_some_and(|gate| !gate.is_open())
    }

    /// The path that reads and writes of it take; `None` for a path of lanes only.
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
    /// Bytes in the slice.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the slice has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Equal blocks of a peer's memory.
#[derive(Clone, Debug)]
pub struct RemoteBlocks {
    pub(crate) region: RemoteRegion,
    pub(crate) blocks: Blocks,
}
