//! Buffers with their pages in place, refused rather than swapped out or killed for.

use std::fs;

use anyhow::{Context, ensure};
use peerway::{Endpoint, Region};

use super::size;

/// A run has two buffers of a size in each of its two processes.
const SHARE: u64 = 4;

/// Private memory, every page of it written once.
pub(crate) fn touched(len: u64) -> anyhow::Result<Vec<u8>> {
    ensure_room(len)?;
    let len = usize::try_from(len)?;
    let mut memory = Vec::new();
    memory
        .try_reserve_exact(len)
        .with_context(|| format!("cannot have a buffer of {}", size::show(len as u64)))?;
    advise_huge(&mut memory);
    memory.resize(len, 1);
    Ok(memory)
}

/// Asks for huge pages where they fit, before the pages exist: as NumPy does for large arrays, so
/// that private memory is what a user's would be. A kernel that has none ignores it.
fn advise_huge(memory: &mut Vec<u8>) {
    const HUGE: usize = 2 << 20;
    let start = memory.as_mut_ptr() as usize;
    let (first, end) = (start.next_multiple_of(HUGE), (start + memory.capacity()) & !(HUGE - 1));
    if first < end {
        // SAFETY: the range lies in the vector's own allocation, which holds no values yet; the
        // advice changes the size of its pages and nothing else.
        let _ = unsafe {
            rustix::mm::madvise(first as *mut _, end - first, rustix::mm::Advice::LinuxHugepage)
        };
    }
}

/// A region with every page written once: `shared` memory can be mapped by local peers.
pub(crate) fn region(endpoint: &Endpoint, len: u64, shared: bool) -> anyhow::Result<Region> {
    if !shared {
        return Ok(endpoint.register(touched(len)?)?);
    }
    ensure_room(len)?;
    let region = endpoint.allocate(usize::try_from(len)?)?;
    region.fill(0, len, 1)?;
    Ok(region)
}

fn ensure_room(len: u64) -> anyhow::Result<()> {
    let free = fs::read_to_string("/proc/meminfo").ok().and_then(|text| available(&text));
    let fits = free.is_none_or(|free| len <= free / SHARE);
    ensure!(
        fits,
        "a buffer of {} is more than a {SHARE}th of the free memory; choose smaller --sizes",
        size::show(len)
    );
    Ok(())
}

/// Bytes that the kernel says can be had without swapping.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_understood() {
        let text = "MemTotal:       24000 kB\nMemAvailable:   12000 kB\n";
        assert_eq!(available(text), Some(12_000 << 10));
        assert_eq!(available("MemTotal: 1 kB"), None);
    }

    #[test]
    fn absurd_sizes_are_refused() {
        let error = touched(1 << 60).unwrap_err();
        assert!(error.to_string().contains("1048576T"), "{error}");
    }
}
