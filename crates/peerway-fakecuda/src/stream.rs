//! Streams: each a list of work, and a thread that does it in order, later than it was asked for.
//!
//! The thread starts with the first work and ends when the stream is destroyed and all is done. Nothing
//! is done at the call, so a program that does not wait for what it put on a stream finds the old
//! bytes. Once the context has failed, work is taken off the list and not done.

use std::collections::VecDeque;
use std::ffi::{c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use peerway_sys::cuda::ffi::*;

use crate::calls::{Answer, call_in_context, call_to_give_back, put, valid};
use crate::capture::Capture;
use crate::context;
use crate::device::Device;
use crate::errors::{
    CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_MERGE, CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED,
};
use crate::event::{Event, Mark};
use crate::lock;
use crate::machine::Machine;
use crate::script::Dice;
use crate::work::Work;

pub(crate) struct Stream {
    /// Counted from 0 in the process.
    number: u64,
    pub(crate) device: &'static Device,
    machine: &'static Machine,
    list: Mutex<List>,
    /// The thread has something to do.
    more: Condvar,
    /// It has done something.
    done: Condvar,
}

#[derive(Debug, Default)]
struct List {
    work: VecDeque<Work>,
    submitted: u64,
    finished: u64,
    has_thread: bool,
    closed: bool,
    capture: Option<Arc<Capture>>,
}

impl Stream {
    pub(crate) fn new(machine: &'static Machine, device: &'static Device) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            // Numbers order nothing.
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            device,
            machine,
            list: Mutex::default(),
            more: Condvar::new(),
            done: Condvar::new(),
        }
    }

    /// Puts work at the end of the list, or into the capture. Its number, to wait for.
    pub(crate) fn submit(self: &Arc<Self>, work: Work) -> Result<u64, CUresult> {
        let mut list = lock(&self.list);
        if let Some(capture) = list.capture() {
            capture.push(self.number, work)?;
            return Ok(0);
        }
        self.push(&mut list, [work])
    }

    /// Puts all of a graph there at once.
    pub(crate) fn submit_all(self: &Arc<Self>, work: Vec<Work>) -> Answer {
        let mut list = lock(&self.list);
        if let Some(capture) = list.capture() {
            return work.into_iter().try_for_each(|one| capture.push(self.number, one));
        }
        self.push(&mut list, work).map(drop)
    }

    fn push(
        self: &Arc<Self>,
        list: &mut List,
        work: impl IntoIterator<Item = Work>,
    ) -> Result<u64, CUresult> {
        if !list.has_thread {
            let stream = Arc::clone(self);
            let name = format!("fakecuda-{}", self.number);
            let thread = std::thread::Builder::new().name(name).spawn(move || stream.run());
            thread.map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
            list.has_thread = true;
        }
        for one in work {
            list.work.push_back(one);
            list.submitted += 1;
        }
        self.more.notify_one();
        Ok(list.submitted)
    }

    /// Waits until work of this number is done.
    pub(crate) fn wait(&self, number: u64) -> Answer {
        let waiting = |list: &mut List| list.finished < number;
        drop(wait_while(&self.done, lock(&self.list), waiting));
        self.device.failed()
    }

    /// Waits until all is done that was put there before.
    pub(crate) fn synchronize(&self) -> Answer {
        let mut list = lock(&self.list);
        list.refuse_capture()?;
        let number = list.submitted;
        drop(list);
        self.wait(number)
    }

    pub(crate) fn is_capturing(&self) -> bool {
        lock(&self.list).capture().is_some()
    }

    /// Records an event behind the work that is there.
    pub(crate) fn record(self: &Arc<Self>, event: &Arc<Event>) -> Answer {
        let mut list = lock(&self.list);
        if let Some(capture) = list.capture() {
            let clock = capture.clock(self.number);
            event.record_captured(capture, clock);
            return Ok(());
        }
        // Numbered under the lock of the list, so that they are in its order.
        let number = event.record();
        self.push(&mut list, [Work::Record(Arc::clone(event), number)]).map(drop)
    }

    /// Lets the work that comes wait for the last recording of an event.
    fn wait_event(self: &Arc<Self>, event: &Arc<Event>) -> Answer {
        let mut list = lock(&self.list);
        match (event.mark(), list.capture()) {
            (Mark::Recorded(0), None) => Ok(()),
            (Mark::Recorded(number), None) => {
                self.push(&mut list, [Work::Await(Arc::clone(event), number)]).map(drop)
            }
            (Mark::Recorded(_), Some(capture)) => {
                capture.break_off();
                Err(CAPTURE_ISOLATION)
            }
            (Mark::Captured(theirs, _), Some(ours)) if !Arc::ptr_eq(&theirs, &ours) => {
                ours.break_off();
                theirs.break_off();
                Err(CAPTURE_MERGE)
            }
            (Mark::Captured(capture, clock), _) => {
                if capture.is_over() {
                    return Err(CAPTURE_INVALIDATED);
                }
                capture.join(self.number, &clock);
                list.capture = Some(capture);
                Ok(())
            }
        }
    }

    pub(crate) fn begin_capture(&self) -> Answer {
        let mut list = lock(&self.list);
        if list.capture().is_some() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        list.capture = Some(Arc::new(Capture::new(self.number)));
        Ok(())
    }

    pub(crate) fn end_capture(&self) -> Result<Vec<Work>, CUresult> {
        let mut list = lock(&self.list);
        let capture = list.capture().ok_or(CAPTURE_UNMATCHED)?;
        let ended = capture.end(self.number);
        list.capture();
        ended
    }

    /// No more work will come; the thread ends when what is there is done.
    pub(crate) fn close(&self) {
        let mut list = lock(&self.list);
        if let Some(capture) = list.capture() {
            capture.break_off();
        }
        list.closed = true;
        self.more.notify_all();
    }

    /// The thread.
    fn run(&self) {
        precise_sleep();
        let script = &self.machine.script;
        let mut dice = Dice::new(script.seed.wrapping_add(self.number << 32));
        let idle = |list: &mut List| list.work.is_empty() && !list.closed;
        loop {
            let mut list = wait_while(&self.more, lock(&self.list), idle);
            let Some(work) = list.work.pop_front() else { return };
            drop(list);
            let jitter = dice.below(script.jitter.as_nanos() as u64);
            rest(script.latency + Duration::from_nanos(jitter));
            let perform = || work.perform(self.machine, self.device, &mut dice);
            // A panic is a bug here; whoever waits for the stream is told.
            let done = catch_unwind(AssertUnwindSafe(perform)).unwrap_or(Err(CUDA_ERROR_UNKNOWN));
            if let Err(code) = done {
                self.device.fail(code);
            }
            lock(&self.list).finished += 1;
            self.done.notify_all();
        }
    }
}

