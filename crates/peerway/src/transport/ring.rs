//! A pair of rings in a session's shared segment as a wire.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use super::Wire;
use crate::os::Piece;
use crate::os::ring::{RingConsumer, RingError, RingProducer};
use crate::os::shm::ShmMapping;
use crate::os::wake::EventFd;

/// Our half of both directions.
pub(crate) struct RingWire {
    outgoing: RingProducer,
    incoming: RingConsumer,
    /// Signalled when the peer has armed its ring and there is something for it.
    peer_wake_fd: Arc<EventFd>,
    /// Whether `disarm` has something to withdraw. It must not touch the armed words needlessly:
    /// each access costs the peer a cache miss.
    armed_in: bool,
    armed_out: bool,
    _segment: Arc<ShmMapping>,
}

impl RingWire {
    pub(crate) fn new(
        outgoing: RingProducer,
        incoming: RingConsumer,
        peer_wake_fd: Arc<EventFd>,
        segment: Arc<ShmMapping>,
    ) -> Self {
        Self {
            outgoing,
            incoming,
            peer_wake_fd,
            armed_in: false,
            armed_out: false,
            _segment: segment,
        }
    }
}

impl Wire for RingWire {
    unsafe fn send(&mut self, pieces: &[Piece]) -> io::Result<usize> {
        // SAFETY: the caller vouches for the pieces.
        let sent = unsafe { self.outgoing.append(pieces) }.map_err(corrupt)?;
        if sent > 0 && self.outgoing.publish() {
            self.peer_wake_fd.signal();
        }
        Ok(sent)
    }

    unsafe fn receive(&mut self, pieces: &[Piece]) -> io::Result<Option<usize>> {
        // SAFETY: the caller vouches for the pieces.
        let taken = unsafe { self.incoming.take(pieces) }.map_err(corrupt)?;
        if taken == 0 {
            return Ok(None);
        }
        if self.incoming.publish() {
            self.peer_wake_fd.signal();
        }
        Ok(Some(taken))
    }

    fn socket(&self) -> Option<RawFd> {
        None
    }

    fn is_memory(&self) -> bool {
        true
    }

    fn has_input(&mut self) -> io::Result<bool> {
        Ok(self.incoming.available().map_err(corrupt)? > 0)
    }

    fn arm(&mut self, blocked: bool) -> io::Result<bool> {
        // An `arm` that finds work withdraws itself.
        let ready = self.incoming.arm().map_err(corrupt)?;
        self.armed_in = !ready;
        if ready || !blocked {
            return Ok(ready);
        }
        let room = self.outgoing.arm(1).map_err(corrupt)?;
        self.armed_out = !room;
        Ok(room)
    }

    fn disarm(&mut self) {
        if std::mem::take(&mut self.armed_in) {
            self.incoming.disarm();
        }
        if std::mem::take(&mut self.armed_out) {
            self.outgoing.disarm();
        }
    }
}

fn corrupt(error: RingError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
