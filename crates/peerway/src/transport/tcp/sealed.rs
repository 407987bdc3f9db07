//! A TCP connection whose bytes travel in records.
//!
//! [`Wire::send`] copies bytes into records in a private buffer and seals them there, so memory
//! that changes meanwhile does no harm. [`Wire::receive`] reads records into a private buffer, and
//! copies bytes out of a record only after the whole record was found to be right. So no wrong byte
//! reaches a parser or the program's memory.
//!
//! A buffer grows once, when the first long record comes, so a lane with small frames takes little
//! memory and a connect little time.

use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};

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
/// Bytes of a send buffer that has grown: what one call sends at most. At 16 MiB, 512 KiB with 1
/// MiB for receiving has 92 % of the speed of `off`, 256 KiB with 256 KiB has 85 %. Fewer and
/// longer calls mean fewer wake-ups and window updates.
const SEND: usize = 8 * MAX_RECORD;
/// Bytes of a receive buffer that has grown: what one call receives at most.
const RECEIVE: usize = 16 * MAX_RECORD;
/// Bytes of a buffer that grows when the budget is used up.
const LEAST: usize = 2 * MAX_RECORD;
/// Bytes of large buffers that the process may still have. Many lanes of strangers take no more.
static BUDGET: AtomicUsize = AtomicUsize::new(256 << 20);

/// See the module.
pub(crate) struct SealedWire {
    socket: TcpWire,
    tx: Outgoing,
    rx: Incoming,
}

/// Sealed bytes. Those from `start` to `end` are not in the socket yet.
struct Outgoing {
    guard: Guard,
    buffer: Buffer,
    start: usize,
    end: usize,
}

