//! Region arithmetic and access rights. All arithmetic is checked because the numbers come from
//! peers and callers.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Where memory lives. Every place carries this field, so host and device memory share one set of
/// shapes.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Memory the CPU loads and stores directly.
    #[default]
    Host,
    /// Memory of the device with this index.
    Device(u16),
}

/// What a peer may do with advertised memory.
#[derive(Clone, Copy, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Access(u8);

impl Access {
    /// The peer may read.
    pub const READ: Self = Self(1);
    /// The peer may write.
    pub const WRITE: Self = Self(2);
    /// The peer may read and write.
    pub const READ_WRITE: Self = Self(3);

    /// Whether every right in `other` is in `self`.
    pub fn allows(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The bits of the wire encoding.
    pub fn bits(self) -> u8 {
        self.0
    }

    /// Parses bits from the wire. Returns `None` for unknown bits and for no bits at all.
    pub fn from_bits(bits: u8) -> Option<Self> {
        (bits != 0 && bits & !3 == 0).then_some(Self(bits))
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            1 => "read",
            2 => "write",
            _ => "read-write",
        })
    }
}

/// A run of bytes inside a region.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Span {
    /// First byte.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
}

impl Span {
    /// The span of a Rust range, or `None` if the range ends before it starts.
    pub fn of(range: Range<u64>) -> Option<Self> {
        Some(Self { offset: range.start, len: range.end.checked_sub(range.start)? })
    }

    /// One past the last byte, or `None` on overflow.
    pub fn end(self) -> Option<u64> {
        self.offset.checked_add(self.len)
    }

    /// Whether `inner` lies entirely in `self`. An empty span at either end counts as inside.
    pub fn contains(self, inner: Self) -> bool {
        match (self.end(), inner.end()) {
            (Some(end), Some(inner_end)) => inner.offset >= self.offset && inner_end <= end,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn access_bits() {
        assert!(Access::READ_WRITE.allows(Access::READ));
        assert!(!Access::READ.allows(Access::WRITE));
        assert_eq!(Access::from_bits(0), None);
        assert_eq!(Access::from_bits(4), None);
        assert_eq!(Access::from_bits(3), Some(Access::READ_WRITE));
    }

    proptest! {
        #[test]
        fn containment_agrees_with_wide_arithmetic(
            a in any::<u64>(), n in any::<u64>(), b in any::<u64>(), m in any::<u64>(),
        ) {
            let (outer, inner) = (Span { offset: a, len: n }, Span { offset: b, len: m });
            let end = |s: Span| u128::from(s.offset) + u128::from(s.len);
            let wide = end(outer) <= u128::from(u64::MAX)
                && end(inner) <= u128::from(u64::MAX)
                && b >= a
                && end(inner) <= end(outer);
            prop_assert_eq!(outer.contains(inner), wide);
        }
    }
}