impl List {
    /// The capture under way; one that ended elsewhere is forgotten.
    fn capture(&mut self) -> Option<Arc<Capture>> {
        self.capture.take_if(|capture| capture.is_over());
        self.capture.clone()
    }

    /// Nothing of a capture can be waited for.
    fn refuse_capture(&mut self) -> Answer {
        let Some(capture) = self.capture() else { return Ok(()) };
        capture.break_off();
        Err(CAPTURE_UNSUPPORTED)
    }
}

fn wait_while<'a>(
    condvar: &Condvar,
    list: MutexGuard<'a, List>,
    condition: impl FnMut(&mut List) -> bool,
) -> MutexGuard<'a, List> {
    condvar.wait_while(list, condition).unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn rest(time: Duration) {
    if !time.is_zero() {
        std::thread::sleep(time);
    }
}

/// Lets this thread sleep for microseconds: the system's default adds 50 of them to every sleep.
fn precise_sleep() {
    // SAFETY: sets a number of this thread.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
}

impl Machine {
    /// The stream of a handle, for work in the context of a device: one of that context.
    pub(crate) fn stream(
        &'static self,
        device: &'static Device,
        handle: CUstream,
    ) -> Result<Arc<Stream>, CUresult> {
        // Null, the legacy one and that of the thread.
        if handle.addr() <= 2 {
            let mut stream = lock(&device.null_stream);
            let made = || Arc::new(Stream::new(self, device));
            return Ok(Arc::clone(stream.get_or_insert_with(made)));
        }
        let stream = self.streams.get(handle)?;
        context::same(device, stream.device.index)?;
        Ok(stream)
    }

