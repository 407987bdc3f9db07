//! Memory copies: one by the C library, one by whole cache lines, and one with stores that bypass
//! the caches.
//!
//! A copy larger than the caches evicts everything else. With ordinary stores, it also reads every
//! destination line before it overwrites it. Non-temporal stores do neither. They are weakly
//! ordered, so there is one rule: **call [`store_fence`] between a [`CopyKind::NonTemporal`] copy
//! and the store that publishes it** (a flag, a counter, a wake-up). Used by every path on which
//! the engine copies bytes itself: same process, shared mapping, bounce ring.

use std::ptr;

/// The kind of stores that [`copy`] uses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum CopyKind {
    /// The C library's copy where it is fast. Best while source and destination fit in the core's
    /// own cache.
    Plain,
    /// Ordinary stores of whole lines. Best while the last-level cache holds source and
    /// destination.
    Cached,
    /// Stores that bypass the caches; weakly ordered until [`store_fence`].
    NonTemporal,
}

/// Transfers of at least this many bytes in total use non-temporal stores, unless measured speeds
/// say otherwise (`transport::stores`).
///
/// Measured on a 2.8 GHz Ice Lake (L2 1.25 MiB per core, L3 48 MiB) with 4 KiB pages of shared
/// memory. Values are GB per second of thread CPU time, best of 3 to 5 on a shared machine:
///
/// | | plain | non-temporal |
/// |---|---|---|
/// | same buffers again, 512 KiB / 1 MiB / 2 MiB / 8 MiB | 32 / 14 / 14 / 11 | 19 / 18 / 16 / 15 |
/// | same buffers again, 16 MiB / 100 MiB | 6.4 / 10.3 | 10.8 / 9.4 |
/// | walking 512 MiB in pieces of 64 KiB to 16 MiB | 5.6-6.6 | 9.2-10.0 |
/// | cold source, this core reads the copy, 1 / 4 / 16 MiB | 6.3 / 6.3 / 3.7 | 4.4 / 4.7 / 4.7 |
/// | 100,000 blocks of 4 KiB, both sides at random in 512 MiB | 4.7 | 5.2 |
/// | the same with [`prefetch`] of the next block | 5.4 | 6.6 |
///
/// (One plain call of 100 MiB keeps up, probably because the C library then uses streaming stores.
/// The engine never copies that much in one call.) By bandwidth alone, the break-even is at 1 MiB.
/// With a reader that follows closely, it is between 4 and 16 MiB. 2 MiB is a compromise.
pub const NON_TEMPORAL_FROM: u64 = 2 << 20;

/// The kind of copy for a transfer of `total` bytes, in any number of pieces.
#[inline]
pub fn kind_for(total: u64) -> CopyKind {
    if total >= NON_TEMPORAL_FROM { CopyKind::NonTemporal } else { CopyKind::Plain }
}

/// Copies `len` bytes from `src` to `dst`. The ranges may overlap, as when a region is transferred
/// onto itself. Then this call copies the original bytes of its source, but it may overwrite bytes
/// that later calls still have to read.
///
/// The bytes of a [`CopyKind::NonTemporal`] copy may become visible after stores that follow it in
/// program order, until [`store_fence`] is called on the same thread.
///
/// # Safety
///
/// `src` must be readable and `dst` writable for `len` bytes. After a non-temporal copy, the
/// calling thread must call [`store_fence`] before it reads those bytes or publishes them.
// Always inline: a call costs a small copy 22 more instructions.
#[inline(always)]
pub unsafe fn copy(kind: CopyKind, dst: *mut u8, src: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if match kind {
        CopyKind::Plain => {
            len >= lines::LIBC && !(dst.addr() ^ src.addr()).is_multiple_of(lines::LINE)
        }
        CopyKind::Cached | CopyKind::NonTemporal => len >= lines::SHORTEST,
    } && dst.addr().abs_diff(src.addr()) >= len
    {
        // SAFETY: the caller upholds the same contract, and the ranges do not overlap.
        return unsafe { lines::copy(kind == CopyKind::NonTemporal, dst, src, len) };
    }
    let _ = kind;
    // SAFETY: the caller guarantees both ranges.
    unsafe { ptr::copy(src, dst, len) }
}