/// Received bytes.
struct Incoming {
    guard: Guard,
    buffer: Buffer,
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
        Self {
            socket,
            tx: Outgoing { guard: send, buffer: Buffer::new(), start: 0, end: 0 },
            rx: Incoming {
                guard: receive,
                buffer: Buffer::new(),
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
            self.buffer.grow(RECEIVE);
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
            self.tx.buffer.grow(SEND);
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

/// A private buffer.
struct Buffer {
    bytes: Box<[u8]>,
    /// Bytes of the budget that it has.
    charged: usize,
}

impl Buffer {
    fn new() -> Self {
        Self { bytes: vec![0; SMALL].into_boxed_slice(), charged: 0 }
    }

    /// Grows to `large` bytes, or to fewer if the budget is used up. A buffer grows once and keeps
    /// its bytes.
    fn grow(&mut self, large: usize) {
        if self.bytes.len() > SMALL {
            return;
        }
        let take = |left: usize| left.checked_sub(large);
        let has_room = BUDGET.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok();
        let len = if has_room { large } else { LEAST };
        self.charged = if has_room { large } else { 0 };
        let mut bytes = vec![0; len].into_boxed_slice();
        bytes[..self.bytes.len()].copy_from_slice(&self.bytes);
        self.bytes = bytes;
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        BUDGET.fetch_add(self.charged, Ordering::Relaxed);
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

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use peerway_core::config::DataProtection;
    use peerway_core::record::RecordError;

    use super::*;
    use crate::transport::tcp::{LaneSecrets, wire};

    const MODES: [DataProtection; 2] = [DataProtection::Integrity, DataProtection::Encrypt];
    /// The secrets of the two directions of a lane, as its first end has them.
    const NEAR: LaneSecrets = LaneSecrets { send: [1; 32], receive: [2; 32] };
    const FAR: LaneSecrets = LaneSecrets { send: [2; 32], receive: [1; 32] };

    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    /// Sends each message in its own call, and returns the records.
    fn sealed(mode: DataProtection, messages: &[&[u8]]) -> Vec<Vec<u8>> {
        let (near, mut far) = connection();
        let mut wire = wire(near, mode, &NEAR).unwrap();
        for message in messages {
            send_all(&mut *wire, message);
        }
        drop(wire);
        let mut bytes = Vec::new();
        far.read_to_end(&mut bytes).unwrap();
        let mut records = Vec::new();
        while let Some(head) = bytes.first_chunk::<4>() {
            let len = u32::from_le_bytes(*head) as usize + HEAD_LEN;
            let trailer = peerway_core::record::trailer_len(mode);
            let rest = bytes.split_off(len + trailer);
            records.push(std::mem::replace(&mut bytes, rest));
        }
        records
    }

    fn send_all(wire: &mut dyn Wire, mut bytes: &[u8]) {
        while !bytes.is_empty() || wire.has_unsent() {
            // SAFETY: the piece is a slice that lives through the call.
            let sent = unsafe { wire.send(&[Piece::of(bytes)]) }.unwrap();
            bytes = &bytes[sent..];
        }
    }

    /// What the other end receives of these bytes until the connection ends or fails.
    fn opened(
        mode: DataProtection,
        secrets: &LaneSecrets,
        bytes: &[u8],
    ) -> (Vec<u8>, Option<RecordError>) {
        let (mut near, far) = connection();
        let mut wire = wire(far, mode, secrets).unwrap();
        let bytes = bytes.to_vec();
        let sender = std::thread::spawn(move || near.write_all(&bytes));
        let (mut received, mut buffer) = (Vec::new(), vec![0; 5000]);
        let error = loop {
            // SAFETY: the piece is a buffer that nothing else refers to during the call.
            match unsafe { wire.receive(&[Piece::of_mut(&mut buffer)]) } {
                Ok(None) => std::thread::yield_now(),
                Ok(Some(0)) => break None,
                Ok(Some(len)) => received.extend_from_slice(&buffer[..len]),
                Err(error) => {
                    let inner = error.get_ref().and_then(|error| error.downcast_ref());
                    break Some(*inner.expect("an error of a record"));
                }
            }
        };
        drop(wire);
        let _ = sender.join();
        (received, error)
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len as u32).map(|at| (at.wrapping_mul(0x9E37_79B9) >> 24) as u8).collect()
    }

    #[test]
    fn bytes_arrive_as_they_were_sent_whatever_their_number() {
        for mode in MODES {
            for len in [1, 64, 320, 8 << 10, MAX_BODY, MAX_BODY + 1, 3 * RECEIVE + 77] {
                let message = pattern(len);
                let bytes = sealed(mode, &[&message]).concat();
                assert_eq!(opened(mode, &FAR, &bytes), (message, None), "{mode} {len}");
            }
        }
    }

    #[test]
    fn a_buffer_takes_from_the_budget_once_and_gives_it_back() {
        let mut large = Buffer::new();
        large[..3].copy_from_slice(b"abc");
        large.grow(RECEIVE);
        large.grow(RECEIVE);
        assert_eq!((large.len(), large.charged, &large[..3]), (RECEIVE, RECEIVE, &b"abc"[..]));
        let mut beyond = Buffer::new();
        beyond.grow(usize::MAX);
        assert_eq!((beyond.len(), beyond.charged), (LEAST, 0));
    }

    #[test]
    fn encrypted_bytes_do_not_show_what_was_sent() {
        let message = [b'A'; 4000];
        let [first, second]: [Vec<u8>; 2] =
            sealed(DataProtection::Encrypt, &[&message, &message]).try_into().unwrap();
        assert!(!first.windows(4).any(|window| window == b"AAAA"));
        assert_ne!(first[HEAD_LEN..], second[HEAD_LEN..], "a nonce was used twice");
        let records = sealed(DataProtection::Integrity, &[&message]);
        assert_eq!(records[0][HEAD_LEN..HEAD_LEN + 4000], message);
    }

    /// The frame of a write: header, table and payload, between two others.
    #[test]
    fn no_byte_of_a_changed_record_or_after_it_is_received() {
        let messages = [&pattern(64)[..], &pattern(64 + 24 + 3000), &pattern(100)];
        for mode in MODES {
            let records = sealed(mode, &messages);
            let (start, end) = (records[0].len(), records[0].len() + records[1].len());
            let tail = end - peerway_core::record::trailer_len(mode);
            let header = start + HEAD_LEN;
            let bits = (8 * start..8 * header)
                .chain([8 * header, 8 * header + 77, 8 * (header + 64), 8 * (header + 500) + 3])
                .chain(8 * tail..8 * end);
            for bit in bits {
                let mut bytes = records.concat();
                bytes[bit / 8] ^= 1 << (bit % 8);
                let (received, error) = opened(mode, &FAR, &bytes);
                assert_eq!(received, messages[0], "{mode}, bit {bit}");
                let expected = match bit / 8 < header {
                    true => RecordError::Head { number: 1 },
                    false => RecordError::Body { number: 1 },
                };
                assert_eq!(error, Some(expected), "{mode}, bit {bit}");
            }
        }
    }

    #[test]
    fn a_cut_record_is_not_received() {
        let messages = [&pattern(64)[..], &pattern(3000)];
        for mode in MODES {
            let records = sealed(mode, &messages);
            let (first, all) = (records[0].len(), records.concat());
            for cut in [1, 4, HEAD_LEN, HEAD_LEN + 1, 2000, records[1].len() - 1] {
                let received = opened(mode, &FAR, &all[..first + cut]);
                assert_eq!(received, (messages[0].to_vec(), None), "{mode} {cut}");
            }
        }
    }

    #[test]
    fn repeated_swapped_and_missing_records_are_refused() {
        let messages = [&pattern(64)[..], &pattern(80), &pattern(96)];
        for mode in MODES {
            let [a, b, c]: [Vec<u8>; 3] = sealed(mode, &messages).try_into().unwrap();
            for order in [vec![&a, &a], vec![&a, &c, &b], vec![&a, &b, &a]] {
                let good = order.windows(2).take_while(|pair| pair == &[&a, &b]).count() + 1;
                let bytes: Vec<u8> = order.into_iter().flatten().copied().collect();
                let (received, error) = opened(mode, &FAR, &bytes);
                assert_eq!(received, messages[..good].concat(), "{mode}");
                assert_eq!(error, Some(RecordError::Head { number: good as u64 }), "{mode}");
            }
        }
    }

    #[test]
    fn records_of_another_lane_direction_or_session_are_refused() {
        for mode in MODES {
            let record = sealed(mode, &[&pattern(500)]).concat();
            let other_lane = LaneSecrets { send: [2; 32], receive: [3; 32] };
            // The end that sealed the record gets it back.
            for secrets in [&other_lane, &NEAR] {
                let (received, error) = opened(mode, secrets, &record);
                assert_eq!((received.len(), error), (0, Some(RecordError::Head { number: 0 })));
            }
        }
    }

    #[test]
    fn a_tag_counts_even_if_every_checksum_is_right() {
        // The seed of the checksums is no secret from this attacker, the key is.
        let mut bytes = sealed(DataProtection::Encrypt, &[&pattern(500)]).concat();
        for at in [HEAD_LEN, HEAD_LEN + 499, HEAD_LEN + 500, HEAD_LEN + 515] {
            bytes[at] ^= 0x80;
            let (received, error) = opened(DataProtection::Encrypt, &FAR, &bytes);
            assert_eq!((received.len(), error), (0, Some(RecordError::Body { number: 0 })));
            bytes[at] ^= 0x80;
        }
    }

    #[test]
    fn a_long_length_is_refused_before_memory_is_used_for_it() {
        for mode in MODES {
            for len in [MAX_BODY as u32 + 1, u32::MAX] {
                let mut bytes = sealed(mode, &[&pattern(64)]).concat();
                bytes[..4].copy_from_slice(&len.to_le_bytes());
                let (received, error) = opened(mode, &FAR, &bytes);
                assert_eq!((received.len(), error), (0, Some(RecordError::Head { number: 0 })));
            }
        }
    }

    #[test]
    fn both_ends_change_their_key_at_the_same_record() {
        let mut near = Guard::encrypt(&[1; 32]).unwrap();
        let mut far = Guard::encrypt(&[1; 32]).unwrap();
        let mut old = Guard::encrypt(&[1; 32]).unwrap();
        for guard in [&mut near, &mut far] {
            guard.skip((1 << 20) - 1);
        }
        for _ in 0..2 {
            let (head, start) = near.head(10);
            let mut record = [&start[..], &[7; 10], &[0; 16]].concat();
            let (body, trailer) = record[HEAD_LEN..].split_at_mut(10);
            near.seal(&start, body, 0, trailer).unwrap();
            far.open(head, &mut record).unwrap();
            assert_eq!(record[HEAD_LEN..HEAD_LEN + 10], [7; 10]);
        }
        // A guard that keeps its first key cannot open the record after the change.
        old.skip_with_one_key(1 << 20);
        let (head, start) = near.head(10);
        let mut record = [&start[..], &[7; 10], &[0; 16]].concat();
        let (body, trailer) = record[HEAD_LEN..].split_at_mut(10);
        old.skip_with_one_key(1);
        near.seal(&start, body, 0, trailer).unwrap();
        assert!(old.open(head, &mut record).is_err());
    }

    #[test]
    fn a_full_socket_keeps_sealed_bytes_and_sends_them_later() {
        for mode in MODES {
            let (near, far) = connection();
            let (mut near, mut far) =
                (wire(near, mode, &NEAR).unwrap(), wire(far, mode, &FAR).unwrap());
            let message = pattern(64 << 20);
            let (mut sent, mut received, mut was_full) = (0, 0, false);
            let mut buffer = vec![0; 1 << 20];
            while received < message.len() {
                // SAFETY: the piece is a slice that lives through the call.
                let n = unsafe { near.send(&[Piece::of(&message[sent..])]) }.unwrap();
                sent += n;
                if n > 0 && !was_full {
                    continue;
                }
                was_full |= near.has_unsent();
                // SAFETY: the piece is a buffer that nothing else refers to during the call.
                if let Some(n) = unsafe { far.receive(&[Piece::of_mut(&mut buffer)]) }.unwrap() {
                    assert!(buffer[..n] == message[received..received + n]);
                    received += n;
                }
            }
            assert!(was_full, "the socket took everything at once");
            assert!(!near.has_unsent());
        }
    }
}
