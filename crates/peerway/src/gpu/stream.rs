//! Transfers in CUDA streams and graphs.
//!
//! Where a GPU carries a transfer out by itself, its copies are put into the user's stream. Else, and in a stream that
//! is being captured, two things are put there: a function that has a thread of ours post the transfer (what a
//! stream calls may not call CUDA itself), and a wait for a word in pinned memory that is raised at its end. The
//! function lowers the word first, so a graph can be launched many times.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::task::{Wake, Waker};
use std::time::Duration;

use peerway_core::outcome::{Ended, Fence, Reason, TransferError};
use peerway_sys::cuda::ffi::{CUhostFn, CUstream};

use super::GpuError;
use super::device::{FLAGS, Flag, Mark, RAISED};
use crate::clock;
use crate::error::PostError;
use crate::peer::Prepared;
use crate::transfer::Transfer;
use crate::transport::gpu::UserStream;
use crate::worker::CALLER;

/// A transfer that was put into a stream, by [`Prepared::enqueue`].
///
/// Dropping it changes nothing about the transfer. One that was captured is kept for the graph's sake, with the memory
/// it names, until [`Self::release`] says that the graph is gone.
#[must_use = "nobody else learns how the transfer ends"]
pub struct Enqueued {
    how: EnqueuedBy,
}

enum EnqueuedBy {
    /// Its copies are in the stream.
    Copies(Transfer),
    /// The stream calls for it.
    Called { trigger: Arc<Trigger>, captured: bool },
}

impl Enqueued {
    /// # Safety
    ///
    /// The stream is alive and of the GPU whose memory is transferred.
    pub(crate) unsafe fn new(prepared: &Prepared, stream: CUstream) -> Result<Self, PostError> {
        let device = prepared.device().ok_or(GpuError::NotForAStream)?;
        let gpu = &device.gpu;
        // SAFETY: the caller's promise.
        let captured = unsafe { gpu.is_capturing(stream) }.map_err(GpuError::from)?;
        if !captured {
            // SAFETY: the caller's promise.
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
        // SAFETY: `data` is a trigger that lives until it is called: a captured one until it is released.
        if let Err(error) = unsafe { gpu.host_function(stream, function, data) } {
            if !captured {
                // SAFETY: never called, so taken back.
                drop(unsafe { Arc::from_raw(data.cast::<Trigger>()) });
            }
            return Err(GpuError::from(error).into());
        }
        // SAFETY: the word stays while the trigger does; the rest is the caller's promise.
        let put = unsafe { gpu.wait_value(stream, address, u64::from(RAISED)) };
        let passed = put.and_then(|()| match captured {
            true => Ok(None),
            // SAFETY: the caller's promise.
            false => unsafe { device.mark(stream) }.map(Some),
        });
        match passed {
            Ok(Some(mark)) => drop(trigger.passed.set(mark)),
            Ok(None) => {}
            Err(error) => {
                // The call is in the stream, or in a graph, and finds it; so does a wait, if that is there too.
                trigger.off.store(true, Ordering::SeqCst);
                trigger.word.iter().for_each(Flag::raise);
                std::mem::forget(trigger);
                return Err(GpuError::from(error).into());
            }
        }
        Ok(Self { how: EnqueuedBy::Called { trigger, captured } })
    }

    /// EnqueuedBy often it has come to its end: more than once only in a graph that is launched again.
    pub fn runs(&self) -> u64 {
        match &self.how {
            EnqueuedBy::Copies(transfer) => u64::from(transfer.poll().is_some()),
            EnqueuedBy::Called { trigger, .. } => trigger.state.lock().unwrap().runs,
        }
    }

    /// EnqueuedBy it ended the last time, or as soon as it has.
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

    /// The graph that it was captured into is gone: so is what was kept for it. Does nothing else than dropping
    /// for one that was not captured.
    ///
    /// # Safety
    ///
    /// No graph that it was captured into is launched, or running, any more.
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

/// What a stream calls.
struct Trigger {
    prepared: Prepared,
    /// What the stream waits for; there until the trigger is gone.
    word: Option<Flag>,
    /// Where the stream is when it does not look at the word any more.
    passed: OnceLock<Mark>,
    /// It could not be put into the stream whole: what was put there does nothing.
    off: AtomicBool,
    state: Mutex<StreamState>,
    changed: Condvar,
}

#[derive(Default)]
struct StreamState {
    running: Option<Transfer>,
    last: Option<Ended>,
    runs: u64,
}

impl Drop for Trigger {
    fn drop(&mut self) {
        // The word is given to others only when the stream has looked at it for the last time.
        if let (Some(word), Some(passed)) = (self.word.take(), self.passed.take()) {
            word.retire(passed);
        }
    }
}

impl Trigger {
    /// The stream has come to it.
    fn called(self: Arc<Self>) {
        if self.off.load(Ordering::SeqCst) {
            return;
        }
        self.word.iter().for_each(Flag::lower);
        CALLER.run(move || self.go());
    }

    /// Posts the transfer; the stream waits until it has ended.
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
                tracing::error!(%error, "a transfer in a stream could not be posted");
                let why = match error {
                    PostError::PeerGone => TransferError::PeerGone,
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
        drop(state);
        drop(transfer);
        self.word.iter().for_each(Flag::raise);
        self.changed.notify_all();
    }
}

impl Wake for Trigger {
    fn wake(self: Arc<Self>) {
        // Whoever ends transfers must not be held up by what follows.
        CALLER.run(move || self.ended());
    }
}

unsafe extern "C" fn call_once(data: *mut c_void) {
    // SAFETY: `Arc::into_raw` in `Enqueued::new`, and called once.
    let trigger = unsafe { Arc::from_raw(data.cast::<Trigger>()) };
    trigger.called();
}

unsafe extern "C" fn call_again(data: *mut c_void) {
    let trigger = data.cast::<Trigger>().cast_const();
    // SAFETY: kept by `Enqueued`, or for ever, until it is released.
    let trigger = unsafe {
        Arc::increment_strong_count(trigger);
        Arc::from_raw(trigger)
    };
    trigger.called();
}

/// Has a function called when a stream comes to it, by a thread that may call CUDA and take its time.
///
/// # Safety
///
/// The stream is alive and of that GPU.
pub(crate) unsafe fn call_in(
    gpu: &peerway_sys::cuda::Gpu,
    stream: CUstream,
    function: impl FnOnce() + Send + 'static,
) -> Result<(), GpuError> {
    type Boxed = Box<dyn FnOnce() + Send>;
    unsafe extern "C" fn call(data: *mut c_void) {
        // SAFETY: made below, and called once.
        let function = unsafe { Box::from_raw(data.cast::<Boxed>()) };
        CALLER.run(*function);
    }
    let data = Box::into_raw(Box::new(Box::new(function) as Boxed));
    // SAFETY: the caller's promise; the data is taken back where it is never called.
    let put = unsafe {
        gpu.host_function(stream, call, data.cast()).inspect_err(|_| drop(Box::from_raw(data)))
    };
    Ok(put?)
}
