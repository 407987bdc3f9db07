//! The source of device addresses: reservations that the host cannot access.
//!
//! The arena takes them from the system in large pieces and never returns them. An address that
//! once meant device memory therefore never becomes host memory. A program that dereferences such a
//! pointer always crashes, and a system call with it always fails with `EFAULT`. The arena reuses
//! free addresses, the lowest first, so that a stale device pointer soon means something else.

use std::collections::BTreeMap;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// The granularity of all reservations, as on a GPU.
pub(crate) const GRANULE: u64 = 2 << 20;

/// The size of a piece taken from the system. It costs only addresses.
const PIECE: u64 = 16 << 30;

#[derive(Debug, Default)]
pub(crate) struct Arena {
    /// Start and length of each piece.
    pieces: Vec<(u64, u64)>,
    /// Free ranges: lengths by start. No two ranges are adjacent.
    free: BTreeMap<u64, u64>,
}

impl Arena {
    /// Whether an address belongs to the arena: it is, was or will be that of device memory.
    pub(crate) fn contains(&self, address: u64) -> bool {
        self.pieces.iter().any(|(start, len)| address.wrapping_sub(*start) < *len)
    }

    /// Whether any byte of a range belongs to the arena.
    pub(crate) fn touches(&self, address: u64, len: u64) -> bool {
        let end = address.saturating_add(len);
        self.pieces.iter().any(|(start, size)| address < start + size && *start < end)
    }

    /// Reserves a range of `len` bytes, a multiple of the granule, at a multiple of `align`, a
    /// power of two.
    pub(crate) fn reserve(&mut self, len: u64, align: u64) -> Option<u64> {
        debug_assert!(len > 0 && len.is_multiple_of(GRANULE) && align.is_power_of_two());
        let align = align.max(GRANULE);
        if let Some(found) = self.first_fit(len, align) {
            return Some(found);
        }
        // Room for the alignment of the piece, and of the range in it.
        self.grow(PIECE.max(len.checked_add(align)?.checked_add(GRANULE)?))?;
        self.first_fit(len, align)
    }

    pub(crate) fn release(&mut self, start: u64, len: u64) {
        let (mut start, mut len) = (start, len);
        if let Some((before, size)) = self.free.range(..start).next_back().map(|(s, l)| (*s, *l))
            && before + size == start
        {
            self.free.remove(&before);
            (start, len) = (before, size + len);
        }
        if let Some(size) = self.free.remove(&(start + len)) {
            len += size;
        }
        self.free.insert(start, len);
    }

    fn first_fit(&mut self, len: u64, align: u64) -> Option<u64> {
        let (start, size, at) = self.free.iter().find_map(|(start, size)| {
            let at = start.checked_next_multiple_of(align)?;
            (at - start).checked_add(len).filter(|need| need <= size)?;
            Some((*start, *size, at))
        })?;
        self.free.remove(&start);
        if at > start {
            self.free.insert(start, at - start);
        }
        let (end, taken) = (start + size, at + len);
        if end > taken {
            self.free.insert(taken, end - taken);
        }
        Some(at)
    }

    fn grow(&mut self, len: u64) -> Option<()> {
        let len = len.checked_next_multiple_of(GRANULE)?;
        let size = usize::try_from(len + GRANULE).ok()?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: without MAP_FIXED, mmap creates a new mapping and touches no existing one. It is
        // never unmapped.
        let mapped = unsafe { mmap_anonymous(ptr::null_mut(), size, ProtFlags::empty(), flags) };
        let start = (mapped.ok()?.addr() as u64).next_multiple_of(GRANULE);
        self.pieces.push((start, len));
        self.release(start, len);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_apart_and_come_again() {
        let mut arena = Arena::default();
        let first = arena.reserve(GRANULE, 1).expect("there is room");
        let second = arena.reserve(3 * GRANULE, 64 << 20).expect("there is room");
        let third = arena.reserve(GRANULE, 1).expect("there is room");
        assert!(second.is_multiple_of(64 << 20) && first.is_multiple_of(GRANULE));
        assert!(third != first && !(second..second + 3 * GRANULE).contains(&third));
        assert!(arena.contains(second) && arena.touches(first - 1, 2) && !arena.contains(0));
        for (start, len) in [(second, 3 * GRANULE), (first, GRANULE), (third, GRANULE)] {
            arena.release(start, len);
        }
        assert_eq!(arena.free.len(), arena.pieces.len());
        assert_eq!(arena.reserve(GRANULE, 1), Some(first));
    }

    #[test]
    fn a_range_larger_than_a_piece_has_its_own() {
        let mut arena = Arena::default();
        let start = arena.reserve(PIECE + GRANULE, 1).expect("there is room");
        assert!(arena.contains(start + PIECE));
        assert_eq!(arena.reserve(u64::MAX - GRANULE + 1, 1), None);
    }
}
