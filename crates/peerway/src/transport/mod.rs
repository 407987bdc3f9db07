//! How bytes move: directly by this process, or as frames on a lane.
//!
//! A [`Wire`] is an ordered stream of bytes (a TCP connection, a pair of shared rings, messages of a
//! queue pair). A lane puts
//! the frames of `peerway_core::wire` on it; which wire it is decides speed and nothing else.

pub(crate) mod direct;
pub(crate) mod gpu;
pub(crate) mod lane;
pub(crate) mod pull;
pub(crate) mod ring;
pub(crate) mod stores;
pub(crate) mod tcp;
pub(crate) mod verbs;

use std::io;
use std::os::fd::RawFd;

use self::verbs::queue::Queue;
use crate::os::Piece;

/// An ordered stream of bytes to one peer. Never blocks.
pub(crate) trait Wire: Send {
    /// Sends what fits; 0 means that there is no room now.
    ///
    /// # Safety
    ///
    /// The pieces are readable memory.
    unsafe fn send(&mut self, pieces: &[Piece]) -> io::Result<usize>;

    /// Receives what is there; `None` means nothing now, `Some(0)` that the peer closed.
    ///
    /// # Safety
    ///
    /// The pieces are writable memory that no Rust reference covers.
    unsafe fn receive(&mut self, pieces: &[Piece]) -> io::Result<Option<usize>>;

    /// The descriptor that epoll watches for this wire alone. A ring has none: its session's event
    /// descriptor stands for it.
    fn socket(&self) -> Option<RawFd>;

    /// Whether a look costs no system call and should be taken at every turn.
    fn is_memory(&self) -> bool;

    /// Cheap test for something to receive; a socket cannot tell and says yes.
    fn has_input(&mut self) -> io::Result<bool>;

    /// Asks to be woken when something can be received (or sent, when `blocked`); true when that is
    /// so already and the caller must not sleep.
    fn arm(&mut self, blocked: bool) -> io::Result<bool>;

    /// Takes `arm` back: the caller looks by itself again.
    fn disarm(&mut self);

    /// The queue pair that it is, if it is one: by that the peer's memory can be reached.
    fn queue(&mut self) -> Option<&mut Queue> {
        None
    }
}
