//! Events: marks on streams.
//!
//! Every recording has a number, and an event knows which recordings its streams have reached. A
//! waiter waits for the recording that was the last one when it called, as in CUDA. An event that
//! was never recorded is complete.

use std::ffi::c_uint;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use peerway_sys::cuda::ffi::*;

use crate::calls::{call, call_in_context, call_to_give_back, put, valid};
use crate::capture::{Capture, Clock};
use crate::errors::CAPTURED_EVENT;
use crate::{context, lock};

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) device: u32,
    marks: Mutex<Marks>,
    reached: Condvar,
}

#[derive(Debug, Default)]
struct Marks {
    recorded: u64,
    done: u64,
    /// Set if the last recording was in a capture instead of on a stream.
    captured: Option<(Arc<Capture>, Clock)>,
}

/// The last recording of an event.
#[derive(Clone, Debug)]
pub(crate) enum Mark {
    Recorded(u64),
    Captured(Arc<Capture>, Clock),
}

impl Event {
    fn new(device: u32) -> Self {
        Self { device, marks: Mutex::default(), reached: Condvar::new() }
    }

    /// Starts a new recording and returns its number.
    pub(crate) fn record(&self) -> u64 {
        let mut marks = lock(&self.marks);
        marks.captured = None;
        marks.recorded += 1;
        marks.recorded
    }

    /// Starts a new recording in a capture.
    pub(crate) fn record_captured(&self, capture: Arc<Capture>, clock: Clock) {
        lock(&self.marks).captured = Some((capture, clock));
    }

    pub(crate) fn mark(&self) -> Mark {
        let marks = lock(&self.marks);
        match &marks.captured {
            Some((capture, clock)) => Mark::Captured(Arc::clone(capture), clock.clone()),
            None => Mark::Recorded(marks.recorded),
        }
    }

    /// Marks a recording as reached by its stream.
    pub(crate) fn reach(&self, number: u64) {
        let mut marks = lock(&self.marks);
        marks.done = marks.done.max(number);
        self.reached.notify_all();
    }

    /// Waits until a stream has reached a recording.
    pub(crate) fn wait(&self, number: u64) {
        let waiting = |marks: &mut Marks| marks.done < number;
        let waited = self.reached.wait_while(lock(&self.marks), waiting);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn recorded(&self) -> Result<u64, CUresult> {
        match self.mark() {
            Mark::Recorded(number) => Ok(number),
            Mark::Captured(..) => Err(CAPTURED_EVENT),
        }
    }
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> CUresult {
    call_in_context("cuEventCreate", |machine, device| {
        // Only "blocking synchronization" and "no timing". Interprocess events are not supported.
        valid(flags & !3 == 0 && !event.is_null())?;
        let made = machine.events.add(Arc::new(Event::new(device.index)));
        // SAFETY: by the pointers contract.
        unsafe { put(event, made) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: CUevent) -> CUresult {
    call_to_give_back("cuEventDestroy_v2", |machine| machine.events.remove(event).map(drop))
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult {
    call_in_context("cuEventRecord", |machine, device| {
        let event = machine.events.get(event)?;
        let stream = machine.stream(device, stream)?;
        context::same(stream.device, event.device)?;
        stream.record(&event)
    })
}

/// The event determines the context, so no context has to be current.
///
/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(event: CUevent) -> CUresult {
    call("cuEventQuery", |machine| {
        let event = machine.events.get(event)?;
        let number = event.recorded()?;
        let done = lock(&event.marks).done >= number;
        machine.device(event.device.cast_signed())?.failed()?;
        if done { Ok(()) } else { Err(CUDA_ERROR_NOT_READY) }
    })
}

/// The event determines the context, as in [`cuEventQuery`].
///
/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventSynchronize(event: CUevent) -> CUresult {
    call("cuEventSynchronize", |machine| {
        let event = machine.events.get(event)?;
        event.wait(event.recorded()?);
        machine.device(event.device.cast_signed())?.failed()
    })
}
