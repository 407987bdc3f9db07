//! A TCP connection whose bytes travel in records.
//!
//! [`Wire::send`] copies bytes into records in a private buffer and seals them there, so memory that
//! changes meanwhile does no harm. [`Wire::receive`] reads records into a private buffer, and copies
//! bytes out of a record only after the whole record was found to be right. So no wrong byte reaches
//! a parser or the program's memory.
//!
//! A buffer grows once, when the first long record comes, so a lane with small frames takes little
//! memory and a connect little time.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;

use peerway_core::record::{HEAD_LEN, MAX_BODY, MAX_TRAILER};

use super::guard::{Guard, bad};
use super::plain::TcpWire;
use crate::os::Piece;
use crate::os::copy::{CopyKind, copy};
use crate::os::crc::copy_with_crc32c;
use crate::transport::Wire;

/// The longest record.
const MAX_RECORD: usize = HEAD_LEN + MAX_BODY + MAX_TRAILER;
/// Bytes of a buffer at first.
const SMALL: usize = 8 << 10;
/// Bytes of a buffer that has grown: what one call sends or receives at most.
const LARGE: usize = 4 * MAX_RECORD;

/// See the module.
pub(crate) struct SealedWire {
    socket: TcpWire,
    tx: Outgoing,
    rx: Incoming,
}

/// Sealed bytes. Those from `start` to `end` are not in the socket yet.
struct Outgoing {
    guard: Guard,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

/// Received bytes.
struct Incoming {
    guard: Guard,
    buffer: Box<[u8]>,
    /// The rest of the body of an opened record.
    plain: Range<usize>,
    /// Bytes of records that are not opened yet: from here to `end`.
    start: usize,
    end: usize,
    /// Why a record did not open, until the caller knows. Nothing after that record is used.
    failed: Option<io::Error>,
}

impl SealedWire {
    pub(super) fn new(socket: TcpWire, send: Guard, receive: Guard) -> Self {
        let buffer = || vec![0; SMALL].into_boxed_slice();
        Self {
            socket,
            tx: Outgoing { guard: send, buffer: buffer(), start: 0, end: 0 },
            rx: Incoming {
                guard: receive,
                buffer: buffer(),
                plain: 0..0,
                start: 0,
                end: 0,
                failed: None,
            },
        }
    }

    /// Writes sealed bytes to the socket, as many as fit.
    fn flush(&mut self) -> io::Result<()> {
        let Outgoing { buffer, start, end, .. } = &mut self.tx;
        if start < end {
            // SAFETY: the piece is this wire's own buffer.
            *start += unsafe { self.socket.send(&[Piece::of(&buffer[*start..*end])]) }?;
        }
        if start == end {
            (*start, *end) = (0, 0);
        }
        Ok(())
    }
}

impl Outgoing {
    /// Whether the next record of `left` bytes can be sealed. False if there are none.
    fn has_room_for(&self, left: usize) -> bool {
        let record = HEAD_LEN + left.min(MAX_BODY) + MAX_TRAILER;
        left > 0 && self.buffer.len() - self.end >= record
    }

    /// Seals the next bytes of `source` as a record.
    ///
    /// # Safety
    ///
    /// As [`Wire::send`].
    unsafe fn seal(&mut self, source: &mut Pieces<'_>) -> io::Result<usize> {
        let trailer = self.guard.trailer_len();
        let len = source.left().min(MAX_BODY);
        let (head, start) = self.guard.head(len);
        let record = &mut self.buffer[self.end..self.end + HEAD_LEN + len + trailer];
        let (head_bytes, rest) = record.split_at_mut(HEAD_LEN);
        let (body, trailer) = rest.split_at_mut(len);
        head_bytes.copy_from_slice(&start);
        let mut crc = head.check;
        let mut at = 0;
        while at < len {
            let piece = source.next(len - at);
            let into = body[at..at + piece.len as usize].as_mut_ptr();
            let from = piece.addr as *const u8;
            // SAFETY: the caller vouches for the piece. `into` has as many bytes by the slice.
            unsafe {
                if self.guard.is_checksum() {
                    crc = copy_with_crc32c(crc, into, from, piece.len as usize);
                } else {
                    copy(CopyKind::Plain, into, from, piece.len as usize);
                }
            }
            at += piece.len as usize;
        }
        self.guard.seal(&start, body, crc, trailer)?;
        self.end += HEAD_LEN + len + self.guard.trailer_len();
        Ok(len)
    }
}

impl Incoming {
    /// Opens the next record, if it is complete. Only then `plain` names its body.
    fn open(&mut self) -> io::Result<bool> {
        let Some(head) = self.guard.find(&self.buffer[self.start..self.end]).map_err(bad)? else {
            return Ok(false);
        };
        let len = HEAD_LEN + head.len + self.guard.trailer_len();
        self.guard.open(head, &mut self.buffer[self.start..self.start + len])?;
        self.plain = self.start + HEAD_LEN..self.start + HEAD_LEN + head.len;
        self.start += len;
        Ok(true)
    }

