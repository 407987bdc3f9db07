//! The positions of a row's pieces in the two buffers.
//!
//! A single piece lies at the start of both buffers. Several pieces fill both buffers, in a random
//! order that differs between the sides, so that no path can merge neighbouring pieces. The order
//! is derived from the row's seed, so both processes know it without sending it.

use serde::{Deserialize, Serialize};

/// The shape of a row's memory.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Layout {
    /// Bytes of one piece.
    pub(crate) size: u64,
    /// How many pieces.
    pub(crate) iovs: u32,
    /// The seed of the order and of the contents.
    pub(crate) seed: u64,
}

/// The process that owns a buffer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Side {
    /// The process that posts the transfers.
    Client,
    /// The process whose memory the transfers read and write.
    Server,
}

impl Layout {
    /// Bytes of the row. It saturates, so that an invalid row exceeds any buffer.
    pub(crate) fn total(&self) -> u64 {
        self.size.saturating_mul(u64::from(self.iovs))
    }

    /// Piece `i` of the transfer is block `indices[i]` of this side's buffer.
    pub(crate) fn indices(&self, side: Side) -> Vec<u32> {
        let mut indices: Vec<u32> = (0..self.iovs).collect();
        let salt = if side == Side::Client { 1 } else { 2 };
        let seed = mix(self.seed.wrapping_mul(4).wrapping_add(salt));
        for i in (1..indices.len()).rev() {
            let random = mix(seed.wrapping_add(i as u64));
            indices.swap(i, (random % (i as u64 + 1)) as usize);
        }
        indices
    }
}

/// A pseudo-random word derived from `word`, by the finalizer of SplitMix64.
pub(crate) fn mix(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_permutations_that_differ_by_side_and_seed() {
        let layout = Layout { size: 4096, iovs: 1000, seed: 7 };
        let client = layout.indices(Side::Client);
        let mut sorted = client.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..1000));
        assert_eq!(client, layout.indices(Side::Client));
        assert_ne!(client, layout.indices(Side::Server));
        assert_ne!(client, Layout { seed: 8, ..layout }.indices(Side::Client));
    }

    #[test]
    fn totals_do_not_wrap() {
        assert_eq!(Layout { size: u64::MAX, iovs: 2, seed: 0 }.total(), u64::MAX);
        assert_eq!(Layout { size: 4096, iovs: 100_000, seed: 0 }.total(), 409_600_000);
    }
}
