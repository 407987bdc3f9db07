//! Identifies an image by a strong hash over everything that determines its content.
//!
//! There are two hashes, because of machines without a compiler. The *program* hash (texts,
//! headers, options) can be computed anywhere, and is in the file's name, next to the architecture.
//! The *key* also covers the architecture and the compiler, and is in the file.
//!
//! With a compiler, there is one file to look up. Without one, the cache searches the files of the
//! program, and each names the compiler that made it. Any of them is a correct image of the
//! program, though perhaps not the one that a newer compiler would make. No index has to be kept
//! consistent with the files.

use std::fmt;

use peerway_sys::nvrtc::Architecture;
use sha2::{Digest as _, Sha256};

use super::Source;

/// Increased when the hashed data or the file format changes.
pub(super) const FORMAT: u32 = 1;

/// A SHA-256 hash.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Digest(pub(super) [u8; 32]);

impl Digest {
    /// Hashes several parts. The boundaries between the parts are included.
    pub(super) fn of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hash = Sha256::new();
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Self(hash.finalize().into())
    }

    /// The hash of a program.
    pub(super) fn of_program(source: &Source) -> Self {
        let format = FORMAT.to_le_bytes();
        let counts =
            [source.headers.len() as u64, source.options.len() as u64].map(u64::to_le_bytes);
        let headers = source.headers.iter().flat_map(|(name, text)| [name, text]);
        let texts = [&source.name, &source.text].into_iter().chain(headers).chain(&source.options);
        let start = [&format[..], &counts[0], &counts[1]];
        Self::of(start.into_iter().chain(texts.map(|text| text.as_bytes())))
    }

    /// The key of an image: the program, the architecture and the compiler.
    pub(super) fn of_image(program: &Self, architecture: Architecture, compiler: &str) -> Self {
        let architecture = architecture.to_string();
        Self::of([&program.0[..], architecture.as_bytes(), compiler.as_bytes()])
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The name of a file: program, architecture, and enough of the compiler's hash to distinguish
/// compilers.
pub(super) fn file_name(program: &Digest, architecture: Architecture, compiler: &str) -> String {
    let compiler = Digest::of([compiler.as_bytes()]).to_string();
    format!("{program}-{architecture}-{}", &compiler[..COMPILER])
}

/// Number of hexadecimal digits of the compiler's hash in a file's name.
const COMPILER: usize = 16;

/// The program's hash in hexadecimal and the architecture in a file's name. `None` if it is not the
/// name of an image.
pub(super) fn parse_file_name(name: &str) -> Option<(&str, Architecture)> {
    let is_hex = |text: &str, len| {
        text.len() == len && text.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
    };
    let (program, rest) = name.split_once('-')?;
    let (architecture, compiler) = rest.split_once('-')?;
    let ours = is_hex(program, 2 * size_of::<Digest>()) && is_hex(compiler, COMPILER);
    ours.then_some((program, architecture.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_counts() {
        let plain = Source::new("a.cu", "text").header("b.h", "c").option("-d");
        let others = [
            Source::new("b.cu", "text").header("b.h", "c").option("-d"),
            Source::new("a.cu", "test").header("b.h", "c").option("-d"),
            Source::new("a.cu", "text").header("b.hc", "").option("-d"),
            Source::new("a.cu", "text").header("b.h", "c").header("d.h", "").option("-d"),
            Source::new("a.cu", "text").header("b.h", "c"),
            Source::new("a.cu", "text").option("b.h").option("c").option("-d"),
        ];
        let program = Digest::of_program(&plain);
        assert_eq!(program, Digest::of_program(&plain.clone()));
        for other in others {
            assert_ne!(Digest::of_program(&other), program, "{other:?}");
        }
        let image = |architecture: &str, compiler| {
            Digest::of_image(&program, architecture.parse().unwrap(), compiler)
        };
        assert_ne!(image("sm_90", "1"), image("sm_90a", "1"));
        assert_ne!(image("sm_90", "1"), image("sm_90", "2"));
    }

    #[test]
    fn names_of_files_are_ours_or_not() {
        let program = Digest::of_program(&Source::new("a.cu", "text"));
        let name = file_name(&program, Architecture::code(90), "a compiler");
        let (digits, architecture) = parse_file_name(&name).unwrap();
        assert_eq!((digits, architecture), (program.to_string().as_str(), Architecture::code(90)));
        let other = file_name(&program, Architecture::code(90), "another");
        assert_ne!(name, other);
        for name in ["", "-", "notes.txt", &name[1..], &format!("{name}0"), ".new-0123"] {
            assert_eq!(parse_file_name(name), None, "{name}");
        }
    }

    #[test]
    fn the_hash_is_sha_256() {
        // The hashed data is a length of zero, that is eight zero bytes.
        let expected = "af5570f5a1810b7af78caf4bc70a660f0df51e42baf91d4de5b2328de0e83dfc";
        assert_eq!(Digest::of([&[][..]]).to_string(), expected);
    }
}
