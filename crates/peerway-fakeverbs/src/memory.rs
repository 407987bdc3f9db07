//! Registered memory: access checks and copies.
//!
//! Invariants: every access by the device goes through [`Regions::find`] and ends before it
//! releases the lock of the context. `ibv_dereg_mr` takes that lock, so after it returns no access
//! touches the memory. A region is found by its key alone and belongs to one protection domain.
//!
//! **Region contract.** A pointer that [`Regions::find`] returns covers bytes of a registered
//! region that allows the access. The program keeps registered memory mapped, as verbs demand.
//! SAFETY comments refer to this by name.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ptr;
use std::sync::LazyLock;
use std::sync::atomic::{Ordering, fence};

use peerway_sys::verbs::ffi::*;

use crate::death::Death;
use crate::window::{Bound, Windows};

/// The regions of a context.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    by_key: HashMap<u32, Region>,
    windows: Windows,
    made: u32,
    /// Writes that have not landed yet, in order. Only regions that are `posted` have them.
    held: RefCell<Vec<(usize, Vec<u8>)>>,
    death: Death,
}

#[derive(Debug)]
struct Region {
    address: usize,
    iova: u64,
    length: u64,
    access: u32,
    pd: u32,
    /// Peers' writes land only when a peer reads such a region.
    posted: bool,
}

impl Regions {
    /// No regions, in a process that dies after peers have accessed its memory `touches` times.
    pub(crate) fn until(touches: Option<u64>) -> Self {
        Self { death: Death::after(touches), ..Self::default() }
    }

    /// Adds a region and returns its key, which serves as local and remote key. Keys are not reused
    /// soon.
    pub(crate) fn add(
        &mut self,
        pd: u32,
        address: usize,
        iova: u64,
        length: u64,
        access: u32,
    ) -> u32 {
        let key = self.next_key();
        self.by_key.insert(key, Region { address, iova, length, access, pd, posted: false });
        key
    }

    /// Makes a region hold back peers' writes.
    pub(crate) fn post_writes(&mut self, key: u32) {
        self.by_key.entry(key).and_modify(|region| region.posted = true);
    }

    fn is_posted(&self, key: u32) -> bool {
        self.by_key.get(&self.windows.region(key)).is_some_and(|region| region.posted)
    }

    /// Writes the held bytes to their regions.
    fn land(&self) {
        for (place, bytes) in self.held.borrow_mut().drain(..) {
            let place = ptr::with_exposed_provenance_mut(place);
            // SAFETY: by the region contract. `write` found the place, and `remove` lands held
            // bytes before it removes a region.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
        }
    }

    /// Total length of all regions.
    pub(crate) fn bytes(&self) -> u64 {
        self.by_key.values().map(|region| region.length).sum()
    }

    fn next_key(&mut self) -> u32 {
        loop {
            self.made = self.made.wrapping_add(1);
            // The low byte differs from region to region, as on hardware.
            let key = (self.made << 8) | (self.made.wrapping_mul(0x9d) & 0xff);
            if key >> 8 != 0 && !self.by_key.contains_key(&key) && !self.windows.has(key) {
                return key;
            }
        }
    }

    /// Removes a region. Returns false if a window is bound to it.
    pub(crate) fn remove(&mut self, key: u32) -> bool {
        self.land();
        !self.windows.are_on(key) && self.by_key.remove(&key).is_some()
    }

    /// Adds a window and returns its key, unless there are `most`.
    pub(crate) fn add_window(&mut self, pd: u32, most: u32) -> Option<u32> {
        if self.windows.len() >= most as usize {
            return None;
        }
        let key = self.next_key();
        self.windows.add(pd, key);
        Some(key)
    }

    /// Whether a window is bound to this queue pair.
    pub(crate) fn has_windows_of(&self, qp: u32) -> bool {
        self.windows.are_of(qp)
    }

    pub(crate) fn remove_window(&mut self, key: u32) {
        self.windows.remove(key);
    }

    /// Binds a window, if the region allows it.
    pub(crate) fn bind(&mut self, pd: u32, key: u32, bound: Bound) -> bool {
        let needed = IBV_ACCESS_MW_BIND
            | if bound.access & IBV_ACCESS_REMOTE_WRITE == 0 { 0 } else { IBV_ACCESS_LOCAL_WRITE };
        let there = self.find(bound.region, pd, bound.address, bound.length, needed).is_some();
        there && self.windows.bind(pd, key, bound)
    }

    /// Invalidates the key of a window.
    pub(crate) fn invalidate(&mut self, pd: u32, key: u32) -> bool {
        self.windows.invalidate(pd, key)
    }

    /// Invalidates the keys that a queue pair has bound.
    pub(crate) fn forget(&mut self, qp: u32) {
        self.windows.forget(qp);
    }

