//! The shapes of work, and a cursor over them.
//!
//! A transfer is a range, a vector of pairs, or a block list. The engine never expands a shape: a
//! [`Cursor`] walks it and yields contiguous pieces on demand. 100,000 blocks therefore cost one
//! index array and nothing else. The walk joins adjacent pieces. The constructors check a shape
//! once, so a walk cannot leave the regions.

use std::ops::Range;
use std::sync::Arc;

use crate::region::{MemoryKind, Span};

/// A position in one of a transfer's regions.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Place {
    /// The index of the region among the transfer's regions on that side.
    pub region: u32,
    /// The offset of the first byte in the region.
    pub offset: u64,
    /// Where that memory lives.
    pub kind: MemoryKind,
}

/// One contiguous piece of work.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Pair {
    /// The local position.
    pub local: Place,
    /// The position at the peer.
    pub remote: Place,
    /// The length in bytes.
    pub len: u64,
}

/// Equal-sized blocks of one region, selected by index: block `i` starts at `base + indices[i] *
/// stride`. A paged KV cache has this layout.
#[derive(Clone, Debug)]
pub struct Blocks {
    /// The index of the region among the transfer's regions on that side.
    pub region: u32,
    /// The offset of block 0.
    pub base: u64,
    /// The distance between the starts of two blocks.
    pub stride: u64,
    /// The length of a block in bytes.
    pub len: u64,
    /// The indices of the blocks, in order.
    pub indices: Arc<[u32]>,
    /// Where that memory lives.
    pub kind: MemoryKind,
}

impl Blocks {
    fn place(&self, item: usize, within: u64) -> Place {
        let offset = self.base + u64::from(self.indices[item]) * self.stride + within;
        Place { region: self.region, offset, kind: self.kind }
    }

    /// Checks every index against the region.
    fn check(&self, side: Side, region: Span) -> Result<(), WorkError> {
        let bad = |item: usize| WorkError::BlockOutside { side, item, index: self.indices[item] };
        // The block with the highest index ends last, so it is enough to check that one.
        let Some((item, &max)) = self.indices.iter().enumerate().max_by_key(|(_, i)| **i) else {
            return Ok(());
        };
        let offset = u64::from(max).checked_mul(self.stride).and_then(|o| o.checked_add(self.base));
        let last = Span { offset: offset.ok_or_else(|| bad(item))?, len: self.len };
        let first_ok = region.contains(Span { offset: self.base, len: 0 });
        if first_ok && region.contains(last) { Ok(()) } else { Err(bad(item)) }
    }
}

/// The side of a transfer that an error concerns.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Side {
    /// Local memory.
    Local,
    /// The peer's memory.
    Remote,
}

/// Why work cannot be carried out.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum WorkError {
    /// A range extends beyond its region.
    #[error(
        "{side:?} range of {len} bytes at offset {offset} (item {item}) extends beyond its region"
    )]
    Outside {
        /// The side.
        side: Side,
        /// The item of the vector.
        item: usize,
        /// The offset of the first byte.
        offset: u64,
        /// The length in bytes.
        len: u64,
    },
    /// A block extends beyond its region.
    #[error("{side:?} block with index {index} (item {item}) extends beyond its region")]
    BlockOutside {
        /// The side.
        side: Side,
        /// The position in the index list.
        item: usize,
        /// The block index at that position.
        index: u32,
    },
    /// The two sides have different numbers of pieces.
    #[error("{local} local pieces do not match {remote} remote pieces")]
    CountMismatch {
        /// The number of local pieces.
        local: usize,
        /// The number of remote pieces.
        remote: usize,
    },
    /// The two sides of a piece have different lengths.
    #[error("item {item}: {local} local bytes do not match {remote} remote bytes")]
    LengthMismatch {
        /// The item.
        item: usize,
        /// The local length in bytes.
        local: u64,
        /// The remote length in bytes.
        remote: u64,
    },
    /// A GPU failed, or its memory no longer exists.
    #[error("{side:?} GPU memory cannot be accessed: it was freed or the GPU failed; see the log")]
    Device {
        /// The side.
        side: Side,
    },
    /// The sum of all lengths does not fit in 64 bits.
    #[error("the total length of the transfer does not fit in 64 bits")]
    TooLong,
}

/// The checked shape of a transfer.
#[derive(Clone, Debug)]
pub struct Shape {
    inner: Inner,
    total: u64,
}

#[derive(Clone, Debug)]
enum Inner {
    Range(Pair),
    Vector(Pairs),
    /// Shared, so that a clone of a shape copies little.
    Blocks(Arc<BlockLists>),
}

