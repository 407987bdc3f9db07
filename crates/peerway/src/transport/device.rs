//! Device transports: devices that read and write the memory of both sides by themselves.
//!
//! An endpoint opens the [`Devices`] of one kind. Each shard has a [`CompletionQueue`] on each
//! device, which its driver polls for all peers. A [`DeviceQueue`] is a connection or a datagram
//! address on one device: it is a [`Wire`] on which frames travel as messages, and it also carries
//! out *parts* of requests, without the peer's CPU.
//!
//! A new device transport implements these traits in a directory of its own and adds one line to
//! [`KINDS`](super::KINDS).

use std::any::Any;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};

use peerway_core::ids::SlotId;
use peerway_core::outcome::TransferError;
use peerway_core::region::Access;
use peerway_core::wire::{QueueEnd, RdmaPort};
use peerway_core::work::Cursor;

use super::Wire;
use super::error::RdmaError;
use crate::gpu::Located;
use crate::path::PathKind;

/// The most work requests in a part.
pub(crate) const PART_REQUESTS: usize = 32;

/// The devices of one kind that an endpoint has opened.
pub(crate) trait Devices: Send + Sync {
    /// The kind of path that they provide.
    fn kind(&self) -> PathKind;

    /// The addresses that peers need to reach them, in the order of the devices.
    fn ports(&self) -> Vec<RdmaPort>;

    /// Whether all of them have a key to our memory for each queue.
    fn has_windows(&self) -> bool;

    /// The processors near all of them. Empty if they are not on one known node.
    fn cpus(&self) -> &[usize];

    /// Creates the completion queues of a shard, one for each device.
    fn completion_queues(&self) -> Result<Vec<Arc<dyn CompletionQueue>>, RdmaError>;

    /// Registers memory for our own requests. `gpu` says where it is, if it is GPU memory.
    ///
    /// # Safety
    ///
    /// The memory stays mapped, and no Rust reference covers it, until the keys are dropped.
    unsafe fn register_local(
        &self,
        ptr: *mut u8,
        len: usize,
        keeper: Keeper<'_>,
        gpu: Option<&Located>,
    ) -> Result<LocalKeys, RdmaError>;

    /// Registers memory for requests of peers with exactly these rights. `gpu` says where it is, if
    /// it is GPU memory.
    ///
    /// # Safety
    ///
    /// The memory stays mapped, and no Rust reference covers it, until the keys are dropped.
    unsafe fn register_remote(
        &self,
        ptr: *mut u8,
        len: usize,
        access: Access,
        gpu: Option<&Located>,
    ) -> Result<Box<dyn RemoteKeys>, RdmaError>;

    /// Whether keys were made by these devices.
    fn made(&self, keys: &LocalKeys) -> bool;

    /// Logs that memory could not be registered.
    fn not_reached(&self, error: &RdmaError);
}

/// What guarantees that registered memory stays mapped.
#[derive(Clone, Copy)]
pub(crate) enum Keeper<'a> {
    /// A region, while this reference count lives.
    Region(&'a Arc<()>),
    /// The caller, by contract.
    Caller,
}

/// The keys of memory that is registered for our own requests.
pub(crate) struct LocalKeys {
    /// By device.
    pub(crate) keys: Box<[u32]>,
    /// Whether the CPU can read the memory too, so that small writes can carry its bytes inline.
    pub(crate) of_host: bool,
    /// Ends the registration when it is dropped.
    pub(crate) registration: Arc<dyn Any + Send + Sync>,
}

/// The keys of memory that is registered for requests of peers. Dropping them ends the
/// registration.
pub(crate) trait RemoteKeys: Send + Sync {
    /// The keys, by device. 0 for a device that has a key for each queue.
    fn keys(&self) -> Vec<u32>;

    /// Makes a key for a queue of this device. May block.
    fn queue_key(&self, device: usize) -> Result<QueueKey, RdmaError>;

    /// Ends the registration, with the keys of all queues. Success proves that no device admits a
    /// peer any more. Otherwise the keys come back, and the fence stays open.
    fn close(self: Box<Self>) -> Result<(), Box<dyn RemoteKeys>>;
}

/// A key to memory of this process, for the peer of one queue.
#[derive(Clone)]
pub(crate) enum QueueKey {
    /// It opens nothing before [`DeviceQueue::bind`], and then the memory to that queue alone.
    Window(Arc<dyn KeyWindow>),
    /// It opens the memory to every queue of the device.
    Open(u32),
}

/// A window to registered memory.
pub(crate) trait KeyWindow: Any + Send + Sync {
    /// The key, once the window is bound.
    fn key(&self) -> u32;

