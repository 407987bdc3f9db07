//! The memory of a region, and what owns it.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use peerway_core::region::{MemoryKind, Span};
use peerway_sys::cuda::Pointer;

use crate::gpu::device::Device;
use crate::gpu::pin::{self, Pin};
use crate::gpu::{self, DeviceMemory, Located, PinnedMemory};
use crate::memory::shared::SharedMemory;
use crate::transport::device::{Devices, Keeper, LocalKeys};
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

// SAFETY: the allocation does not move, and safe code cannot make a reference to GPU memory.
unsafe impl OwnedMemory for DeviceMemory {
    fn bytes(&mut self) -> (*mut u8, usize) {
        (self.address() as *mut u8, self.len() as usize)
    }
}

// SAFETY: the allocation does not move, and the region that owns it never makes a reference to it.
unsafe impl OwnedMemory for PinnedMemory {
    fn bytes(&mut self) -> (*mut u8, usize) {
        (self.ptr(), self.len())
    }
}

/// The memory and its owner.
pub(crate) struct RegionInner {
    ptr: *mut u8,
    len: usize,
    /// The registration with local RDMA devices. The first transfer that uses them creates it.
    registered: OnceLock<Option<LocalKeys>>,
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
    pub(crate) fn take_memory(&mut self) -> impl FnOnce() + Send + 'static {
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
    pub(crate) fn register_with(&self, rdma: &dyn Devices) -> bool {
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
        registered.as_ref().is_some_and(|keys| rdma.made(keys))
    }

    fn keeper(&self) -> Keeper<'_> {
        match self.backing {
            Backing::Raw => Keeper::Caller,
            Backing::Owned { .. } | Backing::Shared { .. } => Keeper::Region(&self.alive),
        }
    }

    /// The keys for local RDMA devices.
    #[inline]
    pub(crate) fn registered(&self) -> Option<&LocalKeys> {
        self.registered.get().and_then(Option::as_ref)
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

/// A backwards range becomes a length that no region contains, so that its use is refused.
pub(crate) fn range_len(range: &Range<u64>) -> u64 {
    range.end.checked_sub(range.start).unwrap_or(u64::MAX)
}
