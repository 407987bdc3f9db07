//! The work of a transfer: its shape, its regions and the signal that follows the bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use peerway_core::protocol::SignalDue;
use peerway_core::work::{Cursor, Pair, Place, Shape};

use crate::gpu::GpuError;
use crate::gpu::device::Device;
use crate::memory::RegionInner;
use crate::os::Piece;
use crate::session::Session;
use crate::session::remote::RemoteInner;
use crate::transport::device::{Devices, FlushWord, LocalKeys};

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Direction {
    /// From local memory into the peer's memory.
    Write,
    /// From the peer's memory into local memory.
    Read,
}

/// The notification and the count that follow the bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Signal {
    pub(crate) notify: Option<Arc<[u8]>>,
    pub(crate) count: Option<u32>,
}

impl Signal {
    pub(crate) fn is_empty(&self) -> bool {
        self.notify.is_none() && self.count.is_none()
    }

    /// The signal, without its message.
    #[inline]
    pub(crate) fn due(&self) -> SignalDue {
        SignalDue { notify: self.notify.is_some(), count: self.count }
    }
}

/// A shape and the regions it refers to, which it keeps alive.
#[derive(Clone)]
pub(crate) struct Work {
    pub(crate) shape: Shape,
    locals: Regions<Arc<RegionInner>>,
    pub(crate) remotes: Regions<Arc<RemoteInner>>,
    /// Whether some of it is GPU memory.
    of_gpu: bool,
}

/// One region without a heap allocation, or many.
#[derive(Clone)]
pub(crate) enum Regions<T> {
    One(T),
    Many(Arc<[T]>),
}

impl<T> Regions<T> {
    /// The region of this number. Work with one region has no other number.
    #[inline]
    fn at(&self, number: u32) -> &T {
        match self {
            Self::One(region) => region,
            Self::Many(regions) => &regions[number as usize],
        }
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[T] {
        match self {
            Self::One(region) => std::slice::from_ref(region),
            Self::Many(regions) => regions,
        }
    }
}

/// The counter of bytes that are moved without the peer's processor.
#[inline]
pub(crate) fn one_sided(session: &Session, direction: Direction) -> &AtomicU64 {
    match direction {
        Direction::Write => &session.stats.one_sided_written,
        Direction::Read => &session.stats.one_sided_read,
    }
}

impl Work {
    /// Counts bytes that were moved without the peer's processor.
    #[inline]
    pub(crate) fn count_moved(&self, direction: Direction, bytes: u64) {
        let Some(remote) = self.remotes.as_slice().first() else { return };
        one_sided(&remote.session, direction).fetch_add(bytes, Ordering::Relaxed);
    }

    /// The local regions.
    pub(crate) fn locals(&self) -> &[Arc<RegionInner>] {
        self.locals.as_slice()
    }

    /// Work between two regions. The caller has checked the shape against them.
    pub(crate) fn between(shape: Shape, local: Arc<RegionInner>, remote: Arc<RemoteInner>) -> Self {
        Self::new(shape, Regions::One(local), Regions::One(remote))
    }

    #[inline]
    pub(crate) fn new(
        shape: Shape,
        locals: Regions<Arc<RegionInner>>,
        remotes: Regions<Arc<RemoteInner>>,
    ) -> Self {
        let of_gpu = locals.as_slice().iter().any(|local| local.gpu.is_some())
            || remotes.as_slice().iter().any(|remote| remote.is_of_gpu());
        Self { shape, locals, remotes, of_gpu }
    }

    /// The address of a local place.
    #[inline]
    pub(crate) fn local_addr(&self, place: &Place) -> *mut u8 {
        // `Shape` checks every offset against its region's extent, so the offset lies inside the
        // region. The addition wraps because GPU memory is not an allocation that Rust knows.
        self.local(place.region).ptr().wrapping_add(place.offset as usize)
    }

    /// A local region.
    #[inline]
    pub(crate) fn local(&self, region: u32) -> &RegionInner {
        self.locals.at(region)
    }

    /// Whether any of it is GPU memory.
    #[inline]
    pub(crate) fn touches_gpu(&self) -> bool {
        self.of_gpu
    }

    /// Fails if local GPU memory was freed while it was registered.
    pub(crate) fn check_gpu(&self) -> Result<(), GpuError> {
        if !self.of_gpu {
            return Ok(());
        }
        match self.locals.as_slice().iter().find(|local| local.is_freed()) {
            Some(local) => {
                let gpu = local.device().map_or(0, |device| device.index());
                Err(GpuError::Freed { address: local.ptr() as u64, gpu })
            }
            None => Ok(()),
        }
    }