    /// Closes the window: its key opens nothing any more. A window must be closed before the queue
    /// to which it is bound is destroyed.
    fn close(&self);
}

/// A completion, as a device reported it. The queue that posted the work interprets it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    /// The key of the queue.
    pub(crate) queue: u32,
    /// The queue's own name of the work.
    pub(crate) work: u32,
    /// The status code of the device.
    pub(crate) status: u32,
    /// The number of received bytes.
    pub(crate) len: u32,
    /// The immediate that a write of the peer carried.
    pub(crate) immediate: Option<u32>,
}

/// The most completions of a poll.
pub(crate) const POLL: usize = 64;
/// Places for the completions of a poll.
pub(crate) type Completions = [MaybeUninit<Completion>; POLL];

/// The completion queue of a shard on one device.
pub(crate) trait CompletionQueue: Send + Sync {
    /// Becomes readable when a completion arrives after [`Self::arm`].
    fn fd(&self) -> BorrowedFd<'_>;

    /// Takes completions. Fewer than [`POLL`] means that the queue is now empty.
    fn poll<'a>(&self, into: &'a mut Completions) -> io::Result<&'a [Completion]>;

    /// Makes the next completion readable at the descriptor. Returns whether it is armed.
    fn arm(&self) -> bool;

    /// Consumes the events at the descriptor. Returns true if there were any; the queue is no
    /// longer armed then.
    fn take_events(&self) -> bool;

    /// Whether a queue with this key exists.
    fn has_queue(&self, key: u32) -> bool;

    /// Creates an unconnected queue, for small transfers or for large ones.
    fn open(self: Arc<Self>, latency: bool) -> Result<Box<dyn DeviceQueue>, String>;
}

/// Our end of a way to one peer on one device. Only the driver uses it. It never blocks, except for
/// `connect`.
pub(crate) trait DeviceQueue: Wire {
    /// Its name in completions.
    fn key(&self) -> u32;

    /// The index of its device.
    fn device(&self) -> usize;

    /// The devices at its two ends, once it is connected. `lane` is the number of its lane.
    fn ends(&self, lane: u16) -> QueueEnds;

    /// Whether our memory has a key for each queue of its device.
    fn has_windows(&self) -> bool;

    /// The name of its device.
    fn device_name(&self) -> String;

    /// Whether it is for small transfers.
    fn is_for_latency(&self) -> bool;

    /// Describes our end to the peer.
    fn end(&self) -> QueueEnd;

    /// Connects to the far end, which is at the peer's port `at`. May block for a second.
    fn connect(&mut self, far: QueueEnd, at: &RdmaPort) -> io::Result<()>;

    /// Lowers the limit of parts in progress.
    fn limit_parts(&mut self, parts: u32);

    /// Whether another part can be posted.
    fn has_room(&self) -> bool;

    /// Whether the peer can take an immediate.
    fn has_credit(&self) -> bool;

    /// Posts a part of a request, with one doorbell. With `counts`, its last write carries an
    /// immediate for that counter.
    ///
    /// # Safety
    ///
    /// The memory that the requests name stays registered until the part is done or the queue is
    /// dropped.
    unsafe fn post_part(
        &mut self,
        work: &[DeviceWork],
        part: DevicePart,
        counts: Option<u32>,
    ) -> io::Result<()>;

    /// Reads the given words of the peer. When [`Completed::Flushed`] follows, all earlier writes
    /// have arrived in the memories that were read.
    fn post_flush(&mut self, slot: SlotId, words: &[FlushWord]) -> io::Result<()>;

    /// Whether another window can be bound.
    fn can_bind(&self) -> bool;

    /// Binds a window to this queue. [`Completed::Bound`] follows, in the order of the calls. If
    /// the window has been closed, does nothing and returns false.
    fn bind(&mut self, window: &Arc<dyn KeyWindow>) -> io::Result<bool>;

    /// Processes a completion.
    fn complete(&mut self, completion: &Completion) -> Completed;

    /// Tells the peer how many messages were taken in, if the peer may wait for that.
    fn return_credits(&mut self) -> io::Result<()>;

    /// The number of immediates that arrived.
    fn immediates(&self) -> u64;

    /// Stops the queue. [`Completed::Drained`] follows.
    fn shut(&mut self);

    /// Whether the queue was shut down and nothing completes any more.
    fn is_drained(&self) -> bool;

    /// Whether a part of this request is in progress.
    fn has_part(&self, slot: SlotId) -> bool;

    /// Takes the posted work that is not complete.
    fn unfinished(&mut self) -> Unfinished;
}

/// The devices at the two ends of a connected queue. They do not change, so a lane keeps them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueEnds {
    /// The index of our device.
    pub(crate) device: usize,
    /// Where keys for this queue stand in a [`KeyTable`].
    pub(crate) key_index: usize,
    /// Whether our device may carry out requests to one peer in any order.
    pub(crate) is_unordered: bool,
}

