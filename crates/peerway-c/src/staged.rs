//! Transfers whose parts go when the caller says so.

use std::ffi::c_void;
use std::time::Duration;

use peerway::{Batch, Staged};

use crate::arguments::{self, Fill};
use crate::batch::peerway_batch;
use crate::entry::call;
use crate::handles::{self, get, handle};
use crate::peer::peerway_peer;
use crate::status::{Answer, peerway_status};
use crate::transfer::{end_if_any, peerway_end};

/// Parts of one transfer, checked in advance: layer `i` goes while layer `i + 1` is still being computed.
pub struct peerway_staged {
    _private: (),
}

handle!(peerway_staged, Staged, "a staged transfer", 11);

/// A transfer in parts, which are released one by one. The batches may be freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_stage(
    peer: *const peerway_peer,
    batches: *const *const peerway_batch,
    count: usize,
    staged: *mut *mut peerway_staged,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let (out, given) = unsafe {
            (arguments::handle(staged, "staged")?, arguments::list(batches, count, "batches")?)
        };
        let batches = given.iter().map(|batch| Ok((*get(*batch)?).clone()));
        let batches: Vec<Batch> = batches.collect::<Answer<_>>()?;
        out.set(handles::new(get(peer)?.stage(batches)?)?);
        Ok(())
    })
}

/// Lets a part go.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_staged_release(
    staged: *const peerway_staged,
    stage: usize,
) -> peerway_status {
    call(|| Ok(get(staged)?.release(stage)?))
}

/// Lets a part go when a CUDA stream has come so far. The stream is alive, of the GPU whose memory is transferred, and not being
/// captured.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_staged_release_in(
    staged: *const peerway_staged,
    stage: usize,
    stream: *mut c_void,
) -> peerway_status {
    // SAFETY: the caller's promise about the stream.
    call(|| Ok(unsafe { get(staged)?.release_in(stage, stream) }?))
}

/// Lets a part go when a CUDA event has happened. The event is alive, was recorded, and is of the GPU whose memory is transferred.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_staged_release_when(
    staged: *const peerway_staged,
    stage: usize,
    event: *mut c_void,
) -> peerway_status {
    // SAFETY: the caller's promise about the event.
    call(|| Ok(unsafe { get(staged)?.release_when(stage, event) }?))
}

/// How a part ended; PENDING where it was not released or has not. Answers as peerway_transfer_poll.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_staged_poll(
    staged: *const peerway_staged,
    stage: usize,
    ended: *mut peerway_end,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let fill = unsafe { Fill::if_any(ended) }?;
        let staged = get(staged)?;
        let stages = staged.len();
        if stage >= stages {
            return Err(peerway::PostError::NoSuchStage { stage, stages }.into());
        }
        end_if_any(staged.poll(stage), fill)
    })
}

/// Waits for all parts that were released, and for those that a stream or an event will release. The first that did not end as done
/// is the answer, and the fence is open if any part's is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_staged_wait(
    staged: *const peerway_staged,
    timeout_ns: u64,
    ended: *mut peerway_end,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let fill = unsafe { Fill::if_any(ended) }?;
        end_if_any(get(staged)?.wait(Duration::from_nanos(timeout_ns)), fill)
    })
}

/// Stops every part that was released; the others never go.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_staged_cancel(staged: *const peerway_staged) -> peerway_status {
    call(|| {
        get(staged)?.cancel();
        Ok(())
    })
}

/// Frees it. Parts that were released go on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_staged_free(staged: *mut peerway_staged) -> peerway_status {
    call(|| handles::free(staged).map(drop))
}
