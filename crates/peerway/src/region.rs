//! Local memory that transfers can use.
//!
//! A region keeps its memory alive while the handle, a transfer or a quarantined fence refers to
//! it. Peers may write it at any time, so safe code never sees it as a slice. It reads and writes
//! through [`Region::read_at`] and [`Region::write_at`].

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use peerway_core::descriptor::{DESCRIPTOR_LEN, Descriptor};
use peerway_core::ids::Incarnation;
use peerway_core::outcome::Fence;
use peerway_core::region::{Access, Span};
use peerway_core::work::{Blocks, Side, WorkError};
use peerway_sys::cuda::CudaError;

use crate::clock;
use crate::error::RegisterError;
use crate::memory::grants::Grant;
use crate::memory::{Backing, RegionInner, range_len};
use crate::os::process;
use crate::progress::engine::Engine;
use crate::quarantine;

/// Registered local memory. Cheap to clone. Dropping the last clone ends the registration.
#[derive(Clone)]
pub struct Region {
    pub(crate) handle: Arc<Handle>,
}

/// The state that the user's clones share. Dropping the last clone ends the advertisements at once.
/// The memory itself lives until transfers no longer use it.
pub(crate) struct Handle {
    pub(crate) memory: Arc<RegionInner>,
    endpoint: Weak<Engine>,
    /// How long a revoke waits, even if the endpoint is gone.
    fence: Duration,
    fork_generation: u32,
    advertised: Mutex<Advertised>,
}

/// The grants of a region.
#[derive(Default)]
struct Advertised {
    live: HashMap<Asked, Arc<Grant>>,
    /// Revoked grants that a peer was still inside at the last check.
    barred: Vec<Arc<Grant>>,
}

/// The parameters of an advertisement: offset, length, rights, and the peer that it is bound to.
type Asked = (u64, u64, Access, Option<Incarnation>);

impl Region {
    pub(crate) fn new(endpoint: &Arc<Engine>, memory: Arc<RegionInner>) -> Self {
        let handle = Handle {
            memory,
            endpoint: Arc::downgrade(endpoint),
            fence: endpoint.config.fence,
            fork_generation: process::fork_generation(),
            advertised: Mutex::default(),
        };
        Self { handle: Arc::new(handle) }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.handle.memory.extent().len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of the first byte in this process.
    pub fn addr(&self) -> u64 {
        self.handle.memory.ptr() as u64
    }

    /// Whether local peers can map it: true for [`SharedMemory`](crate::SharedMemory).
    pub fn is_shareable(&self) -> bool {
        matches!(self.handle.memory.backing, Backing::Shared { .. })
    }

    /// A part of the region, as the source or destination of a transfer.
    ///
    /// A range that exceeds the region is refused when a batch uses it.
    pub fn slice(&self, range: Range<u64>) -> LocalSlice {
        LocalSlice { region: self.clone(), offset: range.start, len: range_len(&range) }
    }

    /// The whole region as a slice.
    pub fn all(&self) -> LocalSlice {
        self.slice(0..self.len())
    }

    /// Blocks of equal length: block `i` of the list starts at `base + indices[i] * stride`.
    pub fn blocks(&self, base: u64, stride: u64, len: u64, indices: &[u32]) -> LocalBlocks {
        LocalBlocks {
            region: self.clone(),
            blocks: Blocks {
                region: 0,
                base,
                stride,
                len,
                indices: indices.into(),
                kind: self.handle.memory.kind(),
            },
        }
    }

    /// The number of the GPU in this process, for GPU memory; `None` for host memory.
    pub fn gpu(&self) -> Option<u32> {
        self.handle.memory.device().map(|device| device.index())
    }

    /// Copies bytes out of the region. Bytes that a peer writes during the call may be torn.
    ///
    /// For GPU memory, waits for the copy; fails if the GPU has failed.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), WorkError> {
        let from = self.checked(offset, into.len())?;
        if let Some(device) = self.handle.memory.device() {
            let (to, from) = (into.as_mut_ptr() as u64, from as u64);
            // SAFETY: `checked` proved that the range lies in the region, which `self` keeps alive.
            // `into` is borrowed mutably until the copy is done.
            return unsafe { device.copy_now(to, from, into.len()) }.map_err(failed);
        }
        // SAFETY: `checked` proved that the range lies in the region, which `self` keeps alive.
        // `into` is a unique reference. Bytes that a peer changes during the copy may be torn, as
        // documented.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies bytes into the region.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), WorkError> {
        let into = self.checked(offset, from.len())?;
        if let Some(device) = self.handle.memory.device() {
            let (to, source) = (into as u64, from.as_ptr() as u64);
            // SAFETY: as in `read_at`, with the source borrowed until the copy is done.
            return unsafe { device.copy_now(to, source, from.len()) }.map_err(failed);
        }
        // SAFETY: as in `read_at`, with the region as the destination.
        unsafe { std::ptr::copy(from.as_ptr(), into, from.len()) };
        Ok(())
    }

