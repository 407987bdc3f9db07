//! Seeded randomness, so that a failure can be repeated, and byte patterns derived from it.

/// A small generator (splitmix64): good enough to vary tests, and the same on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates the generator of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next random word.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A random number below `n`, which must not be 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.word() % n.max(1)
    }

    /// True once in `n` calls on average.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// `len` random bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        for chunk in out.chunks_mut(8) {
            let word = self.word().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
        out
    }

    /// Changes some bytes: flips bits, overwrites runs, truncates, or repeats a part.
    pub fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            if bytes.is_empty() {
                return;
            }
            let at = self.below(bytes.len() as u64) as usize;
            match self.below(5) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = self.word() as u8,
                2 => bytes.truncate(at.max(1)),
                3 => {
                    let end = (at + 8).min(bytes.len());
                    let value = if self.one_in(2) { 0xFF } else { 0 };
                    bytes[at..end].fill(value);
                }
                _ => {
                    let part = bytes[at..(at + 16).min(bytes.len())].to_vec();
                    bytes.splice(at..at, part);
                }
            }
        }
    }
}

/// Fills `into` with the pattern of `seed`, beginning at byte `start` of the pattern.
pub fn pattern(seed: u64, start: u64, into: &mut [u8]) {
    let mut word = start / 8;
    let head = ((8 - start % 8) % 8).min(into.len() as u64) as usize;
    let (first, rest) = into.split_at_mut(head);
    if head > 0 {
        let bytes = word_of(seed, word).to_le_bytes();
        let from = (start % 8) as usize;
        first.copy_from_slice(&bytes[from..from + head]);
        word += 1;
    }
    let mut chunks = rest.chunks_exact_mut(8);
    for chunk in &mut chunks {
        chunk.copy_from_slice(&word_of(seed, word).to_le_bytes());
        word += 1;
    }
    let tail = chunks.into_remainder();
    let bytes = word_of(seed, word).to_le_bytes();
    tail.copy_from_slice(&bytes[..tail.len()]);
}

fn word_of(seed: u64, word: u64) -> u64 {
    mix(seed.wrapping_mul(0xD134_2543_DE82_EF95).wrapping_add(word))
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_does_not_depend_on_where_it_is_cut() {
        let mut whole = vec![0; 100];
        pattern(5, 0, &mut whole);
        for (start, len) in [(0, 3), (3, 1), (5, 40), (7, 9), (8, 16), (99, 1), (100, 0)] {
            let mut part = vec![0; len];
            pattern(5, start as u64, &mut part);
            assert_eq!(part, whole[start..start + len], "{start}+{len}");
        }
    }
}
