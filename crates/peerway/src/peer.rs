//! A peer: one remote endpoint incarnation, and everything that is asked of it.

use std::ffi::c_void;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use peerway_core::ids::Incarnation;
use peerway_core::outcome::Ended;

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

/// A connected peer. Cheap to clone. A restarted peer is another peer.
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
    /// The first import of an advertisement asks the peer, once; later ones are free.
    pub fn import(&self, descriptor: &[u8]) -> Result<RemoteRegion, ImportError> {
        import::import(&self.endpoint, &self.session, descriptor)
    }

    /// Writes and waits.
    pub fn write(&self, local: &LocalSlice, remote: &RemoteSlice) -> Result<(), Error> {
        Ok(self.run(&Batch::write(local, remote)?)?.ok()?)
    }

    /// Reads and waits.
    pub fn read(&self, local: &LocalSlice, remote: &RemoteSlice) -> Result<(), Error> {
        Ok(self.run(&Batch::read(local, remote)?)?.ok()?)
    }

    /// Posts a batch; returns within microseconds whatever its size.
    pub fn post(&self, batch: &Batch) -> Result<Transfer, PostError> {
        transfer::post(&self.endpoint, &self.session, batch, PostMode::Leaves, None)
    }

    /// Posts a batch and waits for its end in the calling thread, which does the work.
    pub fn run(&self, batch: &Batch) -> Result<Ended, PostError> {
        Ok(self.begin(batch)?.join())
    }

    /// Posts a batch that the calling thread waits for next: no other thread is asked to see to it. One
    /// that is kept and neither waited for nor polled may stand still. Dropping the handle lets it go
    /// on; awaiting it, or asking for a wake-up ([`Transfer::on_end`]), has the engine's threads carry it on.
    pub fn begin(&self, batch: &Batch) -> Result<Transfer, PostError> {
        transfer::post(&self.endpoint, &self.session, batch, PostMode::Waits, None)
    }

    /// Keeps a checked batch to be posted many times, from any thread, without checking it again. Where RDMA
    /// devices will carry it out its memory is registered with them now, which else the first post does; for GPU memory
    /// everything is made ready that a transfer in a stream may not ask the driver for.
    pub fn prepare(&self, batch: Batch) -> Result<Prepared, PostError> {
        if let Some(remote) = batch.work.remotes.as_slice().first()
            && !Arc::ptr_eq(&remote.session, &self.session)
        {
            return Err(PostError::OtherPeer);
        }
        let way = transfer::lasting_way(&self.endpoint, &self.session, &batch);
        let of_gpu = batch.work.touches_gpu();
        let prepared = Prepared { peer: self.clone(), batch: Arc::new(batch), way };
        if let Some(device) = prepared.device().filter(|_| of_gpu) {
            if let Err(error) = device.warm_up() {
                tracing::warn!(%error, "a GPU is not ready for transfers");
            }
            // It will be used again, or it would not be prepared.
            prepared.batch.work.pin_for(&device);
            prepared.batch.work.pin_for(&device);
        }
        Ok(prepared)
    }

    /// A transfer in parts that the caller releases one by one, each with its own counter and
    /// notification: layer-wise streaming.
    pub fn stage(&self, stages: Vec<Batch>) -> Result<Staged, PostError> {
        let stages: Result<_, _> = stages.into_iter().map(|batch| self.prepare(batch)).collect();
        self.stage_prepared(stages?)
    }

    /// As [`Self::stage`], of parts that are prepared already.
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

    /// The oldest notification from this peer, as soon as there is one.
    pub fn notification(&self, timeout: Duration) -> Option<Notification> {
        self.endpoint.wait_notification(Some(&self.session.incarnation), timeout)
    }

    /// The path to this peer, and why this one.
    pub fn path(&self) -> &Path {
        &self.session.path
    }

    /// The name of this life of the peer.
    pub fn incarnation(&self) -> Incarnation {
        self.session.incarnation
    }

    /// The address the session was made with.
    pub fn address(&self) -> SocketAddr {
        self.session.addr
    }

    /// Whether we opened the session.
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

    /// What went to and fro, also by threads of proxies.
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
    /// Two handles to one session.
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

/// Counts of one peer. Bytes that this process copied directly are not seen by lanes and count
/// under `transfers` alone.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct PeerStats {
    /// Transfers posted.
    pub transfers: u64,
    /// Bytes that lanes wrote to the peer.
    pub bytes_written: u64,
    /// Bytes that lanes read from it.
    pub bytes_read: u64,
    /// Bytes that it read from us by lanes.
    pub bytes_served: u64,
    /// Bytes that it wrote to us by lanes.
    pub bytes_landed: u64,
    /// Lanes that broke.
    pub lanes_lost: u64,
}

/// A batch that is posted many times.
#[derive(Clone)]
pub struct Prepared {
    peer: Peer,
    batch: Arc<Batch>,
    /// How it reaches the peer, where that is the same each time.
    way: Option<TransferMethod>,
}

impl Prepared {
    /// Posts it.
    pub fn post(&self) -> Result<Transfer, PostError> {
        self.post_then(PostMode::Leaves)
    }

    /// Posts it with this message after its bytes, whatever it was prepared with: its list is not made or checked anew.
    pub fn post_notifying(&self, message: &[u8]) -> Result<Transfer, PostError> {
        self.peer.post(&Batch::clone(&self.batch).notify(message)?)
    }

    /// Posts it and waits.
    pub fn run(&self) -> Result<Ended, PostError> {
        Ok(self.begin()?.join())
    }

    /// Posts it for the calling thread to wait for next: see [`Peer::begin`].
    pub fn begin(&self) -> Result<Transfer, PostError> {
        self.post_then(PostMode::Waits)
    }

    #[inline]
    fn post_then(&self, then: PostMode) -> Result<Transfer, PostError> {
        let Peer { endpoint, session, .. } = &self.peer;
        transfer::post(endpoint, session, &self.batch, then, self.way)
    }

    /// Puts it into a CUDA stream: it begins when the stream has come to it, and what is put into the stream later
    /// waits for its end. In a stream that is being captured it becomes part of the graph, and happens each time the
    /// graph does.
    ///
    /// A transfer that fails lets the stream go on; the handle says how it ended.
    ///
    /// # Safety
    ///
    /// The stream (a `CUstream`, or `cudaStream_t`) is alive and of the GPU whose memory is transferred.
    ///
    /// # Errors
    ///
    /// As for [`Self::post`], and [`PostError::Gpu`].
    pub unsafe fn enqueue(&self, stream: *mut c_void) -> Result<Enqueued, PostError> {
        // SAFETY: the caller's promise.
        unsafe { Enqueued::new(self, stream) }
    }

    /// What [`Self::enqueue`] does where a GPU carries it out by itself.
    ///
    /// # Safety
    ///
    /// As there.
    pub(crate) unsafe fn post_in(&self, stream: UserStream) -> Result<Option<Transfer>, PostError> {
        // SAFETY: the caller's promise.
        unsafe { transfer::post_in(&self.peer.endpoint, &self.peer.session, &self.batch, stream) }
    }

    /// The GPU whose memory it is about.
    pub(crate) fn device(&self) -> Option<Arc<Device>> {
        let work = &self.batch.work;
        work.by_gpu().or_else(|| work.staged_by())
    }

    /// Bytes in the transfer.
    pub fn total(&self) -> u64 {
        self.batch.total()
    }
}
