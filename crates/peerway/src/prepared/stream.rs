//! Transfers in CUDA streams and graphs.
//!
//! If a GPU can carry out a transfer by itself, its copies go into the user's stream. Otherwise,
//! and in a stream that is being captured, two things go into the stream. The first is a host
//! function that makes the thread `CALLER` post the transfer, because a stream's host function may
//! not call CUDA. The second is a wait for a word in pinned memory that the engine raises at the
//! end of the transfer. The host function first lowers the word, so a graph can be launched many
//! times.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::task::{Wake, Waker};
use std::time::Duration;

use peerway_core::outcome::{Ended, Fence, Reason, TransferError};
use peerway_sys::cuda::ffi::{CUhostFn, CUstream};

use super::Prepared;
use crate::clock;
use crate::error::PostError;
use crate::failure::Failure;
use crate::gpu::GpuError;
use crate::gpu::device::{FLAGS, Flag, Mark, RAISED};
use crate::progress::copies::gpu::UserStream;
use crate::transfer::Transfer;
use crate::worker::CALLER;

/// A transfer enqueued in a stream by [`Prepared::enqueue`].
///
/// Dropping it does not change the transfer. If it was captured, the engine keeps it for the graph,
/// with the memory that it names, until [`Self::release`].
#[must_use = "only this value reports how the transfer ends"]
pub struct Enqueued {
    how: EnqueuedBy,
}

enum EnqueuedBy {
    /// The transfer's copies are in the stream.
    Copies(Transfer),
    /// The stream calls a host function that posts the transfer.
    Called { trigger: Arc<Trigger>, captured: bool },
}

impl Enqueued {
    /// # Safety
    ///
    /// The stream is alive and belongs to the GPU whose memory is transferred.
    pub(crate) unsafe fn new(prepared: &Prepared, stream: CUstream) -> Result<Self, PostError> {
        let device = prepared.device().ok_or(GpuError::NotForAStream)?;
        let gpu = &device.gpu;
        // SAFETY: the caller upholds this function's contract.
        let captured = unsafe { gpu.is_capturing(stream) }.map_err(GpuError::from)?;
        if !captured {
            // SAFETY: the caller upholds this function's contract.
            if let Some(transfer) = unsafe { prepared.post_in(UserStream(stream))? } {
                return Ok(Self { how: EnqueuedBy::Copies(transfer) });
            }
        }
        let full = GpuError::TooManyInStreams { most: FLAGS, gpu: device.index() };
        let word = device.flag(stream).ok_or(full)?;
        let address = word.address();
        let prepared = prepared.clone();
        let (state, changed) = (Mutex::default(), Condvar::new());
        let (passed, off) = (OnceLock::new(), AtomicBool::new(false));
        let word = Some(word);
        let trigger = Arc::new(Trigger { prepared, word, passed, off, state, changed });
        let (function, data): (CUhostFn, _) = if captured {
            (call_again, Arc::as_ptr(&trigger).cast_mut().cast())
        } else {
            (call_once, Arc::into_raw(trigger.clone()).cast_mut().cast())
        };
        // SAFETY: `data` points to a trigger that lives until the call: `call_once` owns a count,
        // and a captured trigger lives until `release`.
        if let Err(error) = unsafe { gpu.host_function(stream, function, data) } {
            if !captured {
                // SAFETY: the driver never calls it, so take back the count.
                drop(unsafe { Arc::from_raw(data.cast::<Trigger>()) });
            }
            return Err(GpuError::from(error).into());
        }
        // SAFETY: the word lives as long as the trigger. The caller guarantees the stream.
        let put = unsafe { gpu.wait_value(stream, address, u64::from(RAISED)) };
        let passed = put.and_then(|()| match captured {
            true => Ok(None),
            // SAFETY: the caller upholds this function's contract.
            false => unsafe { device.mark(stream) }.map(Some),
        });
        match passed {
            Ok(Some(mark)) => drop(trigger.passed.set(mark)),
            Ok(None) => {}
            Err(error) => {
                // The host function is already in the stream or graph, and possibly the wait too.
                // `off` disables the first, and the raised word satisfies the second.
                trigger.off.store(true, Ordering::SeqCst);
                trigger.word.iter().for_each(Flag::raise);
                std::mem::forget(trigger);
                return Err(GpuError::from(error).into());
            }
        }
        Ok(Self { how: EnqueuedBy::Called { trigger, captured } })
    }

    /// How often the transfer has ended: more than once only in a graph that is launched
    /// repeatedly.
    pub fn runs(&self) -> u64 {
        match &self.how {
            EnqueuedBy::Copies(transfer) => u64::from(transfer.poll().is_some()),
            EnqueuedBy::Called { trigger, .. } => trigger.state.lock().unwrap().runs,
        }
    }

    /// The result of the last run. Blocks up to `timeout` while no run has ended or one is in
    /// progress.
    pub fn wait(&self, timeout: Duration) -> Option<Ended> {
        match &self.how {
            EnqueuedBy::Copies(transfer) => transfer.wait(timeout),
            EnqueuedBy::Called { trigger, .. } => {
                let deadline = clock::after(clock::now(), timeout);
                let mut state = trigger.state.lock().unwrap();
                while state.last.is_none() || state.running.is_some() {
                    let left = clock::until(deadline, clock::now());
                    if left == Duration::ZERO {
                        return None;
                    }
                    state = trigger.changed.wait_timeout(state, left).unwrap().0;
                }
                state.last
            }
        }
    }

