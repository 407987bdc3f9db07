//! Sizes in the notation of the command line: `256`, `4K`, `100M`, with K = 1024.

use peerway_core::config::parse_bytes;

/// Parses a size. Zero is refused.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    parse_bytes(text)
        .filter(|size| *size > 0)
        .ok_or_else(|| "expected a size such as 256, 4K or 100M".to_owned())
}

/// A size in the largest unit that divides it, so that [`parse`] reads it back.
pub(crate) fn show(size: u64) -> String {
    for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "K")] {
        if size > 0 && size.trailing_zeros() >= shift {
            return format!("{}{unit}", size >> shift);
        }
    }
    size.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_reads_back() {
        for size in [1, 255, 256, 1024, 1025, 4096, 10 << 20, 100 << 20, 3 << 30, 5 << 40] {
            assert_eq!(parse(&show(size)), Ok(size));
        }
        assert_eq!(show(100 << 20), "100M");
        assert_eq!(show(1536), "1536");
        assert_eq!(show(0), "0");
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "0", "0K", "-1", "K", "1.5M", "4Q", "99999999999T"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
