//! Local memory that transfers can use.
//!
//! A region keeps its memory alive while the handle, a transfer or a quarantined fence refers to
//! it. Peers may write it at any time, so safe code never sees it as a slice. It reads and writes
//! through [`Region::read_at`] and [`Region::write_at`].

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use peerway_core::descriptor::{DESCRIPTOR_LEN, Descriptor};
use peerway_core::ids::Incarnation;
use peerway_core::outcome::Fence;
use peerway_core::region::{Access, MemoryKind, Span};
use peerway_core::work::{Blocks, Side, WorkError};
use peerway_sys::cuda::{CudaError, Pointer};

use crate::clock;
use crate::error::RegisterError;
use crate::gpu::device::Device;
use crate::gpu::pin::{self, Pin};
use crate::gpu::{self, Located};
use crate::inner::Inner;
use crate::memory::grants::Grant;
use crate::memory::quarantine;
use crate::memory::shared::SharedMemory;
use crate::os::process;
use crate::peer::Peer;
use crate::transport::verbs::Rdma;
use crate::transport::verbs::keys::{Keeper, Registration};
use crate::worker::REAPER;

/// Memory whose address does not change while it is owned.
///
/// # Safety
///
/// `bytes` must return the same, valid, writable memory on every call until the value is dropped,
/// even if the value itself moves. Nothing else may hold a Rust reference to the memory.
pub unsafe trait OwnedMemory: Send + Sync + 'static {
    /// Start and length of the memory.
    fn bytes(&mut self) -> (*mut u8, usize);
}

// SAFETY: the heap memory of a vector or box does not move with the value. The region that owns the
// value never makes a reference to it.
unsafe impl OwnedMemory for Vec<u8> {
    fn bytes(&mut self) -> (*mut u8, usize) {
        (self.as_mut_ptr(), self.len())
    }
}

// SAFETY: as for `Vec<u8>`.
unsafe impl OwnedMemory for Box<[u8]> {
    fn bytes(&mut self) -> (*mut u8, usize) {
        (self.as_mut_ptr(), self.len())
    }
}

/// Registered local memory. Cheap to clone. Dropping the last clone ends the registration.
#[derive(Clone)]
pub struct Region {
    pub(crate) handle: Arc<Handle>,
}

/// The state that the user's clones share. Dropping the last clone ends the advertisements at once.
/// The memory itself lives until transfers no longer use it.
pub(crate) struct Handle {
    pub(crate) memory: Arc<RegionInner>,
    endpoint: Weak<Inner>,
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

/// The memory and its owner.
pub(crate) struct RegionInner {
    ptr: *mut u8,
    len: usize,
    /// The registration with local RDMA devices. The first transfer that uses them creates it.
    registered: OnceLock<Option<Arc<Registration>>>,
    /// Lives as long as this value.
    alive: Arc<()>,
    /// The location of GPU memory.
    pub(crate) gpu: Option<Located>,
    /// Whether the caller pinned this host memory for GPUs. Queried once, on first use.
    pinned: OnceLock<bool>,
    /// The pin that the engine made for GPUs. Dropped before the memory.
    pin: Pin,
    /// Dropped after the registration.
    pub(crate) backing: Backing,
}

// SAFETY: the pointer is only used for copies of bytes that remote peers may change at any time. No
// reference to the memory is ever made, and `backing` is Send + Sync.
unsafe impl Send for RegionInner {}
// SAFETY: as for `Send`.
unsafe impl Sync for RegionInner {}

/// The owner of a region's memory.
pub(crate) enum Backing {
    /// A value that owns the memory and is dropped with the region.
    Owned { _memory: Box<dyn OwnedMemory> },
    /// The caller of `register_raw` keeps the memory.
    Raw,
    /// A part of shareable memory, from this offset on.
    Shared { memory: SharedMemory, offset: u64 },
}

impl Drop for RegionInner {
    fn drop(&mut self) {
        // The last reference may be the driver's, under its lock. Freeing GPU memory waits for the
        // GPU, which may wait for the driver. The destructor of a caller's memory may call into the
        // engine. So a thread that holds no lock runs both.
        let is_foreign = matches!(self.backing, Backing::Owned { .. });
        if is_foreign || (self.gpu.is_some() && !matches!(self.backing, Backing::Raw)) {
            REAPER.run(self.take_memory());
        }
    }
}

impl RegionInner {
    /// Wraps memory that `backing` keeps valid. For GPU memory, `ptr` is an address that the CPU
    /// cannot use.
    pub(crate) fn new(
        ptr: *mut u8,
        len: usize,
        backing: Backing,
        gpu: Option<Located>,
    ) -> Arc<Self> {
        let (registered, alive, pinned) = (OnceLock::new(), Arc::new(()), OnceLock::new());
        let pin = Pin::default();
        Arc::new(Self { ptr, len, registered, alive, gpu, pinned, pin, backing })
    }

    /// Takes the memory and everything that must be released before it. The returned function
    /// releases them in order.
    fn take_memory(&mut self) -> impl FnOnce() + Send + 'static {
        let registered = self.registered.take();
        let pin = std::mem::take(&mut self.pin);
        let backing = std::mem::replace(&mut self.backing, Backing::Raw);
        move || {
            drop(registered);
            drop(pin);
            drop(backing);
        }
    }

