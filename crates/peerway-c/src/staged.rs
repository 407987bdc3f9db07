//! Staged transfers: the caller releases the stages one by one.

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

/// A transfer in stages that are checked in advance. For example, the transfer of layer `i` runs
/// while layer `i + 1` is computed.
pub struct peerway_staged {
    _private: (),
}

handle!(peerway_staged, Staged, "a staged transfer", 11);

/// Creates a staged transfer. Each batch is a stage, and the stages are released one by one. The
/// batches may be freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_peer_stage(
    peer: *const peerway_peer,
    batches: *const *const peerway_batch,
    count: usize,
    staged: *mut *mut peerway_staged,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let (out, given) = unsafe {
            (arguments::handle(staged, "staged")?, arguments::list(batches, count, "batches")?)
        };
        let batches = given.iter().map(|batch| Ok((*get(*batch)?).clone()));
        let batches: Vec<Batch> = batches.collect::<Answer<_>>()?;
        out.set(handles::new(get(peer)?.stage(batches)?)?);
        Ok(())
    })
}

/// Releases a stage: its transfer starts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_staged_release(
    staged: *const peerway_staged,
    stage: usize,
) -> peerway_status {
    call(|| Ok(get(staged)?.release(stage)?))
}

/// Releases a stage when a CUDA stream reaches this point. The stream must be valid, belong to the
/// GPU whose memory is transferred, and not be in capture.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_staged_release_in(
    staged: *const peerway_staged,
    stage: usize,
    stream: *mut c_void,
) -> peerway_status {
    // SAFETY: the header requires a valid stream.
    call(|| Ok(unsafe { get(staged)?.release_in(stage, stream) }?))
}

/// Releases a stage when a CUDA event completes. The event must be valid, recorded, and belong to
/// the GPU whose memory is transferred.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_staged_release_when(
    staged: *const peerway_staged,
    stage: usize,
    event: *mut c_void,
) -> peerway_status {
    // SAFETY: the header requires a valid event.
    call(|| Ok(unsafe { get(staged)?.release_when(stage, event) }?))
}

/// Returns how a stage ended. PENDING if it was not released or still runs. Otherwise the same as
/// peerway_transfer_poll.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_staged_poll(
    staged: *const peerway_staged,
    stage: usize,
    ended: *mut peerway_end,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::if_any(ended) }?;
        let staged = get(staged)?;
        let stages = staged.len();
        if stage >= stages {
            return Err(peerway::PostError::NoSuchStage { stage, stages }.into());
        }
        end_if_any(staged.poll(stage), || staged.failure_of(stage), fill)
    })
}

/// Waits for all stages that were released, and for those that a stream or an event will release.
/// Returns the status of the first stage that failed. The fence is open if the fence of any stage
/// is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_staged_wait(
    staged: *const peerway_staged,
    timeout_ns: u64,
    ended: *mut peerway_end,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::if_any(ended) }?;
        let staged = get(staged)?;
        let ended = staged.wait(Duration::from_nanos(timeout_ns));
        end_if_any(ended, || staged.failure(), fill)
    })
}

/// Cancels every released stage. The other stages never start.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_staged_cancel(staged: *const peerway_staged) -> peerway_status {
    call(|| {
        get(staged)?.cancel();
        Ok(())
    })
}

/// Frees a staged transfer. Released stages continue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_staged_free(staged: *mut peerway_staged) -> peerway_status {
    call(|| handles::free(staged).map(drop))
}
