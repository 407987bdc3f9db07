//! A TCP connection as a wire: one system call for each send and receive, which neither allocates
//! nor blocks.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

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
        Ok(unsafe { send_pieces(self.stream.as_fd(), pieces) }?.unwrap_or(0))
    }

    unsafe fn receive(&mut self, pieces: &[Piece]) -> io::Result<Option<usize>> {
        // SAFETY: the caller vouches for the pieces.
        unsafe { recv_pieces(self.stream.as_fd(), pieces) }
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

/// Sends as many bytes of the pieces as the socket accepts now, in order. `None` if it accepts
/// none.
///
/// # Safety
///
/// Every piece must be readable memory during the call.
unsafe fn send_pieces(fd: BorrowedFd<'_>, pieces: &[Piece]) -> io::Result<Option<usize>> {
    let message = message(pieces);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `message` points to `pieces`, which have the layout of iovecs. The caller keeps their
    // memory readable.
    moved(|| unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) })
}

/// Receives the available bytes into the pieces, in order. `None` if there are none. `Some(0)` if
/// the peer has shut down its side of the connection (or the pieces are empty).
///
/// # Safety
///
/// Every piece must be writable memory that no reference in this process covers during the call.
unsafe fn recv_pieces(fd: BorrowedFd<'_>, pieces: &[Piece]) -> io::Result<Option<usize>> {
    let mut message = message(pieces);
    let flags = libc::MSG_DONTWAIT;
    // SAFETY: as in `send_pieces`. The kernel writes only to `message` and to the pieces' memory,
    // which the caller keeps writable.
    moved(|| unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, flags) })
}

/// A message header for the first pieces, up to the maximum of one call.
fn message(pieces: &[Piece]) -> libc::msghdr {
    // SAFETY: all zeros is a valid header: no address, no pieces, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut().cast();
    message.msg_iovlen = pieces.len().min(libc::UIO_MAXIOV as usize) as _;
    message
}

/// Repeats a socket call until it is not interrupted, and converts its result.
fn moved(mut call: impl FnMut() -> isize) -> io::Result<Option<usize>> {
    loop {
        if let Ok(n) = usize::try_from(call()) {
            return Ok(Some(n));
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::Interrupted => {}
            io::ErrorKind::WouldBlock => return Ok(None),
            _ => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::os::net::{connect, listen, tune};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let addr = listener.local_addr().unwrap();
        let near = connect(addr, None, Duration::from_secs(10)).unwrap();
        // `connect` has returned, so `accept` will soon return the connection.
        let far = loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        };
        (near, far)
    }

    #[test]
    fn pieces_go_out_and_come_in_in_order() {
        let (near, far) = pair();
        tune(&near).unwrap();
        tune(&far).unwrap();
        let out = [Piece::of(b"peer"), Piece::of(b""), Piece::of(b"way")];
        let (mut a, mut b) = ([0; 2], [0; 5]);
        let into = [Piece::of_mut(&mut a), Piece::of_mut(&mut b)];
        // SAFETY: the pieces are static strings and two arrays that are not used during the calls.
        unsafe {
            assert_eq!(recv_pieces(far.as_fd(), &into).unwrap(), None);
            assert_eq!(send_pieces(near.as_fd(), &out).unwrap(), Some(7));
            while recv_pieces(far.as_fd(), &into).unwrap().is_none() {
                thread::yield_now();
            }
        }
        assert_eq!((&a, &b), (b"pe", b"erway"));
        drop(near);
        let end = loop {
            // SAFETY: as above.
            match unsafe { recv_pieces(far.as_fd(), &into) }.unwrap() {
                Some(n) => break n,
                None => thread::yield_now(),
            }
        };
        assert_eq!(end, 0);
    }

    #[test]
    fn a_full_socket_would_block_and_a_dead_one_is_an_error() {
        let (near, far) = pair();
        let chunk = vec![7; 1 << 20];
        let piece = [Piece::of(&chunk)];
        // SAFETY: `chunk` outlives every call and is only read.
        while unsafe { send_pieces(near.as_fd(), &piece) }.unwrap().is_some() {}
        drop(far);
        // Unread data turns the close into a reset. The sender must not get SIGPIPE.
        loop {
            // SAFETY: as above.
            match unsafe { send_pieces(near.as_fd(), &piece) } {
                Ok(_) => thread::yield_now(),
                Err(error) => break assert_ne!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
    }

    #[test]
    fn more_pieces_than_one_call_takes_are_cut() {
        let (near, mut far) = pair();
        let bytes: Vec<u8> = (0..3000u32).map(|i| i as u8).collect();
        let pieces: Vec<Piece> = bytes.chunks(1).map(Piece::of).collect();
        // SAFETY: `bytes` outlives the call and is only read.
        let sent = unsafe { send_pieces(near.as_fd(), &pieces) }.unwrap();
        assert_eq!(sent, Some(1024));
        far.set_nonblocking(false).unwrap();
        let mut got = vec![0; 1024];
        far.read_exact(&mut got).unwrap();
        assert_eq!(got, bytes[..1024]);
    }
}
