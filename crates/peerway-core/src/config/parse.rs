//! Parsers for durations, byte counts and flags, and the edit distance between two names.
//!
//! Every function accepts any string and returns `None` if it cannot parse it. The caller reports
//! the expected format. Only `distance` allocates in proportion to its input: one row of numbers.

use std::ops::RangeInclusive;
use std::time::Duration;

/// Parses a whole number and its unit: `ns`, `us` (or `µs`), `ms`, `s`, `m` or `h`. A lone `0`
/// needs no unit.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use peerway_core::config::parse_duration;
///
/// assert_eq!(parse_duration("500ms"), Some(Duration::from_millis(500)));
/// assert_eq!(parse_duration("50us"), Some(Duration::from_micros(50)));
/// assert_eq!(parse_duration("2"), None);
/// ```
pub fn parse_duration(text: &str) -> Option<Duration> {
    let (number, unit) = number_and_unit(text)?;
    let nanos_per_unit: u64 = match unit {
        "" if number == 0 => 1,
        "ns" => 1,
        "us" | "µs" | "μs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" | "min" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return None,
    };
    number.checked_mul(nanos_per_unit).map(Duration::from_nanos)
}

/// Parses a byte count: a whole number, plain or followed by `K`, `M`, `G` or `T` in powers of
/// 1024. `KiB` and `KB` mean the same, as in most tools that size buffers.
///
/// # Examples
///
/// ```
/// use peerway_core::config::parse_bytes;
///
/// assert_eq!(parse_bytes("4096"), Some(4096));
/// assert_eq!(parse_bytes("64MiB"), Some(64 << 20));
/// assert_eq!(parse_bytes("1k"), Some(1024));
/// ```
pub fn parse_bytes(text: &str) -> Option<u64> {
    let (number, unit) = number_and_unit(text)?;
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return None,
    };
    number.checked_mul(1 << shift)
}

/// Parses a port or a range of ports, such as `7000` or `7000-7010`.
pub(super) fn parse_ports(text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let port = |text: &str| text.trim().parse().ok().filter(|port| *port != 0);
    let (first, last) = (port(first)?, port(last)?);
    (first <= last).then_some(first..=last)
}

pub(super) fn parse_flag(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Some(true),
        "0" | "false" | "no" | "off" => Some(false),
        _ => None,
    }
}

/// Formats a duration in the largest unit that holds it exactly, so that it parses back.
pub fn show_duration(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    for (per_unit, unit) in
        [(3_600_000_000_000, "h"), (1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")]
    {
        if nanos >= per_unit && nanos.is_multiple_of(per_unit) {
            return format!("{}{unit}", nanos / per_unit);
        }
    }
    if nanos == 0 { "0".to_owned() } else { format!("{nanos}ns") }
}

/// Formats a byte count in the largest unit that holds it exactly.
pub(super) fn show_bytes(bytes: u64) -> String {
    for (shift, unit) in [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >= 1 << shift && bytes.trailing_zeros() >= shift {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

/// The number of edits (insert, remove, replace) between two names, counted in bytes.
pub(super) fn distance(left: &str, right: &str) -> usize {
    let right = right.as_bytes();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[right.len()]
}

fn number_and_unit(text: &str) -> Option<(u64, &str)> {
    let text = text.trim();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    Some((number.parse().ok()?, unit.trim_start()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn durations() {
        assert_eq!(parse_duration("2s"), Some(Duration::from_secs(2)));
        assert_eq!(parse_duration(" 500 ms "), Some(Duration::from_millis(500)));
        assert_eq!(parse_duration("50us"), Some(Duration::from_micros(50)));
        assert_eq!(parse_duration("50µs"), Some(Duration::from_micros(50)));
        assert_eq!(parse_duration("7ns"), Some(Duration::from_nanos(7)));
        assert_eq!(parse_duration("3min"), Some(Duration::from_secs(180)));
        assert_eq!(parse_duration("0"), Some(Duration::ZERO));
        for bad in ["", "s", "2", "-2s", "1.5s", "2 parsecs", "18446744073709551616ns", "5124096h"]
        {
            assert_eq!(parse_duration(bad), None, "{bad}");
        }
    }

    #[test]
    fn bytes() {
        assert_eq!(parse_bytes("0"), Some(0));
        assert_eq!(parse_bytes("100M"), Some(100 << 20));
        assert_eq!(parse_bytes("3 GiB"), Some(3 << 30));
        for bad in ["", "K", "-1", "1.5K", "1X", "16777216T"] {
            assert_eq!(parse_bytes(bad), None, "{bad}");
        }
    }

    #[test]
    fn ports() {
        assert_eq!(parse_ports("7000"), Some(7000..=7000));
        assert_eq!(parse_ports("7000 - 7010"), Some(7000..=7010));
        for bad in ["", "0", "0-5", "7010-7000", "70000", "1-70000", "a", "1-2-3", "-5", "5-"] {
            assert_eq!(parse_ports(bad), None, "{bad}");
        }
    }

    #[test]
    fn flags() {
        assert_eq!(parse_flag("1"), Some(true));
        assert_eq!(parse_flag("OFF"), Some(false));
        assert_eq!(parse_flag("2"), None);
    }

    #[test]
    fn distances() {
        assert_eq!(distance("LANES", "LANES"), 0);
        assert_eq!(distance("LANE", "LANES"), 1);
        assert_eq!(distance("TRANSPROT", "TRANSPORT"), 2);
        assert_eq!(distance("", "abc"), 3);
    }

    proptest! {
        #[test]
        fn formatted_values_parse_back(nanos: u64, bytes: u64) {
            let duration = Duration::from_nanos(nanos);
            prop_assert_eq!(parse_duration(&show_duration(duration)), Some(duration));
            prop_assert_eq!(parse_bytes(&show_bytes(bytes)), Some(bytes));
        }

        #[test]
        fn no_text_panics(text in ".*") {
            let _ = (parse_duration(&text), parse_bytes(&text), parse_flag(&text));
        }
    }
}
