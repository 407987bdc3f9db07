//! Work that is posted at once: a direction, a shape, and the signal that follows the bytes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use peerway_core::region::{Access, Span};
use peerway_core::wire::MAX_NOTIFICATION;
use peerway_core::work::{Cursor, Pair, Place, Shape, WorkError};

use crate::error::PostError;
use crate::gpu::GpuError;
use crate::gpu::device::Device;
use crate::memory::{LocalBlocks, LocalSlice, RegionInner, RemoteBlocks, RemoteInner, RemoteSlice};
use crate::os::Piece;
use crate::transport::verbs::Rdma;
use crate::transport::verbs::keys::Registration;
use crate::transport::verbs::queue::FlushWord;

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Direction {
    /// From local memory into the peer's memory.
    Write,
    /// From the peer's memory into local memory.
    Read,
}

/// The lane class of a transfer.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Class {
    /// Chosen by size: small transfers take the latency lane.
    #[default]
    Auto,
    /// Goes ahead of bulk transfers.
    Latency,
    /// Never delays latency transfers.
    Bulk,
}

/// Work to post: see [`crate::Peer::post`].
///
/// ```
/// # use peerway::{Access, Batch, Endpoint};
/// # let (a, b) = (Endpoint::new()?, Endpoint::new()?);
/// # let peer = a.connect(&b.metadata())?;
/// let ours = a.allocate(4096)?;
/// let theirs = b.allocate(4096)?;
/// let remote = peer.import(&theirs.advertise(Access::WRITE)?)?;
/// // Four blocks of 256 bytes, scattered on both sides; counter 7 of the peer counts one arrival.
/// let batch = Batch::write_blocks(
///     ours.blocks(0, 256, 256, &[3, 1, 4, 15]),
///     remote.blocks(0, 256, 256, &[0, 1, 2, 3]),
/// )?
/// .count(7);
/// peer.run(&batch)?.ok()?;
/// assert_eq!(b.counter(7), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Batch {
    pub(crate) direction: Direction,
    pub(crate) work: Work,
    pub(crate) class: Class,
    pub(crate) deadline: Option<Duration>,
    pub(crate) signal: Signal,
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
}

impl Batch {
    /// Writes one range.
    pub fn write(local: &LocalSlice, remote: &RemoteSlice) -> Result<Self, PostError> {
        Self::new(Direction::Write, Work::range(local, remote)?)
    }

    /// Reads one range.
    pub fn read(local: &LocalSlice, remote: &RemoteSlice) -> Result<Self, PostError> {
        Self::new(Direction::Read, Work::range(local, remote)?)
    }

    /// Writes many ranges.
    pub fn write_vector(pairs: &[(LocalSlice, RemoteSlice)]) -> Result<Self, PostError> {
        Self::new(Direction::Write, Work::vector(pairs)?)
    }

    /// Reads many ranges.
    pub fn read_vector(pairs: &[(LocalSlice, RemoteSlice)]) -> Result<Self, PostError> {
        Self::new(Direction::Read, Work::vector(pairs)?)
    }

    /// Writes blocks.
    pub fn write_blocks(local: LocalBlocks, remote: RemoteBlocks) -> Result<Self, PostError> {
        Self::new(Direction::Write, Work::blocks(local, remote)?)
    }

    /// Reads blocks.
    pub fn read_blocks(local: LocalBlocks, remote: RemoteBlocks) -> Result<Self, PostError> {
        Self::new(Direction::Read, Work::blocks(local, remote)?)
    }

    /// Makes a write from work that another module prepared.
    pub(crate) fn write_of(work: Work) -> Result<Self, PostError> {
        Self::new(Direction::Write, work)
    }