    /// The address of `length` bytes at `iova`, if the region of `key` contains them all and allows
    /// `access`.
    pub(crate) fn find(
        &self,
        key: u32,
        pd: u32,
        iova: u64,
        length: u64,
        access: u32,
    ) -> Option<*mut u8> {
        let region = self.by_key.get(&key)?;
        let offset = iova.checked_sub(region.iova)?;
        let inside = offset.checked_add(length)? <= region.length;
        let allowed = region.access & access == access;
        (inside && allowed && region.pd == pd)
            .then(|| ptr::with_exposed_provenance_mut(region.address + offset as usize))
    }

    /// Whether the local memory of all `pieces` allows `access`.
    pub(crate) fn check(&self, pieces: &[ibv_sge], pd: u32, access: u32) -> bool {
        pieces.iter().all(|piece| {
            piece.length == 0
                || self.find(piece.lkey, pd, piece.addr, u64::from(piece.length), access).is_some()
        })
    }

    /// Appends `length` bytes, starting at `offset` of the memory that `pieces` name, to `into`.
    pub(crate) fn gather(
        &self,
        pieces: &[ibv_sge],
        pd: u32,
        offset: u64,
        length: usize,
        into: &mut Vec<u8>,
    ) -> bool {
        self.walk(pieces, pd, 0, offset, length, |place, _, count| {
            into.reserve(count);
            let end = into.len();
            // SAFETY: by the region contract, and `into` has the reserved space. The program may
            // write at the same time, as with a device; the bytes are then old or new.
            unsafe {
                ptr::copy_nonoverlapping(place, into.as_mut_ptr().add(end), count);
                into.set_len(end + count);
            }
        })
    }

    /// Writes `bytes` to `offset` of the memory that `pieces` name.
    pub(crate) fn scatter(&self, pieces: &[ibv_sge], pd: u32, offset: u64, bytes: &[u8]) -> bool {
        let done = self.walk(
            pieces,
            pd,
            IBV_ACCESS_LOCAL_WRITE,
            offset,
            bytes.len(),
            |place, at, count| {
                // SAFETY: by the region contract for writing, and the slice has `count` bytes at
                // `at`.
                unsafe { ptr::copy_nonoverlapping(bytes[at..].as_ptr(), place, count) };
            },
        );
        // A thread that polls the memory sees the bytes of one packet before those of the next.
        fence(Ordering::Release);
        done
    }

    /// Calls `each` with address, position and count for every piece of the range. Returns false if
    /// part of it is not accessible.
    fn walk(
        &self,
        pieces: &[ibv_sge],
        pd: u32,
        access: u32,
        mut offset: u64,
        length: usize,
        mut each: impl FnMut(*mut u8, usize, usize),
    ) -> bool {
        let mut at = 0;
        for piece in pieces {
            if at == length {
                break;
            }
            let size = u64::from(piece.length);
            if offset >= size {
                offset -= size;
                continue;
            }
            let count = (size - offset).min((length - at) as u64);
            let Some(place) = self.find(piece.lkey, pd, piece.addr + offset, count, access) else {
                return false;
            };
            each(place, at, count as usize);
            at += count as usize;
            offset = 0;
        }
        at == length
    }

    /// Writes `bytes` for a peer. The peer's key must allow its whole message.
    pub(crate) fn write(&self, target: &Target, offset: u64, bytes: &[u8]) -> bool {
        if target.length == 0 {
            return true;
        }
        let Some(place) = self.remote(target, offset, bytes.len(), IBV_ACCESS_REMOTE_WRITE) else {
            return false;
        };
        if self.is_posted(target.key) {
            self.held.borrow_mut().push((place.expose_provenance(), bytes.to_vec()));
            return true;
        }
        // SAFETY: by the region contract; `remote` found the place.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
        fence(Ordering::Release);
        true
    }

    /// Appends bytes that a peer's key allows it to read to `into`.
    pub(crate) fn read(
        &self,
        target: &Target,
        offset: u64,
        count: usize,
        into: &mut Vec<u8>,
    ) -> bool {
        if target.length == 0 {
            return true;
        }
        let Some(place) = self.remote(target, offset, count, IBV_ACCESS_REMOTE_READ) else {
            return false;
        };
        if self.is_posted(target.key) {
            self.land();
        }
        into.reserve(count);
        let end = into.len();
        // SAFETY: by the region contract; `remote` found the place. `into` has the reserved space.
        unsafe {
            ptr::copy_nonoverlapping(place, into.as_mut_ptr().add(end), count);
            into.set_len(end + count);
        }
        true
    }

    fn remote(&self, target: &Target, offset: u64, count: usize, access: u32) -> Option<*mut u8> {
        if self.death.refuses() {
            return None;
        }
        let &Target { pd, qp, key, address, length } = target;
        let start = match self.windows.find(key, pd, qp, address, length, access) {
            Some(region) => self.find(region, pd, address, length, 0)?,
            None => self.find(key, pd, address, length, access)?,
        };
        let inside = offset.checked_add(count as u64)? <= target.length;
        inside.then(|| start.wrapping_add(offset as usize))
    }
}

/// The memory that a peer's request names: the range of its whole message, in all packets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) pd: u32,
    /// The queue pair that the peer is connected to.
    pub(crate) qp: u32,
    pub(crate) key: u32,
    pub(crate) address: u64,
    pub(crate) length: u64,
}

