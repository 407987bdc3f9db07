//! Posted transfers.

use std::ffi::{c_char, c_int};
use std::sync::Arc;
use std::time::Duration;

use peerway::{Ended, Fence, Operation};

use crate::arguments::{Fill, Out, PEERWAY_FOREVER, Versioned};
use crate::completions::{Watch, Watchers, eventfd_of};
use crate::endpoint::peerway_incarnation;
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

    /// The fence of an ended transfer.
    fn fence(&self) -> Option<peerway_fence> {
        let ended = || self.transfer.poll().map(|ended| ended.fence);
        Some(match ended()? {
            Fence::Held => peerway_fence::Held,
            Fence::Open if self.transfer.is_fence_pending() => peerway_fence::Open,
            // Poll again: the fence may have become held since the first poll.
            Fence::Open if ended() == Some(Fence::Held) => peerway_fence::Held,
            Fence::Open => peerway_fence::Lost,
        })
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

/// What a transfer does.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum peerway_operation {
    /// Writes memory of the peer. A notification or a count may follow the bytes.
    Write = 0,
    /// Reads memory of the peer.
    Read = 1,
    /// Sends a notification alone.
    Notify = 2,
    /// Adds one to a counter of the peer, and does nothing else.
    Count = 3,
}

/// What is known of a transfer that failed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct peerway_failure {
    /// sizeof(struct peerway_failure).
    pub size: usize,
    /// The incarnation of the peer.
    pub incarnation: peerway_incarnation,
    /// Bytes that are known to have arrived.
    pub bytes_done: u64,
    /// Bytes of the batch. Zero for a notification or a count alone.
    pub bytes_total: u64,
    /// The result: a peerway_status.
    pub status: i32,
    /// Whether bytes of the transfer may still change memory: a peerway_fence.
    pub fence: u32,
    /// The path of the transfer: a peerway_path.
    pub path: u32,
    /// What the transfer did: a peerway_operation.
    pub operation: u32,
    /// The address of the peer, as text with its zero byte.
    pub peer: [c_char; 64],
    /// The last end of a lane or of the session, with the operating system's reason, as text with
    /// its zero byte. Cut if it is longer; empty if there was none.
    pub last_event: [c_char; 256],
}

// SAFETY: repr(C), the size first, and only integers.
unsafe impl Versioned for peerway_failure {
    const FIRST: usize = 376;
    const NAME: &'static str = "struct peerway_failure";
}

/// A text in an array, cut if it is longer, with at least one zero byte.
fn text<const ROOM: usize>(text: &str) -> [c_char; ROOM] {
    let mut array = [0; ROOM];
    let end = text.floor_char_boundary(ROOM - 1);
    for (to, byte) in array.iter_mut().zip(text[..end].bytes()) {
        *to = byte as c_char;
    }
    array
}

/// Returns the end of a transfer as the result of a call, with a message if it failed. Fills in
/// `peerway_end` if the caller passed one. Without a `failure`, the message is that of the end.
pub(crate) fn end(
    ended: Ended,
    failure: impl FnOnce() -> Option<peerway::Failure>,
    fill: Option<Fill<peerway_end>>,
) -> Answer {
    let status = of_end(ended);
    if let Some(fill) = fill {
        let fence_open = (ended.fence == Fence::Open).into();
        fill.set(peerway_end { size: 0, status: status as i32, fence_open });
    }
    match status {
        peerway_status::Ok => Ok(()),
        status => {
            let sentence = failure().map_or_else(|| ended.to_string(), |known| known.to_string());
            Err(Failure::new(status, sentence))
        }
    }
}

/// Waits for a transfer, and returns its end as [`end`] does.
pub(crate) fn finish(transfer: &peerway::Transfer, fill: Option<Fill<peerway_end>>) -> Answer {
    end(transfer.join(), || transfer.failure(), fill)
}

/// As [`end`], for a transfer that may still run.
pub(crate) fn end_if_any(
    ended: Option<Ended>,
    failure: impl FnOnce() -> Option<peerway::Failure>,
    fill: Option<Fill<peerway_end>>,
) -> Answer {
    match ended {
        Some(ended) => end(ended, failure, fill),
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
        let transfer = get(transfer)?;
        end_if_any(transfer.transfer.poll(), || transfer.transfer.failure(), fill)
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
        end_if_any(found, || transfer.transfer.failure(), fill)
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
        let found = get(transfer)?.fence().ok_or(Failure::PENDING)?;
        out.set(found as u32);
        Ok(())
    })
}

/// Fills in what is known of a transfer that failed: the peer, the path, the bytes, the fence, and
/// the last end of a lane. PENDING if the transfer has not ended, NOTHING if it succeeded. The
/// calls that wait put the same into a sentence: see peerway_last_error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_transfer_failure(
    transfer: *const peerway_transfer,
    failure: *mut peerway_failure,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let fill = unsafe { Fill::new(failure) }?;
        let transfer = get(transfer)?;
        let fence = transfer.fence().ok_or(Failure::PENDING)?;
        let found = transfer.transfer.failure().ok_or(Failure::NOTHING)?;
        let operation = match found.operation {
            Operation::Read => peerway_operation::Read,
            Operation::Notify => peerway_operation::Notify,
            Operation::Count => peerway_operation::Count,
            _ => peerway_operation::Write,
        };
        fill.set(peerway_failure {
            size: 0,
            incarnation: found.incarnation.into(),
            bytes_done: found.bytes_done,
            bytes_total: found.bytes_total,
            status: of_end(found.ended) as i32,
            fence: fence as u32,
            path: peerway_path::from(found.path) as u32,
            operation: operation as u32,
            peer: text(&found.peer.to_string()),
            last_event: text(found.last_event.as_ref().map_or("", |event| &event.what)),
        });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_between_characters_and_end_with_zero() {
        let bytes = |array: &[c_char]| array.iter().map(|c| *c as u8).collect::<Vec<u8>>();
        assert_eq!(bytes(&text::<4>("")), [0; 4]);
        assert_eq!(bytes(&text::<4>("abc")), *b"abc\0");
        assert_eq!(bytes(&text::<4>("abcd")), *b"abc\0");
        assert_eq!(bytes(&text::<4>("ab\u{e9}")), *b"ab\0\0");
    }
}