    /// Whether all of it is GPU memory.
    pub(crate) fn is_on_gpus(&self) -> bool {
        self.locals.as_slice().iter().all(|local| local.gpu.is_some())
            && self.remotes.as_slice().iter().all(|remote| remote.is_of_gpu())
    }

    /// The GPU that can do the whole transfer: it can access every region on both sides. Memory of
    /// several GPUs of this process goes by lanes, because one GPU may not have access to the
    /// memory of another.
    pub(crate) fn by_gpu(&self) -> Option<Arc<Device>> {
        let remotes = self.remotes.as_slice();
        if !remotes.iter().all(|remote| remote.open_for_gpu()) {
            return None;
        }
        let mut devices =
            self.local_devices().chain(remotes.iter().filter_map(|remote| remote.device()));
        let first = devices.next()?;
        devices.all(|device| device.index() == first.index()).then(|| first.clone())
    }

    /// Called before a GPU copies much of it: see `RegionInner::pin_for`.
    pub(crate) fn pin_for(&self, device: &Arc<Device>) {
        self.locals.as_slice().iter().for_each(|local| local.pin_for(device));
        self.remotes.as_slice().iter().for_each(|remote| remote.pin_for(device));
    }

    /// The GPUs of the local regions, one entry per region of GPU memory.
    pub(crate) fn local_devices(&self) -> impl Iterator<Item = &Arc<Device>> {
        self.locals.as_slice().iter().filter_map(|local| local.device())
    }

    /// The GPU that stages local memory which the CPU cannot access.
    pub(crate) fn staged_by(&self) -> Option<Arc<Device>> {
        if !self.of_gpu {
            return None;
        }
        self.local_devices().next().cloned()
    }

    /// Whether the GPU's kernels can access all local memory: its own and pinned host memory.
    pub(crate) fn is_reached_by(&self, device: &Arc<Device>) -> bool {
        self.locals.as_slice().iter().all(|local| local.is_reached_by(device))
    }

    /// The local pieces, starting at a cursor.
    pub(crate) fn local_pieces(&self, mut at: Cursor) -> impl Iterator<Item = Piece> {
        std::iter::from_fn(move || {
            let pair = self.next(&mut at, u64::MAX)?;
            Some(Piece { addr: self.local_addr(&pair.local) as u64, len: pair.len })
        })
    }

    /// The RDMA keys of a local place.
    #[inline]
    pub(crate) fn local_keys(&self, place: &Place) -> Option<&LocalKeys> {
        self.locals.at(place.region).registered()
    }

    /// Whether RDMA devices can do the whole transfer: both sides have keys for all of their
    /// memory.
    pub(crate) fn fits_devices(&self, rdma: &dyn Devices) -> bool {
        self.remotes.as_slice().iter().all(|remote| remote.by_device)
            && self.locals.as_slice().iter().all(|local| local.register_with(rdma))
    }

    /// One word of memory on each GPU of the peer that needs a flush, with its key at this index. A
    /// device must read it before its writes to that GPU are visible.
    pub(crate) fn words(&self, key_index: usize) -> impl Iterator<Item = FlushWord> {
        let remotes = self.remotes.as_slice();
        let first =
            |at: usize| !remotes[..at].iter().any(|r| r.flush && r.kind == remotes[at].kind);
        let wanted = (0..remotes.len()).filter(move |at| remotes[*at].flush && first(*at));
        wanted.map(move |at| {
            let remote = &remotes[at];
            let len = remote.len.min(8) as u32;
            FlushWord { addr: remote.base, rkey: remote.keys.get(key_index), len }
        })
    }

    /// The regions of the peer without a key at this index.
    pub(crate) fn without_key(&self, key_index: usize) -> impl Iterator<Item = &Arc<RemoteInner>> {
        let remotes = self.remotes.as_slice().iter();
        remotes.filter(move |remote| remote.keys.get(key_index) == 0)
    }

    /// The region of a remote place.
    #[inline]
    pub(crate) fn remote(&self, place: &Place) -> &Arc<RemoteInner> {
        self.remotes.at(place.region)
    }

    /// Peeks and advances in one step.
    #[inline]
    pub(crate) fn next(&self, at: &mut Cursor, max: u64) -> Option<Pair> {
        let pair = self.shape.peek(at, max)?;
        self.shape.advance(at, pair.len);
        Some(pair)
    }
}