#[derive(Debug)]
struct BlockLists {
    local: Blocks,
    remote: Blocks,
    /// Whether consecutive indices name adjacent blocks on both sides.
    is_dense: bool,
}

/// The first `count` entries of a list that may be longer. The owner can then reuse a longer list.
#[derive(Clone, Debug)]
struct Pairs {
    list: Arc<[Pair]>,
    count: usize,
}

impl std::ops::Deref for Pairs {
    type Target = [Pair];

    #[inline]
    fn deref(&self) -> &[Pair] {
        &self.list[..self.count]
    }
}

impl Shape {
    /// One contiguous range. `local` and `remote` are the extents of the two regions.
    pub fn range(pair: Pair, local: Span, remote: Span) -> Result<Self, WorkError> {
        check_pair(0, &pair, local, remote)?;
        Ok(Self { total: pair.len, inner: Inner::Range(pair) })
    }

    /// A vector of ranges. `local(i)` and `remote(i)` return the extent of region `i` of that side.
    pub fn vector(
        pairs: Arc<[Pair]>,
        local: impl Fn(u32) -> Span,
        remote: impl Fn(u32) -> Span,
    ) -> Result<Self, WorkError> {
        let count = pairs.len();
        Self::vector_of(pairs, count, local, remote)
    }

    /// As [`Self::vector`], with the first `count` ranges of the list, or all of them if there are
    /// fewer.
    pub fn vector_of(
        list: Arc<[Pair]>,
        count: usize,
        local: impl Fn(u32) -> Span,
        remote: impl Fn(u32) -> Span,
    ) -> Result<Self, WorkError> {
        let count = count.min(list.len());
        let pairs = Pairs { list, count };
        let mut total = 0u64;
        for (item, pair) in pairs.iter().enumerate() {
            check_pair(item, pair, local(pair.local.region), remote(pair.remote.region))?;
            total = total.checked_add(pair.len).ok_or(WorkError::TooLong)?;
        }
        // A single pair is a range, which is cheaper to walk.
        let inner = match *pairs {
            [pair] => Inner::Range(pair),
            _ => Inner::Vector(pairs),
        };
        Ok(Self { inner, total })
    }

    /// Two block lists with the same number of blocks and the same block size.
    pub fn blocks(
        local: Blocks,
        local_region: Span,
        remote: Blocks,
        remote_region: Span,
    ) -> Result<Self, WorkError> {
        let (l, r) = (local.indices.len(), remote.indices.len());
        if l != r {
            return Err(WorkError::CountMismatch { local: l, remote: r });
        }
        if local.len != remote.len {
            return Err(WorkError::LengthMismatch {
                item: 0,
                local: local.len,
                remote: remote.len,
            });
        }
        local.check(Side::Local, local_region)?;
        remote.check(Side::Remote, remote_region)?;
        let total = (l as u64).checked_mul(local.len).ok_or(WorkError::TooLong)?;
        if l == 1 {
            let pair = Pair { local: local.place(0, 0), remote: remote.place(0, 0), len: total };
            return Ok(Self { inner: Inner::Range(pair), total });
        }
        let is_dense = local.stride == local.len && remote.stride == remote.len;
        let lists = BlockLists { local, remote, is_dense };
        Ok(Self { inner: Inner::Blocks(Arc::new(lists)), total })
    }

    /// The total length of the transfer in bytes.
    #[inline]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The number of pieces that the caller specified.
    pub fn items(&self) -> usize {
        match &self.inner {
            Inner::Range(_) => 1,
            Inner::Vector(pairs) => pairs.len(),
            Inner::Blocks(lists) => lists.local.indices.len(),
        }
    }

    /// The block lists and the entries that the cursor covers, if it covers whole blocks.
    pub fn whole_blocks(&self, at: &Cursor) -> Option<(&Blocks, &Blocks, Range<usize>)> {
        let Inner::Blocks(lists) = &self.inner else { return None };
        let BlockLists { local, remote, .. } = &**lists;
        if at.within != 0 || local.len == 0 || !at.left.is_multiple_of(local.len) {
            return None;
        }
        let items = usize::try_from(at.left / local.len).ok()?;
        Some((local, remote, at.item..at.item + items))
    }

    /// A cursor at the first byte.
    pub fn start(&self) -> Cursor {
        let mut cursor = Cursor { item: 0, within: 0, left: self.total };
        self.skip_empty(&mut cursor);
        cursor
    }

