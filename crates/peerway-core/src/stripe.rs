//! How a transfer is divided into pieces for lanes.
//!
//! A lane takes the next piece when it has room, so a slow lane takes fewer pieces. This module
//! decides only the size of a piece. Pieces are aligned and together cover exactly the whole
//! transfer.

use crate::region::Span;

/// Pieces start on multiples of a page. Below that, NICs and copies lose speed.
pub const ALIGN: u64 = 4096;
/// Smaller pieces cost more in headers than they gain in parallelism.
const MIN_PIECE: u64 = 64 << 10;

/// The length of one piece of a transfer of `total` bytes over `lanes` lanes, at most `max`.
///
/// A small transfer is one piece. A larger transfer has one piece for each lane, unless the pieces
/// would be shorter than the minimum or longer than `max`.
pub fn piece_len(total: u64, lanes: usize, max: u64) -> u64 {
    if total <= MIN_PIECE {
        return MIN_PIECE.min(max);
    }
    let share = total.div_ceil(lanes.max(1) as u64);
    let aligned = share.div_ceil(ALIGN).saturating_mul(ALIGN);
    aligned.clamp(MIN_PIECE.min(max), max)
}

/// The pieces of `whole`, in order. The first piece is short if `whole` does not start on an
/// [`ALIGN`] boundary, so all other pieces start on one.
pub fn pieces(whole: Span, piece: u64) -> impl Iterator<Item = Span> {
    let piece = piece.max(1);
    let mut done = 0;
    std::iter::from_fn(move || {
        let left = whole.len - done;
        if left == 0 {
            return None;
        }
        let offset = whole.offset + done;
        let off_border = if piece >= ALIGN { offset % ALIGN } else { 0 };
        let len = (piece - off_border).min(left);
        done += len;
        Some(Span { offset, len })
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn small_is_not_cut() {
        assert_eq!(piece_len(1000, 8, 1 << 20), 64 << 10);
        assert_eq!(piece_len(8 << 20, 4, 1 << 20), 1 << 20);
        assert_eq!(piece_len(1 << 20, 4, 1 << 20), 256 << 10);
    }

    proptest! {
        #[test]
        fn pieces_are_exactly_the_whole(
            offset in 0u64..1 << 40, len in 0u64..8 << 20, lanes in 1usize..9,
        ) {
            let piece = piece_len(len, lanes, 1 << 20);
            let mut at = offset;
            for (i, span) in pieces(Span { offset, len }, piece).enumerate() {
                prop_assert_eq!(span.offset, at);
                prop_assert!(span.len > 0 && span.len <= piece);
                prop_assert!(i == 0 || span.offset % ALIGN == 0);
                at += span.len;
            }
            prop_assert_eq!(at, offset + len);
        }
    }
}
