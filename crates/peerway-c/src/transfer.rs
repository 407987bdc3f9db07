//! Posted transfers.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use peerway::{Ended, Fence};

use crate::arguments::{Fill, Out, PEERWAY_FOREVER, Versioned};
use crate::completions::{Watch, Watchers, eventfd_of};
use crate::entry::call;
use crate::handles::{self, get, handle};
use crate::peer::peerway_path;
use crate::status::{Answer, Failure, of_end, peerway_status};

/// A posted transfer. It continues after its handle is freed. Every transfer has a deadline.
pub struct peerway_transfer {
    _private: (),
}

handle!(peerway_transfer, Transfer, "a transfer", 7);

/// A transfer and the watchers of its end.
pub struct Transfer {
    pub(crate) transfer: peerway::Transfer,
    watchers: Arc<Watchers>,
}

impl Transfer {
    pub(crate) fn new(transfer: peerway::Transfer) -> Self {
        Self { transfer, watchers: Arc::default() }
    }

    /// Adds a watcher. It is notified when the transfer ends, or at once if the transfer has ended.
    pub(crate) fn watch(&self, watch: Watch) {
        self.watchers.add(watch);
        if !self.transfer.on_end(&self.watchers.clone().into()) {
            self.watchers.tell();
        }
    }
}

/// Whether bytes of an ended transfer may still change memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum peerway_fence {
    /// No byte of the transfer changes memory any more.
    Held = 0,
    /// Bytes of the transfer may still change memory. Call again: the result becomes HELD when the
    /// peer drains or dies.
    Open = 1,
    /// Bytes of the transfer may still change memory, and no proof of the contrary can arrive any
    /// more.
    Lost = 2,
}

/// The end of a transfer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_end {
    /// sizeof(struct peerway_end).
    pub size: usize,
    /// The result: a peerway_status. OK if every byte has arrived.
    pub status: i32,
    /// If not zero, bytes of the transfer may still change memory, because the peer did not answer
    /// in time. The library keeps memory that it allocated until they cannot. The caller must keep
    /// other memory valid until peerway_transfer_fence() returns HELD.
    pub fence_open: u32,
}

// SAFETY: repr(C), the size first, and only integers.
unsafe impl Versioned for peerway_end {
    const FIRST: usize = 16;
    const NAME: &'static str = "struct peerway_end";
}

/// Bytes and times of a transfer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_transfer_stats {
    /// sizeof(struct peerway_transfer_stats).
    pub size: usize,
    /// Bytes that are known to have arrived.
    pub bytes_done: u64,
    /// Bytes of the batch.
    pub bytes_total: u64,
    /// Time from the post to the first byte on the path. Zero if unknown.
    pub until_sent_ns: u64,
    /// Time from the post to the end. Zero if unknown.
    pub until_ended_ns: u64,
    /// The path of the transfer: a peerway_path.
    pub path: u32,
    /// Zero.
    pub reserved: u32,
}

// SAFETY: repr(C), the size first, and only integers.
unsafe impl Versioned for peerway_transfer_stats {
    const FIRST: usize = 48;
    const NAME: &'static str = "struct peerway_transfer_stats";
}

/// Returns the end of a transfer as the result of a call, with a message if it failed. Fills in
/// `peerway_end` if the caller passed one.
pub(crate) fn end(ended: Ended, fill: Option<Fill<peerway_end>>) -> Answer {
    let status = of_end(ended);
    if let Some(fill) = fill {
        let fence_open = (ended.fence == Fence::Open).into();
        fill.set(peerway_end { size: 0, status: status as i32, fence_open });
    }
    match status {
        peerway_status::Ok => Ok(()),
        status => Err(Failure::new(status, ended.to_string())),
    }
}

/// As [`end`], for a transfer that may still run.
pub(crate) fn end_if_any(ended: Option<Ended>, fill: Option<Fill<peerway_end>>) -> Answer {
    match ended {
        Some(ended) => end(ended, fill),
        None => {
            let status = peerway_status::Pending as i32;
            if let Some(fill) = fill {
                fill.set(peerway_end { size: 0, status, fence_open: 0 });
            }
            Err(Failure::PENDING)
        }
    }
}

/// Returns how a transfer ended: OK, or the status of its failure. PENDING if it still runs. The
/// call also makes progress on the transfer. `ended` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_transfer_poll(
    transfer: *const peerway_transfer,
    ended: *mut peerway_end,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::if_any(ended) }?;
        end_if_any(get(transfer)?.transfer.poll(), fill)
    })
}

/// Waits at most timeout_ns for the end of a transfer, and makes progress on it. Returns the same
/// as peerway_transfer_poll.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_transfer_wait(
    transfer: *const peerway_transfer,
    timeout_ns: u64,
    ended: *mut peerway_end,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::if_any(ended) }?;
        let transfer = get(transfer)?;
        let found = match timeout_ns {
            PEERWAY_FOREVER => Some(transfer.transfer.join()),
            timeout => transfer.transfer.wait(Duration::from_nanos(timeout)),
        };
        end_if_any(found, fill)
    })
}

/// Sets *fence to whether bytes of an ended transfer may still change memory: a peerway_fence.
/// PENDING if the transfer has not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_transfer_fence(
    transfer: *const peerway_transfer,
    fence: *mut u32,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { Out::new(fence, "fence", peerway_fence::Open as u32) }?;
        let transfer = get(transfer)?;
        let ended = || transfer.transfer.poll().map(|ended| ended.fence);
        let found = match ended().ok_or(Failure::PENDING)? {
            Fence::Held => peerway_fence::Held,
            Fence::Open if transfer.transfer.is_fence_pending() => peerway_fence::Open,
            // Poll again: the fence may have become held since the first poll.
            Fence::Open if ended() == Some(Fence::Held) => peerway_fence::Held,
            Fence::Open => peerway_fence::Lost,
        };
        out.set(found as u32);
        Ok(())
    })
}

/// Cancels a transfer. It ends within the fence's deadline. Its end tells whether its bytes may
/// still change memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_transfer_cancel(
    transfer: *const peerway_transfer,
) -> peerway_status {
    call(|| {
        get(transfer)?.transfer.cancel();
        Ok(())
    })
}

/// Adds one to an eventfd when the transfer ends, or at once if it has ended. The library
/// duplicates the file descriptor, so the caller may close it at any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_transfer_signal(
    transfer: *const peerway_transfer,
    eventfd: c_int,
) -> peerway_status {
    call(|| {
        get(transfer)?.watch(Watch::WakeFd(eventfd_of(eventfd)?));
        Ok(())
    })
}

/// Fills in the path, the bytes and the times of a transfer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_transfer_statistics(
    transfer: *const peerway_transfer,
    stats: *mut peerway_transfer_stats,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::new(stats) }?;
        let transfer = get(transfer)?;
        let stats = transfer.transfer.stats();
        let nanoseconds = |time: Option<Duration>| {
            time.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
        };
        fill.set(peerway_transfer_stats {
            size: 0,
            bytes_done: stats.bytes_done,
            bytes_total: stats.bytes_total,
            until_sent_ns: nanoseconds(stats.until_sent),
            until_ended_ns: nanoseconds(stats.until_ended),
            path: peerway_path::from(transfer.transfer.path()) as u32,
            reserved: 0,
        });
        Ok(())
    })
}

/// Frees a handle to a transfer. The transfer continues, and its slot becomes free when it ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_transfer_free(transfer: *mut peerway_transfer) -> peerway_status {
    call(|| handles::free(transfer).map(drop))
}
