//! Completions for an event loop: a queue of ended transfers, with a file descriptor that becomes
//! readable when the queue is not empty.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Wake;

use crossbeam_queue::SegQueue;
use rustix::event::{EventfdFlags, eventfd};

use crate::arguments::{self, Out};
use crate::entry::call;
use crate::handles::{self, get, handle};
use crate::status::{Answer, Failure, peerway_status};
use crate::transfer::peerway_transfer;

/// A queue of completions, in the order of arrival.
pub struct peerway_completions {
    _private: (),
}

handle!(peerway_completions, Arc<Queue>, "completions", 8);

/// The tokens of ended transfers.
pub struct Queue {
    tokens: SegQueue<u64>,
    /// Whether the file descriptor is readable and `take` has not read it yet.
    signalled: AtomicBool,
    wake_fd: OwnedFd,
}

impl Queue {
    fn push(&self, token: u64) {
        self.tokens.push(token);
        // Pairs with the swap in `take`. A token pushed before that swap is popped there. A token
        // pushed after it signals again.
        if !self.signalled.swap(true, Ordering::SeqCst) {
            signal(&self.wake_fd);
        }
    }

    /// Takes up to `room` tokens. If tokens remain, the file descriptor stays readable.
    fn take(&self, room: usize, mut into: impl FnMut(usize, u64)) -> usize {
        let _ = rustix::io::read(&self.wake_fd, &mut [0; 8]);
        // Pairs with the swap in `push`.
        self.signalled.swap(false, Ordering::SeqCst);
        let mut taken = 0;
        while taken < room
            && let Some(token) = self.tokens.pop()
        {
            into(taken, token);
            taken += 1;
        }
        if !self.tokens.is_empty() && !self.signalled.swap(true, Ordering::SeqCst) {
            signal(&self.wake_fd);
        }
        taken
    }
}

fn signal(wake_fd: &OwnedFd) {
    // A write fails only if the counter is full, and then the eventfd is readable already.
    let _ = rustix::io::write(wake_fd, &1u64.to_ne_bytes());
}

/// A watcher of a transfer's end.
pub(crate) enum Watch {
    Token(Arc<Queue>, u64),
    WakeFd(OwnedFd),
}

/// All watchers of one transfer's end. The engine wakes a single waker, and this is that waker.
#[derive(Default)]
pub(crate) struct Watchers {
    waiting: Mutex<Vec<Watch>>,
}

impl Watchers {
    pub(crate) fn add(&self, watch: Watch) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push(watch);
    }

    /// Notifies all watchers that have not been notified yet.
    pub(crate) fn tell(&self) {
        let waiting =
            std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        for watch in waiting {
            match watch {
                Watch::Token(queue, token) => queue.push(token),
                Watch::WakeFd(wake_fd) => signal(&wake_fd),
            }
        }
    }
}

impl Wake for Watchers {
    fn wake(self: Arc<Self>) {
        self.tell();
    }
}

/// Duplicates an eventfd of C. Other file descriptors are refused, because a full pipe would block
/// the thread that completes transfers.
pub(crate) fn eventfd_of(given: c_int) -> Answer<OwnedFd> {
    let not_one = |why: String| Failure::bad(format!("{given} is not an eventfd: {why}"));
    if given < 0 {
        return Err(not_one("it is negative".into()));
    }
    // SAFETY: the borrow ends in this call. If the descriptor is not open, the system refuses to
    // duplicate it.
    let borrowed = unsafe { BorrowedFd::borrow_raw(given) };
    let ours =
        rustix::io::fcntl_dupfd_cloexec(borrowed, 3).map_err(|error| not_one(error.to_string()))?;
    let link = std::fs::read_link(format!("/proc/self/fd/{}", ours.as_raw_fd()));
    match link {
        Ok(link) if link.as_os_str() == "anon_inode:[eventfd]" => Ok(ours),
        Ok(link) => Err(not_one(format!("it is {}", link.display()))),
        Err(error) => Err(not_one(error.to_string())),
    }
}

/// Creates a queue of completions with its file descriptor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_completions_new(
    completions: *mut *mut peerway_completions,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { arguments::handle(completions, "completions") }?;
        let wake_fd =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| {
                Failure::new(peerway_status::Os, format!("cannot create an eventfd: {error}"))
            })?;
        let queue = Queue { tokens: SegQueue::new(), signalled: AtomicBool::new(false), wake_fd };
        out.set(handles::new(Arc::new(queue))?);
        Ok(())
    })
}

/// Sets *fd to the queue's file descriptor. It is readable while the queue is not empty. Rarely it
/// is readable once although the queue is empty, when a token is taken while it is being signalled.
///
/// The descriptor belongs to the queue and is closed with it. Poll it, but do not read it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_completions_fd(
    completions: *const peerway_completions,
    fd: *mut c_int,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { Out::new(fd, "fd", -1) }?;
        out.set(get(completions)?.wake_fd.as_raw_fd());
        Ok(())
    })
}

/// Puts `token` into the queue when the transfer ends, or at once if it has ended. The transfer's
/// handle may be freed before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_completions_watch(
    completions: *const peerway_completions,
    transfer: *const peerway_transfer,
    token: u64,
) -> peerway_status {
    call(|| {
        let queue = Arc::clone(&*get(completions)?);
        get(transfer)?.watch(Watch::Token(queue, token));
        Ok(())
    })
}

/// Takes at most `room` tokens out of the queue, and sets *count to their number. Does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_completions_take(
    completions: *const peerway_completions,
    tokens: *mut u64,
    room: usize,
    count: *mut usize,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let out = unsafe { Out::new(count, "count", 0) }?;
        let queue = get(completions)?;
        if room > 0 {
            // SAFETY: the C contract.
            unsafe { Out::new(tokens, "tokens", 0) }?;
        }
        // SAFETY: the C contract, and `take` returns at most `room` tokens.
        out.set(queue.take(room, |at, token| unsafe { tokens.add(at).write(token) }));
        Ok(())
    })
}

/// Frees the handle to a queue. The queue and its file descriptor go away once all watched
/// transfers have ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_completions_free(
    completions: *mut peerway_completions,
) -> peerway_status {
    call(|| handles::free(completions).map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_that_does_not_fit_keeps_the_descriptor_readable() {
        let wake_fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let queue = Queue { tokens: SegQueue::new(), signalled: AtomicBool::new(false), wake_fd };
        (0..5).for_each(|token| queue.push(token));
        let mut seen = Vec::new();
        assert_eq!(queue.take(2, |_, token| seen.push(token)), 2);
        assert!(queue.signalled.load(Ordering::SeqCst));
        assert_eq!(
            rustix::io::read(&queue.wake_fd, &mut [0; 8]),
            Ok(8),
            "signalled again for the remaining tokens"
        );
        assert_eq!(queue.take(9, |_, token| seen.push(token)), 3);
        assert_eq!(seen, [0, 1, 2, 3, 4]);
        assert!(rustix::io::read(&queue.wake_fd, &mut [0; 8]).is_err(), "readable although empty");
    }

    #[test]
    fn only_an_eventfd_is_one() {
        let wake_fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert!(eventfd_of(wake_fd.as_raw_fd()).is_ok());
        let pipe = std::io::pipe().unwrap();
        let refused = eventfd_of(pipe.1.as_raw_fd()).unwrap_err().sentence.unwrap();
        assert!(refused.contains("not an eventfd: it is pipe:"), "{refused}");
        assert!(eventfd_of(-1).is_err());
        assert!(eventfd_of(1 << 30).is_err());
    }
}
