//! How bytes move: this process copies them directly, or a lane carries them as frames.
//!
//! A [`Wire`] is an ordered stream of bytes: a TCP connection, a pair of shared rings, or the
//! messages of a queue pair. A lane puts the frames of `peerway_core::wire` on it. The choice of
//! wire affects speed only, never meaning.

pub(crate) mod ring;
pub(crate) mod tcp;
pub(crate) mod verbs;

use std::io;
use std::os::fd::RawFd;

use self::verbs::queue::Queue;
use crate::os::Piece;

/// An ordered stream of bytes to one peer. Never blocks.
pub(crate) trait Wire: Send {
    /// Sends as many bytes as fit. Returns 0 when there is no room now.
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

    /// The wire's queue pair, if it is one. Work requests on it reach the peer's memory.
    fn queue(&mut self) -> Option<&mut Queue> {
        None
    }
}