    /// Sets `len` bytes from `offset` to `value`.
    pub fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), WorkError> {
        let into = self.checked(offset, len as usize)?;
        if let Some(device) = self.handle.memory.device() {
            // SAFETY: as in `read_at`.
            return unsafe { device.fill_now(into as u64, value, len as usize) }.map_err(failed);
        }
        // SAFETY: as in `write_at`.
        unsafe { std::ptr::write_bytes(into, value, len as usize) };
        Ok(())
    }

    fn checked(&self, offset: u64, len: usize) -> Result<*mut u8, WorkError> {
        let span = Span { offset, len: len as u64 };
        if !self.handle.memory.extent().contains(span) {
            return Err(WorkError::Outside { side: Side::Local, item: 0, offset, len: len as u64 });
        }
        // The offset lies inside the region. Wrapping, because GPU memory is not an allocation
        // known to Rust.
        Ok(self.handle.memory.ptr().wrapping_add(offset as usize))
    }

    /// Advertises the whole region to every peer that receives the descriptor.
    pub fn advertise(&self, access: Access) -> Result<[u8; DESCRIPTOR_LEN], RegisterError> {
        self.advertise_bound(0..self.len(), access, None)
    }

    /// Advertises a part of the region, bound to one peer or to every holder of the descriptor.
    pub(crate) fn advertise_bound(
        &self,
        range: Range<u64>,
        access: Access,
        bound: Option<Incarnation>,
    ) -> Result<[u8; DESCRIPTOR_LEN], RegisterError> {
        let endpoint = self.handle.endpoint.upgrade().ok_or(RegisterError::EndpointClosed)?;
        endpoint.check_open().map_err(RegisterError::from)?;
        let span = Span { offset: range.start, len: range_len(&range) };
        if !self.handle.memory.extent().contains(span) {
            return Err(RegisterError::Outside { offset: span.offset, len: span.len });
        }
        let mut advertised = self.handle.advertised.lock().unwrap();
        let asked = (span.offset, span.len, access, bound);
        let grant = match advertised.live.get(&asked).filter(|grant| grant.is_live()) {
            Some(grant) => grant.clone(),
            None => {
                let memory = self.handle.memory.clone();
                let grant = endpoint.grants.add(memory, span, access, bound)?;
                advertised.live.insert(asked, grant.clone());
                grant
            }
        };
        drop(advertised);
        let base = self.addr() + span.offset;
        let who = &endpoint.incarnation;
        Ok(Descriptor::new(who, grant.id, grant.token, access, base, span.len).to_bytes())
    }

    /// Ends every advertisement of this region and waits until no peer accesses it.
    ///
    /// `Held`: no peer accesses the region any more. `Open`: a peer that is stopped (or lies) may
    /// still access it after the fence deadline. The memory is then in quarantine: it stays
    /// allocated until that peer continues or dies, even if the region and its endpoint are dropped
    /// (see [`quarantine`](crate::quarantine)). Another call waits again and returns the state by
    /// then. The region can be advertised again afterwards, with new descriptors.
    pub fn revoke(&self) -> Fence {
        let handle = &*self.handle;
        let Some(grants) = handle.bar() else { return Fence::Open };
        let deadline = clock::after(clock::now(), handle.fence);
        let mut pause = Duration::from_micros(1);
        while !grants.iter().all(|grant| grant.release_if_quiet()) {
            if clock::now() >= deadline {
                handle.quarantine(&grants);
                return Fence::Open;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
        handle.advertised.lock().unwrap().barred.retain(|grant| !grant.is_quiet());
        Fence::Held
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:#x}, {} bytes)", self.addr(), self.len())
    }
}

impl Handle {
    /// Bars every grant, without waiting for peers inside. `None` in a forked child: gates in
    /// shared segments belong to the parent.
    fn bar(&self) -> Option<Vec<Arc<Grant>>> {
        if process::fork_generation() != self.fork_generation {
            return None;
        }
        let mut advertised = self.advertised.lock().unwrap();
        let live = std::mem::take(&mut advertised.live);
        advertised.barred.extend(live.into_values());
        let grants = advertised.barred.clone();
        drop(advertised);
        let endpoint = self.endpoint.upgrade();
        for grant in &grants {
            if let Some(endpoint) = &endpoint {
                endpoint.grants.remove(grant.id);
            }
            grant.bar();
        }
        if let Some(endpoint) = endpoint
            && grants.iter().any(|grant| !grant.is_quiet())
        {
            endpoint.leave_barred_gates();
        }
        Some(grants)
    }

    /// Quarantines the memory of grants that a peer is still inside.
    fn quarantine(&self, grants: &[Arc<Grant>]) {
        for grant in grants.iter().filter(|grant| !grant.release_if_quiet()) {
            quarantine::keep_grant(grant.clone(), self.fence);
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(grants) = self.bar() {
            self.quarantine(&grants);
        }
        *self.advertised.get_mut().unwrap_or_else(|e| e.into_inner()) = Advertised::default();
        // If nothing else refers to the memory, the caller's thread frees it here.
        if let Some(memory) = Arc::get_mut(&mut self.memory)
            && memory.gpu.is_none()
        {
            memory.take_memory()();
        }
    }
}

/// A part of a local region.
#[derive(Clone, Debug)]
pub struct LocalSlice {
    pub(crate) region: Region,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl LocalSlice {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Blocks of equal length in a local region.
#[derive(Clone, Debug)]
pub struct LocalBlocks {
    pub(crate) region: Region,
    pub(crate) blocks: Blocks,
}

/// Logs a GPU failure, because the returned error only names the side.
fn failed(error: CudaError) -> WorkError {
    tracing::error!(%error, "cannot copy to or from local GPU memory");
    WorkError::Device { side: Side::Local }
}