/// The most devices of a peer, and the most lanes of a session.
const PLACES: usize = 64;

/// The keys to the memory of a peer. A key is for all queues of one device of the peer, or for one
/// lane. 0 if it is not known.
pub(crate) struct KeyTable {
    keys: [AtomicU32; 2 * PLACES],
    /// This side has asked for missing keys since a queue pair was last replaced.
    asked: AtomicBool,
    /// The owner says that the memory is revoked.
    revoked: AtomicBool,
}

impl KeyTable {
    pub(crate) fn new() -> Self {
        let keys = [const { AtomicU32::new(0) }; 2 * PLACES];
        Self { keys, asked: AtomicBool::new(false), revoked: AtomicBool::new(false) }
    }

    /// A table without keys, for memory that no device reaches.
    pub(crate) fn none() -> Arc<Self> {
        static NONE: LazyLock<Arc<KeyTable>> = LazyLock::new(|| Arc::new(KeyTable::new()));
        NONE.clone()
    }

    /// The index of keys for all queues of a device.
    pub(crate) fn of_device(device: usize) -> usize {
        device % PLACES
    }

    /// The index of keys for a lane.
    pub(crate) fn of_lane(lane: u16) -> usize {
        PLACES + usize::from(lane) % PLACES
    }

    /// The key at this index. The driver writes keys and reads them, so relaxed suffices.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> u32 {
        self.keys[index % (2 * PLACES)].load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, index: usize, key: u32) {
        self.keys[index % (2 * PLACES)].store(key, Ordering::Relaxed);
    }

    /// Voids the key at this index, because its queue pair was replaced.
    pub(crate) fn void(&self, index: usize) {
        self.set(index, 0);
        self.asked.store(false, Ordering::Relaxed);
    }

    /// Whether to ask the owner for a missing key. True once.
    pub(crate) fn begin_asking(&self) -> bool {
        !self.asked.swap(true, Ordering::Relaxed)
    }

    pub(crate) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Relaxed)
    }

    pub(crate) fn set_revoked(&self) {
        self.revoked.store(true, Ordering::Relaxed);
    }

    /// A copy, in which every key is `key` if that is given. For tests.
    pub(crate) fn with(&self, key: Option<u32>) -> Self {
        let copy = Self::new();
        (0..2 * PLACES).for_each(|at| copy.set(at, key.unwrap_or_else(|| self.get(at))));
        copy
    }

    /// Takes the keys of the peer's devices. Returns false if there are too many.
    pub(crate) fn set_all(&self, keys: &[u32]) -> bool {
        for (device, key) in keys.iter().enumerate().take(PLACES) {
            self.set(Self::of_device(device), *key);
        }
        keys.len() <= PLACES
    }
}

/// One read or write of a part.
#[derive(Clone, Copy)]
pub(crate) struct DeviceWork {
    /// Local address and key.
    pub(crate) local: u64,
    pub(crate) local_key: u32,
    pub(crate) len: u32,
    /// Address and key at the peer.
    pub(crate) remote: u64,
    pub(crate) remote_key: u32,
    /// Whether the CPU can read the local memory.
    pub(crate) of_host: bool,
}

/// A part of a request that a device carries out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DevicePart {
    pub(crate) slot: SlotId,
    /// Its range of the work, so that another queue can repeat it.
    pub(crate) part: Cursor,
    pub(crate) read: bool,
    /// The number of its immediate on this queue, if it has one.
    pub(crate) immediate: Option<u64>,
    /// The error, if the device reports that this part itself failed. Other parts fail only as a
    /// consequence.
    pub(crate) failed: Option<TransferError>,
}

/// Peer memory that a flush reads.
pub(crate) struct FlushWord {
    pub(crate) addr: u64,
    pub(crate) rkey: u32,
    pub(crate) len: u32,
}

/// The meaning of a completion.
#[derive(Debug)]
pub(crate) enum Completed {
    /// The queue has room for more.
    Room,
    /// A message can be received.
    Input,
    /// A count arrived for this counter.
    Immediate(u32),
    /// A part is complete.
    Part(DevicePart),
    /// Everything that this request wrote by this queue before has arrived.
    Flushed(SlotId),
    /// A window is bound.
    Bound,
    /// The queue has just failed, for this reason.
    Failed(String),
    /// The failed queue completes nothing more.
    Drained,
    Nothing,
}

/// The work that a failed queue did not finish.
pub(crate) struct Unfinished {
    pub(crate) parts: Vec<DevicePart>,
    pub(crate) flushes: Vec<SlotId>,
}