    fn new(direction: Direction, work: Work) -> Result<Self, PostError> {
        let needed = match direction {
            Direction::Write => Access::WRITE,
            Direction::Read => Access::READ,
        };
        for remote in work.remotes.as_slice() {
            if !remote.access.allows(needed) {
                return Err(PostError::Access { allowed: remote.access });
            }
            if !Arc::ptr_eq(&remote.session, &work.remotes.as_slice()[0].session) {
                return Err(PostError::OtherPeer);
            }
        }
        if work.of_gpu {
            let mut devices = work.local_devices().map(|device| device.index());
            if let Some(first) = devices.next()
                && let Some(other) = devices.find(|other| *other != first)
            {
                return Err(PostError::MixedGpus { first, other });
            }
        }
        Ok(Self { direction, work, class: Class::Auto, deadline: None, signal: Signal::default() })
    }

    /// Ends the transfer, whatever its state, after this much time since the post.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Chooses the lane.
    pub fn class(mut self, class: Class) -> Self {
        self.class = class;
        self
    }

    /// Sends a message to the peer after the bytes, exactly once.
    pub fn notify(mut self, message: &[u8]) -> Result<Self, PostError> {
        check_notification(message)?;
        self.signal.notify = Some(message.into());
        Ok(self)
    }

    /// Raises a counter of the peer by one after the bytes, exactly once.
    pub fn count(mut self, id: u32) -> Self {
        self.signal.count = Some(id);
        self
    }

    /// The number of bytes in the transfer.
    pub fn total(&self) -> u64 {
        self.work.shape.total()
    }
}

/// Checks a notification against the length limit.
pub(crate) fn check_notification(message: &[u8]) -> Result<(), PostError> {
    if message.len() > MAX_NOTIFICATION {
        return Err(PostError::NotificationTooLong { len: message.len(), max: MAX_NOTIFICATION });
    }
    Ok(())
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
    #[inline]
    pub(crate) fn as_slice(&self) -> &[T] {
        match self {
            Self::One(region) => std::slice::from_ref(region),
            Self::Many(regions) => regions,
        }
    }
}

impl Work {
    /// The local regions.
    pub(crate) fn locals(&self) -> &[Arc<RegionInner>] {
        self.locals.as_slice()
    }

    pub(crate) fn range(local: &LocalSlice, remote: &RemoteSlice) -> Result<Self, WorkError> {
        let memory = &local.region.handle.memory;
        let pair = Pair {
            local: Place { region: 0, offset: local.offset, kind: memory.kind() },
            remote: Place { region: 0, offset: remote.offset, kind: remote.region.inner.kind },
            len: same_len(0, local.len, remote.len)?,
        };
        let shape = Shape::range(pair, memory.extent(), remote_extent(&remote.region.inner))?;
        let remote = Regions::One(remote.region.inner.clone());
        Ok(Self::new(shape, Regions::One(memory.clone()), remote))
    }

    /// Work between two regions. The caller has checked the shape against them.
    pub(crate) fn between(shape: Shape, local: Arc<RegionInner>, remote: Arc<RemoteInner>) -> Self {
        Self::new(shape, Regions::One(local), Regions::One(remote))
    }

    #[inline]
    fn new(
        shape: Shape,
        locals: Regions<Arc<RegionInner>>,
        remotes: Regions<Arc<RemoteInner>>,
    ) -> Self {
        let of_gpu = locals.as_slice().iter().any(|local| local.gpu.is_some())
            || remotes.as_slice().iter().any(|remote| remote.is_of_gpu());
        Self { shape, locals, remotes, of_gpu }
    }

    fn vector(pairs: &[(LocalSlice, RemoteSlice)]) -> Result<Self, WorkError> {
        let mut locals = Numbered::default();
        let mut remotes = Numbered::default();
        let mut shaped = Vec::with_capacity(pairs.len());
        for (item, (local, remote)) in pairs.iter().enumerate() {
            let memory = &local.region.handle.memory;
            shaped.push(Pair {
                local: Place {
                    region: locals.number_of(memory),
                    offset: local.offset,
                    kind: memory.kind(),
                },
                remote: Place {
                    region: remotes.number_of(&remote.region.inner),
                    offset: remote.offset,
                    kind: remote.region.inner.kind,
                },
                len: same_len(item, local.len, remote.len)?,
            });
        }
        let (locals, remotes) = (locals.all, remotes.all);
        let shape = Shape::vector(
            shaped.into(),
            |i| locals[i as usize].extent(),
            |i| remote_extent(&remotes[i as usize]),
        )?;
        Ok(Self::new(shape, Regions::Many(locals.into()), Regions::Many(remotes.into())))
    }

