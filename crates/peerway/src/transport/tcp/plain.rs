//! A TCP connection as a wire.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use super::Wire;
use crate::os::{Piece, net};

/// A connected, non-blocking socket.
pub(crate) struct TcpWire {
    stream: TcpStream,
}

impl TcpWire {
    /// Takes over a connected socket.
    pub(crate) fn new(stream: TcpStream) -> io::Result<Self> {
        net::tune(&stream)?;
        Ok(Self { stream })
    }
}

impl Wire for TcpWire {
    unsafe fn send(&mut self, pieces: &[Piece]) -> io::Result<usize> {
        // SAFETY: the caller vouches for the pieces.
        Ok(unsafe { net::send_pieces(self.stream.as_fd(), pieces) }?.unwrap_or(0))
    }

    unsafe fn receive(&mut self, pieces: &[Piece]) -> io::Result<Option<usize>> {
        // SAFETY: the caller vouches for the pieces.
        unsafe { net::recv_pieces(self.stream.as_fd(), pieces) }
    }

    fn socket(&self) -> Option<RawFd> {
        Some(self.stream.as_raw_fd())
    }

    fn is_memory(&self) -> bool {
        false
    }

    fn has_input(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    /// epoll watches sockets at all times.
    fn arm(&mut self, _blocked: bool) -> io::Result<bool> {
        Ok(false)
    }

    fn disarm(&mut self) {}
}
