//! The acceptor, as the driver sees it. A driver watches its listeners and starts its thread when
//! the first connection comes.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};

use super::driver::{ACCEPTOR, Driver};
use super::engine::Engine;
use super::shard::Shard;
use crate::clock;

/// The time between two attempts to start the acceptor's thread.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// The acceptor, as the driver of the first shard sees it: listeners that need a thread when the
/// first connection comes.
pub(crate) trait Listening: Send {
    /// Becomes readable when a connection waits.
    fn fd(&self) -> BorrowedFd<'_>;
    /// Starts the thread, which accepts from here on.
    fn start(&self, endpoint: &Arc<Engine>) -> io::Result<()>;
    /// Ends the thread, and closes the listeners and all connections in the handshake.
    fn stop(&self);
    /// Closes them in the child of a fork, to which the thread does not belong.
    fn abandon(&self);
}

impl Driver {
    /// Starts the acceptor's thread, because a connection waits. If the system has no room for a
    /// thread, a timer tries again.
    pub(super) fn start_accepting(&mut self, now: u64) {
        let Some(acceptor) = &self.acceptor else { return };
        let _ = epoll::delete(self.shard.epoll(), acceptor.fd());
        self.timers.acceptor = u64::MAX;
        if let Err(error) = acceptor.start(&self.endpoint) {
            tracing::error!(%error, "cannot start the thread that accepts connections");
            self.timers.acceptor = clock::after(now, ACCEPT_AGAIN);
        }
    }

    /// Takes the acceptor out, which the caller ends.
    pub(crate) fn take_acceptor(&mut self) -> Option<Box<dyn Listening>> {
        self.acceptor.take()
    }
}

/// Makes epoll report the acceptor's first connection.
pub(super) fn watch_acceptor(shard: &Shard, acceptor: &dyn Listening) -> io::Result<()> {
    let data = EventData::new_u64(ACCEPTOR);
    Ok(epoll::add(shard.epoll(), acceptor.fd(), data, EventFlags::IN)?)
}
