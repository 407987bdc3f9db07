//! The meaning of addresses: the one table that copies, kernels and queries use.
//!
//! An arena address means the memory mapped there. A host address means pinned memory, or memory
//! that a GPU cannot access. A look-up returns pieces of memory together with references that keep
//! them alive. They stay valid during the work, whatever is unmapped meanwhile.

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
    /// The reservations of `cuMemAddressReserve`: lengths by start.
    pub(crate) reservations: BTreeMap<u64, u64>,
    /// The mapped device memory, by start. No two mappings overlap.
    pub(crate) mappings: BTreeMap<u64, Mapping>,
    /// Host memory that a GPU can access, by start. No two ranges overlap.
    pub(crate) pinned: BTreeMap<u64, Arc<Pinned>>,
    /// The handles of `cuMemCreate` memory, by the memory's number.
    pub(crate) handles: HashMap<u64, Held>,
    pub(crate) segments: Segments,
}

/// A handle that the program holds, and how many times.
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
    /// The offset in `physical`.
    pub(crate) offset: u64,
    /// The allocation's number, as `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub(crate) id: u64,
    /// The devices that may read it, one bit each.
    pub(crate) readers: u64,
    /// The devices that may write it, one bit each.
    pub(crate) writers: u64,
    pub(crate) kind: Kind,
}

#[derive(Debug)]
pub(crate) enum Kind {
    /// An allocation of `cuMemAlloc`.
    Plain {
        /// The ticket file and its nonce, created with the first IPC handle.
        ticket: Option<(OwnedFd, u64)>,
        /// The number of bytes to return to the device's account.
        taken: u64,
    },
    /// Memory mapped by `cuMemMap`.
    Mapped,
    /// An allocation of another process, opened by IPC.
    Opened {
        /// The nonce of its ticket.
        ticket: u64,
        /// How many times it was opened.
        count: u32,
        /// The device in whose context it was opened.
        by: u32,
        /// The reservation that only this mapping uses.
        area: (u64, u64),
    },
}

/// An access to memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) device: u32,
    pub(crate) write: bool,
    /// Whether the driver copies, which may access other devices. Otherwise a kernel accesses the
    /// memory.
    pub(crate) copy: bool,
}

/// A piece of memory.
///
/// **Span contract.** The `len` bytes at `start` stay mapped and readable as long as the span
/// lives, and writable if `resolve` was asked for a write. Other threads may access them at the
/// same time; as on a GPU, the program has to order the accesses.
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
    /// The memory of a range, for an access by a device.
    ///
    /// # Errors
    ///
    /// `CUDA_ERROR_ILLEGAL_ADDRESS` if part of the range is not mapped or not allowed.
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

    /// The mapping that contains an address.
    pub(crate) fn mapping_at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.size).then_some((*start, mapping))
    }

    /// The last mapping that starts at or before an address.
    pub(crate) fn mapping_before(&self, address: u64) -> Option<(u64, &Mapping)> {
        self.mappings.range(..=address).next_back().map(|(start, mapping)| (*start, mapping))
    }

    /// The pinned memory that contains a whole range.
    pub(crate) fn pinned_at(&self, address: u64, len: u64) -> Option<&Arc<Pinned>> {
        let (start, pinned) = self.pinned.range(..=address).next_back()?;
        let end = address.checked_add(len.max(1))?;
        (end <= start + pinned.len as u64).then_some(pinned)
    }

    /// The reservation that contains an address: start and length.
    pub(crate) fn reservation_at(&self, address: u64) -> Option<(u64, u64)> {
        let (start, len) = self.reservations.range(..=address).next_back()?;
        (address - start < *len).then_some((*start, *len))
    }

    fn in_one_reservation(&self, address: u64, end: u64) -> bool {
        self.reservation_at(address).is_some_and(|(start, len)| end <= start + len)
    }

    /// Removes everything that was created in the context of a device. The caller must release the
    /// returned pinned memory.
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

    /// Removes a mapping and releases what only it uses.
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
