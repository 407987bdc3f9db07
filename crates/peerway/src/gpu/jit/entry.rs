//! A file of the cache: a header that identifies it, and the image.
//!
//! | offset | bytes | content |
//! |---|---|---|
//! | 0 | 8 | `PWKERNEL` |
//! | 8 | 4 | format; all numbers are little-endian |
//! | 12 | 4 | length of the compiler's name |
//! | 16 | 8 | length of the image |
//! | 24 | 32 | key |
//! | 56 | 32 | checksum of everything else |
//! | 88 | | the compiler's name, then the image |

use peerway_sys::nvrtc::Architecture;

use super::key::{Digest, FORMAT};

const MAGIC: &[u8; 8] = b"PWKERNEL";
const KEY: usize = 24;
const CHECKSUM: usize = 56;
const HEADER: usize = 88;

/// The content of a file.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct CacheEntry {
    pub(super) compiler: String,
    pub(super) image: Vec<u8>,
}

/// A file that is not a valid entry.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum Broken {
    #[error("it is not a compiled kernel")]
    Foreign,
    #[error("it has another format version")]
    Format,
    #[error("its length differs from the length in its header")]
    Length,
    #[error("its checksum is wrong")]
    Checksum,
    #[error("it is a different kernel than its name says")]
    Key,
}

impl CacheEntry {
    pub(super) fn encode(&self, program: &Digest, architecture: Architecture) -> Vec<u8> {
        let key = Digest::of_image(program, architecture, &self.compiler);
        let compiler = self.compiler.as_bytes();
        let mut bytes = Vec::with_capacity(HEADER + compiler.len() + self.image.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&FORMAT.to_le_bytes());
        bytes.extend_from_slice(&(compiler.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&(self.image.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&key.0);
        bytes.extend_from_slice(&[0; HEADER - CHECKSUM]);
        bytes.extend_from_slice(compiler);
        bytes.extend_from_slice(&self.image);
        let checksum = checksum(&bytes);
        bytes[CHECKSUM..HEADER].copy_from_slice(&checksum.0);
        bytes
    }

    pub(super) fn decode(
        bytes: &[u8],
        program: &Digest,
        architecture: Architecture,
    ) -> Result<Self, Broken> {
        if !bytes.starts_with(MAGIC) {
            return Err(Broken::Foreign);
        }
        if bytes.len() < HEADER {
            return Err(Broken::Length);
        }
        if bytes[8..12] != FORMAT.to_le_bytes() {
            return Err(Broken::Format);
        }
        let mut names = [0; 4];
        names.copy_from_slice(&bytes[12..16]);
        let mut images = [0; 8];
        images.copy_from_slice(&bytes[16..24]);
        let (names, images) = (u64::from(u32::from_le_bytes(names)), u64::from_le_bytes(images));
        let body = &bytes[HEADER..];
        if names.checked_add(images) != Some(body.len() as u64) {
            return Err(Broken::Length);
        }
        if bytes[CHECKSUM..HEADER] != checksum(bytes).0 {
            return Err(Broken::Checksum);
        }
        let (compiler, image) = body.split_at(names as usize);
        let compiler = String::from_utf8(compiler.to_vec()).map_err(|_| Broken::Foreign)?;
        if bytes[KEY..CHECKSUM] != Digest::of_image(program, architecture, &compiler).0 {
            return Err(Broken::Key);
        }
        Ok(Self { compiler, image: image.to_vec() })
    }
}

/// Hashes everything except the checksum. `bytes` has at least the length of a header.
fn checksum(bytes: &[u8]) -> Digest {
    Digest::of([&bytes[..CHECKSUM], &bytes[HEADER..]])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::jit::Source;

    #[test]
    fn no_changed_byte_goes_unnoticed() {
        let program = Digest::of_program(&Source::new("a.cu", "text"));
        let architecture = Architecture::code(90);
        let entry = CacheEntry { compiler: "one".to_owned(), image: (0..200).collect() };
        let bytes = entry.encode(&program, architecture);
        assert_eq!(CacheEntry::decode(&bytes, &program, architecture).as_ref(), Ok(&entry));
        for i in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[i] ^= 0x10;
            assert!(CacheEntry::decode(&changed, &program, architecture).is_err(), "byte {i}");
        }
        for len in 0..bytes.len() {
            assert!(
                CacheEntry::decode(&bytes[..len], &program, architecture).is_err(),
                "{len} bytes"
            );
        }
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(CacheEntry::decode(&longer, &program, architecture), Err(Broken::Length));
        let other = Digest::of_program(&Source::new("b.cu", "text"));
        assert_eq!(CacheEntry::decode(&bytes, &other, architecture), Err(Broken::Key));
        let other = Architecture::code(80);
        assert_eq!(CacheEntry::decode(&bytes, &program, other), Err(Broken::Key));
    }
}
