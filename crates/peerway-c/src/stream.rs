//! Transfers that are posted many times, also by CUDA streams.

use std::ffi::c_void;
use std::time::Duration;

use peerway::Prepared;
use peerway::gpu::Enqueued;

use crate::arguments::{self, Fill, Out};
use crate::entry::call;
use crate::handles::{self, get, handle};
use crate::status::{Failure, peerway_status};
use crate::transfer::{Transfer, end, end_if_any, peerway_end, peerway_transfer};

/// A batch that is ready to be posted to its peer, any number of times, by any thread.
pub struct peerway_prepared {
    _private: (),
}

handle!(peerway_prepared, Prepared, "a prepared transfer", 9);

/// A transfer that was put into a CUDA stream.
pub struct peerway_enqueued {
    _private: (),
}

handle!(peerway_enqueued, Enqueued, "a transfer in a stream", 10);

/// Posts it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_prepared_post(
    prepared: *const peerway_prepared,
    transfer: *mut *mut peerway_transfer,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(transfer, "transfer") }?;
        out.set(handles::new(Transfer::new(get(prepared)?.post()?))?);
        Ok(())
    })
}

/// Posts it with this message after its bytes, whatever it was prepared with.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_prepared_post_notifying(
    prepared: *const peerway_prepared,
    message: *const c_void,
    len: usize,
    transfer: *mut *mut peerway_transfer,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let (out, message) = unsafe {
            (arguments::handle(transfer, "transfer")?, arguments::bytes(message, len, "message")?)
        };
        out.set(handles::new(Transfer::new(get(prepared)?.post_notifying(message)?))?);
        Ok(())
    })
}

/// Posts it and waits for its end, which the status is of. `ended` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_prepared_run(
    prepared: *const peerway_prepared,
    ended: *mut peerway_end,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let fill = unsafe { Fill::if_any(ended) }?;
        end(get(prepared)?.run()?, fill)
    })
}

/// Bytes of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_prepared_total(
    prepared: *const peerway_prepared,
    bytes: *mut u64,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(bytes, "bytes", 0) }?;
        out.set(get(prepared)?.total());
        Ok(())
    })
}

/// Puts it into a CUDA stream (a CUstream or cudaStream_t, alive and of the GPU whose memory is transferred): it begins when the
/// stream has come to it, and what is put there later waits for its end. In a stream that is being captured it becomes part of
/// the graph. A transfer that fails lets the stream go on; the handle says how it ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_prepared_enqueue(
    prepared: *const peerway_prepared,
    stream: *mut c_void,
    enqueued: *mut *mut peerway_enqueued,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(enqueued, "enqueued") }?;
        // SAFETY: the caller's promise about the stream.
        let put = unsafe { get(prepared)?.enqueue(stream) }?;
        out.set(handles::new(put)?);
        Ok(())
    })
}

/// Frees it. What was posted goes on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_prepared_free(prepared: *mut peerway_prepared) -> peerway_status {
    call(|| handles::free(prepared).map(drop))
}

/// How often it has come to its end: more than once only in a graph that is launched again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_enqueued_runs(
    enqueued: *const peerway_enqueued,
    runs: *mut u64,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(runs, "runs", 0) }?;
        out.set(get(enqueued)?.runs());
        Ok(())
    })
}

/// How it ended the last time, waiting for so long for the first. Answers as peerway_transfer_poll.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_enqueued_wait(
    enqueued: *const peerway_enqueued,
    timeout_ns: u64,
    ended: *mut peerway_end,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let fill = unsafe { Fill::if_any(ended) }?;
        end_if_any(get(enqueued)?.wait(Duration::from_nanos(timeout_ns)), fill)
    })
}

/// Frees the handle. What was captured into a graph is kept for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_enqueued_free(enqueued: *mut peerway_enqueued) -> peerway_status {
    call(|| handles::free(enqueued).map(drop))
}

/// Frees the handle and what was kept for graphs: none that it was captured into is launched, or running, any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_enqueued_release(
    enqueued: *mut peerway_enqueued,
) -> peerway_status {
    call(|| {
        let Some(enqueued) = handles::free(enqueued)? else { return Ok(()) };
        let enqueued = std::sync::Arc::into_inner(enqueued).ok_or_else(|| {
            Failure::bad(
                "another thread is in a call with it: it was freed, and is kept for its graph",
            )
        })?;
        // SAFETY: the caller's promise.
        unsafe { enqueued.release() };
        Ok(())
    })
}

/// Has everything ready on a GPU that a stream which is being captured may not ask for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_gpu_warm_up(gpu: u32) -> peerway_status {
    call(|| Ok(peerway::gpu::warm_up(gpu)?))
}
