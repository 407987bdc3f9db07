//! How bytes leave the process.
//!
//! A [`Wire`] is an ordered stream of bytes: a TCP connection, a pair of shared rings, or the
//! messages of a device queue. A lane puts the frames of `peerway_core::wire` on it. [`device`] has
//! the traits of transports whose devices read and write memory by themselves. The choice of
//! transport affects speed only, never meaning.

pub(crate) mod device;
pub(crate) mod error;
mod pairing;
pub(crate) mod queues;
pub(crate) mod ring;
pub(crate) mod tcp;
mod verbs;

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use peerway_core::config::Config;

use self::device::{DeviceQueue, Devices};
use self::error::RdmaError;
use crate::os::Piece;

type Open = fn(&Config) -> Result<Arc<dyn Devices>, RdmaError>;

/// The device transports, best first.
const KINDS: &[Open] = &[verbs::open];

/// Opens the devices of the first transport that has any. Returns the first reason if none has.
pub(crate) fn open_devices(config: &Config) -> Result<Arc<dyn Devices>, RdmaError> {
    let mut first = None;
    for open in KINDS {
        match open(config) {
            Ok(devices) => return Ok(devices),
            Err(error) => first = first.or(Some(error)),
        }
    }
    Err(first.unwrap_or(RdmaError::NoDevice { kind: "RDMA" }))
}

/// An ordered stream of bytes to one peer. Never blocks.
pub(crate) trait Wire: Send {
    /// Sends as many bytes as fit. Returns 0 when there is no room now. Without pieces it sends
    /// only what the wire itself still has: see [`Wire::has_unsent`].
    ///
    /// # Safety
    ///
    /// The pieces are readable memory.
    unsafe fn send(&mut self, pieces: &[Piece]) -> io::Result<usize>;

    /// Receives the bytes that are available. `None` means nothing now; `Some(0)` means that the
    /// peer closed the stream.
    ///
    /// # Safety
    ///
    /// The pieces are writable memory that no Rust reference covers.
    unsafe fn receive(&mut self, pieces: &[Piece]) -> io::Result<Option<usize>>;

    /// Whether the wire has accepted bytes that are not on their way yet. Then the caller sends
    /// again when the wire has room, even if it has nothing more to send.
    fn has_unsent(&self) -> bool {
        false
    }

    /// The file descriptor that epoll watches for this wire alone. A ring has none: its session's
    /// event file descriptor covers it.
    fn socket(&self) -> Option<RawFd>;

    /// Whether a check for input needs no system call, so that the driver does it at every turn.
    fn is_memory(&self) -> bool;

    /// Cheap test for input. A socket cannot tell and returns true.
    fn has_input(&mut self) -> io::Result<bool>;

    /// Asks for a wake-up when the wire can receive (or send, when `blocked`). Returns true when it
    /// can already; the caller must not block then.
    fn arm(&mut self, blocked: bool) -> io::Result<bool>;

    /// Withdraws `arm`: the caller polls again.
    fn disarm(&mut self);

    /// The device queue, if the wire is one. Its parts reach the peer's memory.
    fn queue(&mut self) -> Option<&mut dyn DeviceQueue> {
        None
    }
}
