//! Transfers in stages that the caller releases.

use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use peerway_core::outcome::{Ended, Fence, Reason, TransferError};
use peerway_sys::cuda::Stream;

use super::{Prepared, stream};
use crate::clock;
use crate::error::PostError;
use crate::failure::Failure;
use crate::gpu::GpuError;
use crate::gpu::device::Device;
use crate::transfer::Transfer;

/// The stages of one transfer, checked and planned in advance. Layer `i` is sent while layer `i +
/// 1` is still being computed.
///
/// ```
/// # use peerway::{Access, Batch, Endpoint, Reason};
/// # use std::time::Duration;
/// # let (a, b) = (Endpoint::new()?, Endpoint::new()?);
/// # let peer = a.connect(&b.metadata())?;
/// # let (ours, theirs) = (a.allocate(4096)?, b.allocate(4096)?);
/// # let remote = peer.import(&theirs.advertise(Access::WRITE)?)?;
/// let layer = |i: u64| ours.slice(i * 1024..(i + 1) * 1024);
/// let place = |i: u64| remote.slice(i * 1024..(i + 1) * 1024);
/// let stages = (0..4)
///     .map(|i| Ok(Batch::write(&layer(i), &place(i))?.count(100 + i as u32)))
///     .collect::<Result<Vec<_>, peerway::PostError>>()?;
/// let staged = peer.stage(stages)?;
/// staged.release(0)?; // layer 0 is computed
/// assert_eq!(b.wait_counter(100, 1, Duration::from_secs(5)), 1);
/// for i in 1..4 {
///     staged.release(i)?;
/// }
/// assert_eq!(staged.join().reason, Reason::Done);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Staged {
    inner: Arc<StagedInner>,
}

struct StagedInner {
    stages: Vec<Prepared>,
    released: Mutex<Vec<Stage>>,
    changed: Condvar,
}

/// The state of a stage.
enum Stage {
    /// Not released.
    Kept,
    /// A stream or an event will release it.
    Promised,
    Released(Transfer),
    /// It was released and could not be posted.
    Failed,
}

impl Stage {
    fn failure(&self) -> Option<Failure> {
        match self {
            Self::Released(transfer) => transfer.failure(),
            Self::Kept | Self::Promised | Self::Failed => None,
        }
    }
}

impl StagedInner {
    fn release(&self, stage: usize) -> Result<(), PostError> {
        let stages = self.stages.len();
        let prepared = self.stages.get(stage).ok_or(PostError::NoSuchStage { stage, stages })?;
        let mut released = self.released.lock().unwrap();
        if matches!(released[stage], Stage::Released(_) | Stage::Failed) {
            return Err(PostError::AlreadyReleased(stage));
        }
        let promised = matches!(released[stage], Stage::Promised);
        let posted = prepared.post();
        released[stage] = match posted {
            Ok(transfer) => Stage::Released(transfer),
            Err(error) if promised => {
                let peer = prepared.peer();
                let what = "cannot post a stage that a CUDA stream released";
                tracing::error!(%error, %peer, stage, "{what}");
                Stage::Failed
            }
            Err(error) => return Err(error),
        };
        self.changed.notify_all();
        Ok(())
    }
}

impl Staged {
    pub(crate) fn new(stages: Vec<Prepared>) -> Self {
        let released = Mutex::new(stages.iter().map(|_| Stage::Kept).collect());
        Self { inner: Arc::new(StagedInner { stages, released, changed: Condvar::new() }) }
    }

    /// The number of stages.
    pub fn len(&self) -> usize {
        self.inner.stages.len()
    }

    /// Whether there are no stages.
    pub fn is_empty(&self) -> bool {
        self.inner.stages.is_empty()
    }

    /// Posts a stage.
    pub fn release(&self, stage: usize) -> Result<(), PostError> {
        self.inner.release(stage)
    }

    /// Posts a stage when a CUDA stream reaches this point, behind the kernels that compute the
    /// stage.
    ///
    /// # Safety
    ///
    /// The stream (a `CUstream`, or `cudaStream_t`) is alive, belongs to the GPU whose memory is
    /// transferred, and is not being captured.
    ///
    /// # Errors
    ///
    /// As for [`Self::release`], and [`PostError::Gpu`].
    pub unsafe fn release_in(&self, stage: usize, stream: *mut c_void) -> Result<(), PostError> {
        let device = self.promise(stage)?;
        let inner = self.inner.clone();
        let go = move || {
            // It fails only if the caller released the stage meanwhile.
            let _ = inner.release(stage);
        };
        // SAFETY: the caller's promise.
        Ok(unsafe { stream::call_in(&device.gpu, stream, go) }
            .inspect_err(|_| self.inner.released.lock().unwrap()[stage] = Stage::Kept)?)
    }