/// Faults the pages of a range in, as pinning them would. Returns whether they are mapped and, for
/// `write`, writable. Before Linux 5.14 only the first can be checked.
pub(crate) fn populate(address: usize, length: usize, write: bool) -> bool {
    static KNOWN: LazyLock<bool> = LazyLock::new(|| {
        let ours = 0u8;
        advise(ptr::from_ref(&ours).addr() & !(PAGE - 1), PAGE, libc::MADV_POPULATE_READ)
    });
    let first = address & !(PAGE - 1);
    let end = address.checked_add(length).and_then(|end| end.checked_next_multiple_of(PAGE));
    let Some(size) = end.map(|end| end - first) else { return false };
    if *KNOWN {
        let advice = if write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
        return advise(first, size, advice);
    }
    let mut pages = vec![0u8; size / PAGE];
    // SAFETY: mincore writes one byte per page to `pages`, which has that length. It does not
    // access the range itself.
    unsafe { libc::mincore(ptr::without_provenance_mut(first), size, pages.as_mut_ptr()) == 0 }
}

const PAGE: usize = 4096;

fn advise(start: usize, size: usize, advice: i32) -> bool {
    // SAFETY: the advice that this file uses changes no contents and unmaps nothing, at any
    // address.
    unsafe { libc::madvise(ptr::without_provenance_mut(start), size, advice) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u32 = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

    #[test]
    fn only_what_was_registered_is_found() {
        let mut regions = Regions::default();
        let key = regions.add(1, 0x1_0000, 0x9000, 0x100, ALL);
        let find = |pd, iova, length, access| regions.find(key, pd, iova, length, access);
        assert_eq!(find(1, 0x9010, 0xf0, ALL).map(|place| place.addr()), Some(0x1_0010));
        assert_eq!(find(1, 0x9010, 0xf1, ALL), None);
        assert_eq!(find(1, 0x8fff, 1, ALL), None);
        assert_eq!(find(2, 0x9000, 1, ALL), None);
        assert_eq!(find(1, u64::MAX, 2, ALL), None);
        assert_eq!(find(1, 0x9000, 1, IBV_ACCESS_REMOTE_ATOMIC), None);
        assert_eq!(regions.find(key ^ 1, 1, 0x9000, 1, 0), None);
        assert!(regions.remove(key) && !regions.remove(key));
    }

    #[test]
    fn bytes_go_to_their_pieces() {
        let memory = Box::leak(vec![0u8; 64].into_boxed_slice());
        let start = memory.as_mut_ptr().expose_provenance();
        let mut regions = Regions::default();
        let key = regions.add(1, start, start as u64, 64, ALL);
        let piece = |at: usize, length| ibv_sge { addr: (start + at) as u64, length, lkey: key };
        let pieces = [piece(0, 4), piece(10, 0), piece(20, 8)];
        assert!(regions.scatter(&pieces, 1, 2, b"abcdef"));
        let mut back = Vec::new();
        assert!(regions.gather(&pieces, 1, 1, 8, &mut back));
        assert_eq!(back, b"\0abcdef\0");
        assert!(!regions.scatter(&pieces, 1, 8, b"abcdef"), "the bytes are longer than the pieces");
        assert!(!regions.check(&pieces, 2, 0) && regions.check(&pieces, 1, 0));
    }

    #[test]
    fn posted_writes_are_there_once_such_memory_is_read() {
        let memory = Box::leak(vec![0u8; 128].into_boxed_slice());
        let start = memory.as_mut_ptr().expose_provenance();
        let mut regions = Regions::default();
        let add = |regions: &mut Regions, at| regions.add(1, start + at, at as u64, 64, ALL);
        let (gpu, host) = (add(&mut regions, 0), add(&mut regions, 64));
        regions.post_writes(gpu);
        let target = |key, address| Target { pd: 1, qp: 1, key, address, length: 1 };
        // SAFETY: the memory is leaked, so its first byte is always valid.
        let seen = || unsafe { ptr::with_exposed_provenance::<u8>(start).read_volatile() };
        let mut back = Vec::new();
        assert!(regions.write(&target(gpu, 0), 0, &[7]));
        assert!(regions.read(&target(host, 64), 0, 1, &mut back));
        assert_eq!(seen(), 0);
        assert!(regions.read(&target(gpu, 9), 0, 1, &mut back));
        assert_eq!(seen(), 7);
        assert!(regions.write(&target(gpu, 0), 0, &[8]) && regions.remove(gpu));
        assert_eq!(seen(), 8, "held bytes land before the region is removed");
    }

    #[test]
    fn unmapped_memory_is_not_populated() {
        let buffer = [0u8; 64];
        assert!(populate(buffer.as_ptr().addr(), 64, true));
        assert!(!populate(4096, 4096, true) && !populate(4096, 4096, false));
        let constant: &'static [u8] = b"in the read-only part of the program";
        assert!(populate(constant.as_ptr().addr(), 8, false));
        assert!(!populate(constant.as_ptr().addr(), 8, true));
    }
}
