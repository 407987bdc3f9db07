//! Fills regions with patterns, checks them, and watches them for changes.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use peerway::Region;

use crate::random::pattern;

/// Bytes per step. A step fits in the L2 cache, so that checks run at memory speed.
const STEP: u64 = 256 << 10;

/// Fills part of a region with the pattern of `seed`, beginning at byte `from` of the pattern.
pub fn fill(region: &Region, seed: u64, from: u64, offset: u64, len: u64) -> Result<()> {
    each(offset, len, |at, bytes| {
        pattern(seed, from + (at - offset), bytes);
        Ok(region.write_at(at, bytes)?)
    })
}

/// Fills a whole region with the pattern of `seed`.
pub fn fill_all(region: &Region, seed: u64) -> Result<()> {
    fill(region, seed, 0, 0, region.len())
}

/// Fails unless part of a region holds the pattern of `seed`, beginning at byte `from` of the
/// pattern.
pub fn check(region: &Region, seed: u64, from: u64, offset: u64, len: u64) -> Result<()> {
    let mut want = vec![0; STEP as usize];
    each(offset, len, |at, bytes| {
        region.read_at(at, bytes)?;
        let want = &mut want[..bytes.len()];
        pattern(seed, from + (at - offset), want);
        if bytes != want {
            let i = bytes.iter().zip(&*want).position(|(a, b)| a != b).unwrap_or(0);
            bail!(
                "byte {} of the region is {:#04x}, not {:#04x}",
                at + i as u64,
                bytes[i],
                want[i]
            );
        }
        Ok(())
    })
}

/// Counts the bytes that hold the pattern of `new`. Fails on a byte that matches neither `old` nor
/// `new`.
pub fn count_new(region: &Region, old: u64, new: u64) -> Result<u64> {
    let (mut a, mut b) = (vec![0; STEP as usize], vec![0; STEP as usize]);
    let mut count = 0;
    each(0, region.len(), |at, bytes| {
        region.read_at(at, bytes)?;
        pattern(old, at, &mut a[..bytes.len()]);
        pattern(new, at, &mut b[..bytes.len()]);
        if bytes == &a[..bytes.len()] {
            return Ok(());
        }
        for (i, byte) in bytes.iter().enumerate() {
            if *byte == b[i] {
                count += 1;
            } else if *byte != a[i] {
                bail!("byte {} is {byte:#04x}: neither old nor new", at + i as u64);
            }
        }
        Ok(())
    })?;
    Ok(count)
}

/// A hash of part of a region, which changes when the bytes do.
pub fn hash(region: &Region, offset: u64, len: u64) -> Result<u64> {
    let mut sum = 0xcbf2_9ce4_8422_2325u64;
    each(offset, len, |at, bytes| {
        region.read_at(at, bytes)?;
        let mut chunks = bytes.chunks_exact(8);
        for chunk in &mut chunks {
            let word = u64::from_le_bytes(chunk.try_into().unwrap_or_default());
            sum = (sum ^ word).wrapping_mul(0x2127_599b_f432_5c37).rotate_left(29);
        }
        for byte in chunks.remainder() {
            sum = (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Ok(())
    })?;
    Ok(sum)
}

/// Fails if the region changes within `time`.
pub fn stays(region: &Region, time: Duration) -> Result<()> {
    let before = hash(region, 0, region.len())?;
    let until = Instant::now() + time;
    loop {
        std::thread::sleep(Duration::from_millis(20));
        if hash(region, 0, region.len())? != before {
            bail!("memory changed after its fence was reported as held");
        }
        if Instant::now() >= until {
            return Ok(());
        }
    }
}

fn each(offset: u64, len: u64, mut work: impl FnMut(u64, &mut [u8]) -> Result<()>) -> Result<()> {
    let mut buffer = vec![0; STEP.min(len) as usize];
    let mut done = 0;
    while done < len {
        let step = STEP.min(len - done);
        work(offset + done, &mut buffer[..step as usize])?;
        done += step;
    }
    Ok(())
}
