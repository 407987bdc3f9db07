//! What it costs to make memory known to RDMA devices, by nothing but what an application has.
//!
//! The engine registers a region with its devices when a transfer that uses it is prepared (or first posted). So a
//! region is made, and its first prepare is timed against later ones: the difference is the registration, or the
//! lookup of one that is there already. Lookups are of ranges nested in a registered one, by batches of many regions;
//! once with the whole registered first, and once behind smaller registrations inside it.

use std::time::Instant;

use anyhow::ensure;
use peerway::{Batch, OwnedMemory, Region};

use super::{Session, Tools, memory};
use crate::bench::layout::mix;
use crate::bench::report::Registration;

/// What is registered.
const SIZES: [u64; 3] = [1 << 20, 64 << 20, 1 << 30];
/// Registrations of each size, of which the median counts; prepares that each is compared with.
const REPEATS: usize = 5;
/// Bytes of the transfers.
const PIECE: u64 = 8;
/// Memory whose ranges are looked up.
const WHOLE: u64 = 32 << 20;
/// Ranges looked up, and how many of them in one batch.
const LOOKUPS: usize = 100_000;
const AT_ONCE: usize = 1000;
/// Smaller registrations inside the whole.
const SMALLER: usize = 1000;

impl Session {
    /// Measures registrations and lookups.
    pub(crate) fn registration(&self, tools: &mut Tools<'_>) -> anyhow::Result<Registration> {
        let mut sizes = Vec::new();
        for size in SIZES {
            // Where memory does not suffice the size is left out.
            let Ok(nanos) = self.registers(tools, size) else { continue };
            sizes.push((size, nanos));
        }
        let lookup = self.lookups(tools, 0)?;
        let behind = self.lookups(tools, SMALLER)?;
        let path = self.name.clone();
        Ok(Registration { path, sizes, lookups: LOOKUPS, lookup, behind: (SMALLER, behind) })
    }

    /// Nanoseconds to register so many bytes.
    fn registers(&self, tools: &mut Tools<'_>, size: u64) -> anyhow::Result<u64> {
        let mut all = Vec::new();
        for _ in 0..REPEATS {
            let region = memory::region(&self.endpoint, size, false)?;
            all.push(self.first_prepare(tools, &[region])?);
        }
        Ok(median(all))
    }

    /// Nanoseconds that one lookup of a nested range takes, behind so many smaller registrations.
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
                    // Longer than the smaller ones, so that none of them is the answer.
                    let len = 4096 + PIECE + random % (64 << 10);
                    part((random >> 32) % (WHOLE - len), len)
                })
                .collect::<anyhow::Result<_>>()?;
            all.push(self.first_prepare(tools, &nested)? / AT_ONCE as u64);
        }
        Ok(median(all))
    }

    /// How much longer the first prepare that uses these regions takes than later ones, in nanoseconds.
    fn first_prepare(&self, tools: &mut Tools<'_>, regions: &[Region]) -> anyhow::Result<u64> {
        let room = self.remote.len() / PIECE;
        ensure!(room > 0, "the other side's buffer is too small");
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
        // That it was for devices, and works.
        let transfer = self.peer.post(&batch)?;
        transfer.join().ok()?;
        ensure!(transfer.path().to_string() == self.name, "devices did not carry it out");
        tools.dog.beat();
        Ok(first.saturating_sub(median(later)))
    }
}

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

/// Memory that lasts as long as the program, so that any number of regions can be parts of it.
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

// SAFETY: the memory is leaked, lies inside what `Whole::new` got, and is only ever named by address.
unsafe impl OwnedMemory for Part {
    fn bytes(&mut self) -> (*mut u8, usize) {
        (std::ptr::with_exposed_provenance_mut(self.addr), self.len)
    }
}
