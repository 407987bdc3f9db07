//! CRC32C (Castagnoli), alone and together with a copy.
//!
//! The instruction for CRC32C takes 8 bytes a cycle. Processors with carry-less multiplication of
//! 512 bits fold 64 bytes in about the same time, and a copy that passes by costs them little more.
//! The `crc32c` crate does the rest: other processors, short ranges and the last bytes.

use std::slice;

use super::copy::{CopyKind, copy};

/// The CRC32C of `bytes`, continued from `crc`.
pub(crate) fn crc32c(crc: u32, bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if bytes.len() >= wide::SHORTEST && wide::is_here() {
        // SAFETY: the processor has the instructions. The range is that of the slice.
        let (crc, done) = unsafe { wide::fold::<false>(crc, None, bytes.as_ptr(), bytes.len()) };
        return crc32c::crc32c_append(crc, &bytes[done..]);
    }
    crc32c::crc32c_append(crc, bytes)
}

/// Copies `len` bytes from `src` to `dst`. Returns the CRC32C of the copy, continued from `crc`,
/// even if another thread changes the source meanwhile.
///
/// # Safety
///
/// `src` is readable and `dst` is writable for `len` bytes. The ranges do not overlap, and no other
/// thread accesses `dst`.
pub(crate) unsafe fn copy_with_crc32c(crc: u32, dst: *mut u8, src: *const u8, len: usize) -> u32 {
    let (mut crc, mut done) = (crc, 0);
    #[cfg(target_arch = "x86_64")]
    if len >= wide::SHORTEST && wide::is_here() {
        // SAFETY: the processor has the instructions. The caller vouches for both ranges.
        (crc, done) = unsafe { wide::fold::<true>(crc, Some(dst), src, len) };
    }
    // SAFETY: `done` is at most `len`, and the caller vouches for both ranges. The copied bytes are
    // initialised, and no other thread accesses them.
    unsafe {
        copy(CopyKind::Plain, dst.add(done), src.add(done), len - done);
        crc = crc32c::crc32c_append(crc, slice::from_raw_parts(dst.add(done), len - done));
    }
    crc
}

/// Folding by carry-less multiplication.
///
/// A message is a polynomial over two values, and its CRC is the remainder by the polynomial P. A
/// block may be replaced by its product with x^n mod P, added to the block n bits further on: the
/// remainder stays. Four registers of four lanes fold 256 bytes at a time onto the next 256. The
/// last 256 bytes have the remainder of the whole message, and the usual instruction finds it.
#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::*;

    /// Bytes that one step folds.
    const STEP: usize = 256;
    /// Shorter ranges are faster without folding: the end costs as much as 1 KiB.
    pub(super) const SHORTEST: usize = 2048;
    /// P without its highest term, the highest bit first.
    const POLYNOMIAL: u32 = 0x1EDC_6F41;

    /// x^n mod P in the order of bits that the message has: the lowest bit is the highest term. The
    /// product of two such values is one bit short, which the shift makes up for.
    const fn power(n: usize) -> i64 {
        let (mut value, mut done) = (1u32, 0);
        while done < n {
            let carry = value >> 31;
            value = (value << 1) ^ (carry * POLYNOMIAL);
            done += 1;
        }
        (value.reverse_bits() as i64) << 1
    }

    /// For the first and the second half of a lane. The halves are 64 bits apart, and a remainder
    /// has 32 bits.
    const FIRST: i64 = power(8 * STEP + 32);
    const SECOND: i64 = power(8 * STEP - 32);

    /// Whether the processor has the instructions.
    #[inline]
    pub(super) fn is_here() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("vpclmulqdq")
            && is_x86_feature_detected!("sse4.2")
    }

    /// Folds as many steps as `len` has. Returns the CRC32C of those bytes, continued from `crc`,
    /// and their number. With `COPY`, stores each byte at `dst` after it was read, once.
    ///
    /// # Safety
    ///
    /// [`is_here`] is true. `src` is readable for `len` bytes, and `dst`, with `COPY`, is writable
    /// for as many. `len` is at least [`STEP`].
    #[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
    pub(super) unsafe fn fold<const COPY: bool>(
        crc: u32,
        dst: Option<*mut u8>,
        src: *const u8,
        len: usize,
    ) -> (u32, usize) {
        let dst = dst.unwrap_or(std::ptr::null_mut());
        let done = len - len % STEP;
        // SAFETY: the caller vouches for the ranges. Every access is below `done`, in lanes of 64
        // bytes, and needs no alignment.
        let take = |at: usize| unsafe {
            let bytes = _mm512_loadu_si512(src.add(at).cast());
            if COPY {
                _mm512_storeu_si512(dst.add(at).cast(), bytes);
            }
            bytes
        };
        let factors = _mm512_set_epi64(SECOND, FIRST, SECOND, FIRST, SECOND, FIRST, SECOND, FIRST);
        // The state of a CRC is added to the first four bytes.
        let state = _mm512_zextsi128_si512(_mm_cvtsi32_si128(!crc as i32));
        let mut sums = [_mm512_xor_si512(take(0), state), take(64), take(128), take(192)];
        let mut at = STEP;
        while at < done {
            for (lane, sum) in sums.iter_mut().enumerate() {
                let first = _mm512_clmulepi64_epi128::<0x00>(*sum, factors);
                let second = _mm512_clmulepi64_epi128::<0x11>(*sum, factors);
                // 0x96: the exclusive or of three values.
                *sum = _mm512_ternarylogic_epi64::<0x96>(first, second, take(at + 64 * lane));
            }
            at += STEP;
        }
        let mut last = [0u64; STEP / 8];
        for (lane, sum) in sums.iter().enumerate() {
            // SAFETY: the array has four lanes of 64 bytes.
            unsafe { _mm512_storeu_si512(last.as_mut_ptr().add(8 * lane).cast(), *sum) };
        }
        let state = last.iter().fold(0, |state, word| _mm_crc32_u64(state, *word));
        (!(state as u32), done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_alignment_agrees_with_the_plain_way() {
        let source: Vec<u8> =
            (0..70_000u32).map(|at| (at.wrapping_mul(0x9E37_79B9) >> 24) as u8).collect();
        let mut copied = vec![0; source.len()];
        let lengths =
            (0..600).chain([2047, 2048, 2049, 2303, 2304, 4095, 4096, 65_535, 65_536, 69_000]);
        for len in lengths {
            for start in [0, 1, 7, 63] {
                for crc in [0, 0xDEAD_BEEF] {
                    let bytes = &source[start..start + len];
                    let expected = crc32c::crc32c_append(crc, bytes);
                    assert_eq!(crc32c(crc, bytes), expected, "{len} bytes from {start}");
                    copied.fill(0xEE);
                    // SAFETY: both are arrays of this test that are long enough.
                    let found = unsafe {
                        copy_with_crc32c(crc, copied[3..].as_mut_ptr(), bytes.as_ptr(), len)
                    };
                    assert_eq!(found, expected, "{len} bytes from {start}, copied");
                    assert_eq!(&copied[3..3 + len], bytes);
                    assert!(copied[..3].iter().chain(&copied[3 + len..]).all(|byte| *byte == 0xEE));
                }
            }
        }
    }
}
