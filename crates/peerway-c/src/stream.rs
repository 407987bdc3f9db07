//! Prepared transfers, and transfers in CUDA streams.

use std::ffi::c_void;
use std::time::Duration;

use peerway::Enqueued;
use peerway::Prepared;

use crate::arguments::{self, Fill, Out};
use crate::entry::call;
use crate::handles::{self, get, handle};
use crate::status::{Failure, peerway_status};
use crate::transfer::{Transfer, end_if_any, finish, peerway_end, peerway_transfer};

/// A batch that is prepared for its peer. Any thread may post it any number of times.
pub struct peerway_prepared {
    _private: (),
}

handle!(peerway_prepared, Prepared, "a prepared transfer", 9);

/// A transfer that was enqueued in a CUDA stream.
pub struct peerway_enqueued {
    _private: (),
}

handle!(peerway_enqueued, Enqueued, "a transfer in a stream", 10);

/// Posts a prepared transfer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_prepared_post(
    prepared: *const peerway_prepared,
    transfer: *mut *mut peerway_transfer,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { arguments::handle(transfer, "transfer") }?;
        out.set(handles::new(Transfer::new(get(prepared)?.post()?))?);
        Ok(())
    })
}

/// Posts a prepared transfer with this notification after its bytes, instead of the prepared one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_prepared_post_notifying(
    prepared: *const peerway_prepared,
    message: *const c_void,
    len: usize,
    transfer: *mut *mut peerway_transfer,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let (out, message) = unsafe {
            (arguments::handle(transfer, "transfer")?, arguments::bytes(message, len, "message")?)
        };
        out.set(handles::new(Transfer::new(get(prepared)?.post_notifying(message)?))?);
        Ok(())
    })
}

/// Posts a prepared transfer, waits for its end and returns its status. `ended` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_prepared_run(
    prepared: *const peerway_prepared,
    ended: *mut peerway_end,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::if_any(ended) }?;
        finish(&get(prepared)?.begin()?, fill)
    })
}

/// Sets *bytes to the total bytes of a prepared transfer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_prepared_total(
    prepared: *const peerway_prepared,
    bytes: *mut u64,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { Out::new(bytes, "bytes", 0) }?;
        out.set(get(prepared)?.total());
        Ok(())
    })
}

/// Enqueues a prepared transfer in a CUDA stream. The stream is a valid CUstream or cudaStream_t of
/// the GPU whose memory is transferred.
///
/// The transfer starts when the stream reaches it, and later work in the stream waits for its end.
/// In a stream that is being captured, the transfer becomes part of the graph. If the transfer
/// fails, the stream continues, and the handle tells how the transfer ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_prepared_enqueue(
    prepared: *const peerway_prepared,
    stream: *mut c_void,
    enqueued: *mut *mut peerway_enqueued,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { arguments::handle(enqueued, "enqueued") }?;
        // SAFETY: the header requires a valid stream.
        let put = unsafe { get(prepared)?.enqueue(stream) }?;
        out.set(handles::new(put)?);
        Ok(())
    })
}

/// Frees a prepared transfer. Its posted transfers continue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_prepared_free(prepared: *mut peerway_prepared) -> peerway_status {
    call(|| handles::free(prepared).map(drop))
}

/// Sets *runs to how often the enqueued transfer has ended. More than once is possible only in a
/// graph that is launched several times.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_enqueued_runs(
    enqueued: *const peerway_enqueued,
    runs: *mut u64,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { Out::new(runs, "runs", 0) }?;
        out.set(get(enqueued)?.runs());
        Ok(())
    })
}

/// Returns how the last run of an enqueued transfer ended. Waits at most timeout_ns for the first
/// run. Returns the same as peerway_transfer_poll.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_enqueued_wait(
    enqueued: *const peerway_enqueued,
    timeout_ns: u64,
    ended: *mut peerway_end,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::if_any(ended) }?;
        let enqueued = get(enqueued)?;
        let ended = enqueued.wait(Duration::from_nanos(timeout_ns));
        end_if_any(ended, || enqueued.failure(), fill)
    })
}

/// Frees the handle. If a graph captured the transfer, the library keeps what the graph needs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_enqueued_free(enqueued: *mut peerway_enqueued) -> peerway_status {
    call(|| handles::free(enqueued).map(drop))
}

/// Frees the handle and what the library keeps for graphs. No graph that captured the transfer may
/// run or be launched any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_enqueued_release(
    enqueued: *mut peerway_enqueued,
) -> peerway_status {
    call(|| {
        let Some(enqueued) = handles::free(enqueued)? else { return Ok(()) };
        let enqueued = std::sync::Arc::into_inner(enqueued).ok_or_else(|| {
            Failure::bad(
                "another thread is in a call with the enqueued transfer: the handle was freed, but what its graph needs is kept",
            )
        })?;
        // SAFETY: the header requires that no graph with this transfer runs or is launched again.
        unsafe { enqueued.release() };
        Ok(())
    })
}

/// Prepares a GPU for stream capture: allocates everything now that must not be allocated during a
/// capture.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_gpu_warm_up(gpu: u32) -> peerway_status {
    call(|| Ok(peerway::gpu::warm_up(gpu)?))
}