    /// Makes room for bytes of the next record. No opened record is left.
    fn make_room(&mut self) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 && self.buffer.len() - self.start < MAX_RECORD {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == self.buffer.len() {
            grow(&mut self.buffer);
        }
    }
}

impl Wire for SealedWire {
    unsafe fn send(&mut self, pieces: &[Piece]) -> io::Result<usize> {
        if self.has_unsent() {
            self.flush()?;
            if self.has_unsent() {
                return Ok(0);
            }
        }
        let mut source = Pieces::new(pieces);
        let mut sealed = 0;
        if source.left() > SMALL - HEAD_LEN - MAX_TRAILER {
            grow(&mut self.tx.buffer);
        }
        while self.tx.has_room_for(source.left()) {
            // SAFETY: the caller vouches for the pieces.
            sealed += unsafe { self.tx.seal(&mut source) }?;
        }
        self.flush()?;
        Ok(sealed)
    }

    unsafe fn receive(&mut self, pieces: &[Piece]) -> io::Result<Option<usize>> {
        let mut target = Pieces::new(pieces);
        if target.left() == 0 {
            return Ok(Some(0));
        }
        let mut moved = 0;
        loop {
            while !self.rx.plain.is_empty() && target.left() > 0 {
                let piece = target.next(self.rx.plain.len());
                let len = piece.len as usize;
                let from = self.rx.buffer[self.rx.plain.start..][..len].as_ptr();
                // SAFETY: `from` has `len` bytes by the slice. The caller vouches for the piece,
                // which is not the private buffer.
                unsafe { copy(CopyKind::Plain, piece.addr as *mut u8, from, len) };
                self.rx.plain.start += len;
                moved += len;
            }
            if target.left() == 0 {
                return Ok(Some(moved));
            }
            if let Some(error) = self.rx.failed.take() {
                return Err(error);
            }
            match self.rx.open() {
                Ok(true) => continue,
                Ok(false) => {}
                // The records before it were right.
                Err(error) if moved > 0 => self.rx.failed = Some(error),
                Err(error) => return Err(error),
            }
            if moved > 0 {
                return Ok(Some(moved));
            }
            self.rx.make_room();
            let room = Piece::of_mut(&mut self.rx.buffer[self.rx.end..]);
            // SAFETY: the piece is this wire's own buffer.
            match unsafe { self.socket.receive(&[room]) }? {
                None => return Ok(None),
                // The peer closed the connection, perhaps inside a record.
                Some(0) => return Ok(Some(0)),
                Some(len) => self.rx.end += len,
            }
        }
    }

    fn has_unsent(&self) -> bool {
        self.tx.start < self.tx.end
    }

    fn socket(&self) -> Option<RawFd> {
        self.socket.socket()
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

/// Makes a buffer large, unless it is. Keeps its bytes.
fn grow(buffer: &mut Box<[u8]>) {
    if buffer.len() < LARGE {
        let mut large = vec![0; LARGE].into_boxed_slice();
        large[..buffer.len()].copy_from_slice(buffer);
        *buffer = large;
    }
}

/// The rest of a list of pieces.
struct Pieces<'a> {
    rest: &'a [Piece],
    /// Bytes of the first piece that are used up.
    within: u64,
    left: usize,
}

impl<'a> Pieces<'a> {
    fn new(pieces: &'a [Piece]) -> Self {
        let left = pieces.iter().map(|piece| piece.len as usize).sum();
        Self { rest: pieces, within: 0, left }
    }

    fn left(&self) -> usize {
        self.left
    }

    /// Takes up to `most` bytes in one piece. Empty if there are none.
    fn next(&mut self, most: usize) -> Piece {
        while let Some(first) = self.rest.first() {
            if self.within < first.len {
                let len = (first.len - self.within).min(most as u64);
                let piece = Piece { addr: first.addr + self.within, len };
                self.within += len;
                self.left -= len as usize;
                return piece;
            }
            (self.rest, self.within) = (&self.rest[1..], 0);
        }
        Piece { addr: 0, len: 0 }
    }
}