/// Starts to load the first cache lines of the block that is copied next, while another one is
/// being copied.
///
/// The processor's prefetcher stops at page borders, so each scattered block begins with a miss.
/// Four lines are enough to start it; 16 gain less and 64 lose. Within one block it needs no help:
/// software prefetch in the copy loops gained nothing on long copies and lost 10-20 % on scattered
/// blocks. Any address is allowed, even an unmapped one.
#[inline]
pub fn prefetch(src: *const u8) {
    #[cfg(target_arch = "x86_64")]
    for line in 0..4 {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch is a hint. It never faults and changes no observable state.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(line * 64).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = src;
}

/// Orders all earlier non-temporal stores of this thread before all its later stores.
#[inline]
pub fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `sfence` is part of SSE, which every x86_64 processor has. It accesses no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Copies by whole cache lines on x86_64, with the instruction set chosen at run time.
///
/// **Ranges.** All functions require that `src` is readable and `dst` writable for `len` bytes, and
/// that the two ranges do not overlap.
#[cfg(target_arch = "x86_64")]
mod lines {
    use std::arch::x86_64::{
        __m256i, __m512i, _mm256_loadu_si256, _mm256_store_si256, _mm256_stream_si256,
        _mm512_loadu_si512, _mm512_store_si512, _mm512_stream_si512,
    };
    use std::ptr;

    /// A cache line. A non-temporal burst must fill a whole line, or it becomes partial writes.
    pub(super) const LINE: usize = 64;

    /// Bytes per loop iteration: four lines, which are enough loads in flight to hide most of a
    /// cache miss.
    const TURN: usize = 4 * LINE;

    /// Below this size, the unaligned head and tail would be most of the copy.
    pub(super) const SHORTEST: usize = 256;

    /// From this size on, the C library copies only ranges with equal alignment. It uses `rep
    /// movsb`. On a Zen 4, that falls from 90 GB/s to 3.5 GB/s if the destination lies up to 15
    /// bytes further into its page than the source. At 16 bytes, which is the offset of malloc's
    /// large blocks relative to shared memory, it falls to between 2 and 40 GB/s.
    pub(super) const LIBC: usize = 2 << 10;

    /// The widest available store, in ascending order.
    #[derive(Clone, Copy, Debug, Eq, PartialEq, PartialOrd)]
    pub(super) enum Level {
        Neither,
        Avx2,
        Avx512,
    }

    impl Level {
        /// The level of this processor. Detected once; later calls are a load.
        #[inline]
        pub(super) fn here() -> Self {
            if is_x86_feature_detected!("avx512f") {
                Self::Avx512
            } else if is_x86_feature_detected!("avx2") {
                Self::Avx2
            } else {
                Self::Neither
            }
        }
    }

    /// # Safety
    ///
    /// As [`super::copy`], and the ranges must not overlap.
    #[inline]
    pub(super) unsafe fn copy(stream: bool, dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: the caller upholds "Ranges", and `Level::here` returns a detected level.
        unsafe {
            match stream {
                true => copy_with::<true>(Level::here(), dst, src, len),
                false => copy_with::<false>(Level::here(), dst, src, len),
            }
        }
    }

    /// # Safety
    ///
    /// As [`copy`], and the processor must support `level`.
    pub(super) unsafe fn copy_with<const STREAM: bool>(
        level: Level,
        dst: *mut u8,
        src: *const u8,
        len: usize,
    ) {
        // The wide stores need alignment, so copy the bytes up to the destination's first whole
        // line separately.
        let head = dst.align_offset(LINE).min(len);
        let body = (len - head) / TURN * TURN;
        // SAFETY: head + body <= len, so every range below lies inside the caller's ranges. `dst +
        // head` is line-aligned and `body` is a multiple of `TURN`, as the loops require. The
        // caller guarantees the instruction set of `level`.
        unsafe {
            ptr::copy_nonoverlapping(src, dst, head);
            let (d, s) = (dst.add(head), src.add(head));
            match level {
                Level::Avx512 => avx512::<STREAM>(d, s, body),
                Level::Avx2 => avx2::<STREAM>(d, s, body),
                Level::Neither => ptr::copy_nonoverlapping(s, d, body),
            }
            ptr::copy_nonoverlapping(s.add(body), d.add(body), len - head - body);
        }
    }

    /// # Safety
    ///
    /// `dst` must be writable and aligned to 64 bytes, and the processor must have AVX-512F.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store512<const STREAM: bool>(dst: *mut __m512i, value: __m512i) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            if STREAM { _mm512_stream_si512(dst, value) } else { _mm512_store_si512(dst, value) }
        }
    }

    /// # Safety
    ///
    /// `dst` must be writable and aligned to 32 bytes, and the processor must have AVX2.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn store256<const STREAM: bool>(dst: *mut __m256i, value: __m256i) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            if STREAM { _mm256_stream_si256(dst, value) } else { _mm256_store_si256(dst, value) }
        }
    }

    /// # Safety
    ///
    /// As [`copy`]. Also, `dst` must be line-aligned, `len` a multiple of [`TURN`], and the
    /// processor must have AVX-512F.
    #[target_feature(enable = "avx512f")]
    unsafe fn avx512<const STREAM: bool>(dst: *mut u8, src: *const u8, len: usize) {
        let mut at = 0;
        while at < len {
            // SAFETY: `at + TURN <= len`, so loads and stores stay inside the caller's ranges. The
            // stores are aligned, because `dst` is and `TURN` is a multiple of the line size.
            unsafe {
                let d = dst.add(at).cast::<__m512i>();
                let s = src.add(at).cast::<__m512i>();
                let a = _mm512_loadu_si512(s);
                let b = _mm512_loadu_si512(s.add(1));
                let c = _mm512_loadu_si512(s.add(2));
                let e = _mm512_loadu_si512(s.add(3));
                store512::<STREAM>(d, a);
                store512::<STREAM>(d.add(1), b);
                store512::<STREAM>(d.add(2), c);
                store512::<STREAM>(d.add(3), e);
            }
            at += TURN;
        }
    }

    /// # Safety
    ///
    /// As [`avx512`], but the processor must have AVX2.
    #[target_feature(enable = "avx2")]
    unsafe fn avx2<const STREAM: bool>(dst: *mut u8, src: *const u8, len: usize) {
        // Half of `TURN` per iteration: four loads of 32 bytes, two lines.
        const HALF: usize = TURN / 2;
        let mut at = 0;
        while at < len {
            // SAFETY: as in `avx512`: `HALF` divides `TURN`, so `at + HALF <= len`, and 32 divides
            // `LINE`.
            unsafe {
                let d = dst.add(at).cast::<__m256i>();
                let s = src.add(at).cast::<__m256i>();
                let a = _mm256_loadu_si256(s);
                let b = _mm256_loadu_si256(s.add(1));
                let c = _mm256_loadu_si256(s.add(2));
                let e = _mm256_loadu_si256(s.add(3));
                store256::<STREAM>(d, a);
                store256::<STREAM>(d.add(1), b);
                store256::<STREAM>(d.add(2), c);
                store256::<STREAM>(d.add(3), e);
            }
            at += HALF;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lengths around the shortest streamed copy, the unrolled iteration and the alignment head.
    const LENGTHS: [usize; 25] = [
        0, 1, 7, 31, 63, 64, 65, 127, 128, 255, 256, 257, 300, 319, 320, 321, 383, 511, 512, 513,
        575, 576, 1000, 4096, 4100,
    ];

    /// Copies between all alignments, with canary bytes around the destination.
    fn check(copier: impl Fn(*mut u8, *const u8, usize)) {
        let source: Vec<u8> = (0..8192u32).map(|i| (i * 31 % 251) as u8).collect();
        let mut target = vec![0xEE; 8192];
        for len in LENGTHS {
            for to in (0..=64).chain([127]) {
                for from in [0, 1, 3, 8, 31, 33, 63, 64] {
                    target.fill(0xEE);
                    copier(target[to..][..len].as_mut_ptr(), source[from..][..len].as_ptr(), len);
                    store_fence();
                    assert_eq!(target[to..to + len], source[from..from + len], "{len} {to} {from}");
                    assert!(target[..to].iter().all(|b| *b == 0xEE), "before: {len} {to} {from}");
                    assert!(
                        target[to + len..].iter().all(|b| *b == 0xEE),
                        "after: {len} {to} {from}"
                    );
                }
            }
        }
    }

    #[test]
    fn every_kind_copies_exactly_the_range() {
        for kind in [CopyKind::Plain, CopyKind::Cached, CopyKind::NonTemporal] {
            // SAFETY: `check` passes slices of that length from two separate vectors, and fences.
            check(|dst, src, len| unsafe { copy(kind, dst, src, len) });
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn check_level(level: lines::Level) {
        assert!(level <= lines::Level::here(), "this processor has no {level:?}");
        // SAFETY: `check` passes slices of that length from two separate vectors, and fences. The
        // processor has this level.
        check(|dst, src, len| unsafe { lines::copy_with::<true>(level, dst, src, len) });
        // SAFETY: the same argument.
        check(|dst, src, len| unsafe { lines::copy_with::<false>(level, dst, src, len) });
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn copies_without_wide_stores_are_exactly_the_range() {
        check_level(lines::Level::Neither);
    }

    #[cfg(target_arch = "x86_64")]
    mod needs_avx2 {
        use super::*;

        #[test]
        #[ignore = "probes whether this processor has AVX2"]
        fn probe() {
            assert!(lines::Level::here() >= lines::Level::Avx2, "this processor has no AVX2");
        }

        #[test]
        #[ignore = "needs AVX2: cargo xtask test --only test"]
        fn copies_are_exactly_the_range() {
            check_level(lines::Level::Avx2);
        }
    }

    #[cfg(target_arch = "x86_64")]
    mod needs_avx512 {
        use super::*;

        #[test]
        #[ignore = "probes whether this processor has AVX-512F"]
        fn probe() {
            assert!(lines::Level::here() >= lines::Level::Avx512, "this processor has no AVX-512F");
        }

        #[test]
        #[ignore = "needs AVX-512F: cargo xtask test --only test"]
        fn copies_are_exactly_the_range() {
            check_level(lines::Level::Avx512);
        }
    }

    #[test]
    fn overlapping_ranges_are_copied_correctly() {
        for kind in [CopyKind::Plain, CopyKind::Cached, CopyKind::NonTemporal] {
            for (from, to) in [(0, 3), (3, 0), (0, 64), (100, 37), (0, 2999), (5, 5)] {
                let before: Vec<u8> = (0..8192u32).map(|i| (i * 31 % 251) as u8).collect();
                let mut memory = before.clone();
                let start = memory.as_mut_ptr();
                // SAFETY: both ranges lie in the vector; the fence follows below.
                unsafe { copy(kind, start.add(to), start.add(from), 5000) };
                store_fence();
                assert_eq!(
                    memory[to..to + 5000],
                    before[from..from + 5000],
                    "{kind:?} {from} {to}"
                );
            }
        }
    }

    #[test]
    fn long_copies_are_whole() {
        let source: Vec<u8> = (0..3u32 << 20).map(|i| (i >> 3) as u8 ^ i as u8).collect();
        let mut target = vec![0; source.len()];
        assert_eq!(kind_for(source.len() as u64), CopyKind::NonTemporal);
        // SAFETY: two vectors of equal length; the fence follows below.
        unsafe {
            copy(CopyKind::NonTemporal, target.as_mut_ptr(), source.as_ptr(), source.len());
        }
        store_fence();
        assert!(source == target);
    }

    #[test]
    fn the_switch_is_where_it_says() {
        assert_eq!(kind_for(NON_TEMPORAL_FROM - 1), CopyKind::Plain);
        assert_eq!(kind_for(NON_TEMPORAL_FROM), CopyKind::NonTemporal);
    }

    #[test]
    fn a_prefetch_accesses_no_memory_and_takes_any_address() {
        let page = rustix::param::page_size();
        // SAFETY: a new mapping at an address that the kernel chooses.
        let area = unsafe {
            let (prot, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::PRIVATE);
            rustix::mm::mmap_anonymous(ptr::null_mut(), page, prot, flags).unwrap()
        };
        let is_resident = || {
            let mut resident = 0xFF_u8;
            // SAFETY: the range is one mapped page, for which the call writes one byte.
            assert_eq!(unsafe { libc::mincore(area, page, &mut resident) }, 0);
            resident & 1 == 1
        };
        prefetch(area.cast());
        assert!(!is_resident(), "the prefetch read the page");
        // SAFETY: the page is mapped readable.
        unsafe { area.cast::<u8>().read_volatile() };
        assert!(is_resident(), "a read is visible to `mincore`");
        // SAFETY: the mapping is this test's own, and no reference to it exists.
        unsafe { rustix::mm::munmap(area, page).unwrap() };
        prefetch(ptr::null());
        prefetch(ptr::without_provenance(usize::MAX));
    }
}