    /// The largest contiguous piece at the cursor, of at most `max` bytes. `None` at the end.
    pub fn peek(&self, at: &Cursor, max: u64) -> Option<Pair> {
        let max = max.min(at.left);
        if max == 0 {
            return None;
        }
        let pair = match &self.inner {
            Inner::Range(pair) => shifted(pair, at.within),
            Inner::Vector(pairs) => {
                let mut pair = shifted(&pairs[at.item], at.within);
                for next in &pairs[at.item + 1..] {
                    if pair.len >= max || !follows(&pair, next) {
                        break;
                    }
                    pair.len += next.len;
                }
                pair
            }
            Inner::Blocks(lists) => {
                let BlockLists { local, remote, is_dense } = &**lists;
                let mut pair = Pair {
                    local: local.place(at.item, at.within),
                    remote: remote.place(at.item, at.within),
                    len: local.len - at.within,
                };
                if *is_dense {
                    let (l, r) = (&local.indices, &remote.indices);
                    let mut item = at.item;
                    while pair.len < max
                        && item + 1 < l.len()
                        && l[item].checked_add(1) == Some(l[item + 1])
                        && r[item].checked_add(1) == Some(r[item + 1])
                    {
                        pair.len += local.len;
                        item += 1;
                    }
                }
                pair
            }
        };
        Some(Pair { len: pair.len.min(max), ..pair })
    }

    /// Advances the cursor by `bytes`, which must not exceed the bytes left. The time grows with
    /// the number of vector pieces that the cursor crosses; in a block list it is constant.
    pub fn advance(&self, at: &mut Cursor, bytes: u64) {
        debug_assert!(bytes <= at.left);
        at.left -= bytes;
        match &self.inner {
            Inner::Range(_) => at.within += bytes,
            Inner::Blocks(lists) => {
                let local = &lists.local;
                let within = at.within + bytes;
                // Crossing one block is the common step. Joined runs need the division.
                if within < local.len {
                    at.within = within;
                } else if within == local.len {
                    (at.item, at.within) = (at.item + 1, 0);
                } else {
                    at.item += (within / local.len) as usize;
                    at.within = within % local.len;
                }
            }
            Inner::Vector(pairs) => {
                at.within += bytes;
                while let Some(pair) = pairs.get(at.item)
                    && at.within >= pair.len
                {
                    at.within -= pair.len;
                    at.item += 1;
                }
            }
        }
    }

    fn skip_empty(&self, at: &mut Cursor) {
        if let Inner::Vector(pairs) = &self.inner {
            while pairs.get(at.item).is_some_and(|p| p.len == 0) {
                at.item += 1;
            }
        }
    }
}

/// A position in a [`Shape`]. It is meaningful only with the shape that created it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Cursor {
    item: usize,
    within: u64,
    left: u64,
}

impl Cursor {
    /// The number of bytes from here to the end.
    #[inline]
    pub fn left(&self) -> u64 {
        self.left
    }

    /// The same position, with an end after `bytes`: a view of the next part of the work.
    #[inline]
    pub fn limited(&self, bytes: u64) -> Self {
        Self { left: self.left.min(bytes), ..*self }
    }
}

fn check_pair(item: usize, pair: &Pair, local: Span, remote: Span) -> Result<(), WorkError> {
    let len = pair.len;
    for (side, place, region) in
        [(Side::Local, pair.local, local), (Side::Remote, pair.remote, remote)]
    {
        if !region.contains(Span { offset: place.offset, len }) {
            return Err(WorkError::Outside { side, item, offset: place.offset, len });
        }
    }
    Ok(())
}

fn shifted(pair: &Pair, by: u64) -> Pair {
    let mut pair = *pair;
    pair.local.offset += by;
    pair.remote.offset += by;
    pair.len -= by;
    pair
}