    /// As above, of any context.
    fn any_stream(
        &'static self,
        device: &'static Device,
        handle: CUstream,
    ) -> Result<Arc<Stream>, CUresult> {
        if handle.addr() <= 2 { self.stream(device, handle) } else { self.streams.get(handle) }
    }
}

/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> CUresult {
    call_in_context("cuStreamCreate", |machine, device| {
        valid(flags & !CU_STREAM_NON_BLOCKING == 0 && !stream.is_null())?;
        let made = machine.streams.add(Arc::new(Stream::new(machine, device)));
        // SAFETY: the caller's, to be filled.
        unsafe { put(stream, made) }
    })
}

/// All streams have a thread of their own here, so none has to go first.
///
/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut CUstream,
    flags: c_uint,
    _priority: c_int,
) -> CUresult {
    call_in_context("cuStreamCreateWithPriority", |machine, device| {
        valid(flags & !CU_STREAM_NON_BLOCKING == 0 && !stream.is_null())?;
        let made = machine.streams.add(Arc::new(Stream::new(machine, device)));
        // SAFETY: the caller's, to be filled.
        unsafe { put(stream, made) }
    })
}

/// Does not wait: what is on the stream is done, and its thread ends then.
///
/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(stream: CUstream) -> CUresult {
    call_to_give_back("cuStreamDestroy_v2", |machine| {
        machine.streams.remove(stream)?.close();
        Ok(())
    })
}

/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamSynchronize(stream: CUstream) -> CUresult {
    call_in_context("cuStreamSynchronize", |machine, device| {
        machine.any_stream(device, stream)?.synchronize()
    })
}

/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamQuery(stream: CUstream) -> CUresult {
    call_in_context("cuStreamQuery", |machine, device| {
        let stream = machine.any_stream(device, stream)?;
        let mut list = lock(&stream.list);
        list.refuse_capture()?;
        let done = list.finished == list.submitted;
        stream.device.failed()?;
        if done { Ok(()) } else { Err(CUDA_ERROR_NOT_READY) }
    })
}

/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitEvent(
    stream: CUstream,
    event: CUevent,
    flags: c_uint,
) -> CUresult {
    call_in_context("cuStreamWaitEvent", |machine, device| {
        valid(flags & !1 == 0)?;
        let event = machine.events.get(event)?;
        machine.any_stream(device, stream)?.wait_event(&event)
    })
}

/// # Safety
///
/// As CUDA documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: CUstream, status: *mut c_uint) -> CUresult {
    call_in_context("cuStreamIsCapturing", |machine, device| {
        let capturing = machine.any_stream(device, stream)?.is_capturing();
        // SAFETY: the caller's, to be filled.
        unsafe { put(status, capturing.into()) }
    })
}

/// # Safety
///
/// As CUDA documents it; what the function touches stays until it was called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchHostFunc(
    stream: CUstream,
    function: Option<CUhostFn>,
    data: *mut c_void,
) -> CUresult {
    call_in_context("cuLaunchHostFunc", |machine, device| {
        let function = function.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let data = data.expose_provenance();
        machine.stream(device, stream)?.submit(Work::Call(function, data)).map(drop)
    })
}
