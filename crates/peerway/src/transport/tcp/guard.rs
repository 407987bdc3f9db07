//! Seals and opens records of one lane in one direction.
//!
//! The secret of the direction is exported from TLS for this session, lane and side. HKDF derives
//! from it the seed of the checksums, or the key and the mask of nonces. The nonce of a record is
//! its number, masked; a number is used once. After [`RECORDS_PER_KEY`] records both ends derive
//! the next secret, so that no key seals so many bytes that their number weakens it.

use std::io;

use peerway_core::config::DataProtection;
use peerway_core::record::{HEAD_LEN, Head, MAX_TRAILER, Position, RecordError, trailer_len};
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use ring::error::Unspecified;
use ring::hkdf;

use crate::os::crc::crc32c;

/// Records that one key seals. With the longest records these are 64 GiB, 2^32 blocks of AES: an
/// attacker gains less than 2^-60 over guessing (RFC 8446, section 5.5, allows 2^34.5).
const RECORDS_PER_KEY: u64 = 1 << 20;

/// See the module.
pub(super) struct Guard {
    position: Position,
    cipher: Option<Cipher>,
}

/// The key of the current records.
struct Cipher {
    secret: [u8; 32],
    key: LessSafeKey,
    mask: [u8; NONCE_LEN],
}

impl Guard {
    /// Checks records by their CRC32C.
    pub(super) fn integrity(secret: &[u8; 32]) -> Self {
        Self { position: Position::new(seed(secret)), cipher: None }
    }

    /// Encrypts records.
    pub(super) fn encrypt(secret: &[u8; 32]) -> io::Result<Self> {
        let cipher = Cipher::new(*secret).map_err(|Unspecified| no_key())?;
        Ok(Self { position: Position::new(seed(secret)), cipher: Some(cipher) })
    }

    /// The bytes after the body.
    pub(super) fn trailer_len(&self) -> usize {
        match self.cipher {
            None => trailer_len(DataProtection::Integrity),
            Some(_) => trailer_len(DataProtection::Encrypt),
        }
    }

    /// The head of the next record.
    pub(super) fn head(&self, len: usize) -> (Head, [u8; HEAD_LEN]) {
        self.position.head(len)
    }

    /// Whether the caller computes the checksum of a body while it copies the body.
    pub(super) fn is_checksum(&self) -> bool {
        self.cipher.is_none()
    }

    /// Ends the next record: writes its trailer, and encrypts its body if that is the mode. `crc`
    /// is the checksum of the body, continued from the head's.
    pub(super) fn seal(
        &mut self,
        head: &[u8; HEAD_LEN],
        body: &mut [u8],
        crc: u32,
        trailer: &mut [u8],
    ) -> io::Result<()> {
        match &mut self.cipher {
            None => trailer.copy_from_slice(&crc.to_le_bytes()),
            Some(cipher) => {
                let nonce = cipher.nonce(self.position.number());
                let sealed = cipher.key.seal_in_place_separate_tag(nonce, Aad::from(*head), body);
                trailer.copy_from_slice(sealed.map_err(|Unspecified| no_key())?.as_ref());
            }
        }
        self.advance()
    }

    /// Finds the next record at the beginning of `bytes`. `None` if it is not complete.
    pub(super) fn find(&self, bytes: &[u8]) -> Result<Option<Head>, RecordError> {
        self.position.find(bytes, self.trailer_len())
    }

    /// Checks the record of this head, and decrypts its body in place. The body must not be used
    /// unless this succeeds. `record` begins with the head and ends with the trailer.
    pub(super) fn open(&mut self, head: Head, record: &mut [u8]) -> io::Result<()> {
        let (start, rest) = record.split_at_mut(HEAD_LEN);
        let (body, trailer) = rest.split_at_mut(head.len);
        let wrong = RecordError::Body { number: self.position.number() };
        match &self.cipher {
            None => {
                let trailer = trailer.first_chunk().ok_or_else(|| bad(wrong))?;
                self.position.check_body(crc32c(head.check, body), *trailer).map_err(bad)?;
            }
            Some(cipher) => {
                let nonce = cipher.nonce(self.position.number());
                let tag: [u8; MAX_TRAILER] = (&*trailer).try_into().map_err(|_| bad(wrong))?;
                let start: [u8; HEAD_LEN] = (&*start).try_into().map_err(|_| bad(wrong))?;
                let (key, tag) = (&cipher.key, Tag::from(tag));
                let opened =
                    key.open_in_place_separate_tag(nonce, Aad::from(start), tag, body, 0..);
                opened.map_err(|Unspecified| bad(wrong))?;
            }
        }
        self.advance()
    }

    fn advance(&mut self) -> io::Result<()> {
        self.position.advance();
        if let Some(cipher) = &mut self.cipher
            && self.position.number().is_multiple_of(RECORDS_PER_KEY)
        {
            *cipher = cipher.next().map_err(|Unspecified| no_key())?;
        }
        Ok(())
    }

    /// Goes on as if `records` more had been sealed or opened.
    #[cfg(test)]
    pub(super) fn skip(&mut self, records: u64) {
        for _ in 0..records {
            self.advance().unwrap();
        }
    }

    /// The same without a change of the key.
    #[cfg(test)]
    pub(super) fn skip_with_one_key(&mut self, records: u64) {
        for _ in 0..records {
            self.position.advance();
        }
    }
}

impl Cipher {
    fn new(secret: [u8; 32]) -> Result<Self, Unspecified> {
        let key: [u8; 16] = derive(&secret, b"peerway data key")?;
        let mask = derive(&secret, b"peerway data nonce")?;
        Ok(Self { secret, key: LessSafeKey::new(UnboundKey::new(&AES_128_GCM, &key)?), mask })
    }

    /// The cipher of the records after those of this key. Its secret does not tell this one.
    fn next(&self) -> Result<Self, Unspecified> {
        Self::new(derive(&self.secret, b"peerway data next secret")?)
    }

    fn nonce(&self, number: u64) -> Nonce {
        let mut nonce = self.mask;
        for (byte, number) in nonce[NONCE_LEN - 8..].iter_mut().zip(number.to_be_bytes()) {
            *byte ^= number;
        }
        Nonce::assume_unique_for_key(nonce)
    }
}

/// The seed of the checksums. Records of another lane or direction have another one.
fn seed(secret: &[u8; 32]) -> u32 {
    // Four bytes are always within what HKDF can derive.
    u32::from_le_bytes(derive(secret, b"peerway data seed").unwrap_or_default())
}

/// Derives bytes from a secret by HKDF with SHA-256.
fn derive<const N: usize>(secret: &[u8; 32], purpose: &[u8]) -> Result<[u8; N], Unspecified> {
    struct Len(usize);

    impl hkdf::KeyType for Len {
        fn len(&self) -> usize {
            self.0
        }
    }

    let mut bytes = [0; N];
    let secret = hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, secret);
    secret.expand(&[purpose], Len(N))?.fill(&mut bytes)?;
    Ok(bytes)
}

/// The error of a record that does not open. `progress::ending` finds the [`RecordError`] in it.
pub(super) fn bad(error: RecordError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

fn no_key() -> io::Error {
    io::Error::other("the cryptographic library refuses a key or a record")
}
