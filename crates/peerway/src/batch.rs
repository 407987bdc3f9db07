//! Work that is posted at once: a direction, a shape, and the signal that follows the bytes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use peerway_core::region::{Access, Span};
use peerway_core::wire::MAX_NOTIFICATION;
use peerway_core::work::{Pair, Place, Shape, WorkError};

use crate::error::PostError;
use crate::region::{LocalBlocks, LocalSlice};
use crate::session::remote::{RemoteBlocks, RemoteInner, RemoteSlice};
use crate::work::{Direction, Regions, Signal, Work};

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
        if work.touches_gpu() {
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

impl Work {
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
