//! Wakes blocked threads: event descriptors across processes and in epoll, futexes within the
//! process.
//!
//! Neither carries data. A wake-up may be spurious, so a woken thread checks again. The code that
//! sets and tests the armed flag ensures that no wake-up is *missing* (see `ring.rs`).
//!
//! A peer that holds our event descriptor shares its open file. It may signal it at will. It could
//! also clear `O_NONBLOCK` and fill the counter, so that `signal` blocks. So event descriptors pass
//! only between processes that already share a ring, and [`EventFd::from_owned`] accepts nothing
//! but an eventfd.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::event::EventfdFlags;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::thread::futex;

/// A kernel counter. Its file descriptor is readable while the counter is not zero.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    /// A new event descriptor, not signalled.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Takes ownership of a file descriptor received from a peer. It refuses anything but an
    /// eventfd: a write to another file could block or do harm.
    pub(crate) fn from_owned(fd: OwnedFd) -> io::Result<Self> {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        if link.as_os_str() != "anon_inode:[eventfd]" {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the peer passed a file descriptor that is not an eventfd",
            ));
        }
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        Ok(Self(fd))
    }

    /// Makes the file descriptor readable, which wakes the threads that poll it.
    pub(crate) fn signal(&self) {
        // EAGAIN means that the counter is full and so already readable. The wake-up is not lost.
        let written = rustix::io::retry_on_intr(|| rustix::io::write(&self.0, &1u64.to_ne_bytes()));
        debug_assert!(matches!(written, Ok(8) | Err(Errno::AGAIN)), "eventfd write: {written:?}");
    }

    /// Makes the file descriptor unreadable again. Returns whether it was signalled.
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

/// Blocks while `word` equals `expected`, until a wake-up or for `timeout`. Returns false if the
/// time ran out.
///
/// True guarantees nothing: the word may have differed at the start, or a signal arrived. The
/// caller must check again. Only for words of this process (private futex).
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) -> bool {
    // A timeout too long to express means no timeout.
    let timeout = timeout.and_then(|timeout| rustix::thread::Timespec::try_from(timeout).ok());
    futex::wait(word, futex::Flags::PRIVATE, expected, timeout.as_ref()) != Err(Errno::TIMEDOUT)
}

/// Wakes up to `n` threads that block on `word`. Returns how many it woke.
pub(crate) fn futex_wake(word: &AtomicU32, n: u32) -> usize {
    // The kernel's count is signed: it would take a larger one as negative and wake a single
    // thread.
    futex::wake(word, futex::Flags::PRIVATE, n.min(i32::MAX as u32)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
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
    fn a_wake_up_ends_a_wait_and_is_counted() {
        const WATCHDOG: Duration = Duration::from_secs(60);
        // The word never changes, so only a wake-up ends the wait before its time-out.
        let word = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| futex_wait(&word, 0, Some(WATCHDOG)));
            // A wake-up before the thread blocks reaches no thread.
            while futex_wake(&word, u32::MAX) == 0 {
                assert!(!sleeper.is_finished(), "the thread blocked, but no wake-up reached it");
                std::thread::yield_now();
            }
            assert!(sleeper.join().unwrap(), "the thread slept until its time-out");
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
