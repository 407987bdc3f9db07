//! Waking a sleeper: event descriptors across processes and inside epoll, futexes inside the process.
//!
//! Neither carries data. A wake-up may be spurious, so a woken thread looks again; that none is *missing*
//! is the business of whoever sets and tests the armed flag (see `ring.rs`).
//!
//! A peer that holds our event descriptor shares its open file: it may signal it at will, and it could clear
//! `O_NONBLOCK` and fill the counter so that a `signal` blocks. So descriptors pass only between processes
//! that already share a ring, and [`EventFd::from_owned`] takes nothing but an eventfd.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::event::EventfdFlags;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::thread::futex;

/// A counter in the kernel that makes its descriptor readable while it is not zero.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    /// A new one, not signalled.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Takes over a descriptor received from a peer, refusing anything but an eventfd: a write to some
    /// other file could block or do harm.
    pub(crate) fn from_owned(fd: OwnedFd) -> io::Result<Self> {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        if link.as_os_str() != "anon_inode:[eventfd]" {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not an event descriptor"));
        }
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        Ok(Self(fd))
    }

    /// Makes the descriptor readable, waking whoever polls it.
    pub(crate) fn signal(&self) {
        // EAGAIN means that the counter is full, hence already readable: the wake-up is there.
        let written = rustix::io::retry_on_intr(|| rustix::io::write(&self.0, &1u64.to_ne_bytes()));
        debug_assert!(matches!(written, Ok(8) | Err(Errno::AGAIN)), "eventfd write: {written:?}");
    }

    /// Makes the descriptor unreadable again; whether it had been signalled.
    pub(crate) fn drain(&self) -> bool {
        let mut count = [0; 8];
        rustix::io::retry_on_intr(|| rustix::io::read(&self.0, &mut count)).is_ok()
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sleeps while `word` is `expected`, until woken or for `timeout`; false when the time ran out.
///
/// True promises nothing: the word may have differed at once, or a signal came. Look again. Only for words
/// of this process (private futex).
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) -> bool {
    // A time-out too long to express is no time-out.
    let timeout = timeout.and_then(|timeout| rustix::thread::Timespec::try_from(timeout).ok());
    futex::wait(word, futex::Flags::PRIVATE, expected, timeout.as_ref()) != Err(Errno::TIMEDOUT)
}

/// Wakes up to `n` threads that sleep on `word`; how many there were.
pub(crate) fn futex_wake(word: &AtomicU32, n: u32) -> usize {
    // The kernel's count is signed: a larger one would read as negative and wake a single thread.
    futex::wake(word, futex::Flags::PRIVATE, n.min(i32::MAX as u32)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn signals_add_up_to_one_wake_up() {
        let event = EventFd::new().unwrap();
        assert!(!event.drain());
        event.signal();
        event.signal();
        assert!(event.drain());
        assert!(!event.drain());
    }

    #[test]
    fn a_full_counter_is_still_a_wake_up() {
        let event = EventFd::new().unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        event.signal();
        assert!(event.drain());
    }

    #[test]
    fn a_received_descriptor_is_made_non_blocking() {
        let blocking = rustix::event::eventfd(0, EventfdFlags::empty()).unwrap();
        let event = EventFd::from_owned(blocking).unwrap();
        assert!(!event.drain());
        event.signal();
        assert!(event.drain());
    }

    #[test]
    fn only_event_descriptors_are_taken() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        assert!(EventFd::from_owned(read).is_err());
        assert!(EventFd::from_owned(write).is_err());
    }

    #[test]
    fn a_futex_wakes_its_sleeper() {
        let word = AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while word.load(Ordering::Acquire) == 0 {
                    futex_wait(&word, 0, None);
                }
            });
            // pairs with the Acquire load of the sleeper.
            word.store(1, Ordering::Release);
            futex_wake(&word, 1);
        });
    }

    #[test]
    fn a_futex_wait_ends_by_time_or_by_a_changed_word() {
        let word = AtomicU32::new(3);
        assert!(!futex_wait(&word, 3, Some(Duration::from_millis(5))));
        assert!(futex_wait(&word, 4, None));
        assert!(futex_wait(&word, 4, Some(Duration::MAX)));
        assert_eq!(futex_wake(&word, 1), 0);
    }
}
