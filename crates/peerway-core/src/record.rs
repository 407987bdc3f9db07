//! Records: how a TCP connection protects the frames that it carries (`PEERWAY_DATA`).
//!
//! The bytes of a lane in one direction are cut into records, without regard to frames:
//!
//! ```text
//!   0 length u32 | 4 check u32 | 8 body of `length` bytes | trailer
//! ```
//!
//! `check` is a CRC32C of the length, the number of the record and a seed that both ends derive
//! from the session, the lane and the direction. The number is not sent: both ends count. So a
//! receiver knows that a length is right before it uses it, and a record that was repeated, left
//! out, swapped or taken from another lane fails.
//!
//! The trailer of `integrity` is the CRC32C of the body, continued from `check`. The trailer of
//! `encrypt` is the tag of AES-128-GCM, with the head as additional data.
//!
//! `check` is no protection against a person who changes bytes; the tag is. Such a person can
//! announce a wrong length within [`MAX_BODY`] and so delay a lane, as one who drops packets can.

use crate::config::DataProtection;

/// Bytes before the body.
pub const HEAD_LEN: usize = 8;
/// The longest body. A record and its copy stay in the second-level cache.
pub const MAX_BODY: usize = 64 << 10;
/// The longest trailer.
pub const MAX_TRAILER: usize = 16;

/// The bytes after the body.
pub const fn trailer_len(mode: DataProtection) -> usize {
    match mode {
        DataProtection::Off => 0,
        DataProtection::Integrity => 4,
        DataProtection::Encrypt => MAX_TRAILER,
    }
}

/// Why a record is not what the peer sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The head was changed, or the record does not follow the last one on this lane.
    #[error("the head of record {number} does not match its checksum")]
    Head {
        /// The number of the record.
        number: u64,
    },
    /// The length is 0 or more than [`MAX_BODY`].
    #[error("record {number} has an invalid length of {len} bytes")]
    Length {
        /// The number of the record.
        number: u64,
        /// The announced length.
        len: u32,
    },
    /// The body or the trailer was changed.
    #[error("the body of record {number} does not match its checksum or tag")]
    Body {
        /// The number of the record.
        number: u64,
    },
}

/// The position in the records of one lane in one direction.
#[derive(Clone, Debug)]
pub struct Position {
    seed: u32,
    number: u64,
}

/// The head of a record that passed its check.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Head {
    /// The length of the body, from 1 to [`MAX_BODY`].
    pub len: usize,
    /// The head's own checksum, from which that of the body continues.
    pub check: u32,
}

impl Position {
    /// The first record. Both ends have the same seed.
    pub fn new(seed: u32) -> Self {
        Self { seed, number: 0 }
    }

    /// The number of the next record.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Called when a record has been sealed, or opened and found to be right.
    pub fn advance(&mut self) {
        self.number += 1;
    }

    /// The head of the next record, for a body of `len` bytes.
    pub fn head(&self, len: usize) -> (Head, [u8; HEAD_LEN]) {
        debug_assert!((1..=MAX_BODY).contains(&len));
        let check = self.check(len as u32);
        let mut bytes = [0; HEAD_LEN];
        bytes[..4].copy_from_slice(&(len as u32).to_le_bytes());
        bytes[4..].copy_from_slice(&check.to_le_bytes());
        (Head { len, check }, bytes)
    }

