//! A peer: one remote endpoint incarnation, and all operations on it.

use std::ffi::c_void;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use peerway_core::ids::Incarnation;
use peerway_core::outcome::{Ended, Reason};

use crate::batch::{Batch, Signal, check_notification};
use crate::error::{Error, ImportError, PostError};
use crate::gpu::Enqueued;
use crate::gpu::device::Device;
use crate::inbox::Notification;
use crate::inner::Inner;
use crate::memory::{LocalSlice, RemoteRegion, RemoteSlice};
use crate::path::Path;
use crate::session::{Session, import};
use crate::staged::Staged;
use crate::transfer::{self, PostMode, Transfer, TransferMethod};
use crate::transport::gpu::UserStream;

/// A connected peer. Cloning is cheap. A restarted peer is another peer.
#[derive(Clone)]
pub struct Peer {
    endpoint: Arc<Inner>,
    session: Arc<Session>,
}

impl Peer {
    pub(crate) fn new(endpoint: Arc<Inner>, session: Arc<Session>) -> Self {
        Self { endpoint, session }
    }

    pub(crate) fn endpoint(&self) -> &Arc<Inner> {
        &self.endpoint
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Turns a descriptor that the peer advertised into memory that can be read and written.
    ///
    /// The first import of an advertisement asks the peer once. Later imports cost nothing.
    pub fn import(&self, descriptor: &[u8]) -> Result<RemoteRegion, ImportError> {
        import::import(&self.endpoint, &self.session, descriptor)
    }

    /// Writes and waits for the end.
    pub fn write(&self, local: &LocalSlice, remote: &RemoteSlice) -> Result<(), Error> {
        self.finish(&Batch::write(local, remote)?)
    }

    /// Reads and waits for the end.
    pub fn read(&self, local: &LocalSlice, remote: &RemoteSlice) -> Result<(), Error> {
        self.finish(&Batch::read(local, remote)?)
    }

    fn finish(&self, batch: &Batch) -> Result<(), Error> {
        let transfer = self.begin(batch)?;
        if transfer.join().reason == Reason::Done {
            return Ok(());
        }
        transfer.failure().map_or(Ok(()), |failure| Err(Box::new(failure).into()))
    }

    /// Posts a batch. It returns within microseconds, whatever the size of the batch.
    pub fn post(&self, batch: &Batch) -> Result<Transfer, PostError> {
        transfer::post(&self.endpoint, &self.session, batch, PostMode::Leaves, None)
    }

    /// Posts a batch and waits for its end. The calling thread does the work.
    ///
    /// To learn more of a failure than its reason and fence, use [`Self::begin`],
    /// [`Transfer::join`] and [`Transfer::failure`].
    pub fn run(&self, batch: &Batch) -> Result<Ended, PostError> {
        Ok(self.begin(batch)?.join())
    }

    /// Posts a batch that the calling thread waits for next. The engine's threads do not work on
    /// it. A handle that the caller keeps without waiting for it or polling it may make no
    /// progress. The engine's threads continue the transfer after the caller drops the handle,
    /// awaits it, or asks for a wake-up ([`Transfer::on_end`]).
    pub fn begin(&self, batch: &Batch) -> Result<Transfer, PostError> {
        transfer::post(&self.endpoint, &self.session, batch, PostMode::Waits, None)
    }

    /// Keeps a checked batch that any thread can post many times without another check.
    ///
    /// If RDMA devices will carry it, this call registers its memory with them. Otherwise the first
    /// post does. For GPU memory it also prepares everything that a transfer in a stream must not
    /// ask the driver for.
    pub fn prepare(&self, batch: Batch) -> Result<Prepared, PostError> {
        if let Some(remote) = batch.work.remotes.as_slice().first()
            && !Arc::ptr_eq(&remote.session, &self.session)
        {
            return Err(PostError::OtherPeer);
        }
        let way = transfer::lasting_method(&self.endpoint, &self.session, &batch);
        let of_gpu = batch.work.touches_gpu();
        let prepared = Prepared { peer: self.clone(), batch: Arc::new(batch), way };
        if let Some(device) = prepared.device().filter(|_| of_gpu) {
            if let Err(error) = device.warm_up() {
                let peer = self.session.addr;
                tracing::warn!(%error, %peer, "cannot prepare a GPU for transfers");
            }
            // Memory is pinned at its second use. A prepared batch is used repeatedly, so count
            // both uses now.
            prepared.batch.work.pin_for(&device);
            prepared.batch.work.pin_for(&device);
        }
        Ok(prepared)
    }

    /// Prepares a transfer in stages that the caller releases one by one. Each stage has its own
    /// counter and notification. Use it for layer-wise streaming.
    pub fn stage(&self, stages: Vec<Batch>) -> Result<Staged, PostError> {
        let stages: Result<_, _> = stages.into_iter().map(|batch| self.prepare(batch)).collect();
        self.stage_prepared(stages?)
    }

    /// Does [`Self::stage`] with stages that are already prepared.
    pub fn stage_prepared(&self, stages: Vec<Prepared>) -> Result<Staged, PostError> {
        if stages.iter().any(|stage| stage.peer != *self) {
            return Err(PostError::OtherPeer);
        }
        Ok(Staged::new(stages))
    }

    /// Sends a message to the peer's notification queue.
    pub fn notify(&self, message: &[u8]) -> Result<Transfer, PostError> {
        check_notification(message)?;
        let signal = Signal { notify: Some(message.into()), count: None };
        transfer::post_signal(&self.endpoint, &self.session, signal)
    }

    /// Adds one to a counter of the peer.
    pub fn count(&self, id: u32) -> Result<Transfer, PostError> {
        transfer::post_signal(
            &self.endpoint,
            &self.session,
            Signal { notify: None, count: Some(id) },
        )
    }

    /// Waits for a notification from this peer and takes the oldest.
    pub fn notification(&self, timeout: Duration) -> Option<Notification> {
        self.endpoint.wait_notification(Some(&self.session.incarnation), timeout)
    }

    /// The path to this peer, and why it was chosen.
    pub fn path(&self) -> &Path {
        &self.session.path
    }

    /// The identity of this incarnation of the peer.
    pub fn incarnation(&self) -> Incarnation {
        self.session.incarnation
    }

    /// The address that the session was opened with.
    pub fn address(&self) -> SocketAddr {
        self.session.addr
    }

    /// Whether this endpoint opened the session.
    pub fn is_initiator(&self) -> bool {
        self.session.initiator
    }

    /// Whether transfers can be posted.
    pub fn is_alive(&self) -> bool {
        self.session.is_alive()
    }

    /// Closes the session.
    pub fn remove(&self) {
        self.session.remove();
    }

    /// Statistics of this peer, including the sub-sessions of proxy threads.
    pub fn stats(&self) -> PeerStats {
        let mut sum = PeerStats::default();
        let open = self.endpoint.check_open().is_ok();
        let sub_sessions =
            if open { self.endpoint.sub_sessions_of(&self.session) } else { Vec::new() };
        for session in sub_sessions.iter().chain([&self.session]) {
            let stats = &session.stats;
            let load = |n: &std::sync::atomic::AtomicU64| n.load(Ordering::Relaxed);
            sum.transfers += load(&stats.transfers);
            sum.bytes_written += load(&stats.bytes_written);
            sum.bytes_read += load(&stats.bytes_read);
            sum.bytes_served += load(&stats.bytes_served);
            sum.bytes_landed += load(&stats.bytes_landed);
            sum.lanes_lost += load(&stats.lanes_lost);
        }
        sum
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Peer({}, {}, {})", self.incarnation(), self.address(), self.path().kind)
    }
}

impl PartialEq for Peer {
    /// Whether both handles name the same session.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.session, &other.session)
    }
}

