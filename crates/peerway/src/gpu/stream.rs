//! Transfers in CUDA streams and graphs.
//!
//! Where a GPU carries a transfer out by itself, its copies are put into the user's stream. Else, and in a stream that
//! is being captured, two things are put there: a function that has a thread of ours post the transfer (what a
//! stream calls may not call CUDA itself), and a wait for a word in pinned memory that is raised at its end. The
//! function lowers the word first, so a graph can be launched many times.

use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::task::{Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use crossbeam_queue::SegQueue;
use peerway_core::outcome::{Ended, Fence, Reason, TransferError};
use peerway_sys::cuda::ffi::{CUhostFn, CUstream};

use super::GpuError;
use super::device::{FLAGS, Flag, Mark, RAISED};
use crate::clock;
use crate::error::PostError;
use crate::peer::Prepared;
use crate::transfer::Transfer;
use crate::transport::gpu::UserStream;

/// A transfer that was put into a stream, by [`Prepared::enqueue`].
///
/// Dropping it changes nothing about the transfer. One that was captured is kept for the graph's sake, with the memory
/// it names, until [`Self::release`] says that the graph is gone.
#[must_use = "nobody else learns how the transfer ends"]
pub struct Enqueued {
    how: How,
}

enum How {
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
                return Ok(Self { how: How::Copies(transfer) });
            }
        }
        let full = GpuError::TooManyInStreams { most: FLAGS, gpu: device.index() };
        let word = device.flag(stream).ok_or(full)?;
        let address = word.address();
        let prepared = prepared.clone();
        let (state, changed) = (Mutex::default(), Condvar::new());
        let passed = OnceLock::new();
        let trigger = Arc::new(Trigger { prepared, word: Some(word), passed, state, changed });
        let (function, data): (CUhostFn, _) = if captured {
            (call_again, Arc::as_ptr(&trigger).cast_mut().cast())
        } else {
            (call_once, Arc::into_raw(trigger.clone()).cast_mut().cast())
        };
        // SAFETY: `data` is a trigger that lives until it is called: a captured one until it is released.
        let put = unsafe {
            gpu.host_function(stream, function, data)
                .inspect_err(|_| {
                    if !captured {
                        // Never called: taken back.
                        drop(Arc::from_raw(data.cast::<Trigger>()));
                    }
                })
                .and_then(|()| gpu.wait_value(stream, address, u64::from(RAISED)))
        };
        put.map_err(GpuError::from)?;
        if !captured {
            // SAFETY: the caller's promise.
            let passed = unsafe { device.mark(stream) }.map_err(GpuError::from)?;
            let _ = trigger.passed.set(passed);
        }
        Ok(Self { how: How::Called { trigger, captured } })
    }

    /// How often it has come to its end: more than once only in a graph that is launched again.
    pub fn runs(&self) -> u64 {
        match &self.how {
            How::Copies(transfer) => u64::from(transfer.poll().is_some()),
            How::Called { trigger, .. } => trigger.state.lock().unwrap().runs,
        }
    }

    /// How it ended the last time, or as soon as it has.
    pub fn wait(&self, timeout: Duration) -> Option<Ended> {
        match &self.how {
            How::Copies(transfer) => transfer.wait(timeout),
            How::Called { trigger, .. } => {
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
        if let How::Called { captured, .. } = &mut self.how {
            *captured = false;
        }
    }
}

impl Drop for Enqueued {
    fn drop(&mut self) {
        if let How::Called { trigger, captured: true } = &self.how {
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
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
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
    fn lower(&self) {
        self.word.iter().for_each(Flag::lower);
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
        Caller::push(Task::Look(self));
    }
}

unsafe extern "C" fn call_once(data: *mut c_void) {
    // SAFETY: `Arc::into_raw` in `Enqueued::new`, and called once.
    let trigger = unsafe { Arc::from_raw(data.cast::<Trigger>()) };
    trigger.lower();
    Caller::push(Task::Go(trigger));
}

unsafe extern "C" fn call_again(data: *mut c_void) {
    let trigger = data.cast::<Trigger>().cast_const();
    // SAFETY: kept by `Enqueued`, or for ever, until it is released.
    let trigger = unsafe {
        Arc::increment_strong_count(trigger);
        Arc::from_raw(trigger)
    };
    trigger.lower();
    Caller::push(Task::Go(trigger));
}

/// The thread that does what streams call for.
struct Caller {
    tasks: SegQueue<Task>,
    thread: OnceLock<Thread>,
}

/// What it is asked for.
enum Task {
    Go(Arc<Trigger>),
    Look(Arc<Trigger>),
    Call(Box<dyn FnOnce() + Send>),
}

static CALLER: OnceLock<Option<Arc<Caller>>> = OnceLock::new();

impl Caller {
    fn push(task: Task) {
        let caller = CALLER.get_or_init(|| {
            let caller = Arc::new(Self { tasks: SegQueue::new(), thread: OnceLock::new() });
            let shared = caller.clone();
            let started =
                std::thread::Builder::new().name("peerway-stream".into()).spawn(move || {
                    loop {
                        while let Some(task) = shared.tasks.pop() {
                            task.run();
                        }
                        std::thread::park();
                    }
                });
            let thread =
                started.inspect_err(|error| tracing::error!(%error, "no thread for streams"));
            let _ = caller.thread.set(thread.ok()?.thread().clone());
            Some(caller)
        });
        match caller {
            Some(caller) => {
                caller.tasks.push(task);
                if let Some(thread) = caller.thread.get() {
                    thread.unpark();
                }
            }
            // Better here than never: a stream would wait for ever.
            None => task.run(),
        }
    }
}

impl Task {
    fn run(self) {
        match self {
            Self::Go(trigger) => trigger.go(),
            Self::Look(trigger) => trigger.ended(),
            Self::Call(function) => function(),
        }
    }
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
        Caller::push(Task::Call(*function));
    }
    let data = Box::into_raw(Box::new(Box::new(function) as Boxed));
    // SAFETY: the caller's promise; the data is taken back where it is never called.
    let put = unsafe {
        gpu.host_function(stream, call, data.cast()).inspect_err(|_| drop(Box::from_raw(data)))
    };
    Ok(put?)
}
