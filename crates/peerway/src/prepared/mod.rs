//! Batches that are checked once and posted many times, also in stages and in CUDA streams.

mod staged;
mod stream;

use std::ffi::c_void;
use std::net::SocketAddr;
use std::sync::Arc;

use peerway_core::outcome::Ended;

pub use self::staged::Staged;
pub use self::stream::Enqueued;
use crate::batch::Batch;
use crate::error::PostError;
use crate::gpu::device::Device;
use crate::peer::Peer;
use crate::progress::copies::gpu::UserStream;
use crate::progress::engine::Engine;
use crate::session::Session;
use crate::transfer::{self, PostMode, Transfer, TransferMethod};

/// What a program prepares for a peer.
impl Peer {
    /// Keeps a checked batch that any thread can post many times without another check.
    ///
    /// If RDMA devices will carry it, this call registers its memory with them. Otherwise the first
    /// post does. For GPU memory it also prepares everything that a transfer in a stream must not
    /// ask the driver for.
    pub fn prepare(&self, batch: Batch) -> Result<Prepared, PostError> {
        if let Some(remote) = batch.work.remotes.as_slice().first()
            && !Arc::ptr_eq(&remote.session, self.session())
        {
            return Err(PostError::OtherPeer);
        }
        Ok(Prepared::new(self.endpoint().clone(), self.session().clone(), batch))
    }

    /// Prepares a transfer in stages that the caller releases one by one. Each stage has its own
    /// counter and notification. Use it for layer-wise streaming.
    pub fn stage(&self, stages: Vec<Batch>) -> Result<Staged, PostError> {
        let stages: Result<_, _> = stages.into_iter().map(|batch| self.prepare(batch)).collect();
        self.stage_prepared(stages?)
    }

    /// Does [`Self::stage`] with stages that are already prepared.
    pub fn stage_prepared(&self, stages: Vec<Prepared>) -> Result<Staged, PostError> {
        if stages.iter().any(|stage| !stage.is_for(self.session())) {
            return Err(PostError::OtherPeer);
        }
        Ok(Staged::new(stages))
    }
}

/// A checked batch that can be posted many times.
#[derive(Clone)]
pub struct Prepared {
    endpoint: Arc<Engine>,
    session: Arc<Session>,
    batch: Arc<Batch>,
    /// How it reaches the peer, if that is the same for each post.
    method: Option<TransferMethod>,
}

impl Prepared {
    /// Prepares a batch for the session's peer. See [`Peer::prepare`].
    pub(crate) fn new(endpoint: Arc<Engine>, session: Arc<Session>, batch: Batch) -> Self {
        let method = transfer::lasting_method(&endpoint, &session, &batch);
        let prepared = Self { endpoint, session, batch: Arc::new(batch), method };
        let of_gpu = prepared.batch.work.touches_gpu();
        if let Some(device) = prepared.device().filter(|_| of_gpu) {
            if let Err(error) = device.warm_up() {
                let peer = prepared.session.addr;
                tracing::warn!(%error, %peer, "cannot prepare a GPU for transfers");
            }
            // Memory is pinned at its second use. A prepared batch is used repeatedly, so count
            // both uses now.
            prepared.batch.work.pin_for(&device);
            prepared.batch.work.pin_for(&device);
        }
        prepared
    }

    /// Posts the batch.
    pub fn post(&self) -> Result<Transfer, PostError> {
        self.post_then(PostMode::Leaves)
    }

    /// Posts the batch with this message after its bytes, instead of the message it was prepared
    /// with. The list of ranges is neither rebuilt nor checked again.
    pub fn post_notifying(&self, message: &[u8]) -> Result<Transfer, PostError> {
        let batch = Batch::clone(&self.batch).notify(message)?;
        transfer::post(&self.endpoint, &self.session, &batch, PostMode::Leaves, None)
    }

    /// Posts the batch and waits for its end.
    pub fn run(&self) -> Result<Ended, PostError> {
        Ok(self.begin()?.join())
    }

    /// Posts the batch for the calling thread to wait for next: see
    /// [`Peer::begin`](crate::Peer::begin).
    pub fn begin(&self) -> Result<Transfer, PostError> {
        self.post_then(PostMode::Waits)
    }

    #[inline]
    fn post_then(&self, then: PostMode) -> Result<Transfer, PostError> {
        transfer::post(&self.endpoint, &self.session, &self.batch, then, self.method)
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
        unsafe { transfer::post_in(&self.endpoint, &self.session, &self.batch, stream) }
    }

    /// Whether it goes to the peer of this session.
    pub(crate) fn is_for(&self, session: &Arc<Session>) -> bool {
        Arc::ptr_eq(&self.session, session)
    }

    /// The address of the peer.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.session.addr
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