    /// The GPU of the memory.
    pub(crate) fn device(&self) -> Option<&Arc<Device>> {
        self.gpu.as_ref().map(|located| &located.device)
    }

    /// Whether a GPU's threads can access the memory: its own memory, and pinned host memory. They
    /// may not access another GPU's memory, although a copy by the driver still works.
    pub(crate) fn is_reached_by(&self, device: &Device) -> bool {
        if let Some(own) = self.device() {
            return own.index() == device.index();
        }
        let Some(gpus) = gpu::in_use() else { return false };
        let is_pinned =
            |at: u64| matches!(Pointer::of(&gpus.cuda, at), Ok(Pointer::Pinned { mapped: true }));
        // Check both ends, because the region may be larger than the pinned range. Memory that the
        // engine pinned does not count: it stays pinned only while another region exists.
        let end = self.ptr as u64 + self.len.max(1) as u64 - 1;
        let pinned =
            || !pin::is_ours(self.ptr, self.len) && is_pinned(self.ptr as u64) && is_pinned(end);
        *self.pinned.get_or_init(pinned)
    }

    /// Whether the owner has freed this GPU memory. A copy of it would destroy the CUDA context of
    /// the whole process. Only raw memory can be freed while it is registered.
    pub(crate) fn is_freed(&self) -> bool {
        let raw = matches!(self.backing, Backing::Raw);
        let located = self.gpu.as_ref().filter(|_| raw && self.len > 0);
        located.is_some_and(|located| !located.is_still_there(self.ptr as u64))
    }

    /// Prepares for a large copy by a GPU. At the second call, host memory is pinned.
    pub(crate) fn pin_for(&self, device: &Arc<Device>) {
        if self.gpu.is_none() && !self.is_reached_by(device) {
            // SAFETY: `backing` keeps the memory and is dropped after the pin in this struct.
            unsafe { self.pin.used(device, self.ptr, self.len) };
        }
    }

    /// Registers the memory with local RDMA devices, at most once. Returns whether it is registered
    /// with `rdma`.
    pub(crate) fn register_with(&self, rdma: &Rdma) -> bool {
        let registered = self.registered.get_or_init(|| {
            if self.len == 0 {
                return None;
            }
            // SAFETY: `backing` keeps the memory and is dropped after the registration in this
            // struct. No reference to the memory is made.
            let made = unsafe {
                rdma.register_local(self.ptr, self.len, self.keeper(), self.gpu.as_ref())
            };
            made.inspect_err(|error| rdma.not_reached(error)).ok()
        });
        registered.as_ref().is_some_and(|registration| registration.is_of(rdma))
    }

    fn keeper(&self) -> Keeper<'_> {
        match self.backing {
            Backing::Raw => Keeper::Caller,
            Backing::Owned { .. } | Backing::Shared { .. } => Keeper::Region(&self.alive),
        }
    }

    /// The keys for local RDMA devices.
    #[inline]
    pub(crate) fn registered(&self) -> Option<&Registration> {
        self.registered.get().and_then(Option::as_deref)
    }

    /// First byte.
    #[inline]
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// The whole region.
    pub(crate) fn extent(&self) -> Span {
        Span { offset: 0, len: self.len as u64 }
    }

    /// The kind of memory.
    pub(crate) fn kind(&self) -> MemoryKind {
        self.device().map_or(MemoryKind::Host, |device| MemoryKind::Device(device.index() as u16))
    }
}

impl Region {
    pub(crate) fn new(endpoint: &Arc<Inner>, memory: Arc<RegionInner>) -> Self {
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
        self.handle.memory.len as u64
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of the first byte in this process.
    pub fn addr(&self) -> u64 {
        self.handle.memory.ptr as u64
    }

    /// Whether local peers can map it: true for [`SharedMemory`].
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
        Ok(self.handle.memory.ptr.wrapping_add(offset as usize))
    }

    /// Advertises the whole region to every peer that receives the descriptor.
    pub fn advertise(&self, access: Access) -> Result<[u8; DESCRIPTOR_LEN], RegisterError> {
        self.advertise_range(0..self.len(), access, None)
    }

    /// Advertises the whole region to one peer. Other peers cannot use the descriptor.
    pub fn advertise_to(
        &self,
        peer: &Peer,
        access: Access,
    ) -> Result<[u8; DESCRIPTOR_LEN], RegisterError> {
        self.advertise_range(0..self.len(), access, Some(peer))
    }

    /// Advertises a part of the region, to one peer or to every holder of the descriptor.
    ///
    /// The same part, rights and peer give the same descriptor again.
    pub fn advertise_range(
        &self,
        range: Range<u64>,
        access: Access,
        to: Option<&Peer>,
    ) -> Result<[u8; DESCRIPTOR_LEN], RegisterError> {
        let endpoint = self.handle.endpoint.upgrade().ok_or(RegisterError::EndpointClosed)?;
        endpoint.check_open().map_err(RegisterError::from)?;
        let span = Span { offset: range.start, len: range_len(&range) };
        if !self.handle.memory.extent().contains(span) {
            return Err(RegisterError::Outside { offset: span.offset, len: span.len });
        }
        let bound = to.map(|peer| peer.incarnation());
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

/// A backwards range becomes a length that no region contains, so that its use is refused.
pub(crate) fn range_len(range: &Range<u64>) -> u64 {
    range.end.checked_sub(range.start).unwrap_or(u64::MAX)
}