    /// Checks the head of the next record.
    ///
    /// # Errors
    ///
    /// The head does not match its checksum, or announces an invalid length.
    pub fn open_head(&self, bytes: &[u8; HEAD_LEN]) -> Result<Head, RecordError> {
        let [a, b, c, d, check @ ..] = *bytes;
        let (len, check) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes(check));
        let number = self.number;
        if check != self.check(len) {
            return Err(RecordError::Head { number });
        }
        if len == 0 || len as usize > MAX_BODY {
            return Err(RecordError::Length { number, len });
        }
        Ok(Head { len: len as usize, check })
    }

    /// Finds the next record at the beginning of `bytes`. `None` if it is not complete.
    ///
    /// # Errors
    ///
    /// As [`Position::open_head`].
    pub fn find(&self, bytes: &[u8], trailer: usize) -> Result<Option<Head>, RecordError> {
        let Some(head) = bytes.first_chunk() else { return Ok(None) };
        let head = self.open_head(head)?;
        Ok((bytes.len() >= HEAD_LEN + head.len + trailer).then_some(head))
    }

    /// Checks the body of the next record. `crc` is its CRC32C, continued from the head's.
    ///
    /// # Errors
    ///
    /// The trailer is another one.
    pub fn check_body(&self, crc: u32, trailer: [u8; 4]) -> Result<(), RecordError> {
        if crc == u32::from_le_bytes(trailer) {
            return Ok(());
        }
        Err(RecordError::Body { number: self.number })
    }

    fn check(&self, len: u32) -> u32 {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..].copy_from_slice(&len.to_le_bytes());
        crc32c::crc32c_append(self.seed, &bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record with a CRC32C, as `integrity` sends it.
    fn seal(position: &mut Position, body: &[u8]) -> Vec<u8> {
        let (head, bytes) = position.head(body.len());
        position.advance();
        let trailer = crc32c::crc32c_append(head.check, body).to_le_bytes();
        [&bytes[..], body, &trailer].concat()
    }

    /// Opens the record at the beginning of `bytes`. `None` if it is not complete.
    fn open(position: &mut Position, bytes: &[u8]) -> Result<Option<Vec<u8>>, RecordError> {
        let Some(head) = position.find(bytes, 4)? else { return Ok(None) };
        let (body, trailer) = bytes[HEAD_LEN..].split_at(head.len);
        let crc = crc32c::crc32c_append(head.check, body);
        position.check_body(crc, *trailer.first_chunk().unwrap())?;
        position.advance();
        Ok(Some(body.to_vec()))
    }

    #[test]
    fn what_is_sealed_opens_and_nothing_is_used_before_it_is_whole() {
        let (mut near, mut far) = (Position::new(7), Position::new(7));
        for len in [1, 2, 63, 64, 4096, MAX_BODY] {
            let body: Vec<u8> = (0..len).map(|at| at as u8).collect();
            let record = seal(&mut near, &body);
            for cut in [0, 1, HEAD_LEN - 1, HEAD_LEN, record.len() / 2, record.len() - 1] {
                let cut = cut.min(record.len() - 1);
                assert_eq!(open(&mut far.clone(), &record[..cut]), Ok(None));
            }
            assert_eq!(open(&mut far, &record), Ok(Some(body)));
        }
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let mut near = Position::new(7);
        let record = seal(&mut near, &[0xA5; 100]);
        for bit in 0..record.len() * 8 {
            let mut changed = record.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            let error = open(&mut Position::new(7), &changed).unwrap_err();
            let in_head = bit < HEAD_LEN * 8;
            let expected = match in_head {
                true => RecordError::Head { number: 0 },
                false => RecordError::Body { number: 0 },
            };
            assert_eq!(error, expected, "bit {bit}");
        }
    }

    #[test]
    fn a_record_is_good_in_one_place_only() {
        let mut near = Position::new(7);
        let records = [seal(&mut near, b"first"), seal(&mut near, b"second")];
        let mut far = Position::new(7);
        assert!(matches!(open(&mut far, &records[1]), Err(RecordError::Head { number: 0 })));
        open(&mut far, &records[0]).unwrap();
        assert!(matches!(open(&mut far, &records[0]), Err(RecordError::Head { number: 1 })));
        open(&mut far, &records[1]).unwrap();
        let mut other_lane = Position::new(8);
        assert!(matches!(open(&mut other_lane, &records[0]), Err(RecordError::Head { .. })));
    }

    #[test]
    fn lengths_are_capped_even_if_the_checksum_is_right() {
        let position = Position::new(7);
        for len in [0, MAX_BODY as u32 + 1, u32::MAX] {
            let bytes = [len.to_le_bytes(), position.check(len).to_le_bytes()].concat();
            let opened = position.open_head(bytes.first_chunk().unwrap());
            assert_eq!(opened, Err(RecordError::Length { number: 0, len }));
        }
    }
}