    fn blocks(local: LocalBlocks, remote: RemoteBlocks) -> Result<Self, WorkError> {
        let memory = local.region.handle.memory.clone();
        let inner = remote.region.inner.clone();
        let shape =
            Shape::blocks(local.blocks, memory.extent(), remote.blocks, remote_extent(&inner))?;
        Ok(Self::new(shape, Regions::One(memory), Regions::One(inner)))
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
        &self.locals.as_slice()[region as usize]
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
    pub(crate) fn local_keys(&self, place: &Place) -> Option<&Registration> {
        self.locals.as_slice()[place.region as usize].registered()
    }

    /// Whether RDMA devices can do the whole transfer: both sides have keys for all of their
    /// memory.
    pub(crate) fn fits_devices(&self, rdma: &Rdma) -> bool {
        self.remotes.as_slice().iter().all(|remote| !remote.keys.is_empty())
            && self.locals.as_slice().iter().all(|local| local.register_with(rdma))
    }

    /// One word of memory on each GPU of the peer that needs a flush. A device at port `far_port`
    /// of the peer must read it before its writes to that GPU are visible.
    pub(crate) fn words(&self, far_port: usize) -> impl Iterator<Item = FlushWord> {
        let remotes = self.remotes.as_slice();
        let first =
            |at: usize| !remotes[..at].iter().any(|r| r.flush && r.kind == remotes[at].kind);
        let wanted = (0..remotes.len()).filter(move |at| remotes[*at].flush && first(*at));
        wanted.filter_map(move |at| {
            let remote = &remotes[at];
            let len = remote.len.min(8) as u32;
            remote.keys.get(far_port).map(|&rkey| FlushWord { addr: remote.base, rkey, len })
        })
    }

    /// The region of a remote place.
    #[inline]
    pub(crate) fn remote(&self, place: &Place) -> &Arc<RemoteInner> {
        &self.remotes.as_slice()[place.region as usize]
    }

    /// Peeks and advances in one step.
    #[inline]
    pub(crate) fn next(&self, at: &mut Cursor, max: u64) -> Option<Pair> {
        let pair = self.shape.peek(at, max)?;
        self.shape.advance(at, pair.len);
        Some(pair)
    }
}

fn remote_extent(remote: &RemoteInner) -> Span {
    Span { offset: 0, len: remote.len }
}

fn same_len(item: usize, local: u64, remote: u64) -> Result<u64, WorkError> {
    if local != remote {
        return Err(WorkError::LengthMismatch { item, local, remote });
    }
    Ok(local)
}

/// Regions in the order in which a vector first names them.
struct Numbered<T> {
    all: Vec<Arc<T>>,
    /// Numbers by address, used once there are too many regions for a scan.
    numbers: HashMap<*const T, u32>,
}

/// Scanning this many pointers takes no longer than hashing one.
const FEW: usize = 16;

impl<T> Default for Numbered<T> {
    fn default() -> Self {
        Self { all: Vec::new(), numbers: HashMap::new() }
    }
}

impl<T> Numbered<T> {
    fn number_of(&mut self, one: &Arc<T>) -> u32 {
        // A vector names few regions, most often the previous one again. A backwards scan finds
        // that at once.
        let recent = &self.all[self.all.len().saturating_sub(FEW)..];
        if let Some(at) = recent.iter().rposition(|known| Arc::ptr_eq(known, one)) {
            return (self.all.len() - recent.len() + at) as u32;
        }
        if let Some(number) = self.numbers.get(&Arc::as_ptr(one)) {
            return *number;
        }
        let number = self.all.len() as u32;
        self.all.push(one.clone());
        if self.all.len() > FEW {
            if self.numbers.is_empty() {
                let numbered = self.all.iter().map(Arc::as_ptr).zip(0..);
                self.numbers = numbered.collect();
            }
            self.numbers.insert(Arc::as_ptr(one), number);
        }
        number
    }
}
