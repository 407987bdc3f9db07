//! Versions.

use std::ffi::{CStr, c_char};

/// The version of this header.
pub const PEERWAY_VERSION_MAJOR: u32 = 0;
/// The version of this header.
pub const PEERWAY_VERSION_MINOR: u32 = 1;
/// The version of this header.
pub const PEERWAY_VERSION_PATCH: u32 = 0;

const TEXT: &CStr = {
    const BYTES: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    match CStr::from_bytes_with_nul(BYTES.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("the version must not contain a zero byte"),
    }
};

/// The version of the library: major << 16 | minor << 8 | patch.
#[unsafe(no_mangle)]
pub extern "C" fn peerway_version() -> u32 {
    PEERWAY_VERSION_MAJOR << 16 | PEERWAY_VERSION_MINOR << 8 | PEERWAY_VERSION_PATCH
}

/// The version of the library as text.
#[unsafe(no_mangle)]
pub extern "C" fn peerway_version_text() -> *const c_char {
    TEXT.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_package() {
        let numbers = [PEERWAY_VERSION_MAJOR, PEERWAY_VERSION_MINOR, PEERWAY_VERSION_PATCH];
        assert_eq!(numbers.map(|number| number.to_string()).join("."), env!("CARGO_PKG_VERSION"));
        assert_eq!(TEXT.to_str(), Ok(env!("CARGO_PKG_VERSION")));
    }
}