impl Eq for Peer {}

impl Hash for Peer {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.session).hash(state);
    }
}

/// Statistics of one peer. Lanes do not see bytes that this process copies directly, so such
/// transfers count only under `transfers`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct PeerStats {
    /// Transfers posted.
    pub transfers: u64,
    /// Bytes that lanes wrote to the peer.
    pub bytes_written: u64,
    /// Bytes that lanes read from the peer.
    pub bytes_read: u64,
    /// Bytes that the peer read from this endpoint by lanes.
    pub bytes_served: u64,
    /// Bytes that the peer wrote to this endpoint by lanes.
    pub bytes_landed: u64,
    /// Lanes that broke.
    pub lanes_lost: u64,
}

/// A checked batch that can be posted many times.
#[derive(Clone)]
pub struct Prepared {
    peer: Peer,
    batch: Arc<Batch>,
    /// How it reaches the peer, if that is the same for each post.
    way: Option<TransferMethod>,
}

impl Prepared {
    /// Posts the batch.
    pub fn post(&self) -> Result<Transfer, PostError> {
        self.post_then(PostMode::Leaves)
    }

    /// Posts the batch with this message after its bytes, instead of the message it was prepared
    /// with. The list of ranges is neither rebuilt nor checked again.
    pub fn post_notifying(&self, message: &[u8]) -> Result<Transfer, PostError> {
        self.peer.post(&Batch::clone(&self.batch).notify(message)?)
    }

    /// Posts the batch and waits for its end.
    pub fn run(&self) -> Result<Ended, PostError> {
        Ok(self.begin()?.join())
    }

    /// Posts the batch for the calling thread to wait for next: see [`Peer::begin`].
    pub fn begin(&self) -> Result<Transfer, PostError> {
        self.post_then(PostMode::Waits)
    }

    #[inline]
    fn post_then(&self, then: PostMode) -> Result<Transfer, PostError> {
        let Peer { endpoint, session, .. } = &self.peer;
        transfer::post(endpoint, session, &self.batch, then, self.way)
    }

    /// Puts the transfer into a CUDA stream. It starts when the stream reaches it, and later work
    /// in the stream waits for its end. In a stream that is being captured it becomes part of the
    /// graph and runs each time the graph runs.
    ///
    /// A transfer that fails does not stop the stream. The handle says how it ended.
    ///
    /// # Safety
    ///
    /// The stream (a `CUstream`, or `cudaStream_t`) is alive and belongs to the GPU whose memory is
    /// transferred.
    ///
    /// # Errors
    ///
    /// As for [`Self::post`], and [`PostError::Gpu`].
    pub unsafe fn enqueue(&self, stream: *mut c_void) -> Result<Enqueued, PostError> {
        // SAFETY: the caller's promise.
        unsafe { Enqueued::new(self, stream) }
    }

    /// The part of [`Self::enqueue`] for transfers that a GPU can do alone.
    ///
    /// # Safety
    ///
    /// As for [`Self::enqueue`].
    pub(crate) unsafe fn post_in(&self, stream: UserStream) -> Result<Option<Transfer>, PostError> {
        // SAFETY: the caller's promise.
        unsafe { transfer::post_in(&self.peer.endpoint, &self.peer.session, &self.batch, stream) }
    }

    /// The peer.
    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    /// The GPU whose memory the transfer uses.
    pub(crate) fn device(&self) -> Option<Arc<Device>> {
        let work = &self.batch.work;
        work.by_gpu().or_else(|| work.staged_by())
    }

    /// The number of bytes in the transfer.
    pub fn total(&self) -> u64 {
        self.batch.total()
    }
}
