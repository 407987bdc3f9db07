//! The contents of the buffers, and how the two processes compare them without sending them.
//!
//! Before a row, the source is filled with words derived from the row's seed and their offset, and
//! the destination with a different byte. After the row, each side computes a checksum of its own
//! pieces in the order of the transfer. Equal checksums mean that every piece arrived at its place.

use peerway::{Region, WorkError};

use super::layout::{Layout, Side, mix};

/// Bytes per step for host memory. They fit into L2, so a fill costs one pass over memory.
const CHUNK: usize = 64 << 10;

/// Bytes per step for GPU memory, where every read and write is a synchronous copy.
const GPU_CHUNK: usize = 4 << 20;

/// The byte that fills a destination before a row. No pattern contains a run of it.
pub(crate) const BLANK: u8 = 0xEE;

/// Fills the first `len` bytes of the region with the pattern of `seed`.
pub(crate) fn fill(region: &Region, len: u64, seed: u64) -> Result<(), WorkError> {
    let size = if region.gpu().is_some() { GPU_CHUNK } else { CHUNK };
    let mut chunk = vec![0; size.min(len as usize)];
    for at in (0..len).step_by(size) {
        let part = &mut chunk[..(len - at).min(size as u64) as usize];
        write_pattern(part, seed, at);
        region.write_at(at, part)?;
    }
    Ok(())
}

/// Sets the first `len` bytes of the region to [`BLANK`].
pub(crate) fn blank(region: &Region, len: u64) -> Result<(), WorkError> {
    region.fill(0, len, BLANK)
}

/// The checksum of the row's pieces in the order of the transfer.
pub(crate) fn checksum(region: &Region, layout: &Layout, side: Side) -> Result<u64, WorkError> {
    let mut sum = Sum::default();
    if region.gpu().is_some() {
        // Reading piece by piece would take up to a hundred thousand synchronous copies.
        let mut all = vec![0; layout.total() as usize];
        for (i, chunk) in all.chunks_mut(GPU_CHUNK).enumerate() {
            region.read_at((i * GPU_CHUNK) as u64, chunk)?;
        }
        for index in layout.indices(side) {
            let start = index as usize * layout.size as usize;
            for part in all[start..start + layout.size as usize].chunks(CHUNK) {
                sum.add(part);
            }
        }
        return Ok(sum.0);
    }
    let mut chunk = vec![0; CHUNK];
    for index in layout.indices(side) {
        let start = u64::from(index) * layout.size;
        for at in (0..layout.size).step_by(CHUNK) {
            let part = &mut chunk[..(layout.size - at).min(CHUNK as u64) as usize];
            region.read_at(start + at, part)?;
            sum.add(part);
        }
    }
    Ok(sum.0)
}

/// Writes the pattern of `seed` from byte `at` on. `at` must be a multiple of eight.
fn write_pattern(into: &mut [u8], seed: u64, at: u64) {
    let base = mix(seed).wrapping_add(at / 8);
    let mut words = into.chunks_exact_mut(8);
    let mut index = base;
    for word in &mut words {
        word.copy_from_slice(&mix(index).to_le_bytes());
        index = index.wrapping_add(1);
    }
    let rest = words.into_remainder();
    let len = rest.len();
    rest.copy_from_slice(&mix(index).to_le_bytes()[..len]);
}

/// A running checksum that depends on every byte and its position.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Sum(u64);

impl Sum {
    fn add(&mut self, bytes: &[u8]) {
        let mut words = bytes.chunks_exact(8);
        for word in &mut words {
            self.word(u64::from_le_bytes(word.try_into().unwrap_or_default()));
        }
        let rest = words.remainder();
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            self.word(u64::from_le_bytes(last) ^ (rest.len() as u64) << 56);
        }
    }

    #[inline]
    fn word(&mut self, word: u64) {
        // The factor is odd, so the multiplication is a bijection and loses no bits.
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517C_C1B7_2722_0A95);
    }
}

#[cfg(test)]
mod tests {
    use peerway::Endpoint;

    use super::*;

    #[test]
    fn patterns_are_the_same_in_any_cut_and_differ_by_seed() {
        let mut whole = vec![0; 1003];
        write_pattern(&mut whole, 1, 0);
        let mut parts = vec![0; 1003];
        let (first, second) = parts.split_at_mut(512);
        write_pattern(first, 1, 0);
        write_pattern(second, 1, 512);
        assert_eq!(whole, parts);
        write_pattern(&mut parts, 2, 0);
        assert_ne!(whole, parts);
        assert!(!whole.windows(4).any(|window| window == [BLANK; 4]));
    }

    #[test]
    fn a_sum_sees_every_byte_and_the_order() {
        let sum = |bytes: &[u8]| {
            let mut sum = Sum::default();
            sum.add(bytes);
            sum.0
        };
        let mut bytes: Vec<u8> = (0..77).collect();
        let before = sum(&bytes);
        for i in 0..bytes.len() {
            bytes[i] ^= 1;
            assert_ne!(sum(&bytes), before, "byte {i}");
            bytes[i] ^= 1;
        }
        bytes.swap(0, 70);
        assert_ne!(sum(&bytes), before);
        assert_ne!(sum(&[1, 2]), sum(&[1, 2, 0]));
    }

    #[test]
    fn both_sides_agree_once_the_pieces_are_where_they_belong() {
        let endpoint = Endpoint::new().unwrap();
        for (size, iovs) in [(256, 1), (100_003, 1), (1000, 37)] {
            let layout = Layout { size, iovs, seed: 3 };
            let total = layout.total();
            let ours = endpoint.register(vec![0; total as usize]).unwrap();
            let theirs = endpoint.register(vec![0; total as usize]).unwrap();
            fill(&ours, total, layout.seed).unwrap();
            blank(&theirs, total).unwrap();
            let expected = checksum(&ours, &layout, Side::Client).unwrap();
            assert_ne!(checksum(&theirs, &layout, Side::Server).unwrap(), expected);
            let mut piece = vec![0; size as usize];
            let order = layout.indices(Side::Client).into_iter().zip(layout.indices(Side::Server));
            for (from, to) in order {
                ours.read_at(u64::from(from) * size, &mut piece).unwrap();
                theirs.write_at(u64::from(to) * size, &piece).unwrap();
            }
            assert_eq!(checksum(&theirs, &layout, Side::Server).unwrap(), expected);
        }
    }
}