fn follows(pair: &Pair, next: &Pair) -> bool {
    let touches = |a: &Place, b: &Place| {
        a.region == b.region && a.kind == b.kind && a.offset.checked_add(pair.len) == Some(b.offset)
    };
    touches(&pair.local, &next.local) && touches(&pair.remote, &next.remote)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOST: MemoryKind = MemoryKind::Host;

    fn place(region: u32, offset: u64) -> Place {
        Place { region, offset, kind: HOST }
    }

    fn extent(len: u64) -> Span {
        Span { offset: 0, len }
    }

    /// Every byte of the shape as (local region, local offset, remote region, remote offset).
    fn walk(shape: &Shape, steps: &mut dyn FnMut() -> u64) -> Vec<(u32, u64, u32, u64)> {
        let mut bytes = Vec::new();
        let mut at = shape.start();
        while let Some(pair) = shape.peek(&at, steps().max(1)) {
            for i in 0..pair.len {
                bytes.push((
                    pair.local.region,
                    pair.local.offset + i,
                    pair.remote.region,
                    pair.remote.offset + i,
                ));
            }
            shape.advance(&mut at, pair.len);
        }
        assert_eq!(at.left(), 0);
        bytes
    }

    #[test]
    fn adjacent_blocks_join() {
        let blocks = |indices: &[u32]| Blocks {
            region: 0,
            base: 16,
            stride: 8,
            len: 8,
            indices: indices.into(),
            kind: HOST,
        };
        let shape =
            Shape::blocks(blocks(&[3, 4, 5, 9]), extent(200), blocks(&[0, 1, 2, 3]), extent(200))
                .unwrap();
        let mut at = shape.start();
        let run = shape.peek(&at, 1 << 20).unwrap();
        assert_eq!((run.local.offset, run.remote.offset, run.len), (40, 16, 24));
        shape.advance(&mut at, run.len);
        assert_eq!(shape.peek(&at, 1 << 20).unwrap().local.offset, 16 + 9 * 8);
    }

    #[test]
    fn a_limited_cursor_ends_where_it_should() {
        let pair = Pair { local: place(0, 0), remote: place(0, 0), len: 100 };
        let shape = Shape::range(pair, extent(100), extent(100)).unwrap();
        let mut at = shape.start().limited(30);
        assert_eq!(shape.peek(&at, u64::MAX).unwrap().len, 30);
        shape.advance(&mut at, 30);
        assert_eq!(shape.peek(&at, u64::MAX), None);
    }

    #[test]
    fn bad_work_is_named() {
        let pair = |offset, len| Pair { local: place(0, offset), remote: place(0, 0), len };
        assert!(matches!(
            Shape::range(pair(1, 10), extent(10), extent(10)),
            Err(WorkError::Outside { side: Side::Local, .. })
        ));
        assert!(Shape::range(pair(u64::MAX, 2), extent(u64::MAX), extent(10)).is_err());
        assert!(Shape::range(pair(10, 0), extent(10), extent(10)).is_ok());
        let blocks = |base, stride, indices: &[u32]| Blocks {
            region: 0,
            base,
            stride,
            len: 8,
            indices: indices.into(),
            kind: HOST,
        };
        let err =
            Shape::blocks(blocks(0, 8, &[0, 2]), extent(24), blocks(0, 8, &[0, 3]), extent(24));
        assert_eq!(
            err.unwrap_err(),
            WorkError::BlockOutside { side: Side::Remote, item: 1, index: 3 }
        );
        let huge = blocks(u64::MAX - 1, u64::MAX, &[u32::MAX]);
        assert!(Shape::blocks(huge, extent(24), blocks(0, 8, &[0]), extent(24)).is_err());
        let err = Shape::blocks(blocks(0, 8, &[0]), extent(24), blocks(0, 8, &[]), extent(24));
        assert!(matches!(err, Err(WorkError::CountMismatch { local: 1, remote: 0 })));
    }

    proptest! {
        #[test]
        fn a_vector_is_walked_exactly(
            items in prop::collection::vec((0u32..3, 0u64..64, 0u32..3, 0u64..64, 0u64..16), 0..20),
            steps in prop::collection::vec(1u64..40, 1..8),
        ) {
            let pairs: Arc<[Pair]> = items
                .iter()
                .map(|&(lr, lo, rr, ro, len)| Pair {
                    local: place(lr, lo), remote: place(rr, ro), len,
                })
                .collect();
            let shape = Shape::vector(pairs, |_| extent(80), |_| extent(80)).unwrap();
            let mut expected = Vec::new();
            for (lr, lo, rr, ro, len) in items {
                expected.extend((0..len).map(|i| (lr, lo + i, rr, ro + i)));
            }
            let mut turn = 0;
            let got = walk(&shape, &mut || { turn += 1; steps[turn % steps.len()] });
            prop_assert_eq!(got, expected);
        }

        #[test]
        fn blocks_are_walked_exactly(
            indices in prop::collection::vec((0u32..12, 0u32..12), 0..20),
            len in 1u64..9, gap in 0u64..3,
            steps in prop::collection::vec(1u64..40, 1..8),
        ) {
            let stride = len + gap;
            let side = |pick: fn(&(u32, u32)) -> u32| Blocks {
                region: 0, base: 5, stride, len,
                indices: indices.iter().map(pick).collect(), kind: HOST,
            };
            let shape =
                Shape::blocks(side(|p| p.0), extent(500), side(|p| p.1), extent(500)).unwrap();
            let mut expected = Vec::new();
            for (l, r) in &indices {
                let start = |i: &u32| 5 + u64::from(*i) * stride;
                expected.extend((0..len).map(|i| (0, start(l) + i, 0, start(r) + i)));
            }
            let mut turn = 0;
            let got = walk(&shape, &mut || { turn += 1; steps[turn % steps.len()] });
            prop_assert_eq!(got, expected);
        }
    }
}
