//! Transfers that were posted.

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

/// A posted transfer. It goes on when its handle is freed; every transfer has a deadline.
pub struct peerway_transfer {
    _private: (),
}

handle!(peerway_transfer, Transfer, "a transfer", 7);

/// A transfer and who is to be told of its end.
pub struct Transfer {
    pub(crate) transfer: peerway::Transfer,
    watchers: Arc<Watchers>,
}

impl Transfer {
    pub(crate) fn new(transfer: peerway::Transfer) -> Self {
        Self { transfer, watchers: Arc::default() }
    }

    /// Has somebody told of the end, at once where it has come.
    pub(crate) fn watch(&self, watch: Watch) {
        self.watchers.add(watch);
        if !self.transfer.on_end(&self.watchers.clone().into()) {
            self.watchers.tell();
        }
    }
}

/// Whether bytes of a transfer that has ended may still change memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum peerway_fence {
    /// No byte of it changes memory any more.
    Held = 0,
    /// Bytes of it may still change memory. Ask again: the answer turns to HELD when the peer drains
    /// or dies.
    Open = 1,
    /// Bytes of it may still change memory, and no proof can arrive any more that they cannot.
    Lost = 2,
}

/// How a transfer ended.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_end {
    /// sizeof(struct peerway_end).
    pub size: usize,
    /// Why: a peerway_status. OK where every byte is where it was meant to be.
    pub status: i32,
    /// Not zero: bytes of it may still change memory, because the peer did not answer for them in time. Memory that the library
    /// allocated is kept until they cannot; other memory must be. peerway_transfer_fence() tells
    /// when they no longer can.
    pub fence_open: u32,
}

// SAFETY: repr(C), its size first, and numbers only.
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
    /// Bytes known to have arrived.
    pub bytes_done: u64,
    /// Bytes asked for.
    pub bytes_total: u64,
    /// From the post to the first byte that was handed to the path; zero where that is not known.
    pub until_sent_ns: u64,
    /// From the post to the end; zero where that is not known.
    pub until_ended_ns: u64,
    /// The path it took: a peerway_path.
    pub path: u32,
    /// Zero.
    pub reserved: u32,
}

// SAFETY: repr(C), its size first, and numbers only.
unsafe impl Versioned for peerway_transfer_stats {
    const FIRST: usize = 48;
    const NAME: &'static str = "struct peerway_transfer_stats";
}

/// An end as a call answers it: a status, a sentence where it is not done, and the fence for who asked.
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

/// As [`end`], of what may not have ended.
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

/// How a transfer ended: OK, or why not; PENDING where it has not. Moves it along a little. `ended` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_transfer_poll(
    transfer: *const peerway_transfer,
    ended: *mut peerway_end,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let fill = unsafe { Fill::if_any(ended) }?;
        end_if_any(get(transfer)?.transfer.poll(), fill)
    })
}

/// Waits for the end, for so long; the calling thread works for the transfer meanwhile. Answers as peerway_transfer_poll.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_transfer_wait(
    transfer: *const peerway_transfer,
    timeout_ns: u64,
    ended: *mut peerway_end,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let fill = unsafe { Fill::if_any(ended) }?;
        let transfer = get(transfer)?;
        let found = match timeout_ns {
            PEERWAY_FOREVER => Some(transfer.transfer.join()),
            timeout => transfer.transfer.wait(Duration::from_nanos(timeout)),
        };
        end_if_any(found, fill)
    })
}

/// Whether bytes of a transfer that has ended may still change memory: *fence becomes a
/// peerway_fence. PENDING where it has not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_transfer_fence(
    transfer: *const peerway_transfer,
    fence: *mut u32,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { Out::new(fence, "fence", peerway_fence::Open as u32) }?;
        let transfer = get(transfer)?;
        let ended = || transfer.transfer.poll().map(|ended| ended.fence);
        let found = match ended().ok_or(Failure::PENDING)? {
            Fence::Held => peerway_fence::Held,
            Fence::Open if transfer.transfer.is_fence_pending() => peerway_fence::Open,
            // Asked again: the fence may have turned to held since it was read.
            Fence::Open if ended() == Some(Fence::Held) => peerway_fence::Held,
            Fence::Open => peerway_fence::Lost,
        };
        out.set(found as u32);
        Ok(())
    })
}

/// Asks for a transfer to stop. It ends within the fence's deadline, and says then whether anything of it can still change memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_transfer_cancel(
    transfer: *const peerway_transfer,
) -> peerway_status {
    call(|| {
        get(transfer)?.transfer.cancel();
        Ok(())
    })
}

/// Adds one to an eventfd when the transfer ends, at once where it has. The descriptor is duplicated: closing it is the
/// caller's own affair, at any time.
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

/// The path that a transfer took, its bytes and its times.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_transfer_statistics(
    transfer: *const peerway_transfer,
    stats: *mut peerway_transfer_stats,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise.
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

/// Frees a handle to a transfer, which goes on. Its slot is free once it has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_transfer_free(transfer: *mut peerway_transfer) -> peerway_status {
    call(|| handles::free(transfer).map(drop))
}
