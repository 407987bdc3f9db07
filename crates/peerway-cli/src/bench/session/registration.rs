//! The cost of registering memory with RDMA devices, measured through the public interface alone.
//!
//! The engine registers a region with its devices when a transfer that uses it is prepared (or
//! first posted). This benchmark creates a region and compares its first prepare with later ones.
//! The difference is the cost of the registration, or of the lookup of an existing registration.
//!
//! The lookups are for ranges inside a registered range, in batches of many regions. They are
//! measured without and with smaller registrations inside that range.

use std::time::Instant;

use anyhow::ensure;
use peerway::{Batch, OwnedMemory, Region};

use super::{Session, Tools, memory};
use crate::bench::layout::mix;
use crate::bench::report::Registration;

/// Bytes to register.
const SIZES: [u64; 3] = [1 << 20, 64 << 20, 1 << 30];
/// Registrations per size, whose median counts. Also the number of later prepares to compare with.
const REPEATS: usize = 5;
/// Bytes of the transfers.
const PIECE: u64 = 8;
/// Bytes of the memory whose ranges are looked up.
const WHOLE: u64 = 32 << 20;
/// Lookups in total, and per batch.
const LOOKUPS: usize = 100_000;
const AT_ONCE: usize = 1000;
/// Smaller registrations inside the whole.
const SMALLER: usize = 1000;

impl Session {
    /// Measures registrations and lookups.
    pub(crate) fn registration(&self, tools: &mut Tools<'_>) -> anyhow::Result<Registration> {
        let mut sizes = Vec::new();
        for size in SIZES {
            // A size that fails, for example for lack of memory, is left out.
            let Ok(nanos) = self.registers(tools, size) else { continue };
            sizes.push((size, nanos));
        }
        let lookup = self.lookups(tools, 0)?;
        let behind = self.lookups(tools, SMALLER)?;
        let path = self.name.clone();
        Ok(Registration { path, sizes, lookups: LOOKUPS, lookup, behind: (SMALLER, behind) })
    }

    /// Nanoseconds to register `size` bytes.
    fn registers(&self, tools: &mut Tools<'_>, size: u64) -> anyhow::Result<u64> {
        let mut all = Vec::new();
        for _ in 0..REPEATS {
            let region = memory::region(&self.endpoint, size, false)?;
            all.push(self.first_prepare(tools, &[region])?);
        }
        Ok(median(all))
    }

    /// Nanoseconds per lookup of a nested range, with `smaller` smaller registrations inside.
    fn lookups(&self, tools: &mut Tools<'_>, smaller: usize) -> anyhow::Result<u64> {
        let whole = Whole::new(WHOLE)?;
        let part = |at: u64, len: u64| Ok(self.endpoint.register(whole.part(at, len))?);
        let step = WHOLE / (smaller as u64 + 1);
        let kept: Vec<Region> =
            (0..smaller as u64).map(|i| part(i * step, 4096)).collect::<anyhow::Result<_>>()?;
        for some in kept.chunks(AT_ONCE) {
            self.first_prepare(tools, some)?;
        }
        let _outer = part(0, WHOLE).and_then(|outer| {
            self.first_prepare(tools, std::slice::from_ref(&outer))?;
            Ok(outer)
        })?;
        let mut all = Vec::new();
        for round in 0..LOOKUPS / AT_ONCE {
            let nested: Vec<Region> = (0..AT_ONCE)
                .map(|i| {
                    let random = mix((round * AT_ONCE + i) as u64);
                    // Longer than the smaller registrations, so that none of them covers it.
                    let len = 4096 + PIECE + random % (64 << 10);
                    part((random >> 32) % (WHOLE - len), len)
                })
                .collect::<anyhow::Result<_>>()?;
            all.push(self.first_prepare(tools, &nested)? / AT_ONCE as u64);
        }
        Ok(median(all))
    }

    /// How much longer the first prepare with these regions takes than later ones, in nanoseconds.
    fn first_prepare(&self, tools: &mut Tools<'_>, regions: &[Region]) -> anyhow::Result<u64> {
        let room = self.remote.len() / PIECE;
        ensure!(room > 0, "the other side's buffer is smaller than {PIECE} bytes");
        let pairs: Vec<_> = regions
            .iter()
            .enumerate()
            .map(|(i, region)| {
                let at = (i as u64 % room) * PIECE;
                (region.slice(0..PIECE), self.remote.slice(at..at + PIECE))
            })
            .collect();
        let batch = Batch::write_vector(&pairs)?;
        let prepare = || -> anyhow::Result<u64> {
            let batch = batch.clone();
            let start = Instant::now();
            let prepared = self.peer.prepare(batch)?;
            let taken = start.elapsed();
            drop(prepared);
            Ok(taken.as_nanos() as u64)
        };
        let first = prepare()?;
        let later = (0..REPEATS).map(|_| prepare()).collect::<anyhow::Result<_>>()?;
        // Check that the prepared transfer works and uses the RDMA devices.
        let transfer = self.peer.post(&batch)?;
        transfer.join().ok()?;
        ensure!(
            transfer.path().to_string() == self.name,
            "the transfer did not take {}",
            self.name
        );
        tools.dog.beat();
        Ok(first.saturating_sub(median(later)))
    }
}

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

/// Leaked memory. It lives as long as the program, so any number of regions can be parts of it.
#[derive(Clone, Copy)]
struct Whole {
    addr: usize,
}

impl Whole {
    fn new(len: u64) -> anyhow::Result<Self> {
        let bytes: &'static mut [u8] = memory::touched(len)?.leak();
        Ok(Self { addr: bytes.as_mut_ptr().expose_provenance() })
    }

    fn part(self, at: u64, len: u64) -> Part {
        Part { addr: self.addr + at as usize, len: len as usize }
    }
}

struct Part {
    addr: usize,
    len: usize,
}

// SAFETY: `Whole::part` gives a range of memory that `Whole::new` leaked, so the range is valid
// forever. No reference to it exists: this program names it only by address.
unsafe impl OwnedMemory for Part {
    fn bytes(&mut self) -> (*mut u8, usize) {
        (std::ptr::with_exposed_provenance_mut(self.addr), self.len)
    }
}
