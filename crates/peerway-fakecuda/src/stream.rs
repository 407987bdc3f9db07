//! Streams: each is a list of work and a thread that executes it in order, later than the call.
//!
//! The thread starts with the first work. It ends when the stream is destroyed and all work is
//! done. No work is done during the call, so a program that does not wait sees the old bytes. Once
//! the context has failed, the thread removes work from the list without executing it.

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
use crate::work::Work;
use peerway_fakescript::Dice;

pub(crate) struct Stream {
    /// The stream's number in the process, counted from 0.
    number: u64,
    pub(crate) device: &'static Device,
    machine: &'static Machine,
    list: Mutex<List>,
    /// Signalled when the thread has something to do.
    more: Condvar,
    /// Signalled when the thread has finished work.
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
            // The numbers order no other memory accesses.
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            device,
            machine,
            list: Mutex::default(),
            more: Condvar::new(),
            done: Condvar::new(),
        }
    }

    /// Appends work to the list, or to the capture. Returns the number to wait for.
    pub(crate) fn submit(self: &Arc<Self>, work: Work) -> Result<u64, CUresult> {
        let mut list = lock(&self.list);
        if let Some(capture) = list.capture() {
            capture.push(self.number, work)?;
            return Ok(0);
        }
        self.push(&mut list, [work])
    }

    /// Appends all work of a graph at once.
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

    /// Waits until the work with this number is done.
    pub(crate) fn wait(&self, number: u64) -> Answer {
        let waiting = |list: &mut List| list.finished < number;
        drop(wait_while(&self.done, lock(&self.list), waiting));
        self.device.failed()
    }

    /// Waits until all work submitted so far is done.
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

    /// Records an event after the work submitted so far.
    pub(crate) fn record(self: &Arc<Self>, event: &Arc<Event>) -> Answer {
        let mut list = lock(&self.list);
        if let Some(capture) = list.capture() {
            let clock = capture.clock(self.number);
            event.record_captured(capture, clock);
            return Ok(());
        }
        // The number is taken under the lock of the list, so that recordings are in list order.
        let number = event.record();
        self.push(&mut list, [Work::Record(Arc::clone(event), number)]).map(drop)
    }

    /// Makes later work wait for the last recording of an event.
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

    /// Accepts no more work. The thread ends when the submitted work is done.
    pub(crate) fn close(&self) {
        let mut list = lock(&self.list);
        if let Some(capture) = list.capture() {
            capture.break_off();
        }
        list.closed = true;
        self.more.notify_all();
    }

    /// The main function of the thread.
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
            // A panic is a bug of this library. It fails the context, so that waiters see it.
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
    /// The capture in progress. Drops a capture that has ended on another stream.
    fn capture(&mut self) -> Option<Arc<Capture>> {
        self.capture.take_if(|capture| capture.is_over());
        self.capture.clone()
    }

    /// Refuses to wait for captured work, and invalidates the capture.
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

/// Makes short sleeps of this thread precise: by default the system adds 50 µs to every sleep.
fn precise_sleep() {
    // SAFETY: prctl takes only numbers here and changes only this thread.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
}

impl Machine {
    /// The stream of a handle, which must belong to the context of `device`.
    pub(crate) fn stream(
        &'static self,
        device: &'static Device,
        handle: CUstream,
    ) -> Result<Arc<Stream>, CUresult> {
        // The NULL stream, the legacy stream and the per-thread stream.
        if handle.addr() <= 2 {
            let mut stream = lock(&device.null_stream);
            let made = || Arc::new(Stream::new(self, device));
            return Ok(Arc::clone(stream.get_or_insert_with(made)));
        }
        let stream = self.streams.get(handle)?;
        context::same(device, stream.device.index)?;
        Ok(stream)
    }

    /// The stream of a handle, of any context.
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
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> CUresult {
    call_in_context("cuStreamCreate", |machine, device| {
        valid(flags & !CU_STREAM_NON_BLOCKING == 0 && !stream.is_null())?;
        let made = machine.streams.add(Arc::new(Stream::new(machine, device)));
        // SAFETY: by the pointers contract.
        unsafe { put(stream, made) }
    })
}

/// Every stream has its own thread here, so priorities have no effect.
///
/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut CUstream,
    flags: c_uint,
    _priority: c_int,
) -> CUresult {
    call_in_context("cuStreamCreateWithPriority", |machine, device| {
        valid(flags & !CU_STREAM_NON_BLOCKING == 0 && !stream.is_null())?;
        let made = machine.streams.add(Arc::new(Stream::new(machine, device)));
        // SAFETY: by the pointers contract.
        unsafe { put(stream, made) }
    })
}

/// Returns without waiting. The submitted work is still done, and then the thread ends.
///
/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(stream: CUstream) -> CUresult {
    call_to_give_back("cuStreamDestroy_v2", |machine| {
        machine.streams.remove(stream)?.close();
        Ok(())
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamSynchronize(stream: CUstream) -> CUresult {
    call_in_context("cuStreamSynchronize", |machine, device| {
        machine.any_stream(device, stream)?.synchronize()
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
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
/// The caller keeps the contract of CUDA.
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
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: CUstream, status: *mut c_uint) -> CUresult {
    call_in_context("cuStreamIsCapturing", |machine, device| {
        let capturing = machine.any_stream(device, stream)?.is_capturing();
        // SAFETY: by the pointers contract.
        unsafe { put(status, capturing.into()) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA. `data` stays valid until the function has been called.
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
