//! A peer that overwrites everything it shares with its victims.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use peerway_testkit::procfs;
use peerway_testkit::random::Random;

/// Bytes at the end of a segment that hold the gates of both sides.
const GATES: u64 = 512 << 10;

/// Writes random words over the shared segments of all sessions of this process, or over their
/// gates alone.
pub(crate) fn scribble(seed: u64, time: Duration, gates: bool) -> Result<String> {
    let segments = procfs::mappings_of("memfd:peerway-session")?;
    ensure!(!segments.is_empty(), "this process shares no session segment");
    let mut random = Random::new(seed);
    let until = Instant::now() + time;
    let mut words = 0u64;
    while Instant::now() < until {
        for &(start, end) in &segments {
            for _ in 0..256 {
                // Half of the writes go to the first and last pages, which hold headers and gates.
                let len = (end - start) as u64;
                let at = match random.below(4) {
                    // Few gates are in use, and those are first in each table.
                    0 | 1 if gates => {
                        len - GATES + random.below(2) * (GATES / 2) + random.below(512)
                    }
                    _ if gates => len - GATES + random.below(GATES - 8),
                    0 => random.below(512),
                    1 => len - 8 - random.below(GATES).min(len - 8),
                    _ => random.below(len - 8),
                } & !7;
                let word = match random.below(4) {
                    0 => 0,
                    1 => u64::MAX,
                    2 => random.below(1 << 22),
                    _ => random.word(),
                };
                // SAFETY: the range is a shared mapping of this process, which its session keeps
                // mapped. The store may tear what the engine reads there, which is the purpose.
                unsafe { ((start as u64 + at) as *mut u64).write_volatile(word) };
                words += 1;
            }
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(words.to_string())
}