    /// What is known of the last run if it did not end as done. `None` if it could not be posted:
    /// the log has the reason then.
    pub fn failure(&self) -> Option<Failure> {
        match &self.how {
            EnqueuedBy::Copies(transfer) => transfer.failure(),
            EnqueuedBy::Called { trigger, .. } => trigger.state.lock().unwrap().failure.clone(),
        }
    }

    /// Releases a captured transfer, after its graph is destroyed, with everything that was kept
    /// for it. For a transfer that was not captured, this is the same as dropping it.
    ///
    /// # Safety
    ///
    /// No graph that captured it is running or will be launched again.
    pub unsafe fn release(mut self) {
        if let EnqueuedBy::Called { captured, .. } = &mut self.how {
            *captured = false;
        }
    }
}

impl Drop for Enqueued {
    fn drop(&mut self) {
        if let EnqueuedBy::Called { trigger, captured: true } = &self.how {
            std::mem::forget(trigger.clone());
        }
    }
}

/// The state behind the host function that a stream calls.
struct Trigger {
    prepared: Prepared,
    /// The word that the stream waits for. Present until the trigger is dropped.
    word: Option<Flag>,
    /// Marks the point after which the stream no longer reads the word.
    passed: OnceLock<Mark>,
    /// Enqueueing failed part-way: the parts that are in the stream must have no effect.
    off: AtomicBool,
    state: Mutex<StreamState>,
    changed: Condvar,
}

#[derive(Default)]
struct StreamState {
    running: Option<Transfer>,
    last: Option<Ended>,
    /// Of the last run.
    failure: Option<Failure>,
    runs: u64,
}

impl Drop for Trigger {
    fn drop(&mut self) {
        // The word must not be reused before the stream has read it for the last time.
        if let (Some(word), Some(passed)) = (self.word.take(), self.passed.take()) {
            word.retire(passed);
        }
    }
}

impl Trigger {
    /// Runs when the stream reaches the host function.
    fn called(self: Arc<Self>) {
        if self.off.load(Ordering::SeqCst) {
            return;
        }
        self.word.iter().for_each(Flag::lower);
        CALLER.run(move || self.go());
    }

    /// Posts the transfer. The stream waits until it has ended.
    fn go(self: &Arc<Self>) {
        match self.prepared.post() {
            Ok(transfer) => {
                let waker = Waker::from(self.clone());
                let mut state = self.state.lock().unwrap();
                let pending = transfer.on_end(&waker);
                state.running = Some(transfer);
                drop(state);
                if !pending {
                    self.ended();
                }
            }
            Err(error) => {
                let peer = self.prepared.peer();
                tracing::error!(%error, %peer, "cannot post a transfer from a CUDA stream");
                let why = match error {
                    PostError::PeerGone { .. } => TransferError::PeerGone,
                    PostError::EndpointClosed | PostError::Forked => TransferError::EndpointClosed,
                    _ => TransferError::Device,
                };
                self.over(Ended { reason: Reason::Failed(why), fence: Fence::Held });
            }
        }
    }

    fn ended(&self) {
        let state = self.state.lock().unwrap();
        let ended = state.running.as_ref().and_then(Transfer::ended);
        drop(state);
        if let Some(ended) = ended {
            self.over(ended);
        }
    }

    fn over(&self, ended: Ended) {
        let mut state = self.state.lock().unwrap();
        let transfer = state.running.take();
        (state.last, state.runs) = (Some(ended), state.runs + 1);
        state.failure = transfer.as_ref().and_then(Transfer::failure);
        drop(state);
        drop(transfer);
        self.word.iter().for_each(Flag::raise);
        self.changed.notify_all();
    }
}

impl Wake for Trigger {
    fn wake(self: Arc<Self>) {
        // Run the rest on another thread, so that it does not delay the thread that completes
        // transfers.
        CALLER.run(move || self.ended());
    }
}

unsafe extern "C" fn call_once(data: *mut c_void) {
    // SAFETY: `data` comes from `Arc::into_raw` in `Enqueued::new`, and the driver calls this once.
    let trigger = unsafe { Arc::from_raw(data.cast::<Trigger>()) };
    trigger.called();
}

unsafe extern "C" fn call_again(data: *mut c_void) {
    let trigger = data.cast::<Trigger>().cast_const();
    // SAFETY: `Enqueued` keeps the trigger alive until it is released, or forever.
    let trigger = unsafe {
        Arc::increment_strong_count(trigger);
        Arc::from_raw(trigger)
    };
    trigger.called();
}

/// Calls a function when a stream reaches it, on a thread that may call CUDA and block.
///
/// # Safety
///
/// The stream is alive and belongs to that GPU.
pub(crate) unsafe fn call_in(
    gpu: &peerway_sys::cuda::Gpu,
    stream: CUstream,
    function: impl FnOnce() + Send + 'static,
) -> Result<(), GpuError> {
    type Boxed = Box<dyn FnOnce() + Send>;
    unsafe extern "C" fn call(data: *mut c_void) {
        // SAFETY: `call_in` made the pointer with `Box::into_raw`, and the driver calls this once.
        let function = unsafe { Box::from_raw(data.cast::<Boxed>()) };
        CALLER.run(*function);
    }
    let data = Box::into_raw(Box::new(Box::new(function) as Boxed));
    // SAFETY: the caller guarantees the stream. If the driver refuses, it never calls the function,
    // so the box is taken back.
    let put = unsafe {
        gpu.host_function(stream, call, data.cast()).inspect_err(|_| drop(Box::from_raw(data)))
    };
    Ok(put?)
}