    /// Posts a stage when a CUDA event has occurred.
    ///
    /// # Safety
    ///
    /// The event (a `CUevent`, or `cudaEvent_t`) is alive, has been recorded, and belongs to the
    /// GPU whose memory is transferred.
    ///
    /// # Errors
    ///
    /// As for [`Self::release_in`].
    pub unsafe fn release_when(&self, stage: usize, event: *mut c_void) -> Result<(), PostError> {
        let stages = self.inner.stages.len();
        let prepared = self.inner.stages.get(stage);
        let prepared = prepared.ok_or(PostError::NoSuchStage { stage, stages })?;
        let device = prepared.device().ok_or(GpuError::NotForAStream)?;
        // Each stage has its own stream, because events may occur in any order. The stream is
        // destroyed when its work is done.
        let stream = Stream::new(&device.gpu).map_err(GpuError::from)?;
        // SAFETY: this function owns the stream. The event is the caller's promise.
        unsafe {
            device.gpu.wait_event(stream.raw(), event).map_err(GpuError::from)?;
            self.release_in(stage, stream.raw())
        }
    }

    fn promise(&self, stage: usize) -> Result<Arc<Device>, PostError> {
        let stages = self.inner.stages.len();
        let prepared = self.inner.stages.get(stage);
        let prepared = prepared.ok_or(PostError::NoSuchStage { stage, stages })?;
        let device = prepared.device().ok_or(GpuError::NotForAStream)?;
        let mut released = self.inner.released.lock().unwrap();
        if !matches!(released[stage], Stage::Kept) {
            return Err(PostError::AlreadyReleased(stage));
        }
        released[stage] = Stage::Promised;
        Ok(device)
    }

    /// The result of a stage, if it was released and has ended.
    pub fn poll(&self, stage: usize) -> Option<Ended> {
        match self.inner.released.lock().unwrap().get(stage)? {
            Stage::Released(transfer) => transfer.poll(),
            Stage::Failed => Some(NOT_POSTED),
            Stage::Kept | Stage::Promised => None,
        }
    }

    /// What is known of the first stage that did not end as done. `None` if there is none, or if
    /// that stage could not be posted; the log has the reason then.
    pub fn failure(&self) -> Option<Failure> {
        let released = self.inner.released.lock().unwrap();
        let posted = released.iter().take_while(|stage| !matches!(stage, Stage::Failed));
        posted.filter_map(Stage::failure).next()
    }

    /// What is known of this stage if it was posted and did not end as done.
    pub fn failure_of(&self, stage: usize) -> Option<Failure> {
        self.inner.released.lock().unwrap().get(stage)?.failure()
    }

    /// Cancels every released stage. The other stages are never posted.
    pub fn cancel(&self) {
        for stage in self.inner.released.lock().unwrap().iter() {
            if let Stage::Released(transfer) = stage {
                transfer.cancel();
            }
        }
    }

    /// Waits for every released stage, and for those that a stream or an event will release. The
    /// result is that of the first stage that did not end as done. The fence is open if that of any
    /// stage is.
    pub fn join(&self) -> Ended {
        loop {
            if let Some(ended) = self.wait(Duration::from_secs(1)) {
                return ended;
            }
        }
    }

    /// Does [`Self::join`] with a time limit.
    pub fn wait(&self, timeout: Duration) -> Option<Ended> {
        let deadline = clock::after(clock::now(), timeout);
        let mut released = self.inner.released.lock().unwrap();
        while released.iter().any(|stage| matches!(stage, Stage::Promised)) {
            let left = clock::until(deadline, clock::now());
            if left == Duration::ZERO {
                return None;
            }
            released = self.inner.changed.wait_timeout(released, left).unwrap().0;
        }
        let mut all = Ended::DONE;
        for stage in released.iter() {
            let ended = match stage {
                Stage::Released(transfer) => transfer.wait(clock::until(deadline, clock::now()))?,
                Stage::Failed => NOT_POSTED,
                Stage::Kept | Stage::Promised => continue,
            };
            if all.reason == Reason::Done {
                all.reason = ended.reason;
            }
            if ended.fence == Fence::Open {
                all.fence = Fence::Open;
            }
        }
        Some(all)
    }
}

/// The result of a stage that a stream released and that could not be posted. The log says why.
const NOT_POSTED: Ended =
    Ended { reason: Reason::Failed(TransferError::Device), fence: Fence::Held };
