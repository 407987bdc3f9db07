//! `cuMemAlloc`: many allocations in few segments.
//!
//! As on a GPU, small allocations share segments of 2 MiB and start at multiples of 512 bytes. An
//! export names a segment, so it must also name the allocation's offset in it. No small allocation
//! starts at the start of its segment, so that a program that confuses the two fails.

use std::collections::BTreeMap;
use std::sync::Arc;

use peerway_sys::cuda::ffi::*;

use crate::arena::{Arena, GRANULE};
use crate::calls::{call_in_context, call_to_give_back, put, valid};
use crate::lock;
use crate::machine::Machine;
use crate::memfd::What;
use crate::physical::{Physical, next_id};
use crate::space::{Kind, Mapping};

/// The granularity of allocations.
const UNIT: u64 = 512;

/// Larger allocations have their own segment and start at its start.
const SMALL: u64 = 1 << 20;

/// The segments, by start.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    segments: BTreeMap<u64, Segment>,
}

#[derive(Debug)]
struct Segment {
    physical: Arc<Physical>,
    /// Free ranges: lengths by offset. No two ranges are adjacent.
    free: BTreeMap<u64, u64>,
    allocations: u32,
}

impl Segments {
    /// Allocates `len` bytes. Returns the address, the memory, and the offset in it.
    fn allocate(
        &mut self,
        arena: &mut Arena,
        machine: &Machine,
        device: u32,
        len: u64,
    ) -> Result<(u64, Arc<Physical>, u64), CUresult> {
        let len = len.next_multiple_of(UNIT);
        if len <= SMALL {
            for (start, segment) in &mut self.segments {
                if segment.physical.name.device == device
                    && let Some(offset) = segment.take(len)
                {
                    return Ok((start + offset, Arc::clone(&segment.physical), offset));
                }
            }
        }
        let lead = if len <= SMALL { UNIT } else { 0 };
        let oom = CUDA_ERROR_OUT_OF_MEMORY;
        let size = (len + lead).checked_next_multiple_of(GRANULE).ok_or(oom)?;
        let name = Physical::name(What::Segment, device, 0, true)?;
        let physical = Arc::new(Physical::create(machine, name, size, 0)?);
        let start = arena.reserve(size, GRANULE).ok_or(oom)?;
        let mut segment = Segment {
            physical: Arc::clone(&physical),
            free: BTreeMap::from([(lead, if lead > 0 { size - lead } else { len })]),
            allocations: 0,
        };
        let offset = segment.take(len).ok_or(oom)?;
        self.segments.insert(start, segment);
        Ok((start + offset, physical, offset))
    }

    /// Frees an allocation, and its segment with the last allocation in it.
    pub(crate) fn release(&mut self, arena: &mut Arena, address: u64, len: u64) {
        let Some((start, segment)) = self.segments.range_mut(..=address).next_back() else {
            return;
        };
        let start = *start;
        segment.give_back(address - start, len.next_multiple_of(UNIT));
        if segment.allocations == 0 {
            arena.release(start, segment.physical.size);
            self.segments.remove(&start);
        }
    }
}

impl Segment {
    fn take(&mut self, len: u64) -> Option<u64> {
        let (offset, size) = self.free.iter().find(|(_, size)| **size >= len)?;
        let (offset, size) = (*offset, *size);
        self.free.remove(&offset);
        if size > len {
            self.free.insert(offset + len, size - len);
        }
        self.allocations += 1;
        Some(offset)
    }

    fn give_back(&mut self, offset: u64, len: u64) {
        let (mut offset, mut len) = (offset, len);
        if let Some((before, size)) = self.free.range(..offset).next_back().map(|(o, l)| (*o, *l))
            && before + size == offset
        {
            self.free.remove(&before);
            (offset, len) = (before, size + len);
        }
        if let Some(size) = self.free.remove(&(offset + len)) {
            len += size;
        }
        self.free.insert(offset, len);
        self.allocations -= 1;
    }
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, len: usize) -> CUresult {
    call_in_context("cuMemAlloc_v2", |machine, device| {
        valid(len > 0 && !pointer.is_null())?;
        let size = len as u64;
        let taken = size.checked_next_multiple_of(UNIT).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        device.take(taken, &machine.script)?;
        let mut space = lock(&machine.space);
        let space = &mut *space;
        let found = space.segments.allocate(&mut space.arena, machine, device.index, size);
        let (address, physical, offset) = found.inspect_err(|_| device.give_back(taken))?;
        let bit = 1 << device.index;
        let kind = Kind::Plain { ticket: None, taken };
        let id = next_id();
        let mapping = Mapping { size, physical, offset, id, readers: bit, writers: bit, kind };
        space.mappings.insert(address, mapping);
        // SAFETY: by the pointers contract.
        unsafe { put(pointer, address) }
    })
}

/// # Safety
///
/// The caller keeps the contract of CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(pointer: CUdeviceptr) -> CUresult {
    call_to_give_back("cuMemFree_v2", |machine| {
        let mut space = lock(&machine.space);
        let mapping = space.mappings.get(&pointer);
        valid(mapping.is_some_and(|mapping| matches!(mapping.kind, Kind::Plain { .. })))?;
        space.remove(machine, pointer);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ranges_become_one_again() {
        let name = Physical::name(What::Segment, 0, 0, true).expect("the kernel has randomness");
        let fd = crate::memfd::create(name, GRANULE).expect("there is memory");
        let physical = Arc::new(Physical::import(fd, name).expect("the memory can be mapped"));
        let free = BTreeMap::from([(UNIT, GRANULE - UNIT)]);
        let mut segment = Segment { physical, free: free.clone(), allocations: 0 };
        let taken: Vec<u64> = (0..3).map(|_| segment.take(UNIT).expect("there is room")).collect();
        assert_eq!(taken, [UNIT, 2 * UNIT, 3 * UNIT]);
        for offset in [taken[1], taken[0], taken[2]] {
            segment.give_back(offset, UNIT);
        }
        assert_eq!((segment.free, segment.allocations), (free, 0));
    }
}
