//! What addresses mean: the one table that copies, kernels and questions look into.
//!
//! An address of the arena means what is mapped there; an address of the host means pinned memory, or
//! nothing that a GPU could reach. A look-up gives pieces of memory together with holds on them, so
//! that they stay for as long as somebody works on them, whatever is unmapped meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use peerway_sys::cuda::ffi::*;

use crate::arena::Arena;
use crate::host::Pinned;
use crate::machine::Machine;
use crate::physical::Physical;
use crate::plain::Segments;

#[derive(Debug, Default)]
pub(crate) struct Space {
    pub(crate) arena: Arena,
    /// What `cuMemAddressReserve` gave out: lengths by start.
    pub(crate) reservations: BTreeMap<u64, u64>,
    /// What device addresses mean, by start. No two overlap.
    pub(crate) mappings: BTreeMap<u64, Mapping>,
    /// Host memory that a GPU reaches, by start. No two overlap.
    pub(crate) pinned: BTreeMap<u64, Arc<Pinned>>,
    /// Handles of `cuMemCreate` memory, by its number.
    pub(crate) handles: HashMap<u64, Held>,
    pub(crate) segments: Segments,
}

/// A handle that the program has, as often as it was given to it.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) physical: Arc<Physical>,
    pub(crate) count: u32,
}

/// Memory at an address.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) size: u64,
    pub(crate) physical: Arc<Physical>,
    /// Where in that it begins.
    pub(crate) offset: u64,
    /// The number of the allocation, as `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub(crate) id: u64,
    /// Devices that may read it, one bit each.
    pub(crate) readers: u64,
    /// Devices that may write it.
    pub(crate) writers: u64,
    pub(crate) kind: Kind,
}

#[derive(Debug)]
pub(crate) enum Kind {
    /// An allocation of `cuMemAlloc`.
    Plain {
        /// Made with the first IPC handle: the file, and its number.
        ticket: Option<(OwnedFd, u64)>,
        /// What to give back to the device.
        taken: u64,
    },
    /// By `cuMemMap`.
    Mapped,
    /// An allocation of another process.
    Opened {
        /// The number of its ticket.
        ticket: u64,
        /// How often it was opened.
        count: u32,
        /// The device in whose context it was opened.
        by: u32,
        /// The reservation that is its alone.
        area: (u64, u64),
    },
}

/// Who wants to touch memory, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) device: u32,
    pub(crate) write: bool,
    /// By the driver, which copies between devices by itself; and not by a kernel.
    pub(crate) copy: bool,
}

/// A piece of memory that stays as long as this does.
pub(crate) struct Span {
    pub(crate) start: *mut u8,
    pub(crate) len: usize,
    _hold: Hold,
}

#[allow(dead_code, reason = "held for as long as the span")]
enum Hold {
    Device(Arc<Physical>),
    Host(Arc<Pinned>),
}

impl Space {
    /// The memory of a range, for a stream of a device.
    ///
    /// # Errors
    ///
    /// An illegal address.
    pub(crate) fn resolve(
        &self,
        access: Access,
        address: u64,
        len: u64,
    ) -> Result<Vec<Span>, CUresult> {
        let illegal = CUDA_ERROR_ILLEGAL_ADDRESS;
        let end = address.checked_add(len).ok_or(illegal)?;
        if !self.arena.contains(address) {
            return self.resolve_host(address, len).ok_or(illegal);
        }
        let mut spans = Vec::new();
        let mut at = address;
        while at < end {
            let (start, mapping) = self.mapping_at(at).ok_or(illegal)?;
            if !mapping.allows(access) {
                return Err(illegal);
            }
            let (offset, count) = (at - start, (end - at).min(start + mapping.size - at));
            let joins = matches!(mapping.kind, Kind::Mapped);
            if count < end - at && !(joins && self.in_one_reservation(address, end)) {
                return Err(illegal);
            }
            let place = mapping.physical.place(mapping.offset + offset, count);
            let hold = Hold::Device(Arc::clone(&mapping.physical));
            spans.push(Span { start: place, len: count as usize, _hold: hold });
            at += count;
        }
        Ok(spans)
    }

    fn resolve_host(&self, address: u64, len: u64) -> Option<Vec<Span>> {
        if len == 0 {
            return Some(Vec::new());
        }
        let pinned = self.pinned_at(address, len)?;
        let start = pinned.start.wrapping_add((address - pinned.address()) as usize);
        let hold = Hold::Host(Arc::clone(pinned));
        Some(vec![Span { start, len: len as usize, _hold: hold }])
    }

    /// The mapping that an address is in.
    pub(crate) fn mapping_at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.size).then_some((*start, mapping))
    }

    /// The last mapping that starts at or before an address.
    pub(crate) fn mapping_before(&self, address: u64) -> Option<(u64, &Mapping)> {
        self.mappings.range(..=address).next_back().map(|(start, mapping)| (*start, mapping))
    }

    /// The pinned memory that all of a range is in.
    pub(crate) fn pinned_at(&self, address: u64, len: u64) -> Option<&Arc<Pinned>> {
        let (start, pinned) = self.pinned.range(..=address).next_back()?;
        let end = address.checked_add(len.max(1))?;
        (end <= start + pinned.len as u64).then_some(pinned)
    }

    /// The reservation that an address is in: start and length.
    pub(crate) fn reservation_at(&self, address: u64) -> Option<(u64, u64)> {
        let (start, len) = self.reservations.range(..=address).next_back()?;
        (address - start < *len).then_some((*start, *len))
    }

    fn in_one_reservation(&self, address: u64, end: u64) -> bool {
        self.reservation_at(address).is_some_and(|(start, len)| end <= start + len)
    }

    /// Removes what was made in the context of a device. Pinned memory is to be given back by the
    /// caller.
    pub(crate) fn leave(&mut self, machine: &Machine, device: u32) -> Vec<Arc<Pinned>> {
        let of_context = |mapping: &Mapping| match mapping.kind {
            Kind::Plain { .. } => mapping.physical.name.device == device,
            Kind::Opened { by, .. } => by == device,
            Kind::Mapped => false,
        };
        let ours = self.mappings.iter().filter(|(_, mapping)| of_context(mapping));
        let starts: Vec<u64> = ours.map(|(start, _)| *start).collect();
        for start in starts {
            self.remove(machine, start);
        }
        let ours = self.pinned.iter().filter(|(_, pinned)| pinned.device == device);
        let starts: Vec<u64> = ours.map(|(start, _)| *start).collect();
        starts.iter().filter_map(|start| self.pinned.remove(start)).collect()
    }

    /// Removes a mapping with all that is its own.
    pub(crate) fn remove(&mut self, machine: &Machine, start: u64) {
        let Some(mapping) = self.mappings.remove(&start) else { return };
        match mapping.kind {
            Kind::Plain { taken, .. } => {
                if let Some(device) = machine.devices.get(mapping.physical.name.device as usize) {
                    device.give_back(taken);
                }
                self.segments.release(&mut self.arena, start, mapping.size);
            }
            Kind::Mapped => {}
            Kind::Opened { area, .. } => self.arena.release(area.0, area.1),
        }
    }
}

impl Mapping {
    fn allows(&self, access: Access) -> bool {
        let bit = 1 << access.device;
        let rights = if access.write { self.writers } else { self.readers };
        rights & bit != 0 || (access.copy && !matches!(self.kind, Kind::Mapped))
    }
}
