//! Events that a program reads from a descriptor: completion channels and asynchronous events.
//!
//! They travel through a pipe, because programs make the descriptor non-blocking and add it to
//! their own epoll. An event names its object by number, which is looked up when the program takes
//! the event. An event of an object that is gone by then is skipped, as the kernel does.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};

use rustix::pipe::{PipeFlags, pipe_with};

/// A queue of records of 16 bytes. A pipe never splits records of this size.
#[derive(Debug)]
pub(crate) struct EventPipe {
    read: OwnedFd,
    write: OwnedFd,
}

/// What happened, and the number of the object that it happened to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Event {
    pub(crate) kind: u32,
    pub(crate) port: u32,
    pub(crate) id: u64,
}

impl EventPipe {
    pub(crate) fn new() -> io::Result<Self> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        // Only the end that the device writes must never block.
        rustix::io::ioctl_fionbio(&write, true)?;
        Ok(Self { read, write })
    }

    /// The descriptor that the program reads.
    pub(crate) fn fd(&self) -> RawFd {
        self.read.as_raw_fd()
    }

    /// Queues an event. Returns false if the pipe is full of unread events.
    pub(crate) fn put(&self, event: Event) -> bool {
        let mut record = [0; 16];
        record[..4].copy_from_slice(&event.kind.to_ne_bytes());
        record[4..8].copy_from_slice(&event.port.to_ne_bytes());
        record[8..].copy_from_slice(&event.id.to_ne_bytes());
        rustix::io::write(&self.write, &record) == Ok(record.len())
    }

    /// Takes the next event. Blocks if the program left the descriptor blocking.
    pub(crate) fn take(&self) -> io::Result<Event> {
        let mut record = [0; 16];
        if rustix::io::read(&self.read, &mut record)? != record.len() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let word = |at: usize| {
            u32::from_ne_bytes([record[at], record[at + 1], record[at + 2], record[at + 3]])
        };
        let mut id = [0; 8];
        id.copy_from_slice(&record[8..]);
        Ok(Event { kind: word(0), port: word(4), id: u64::from_ne_bytes(id) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_and_none_is_invented() {
        let pipe = EventPipe::new().expect("a pipe");
        let event = |id| Event { kind: 3, port: 1, id };
        assert!(pipe.put(event(u64::MAX)) && pipe.put(event(2)));
        assert_eq!(pipe.take().expect("the first"), event(u64::MAX));
        assert_eq!(pipe.take().expect("the second"), event(2));
        rustix::io::ioctl_fionbio(&pipe.read, true).expect("non-blocking");
        let none = pipe.take().expect_err("nothing is left");
        assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
    }
}
