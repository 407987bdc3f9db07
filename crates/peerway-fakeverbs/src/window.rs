//! Memory windows of type 2B: keys to part of a region, bound and invalidated by work requests.
//!
//! Invariants: the upper three bytes of a window's key never change. The program chooses the lowest
//! byte, which changes with every bind. A key grants access to its range, only to the peer of the
//! queue pair that bound it, until it is invalidated. A region with a bound window cannot be
//! deregistered, and a queue pair with a bound window cannot be destroyed.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::Ordering;

use peerway_sys::verbs::ffi::*;

use crate::context::fail;
use crate::pd::FakePd;
use crate::stats::{COUNTERS, count};

/// The windows of a context, by the upper bytes of their keys.
#[derive(Debug, Default)]
pub(crate) struct Windows(HashMap<u32, Window>);

#[derive(Debug)]
struct Window {
    pd: u32,
    key: u32,
    bound: Option<Bound>,
}

/// The range that a window is bound to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    /// The key of the region.
    pub(crate) region: u32,
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) access: u32,
    pub(crate) qp: u32,
}

impl Windows {
    pub(crate) fn has(&self, key: u32) -> bool {
        self.0.contains_key(&(key >> 8))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether a window is bound to this queue pair.
    pub(crate) fn are_of(&self, qp: u32) -> bool {
        self.0.values().any(|window| window.bound.is_some_and(|bound| bound.qp == qp))
    }

    /// The key of the region behind a key: of the bound region, if it is the key of a window.
    pub(crate) fn region(&self, key: u32) -> u32 {
        let window = self.0.get(&(key >> 8)).filter(|window| window.key == key);
        window.and_then(|window| window.bound).map_or(key, |bound| bound.region)
    }

    pub(crate) fn are_on(&self, region: u32) -> bool {
        let on = |window: &Window| window.bound.is_some_and(|bound| bound.region == region);
        self.0.values().any(on)
    }

    pub(crate) fn add(&mut self, pd: u32, key: u32) {
        self.0.insert(key >> 8, Window { pd, key, bound: None });
    }

    pub(crate) fn remove(&mut self, key: u32) {
        self.0.remove(&(key >> 8));
    }

    /// Binds a window. Returns false if it does not exist, is already bound, or would keep its key.
    pub(crate) fn bind(&mut self, pd: u32, key: u32, bound: Bound) -> bool {
        match self.0.get_mut(&(key >> 8)) {
            Some(window) if window.pd == pd && window.bound.is_none() && window.key != key => {
                (window.key, window.bound) = (key, Some(bound));
                true
            }
            _ => false,
        }
    }

    pub(crate) fn invalidate(&mut self, pd: u32, key: u32) -> bool {
        match self.0.get_mut(&(key >> 8)) {
            Some(window) if window.pd == pd && window.key == key => window.bound.take().is_some(),
            _ => false,
        }
    }

    pub(crate) fn forget(&mut self, qp: u32) {
        for window in self.0.values_mut() {
            window.bound = window.bound.filter(|bound| bound.qp != qp);
        }
    }

    /// The region behind a key, if the key allows access to the whole range.
    pub(crate) fn find(
        &self,
        key: u32,
        pd: u32,
        qp: u32,
        address: u64,
        length: u64,
        access: u32,
    ) -> Option<u32> {
        let window = self.0.get(&(key >> 8)).filter(|window| window.key == key)?;
        let bound = window.bound.filter(|bound| window.pd == pd && bound.qp == qp)?;
        let offset = address.checked_sub(bound.address)?;
        let inside = offset.checked_add(length)? <= bound.length;
        (inside && bound.access & access == access).then_some(bound.region)
    }
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: c_uint) -> *mut ibv_mw {
    // SAFETY: by the handles contract.
    let domain = unsafe { FakePd::of(pd) };
    if kind != IBV_MW_TYPE_2 || domain.nic.device.is_efa() {
        return fail(libc::EOPNOTSUPP);
    }
    if domain.nic.device.is_removed() {
        return fail(libc::EIO);
    }
    let most = domain.nic.device.fabric.script.windows;
    let Some(rkey) = domain.nic.lock().regions.add_window(domain.id, most) else {
        return fail(libc::ENOMEM);
    };
    domain.add_user();
    count(&COUNTERS.windows, 1);
    // SAFETY: by the handles contract.
    let context = unsafe { (*pd).context };
    Box::into_raw(Box::new(ibv_mw { context, pd, rkey, handle: rkey >> 8, r#type: kind }))
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: by the handles and destroy contracts. The window counts as a user of its domain, so
    // the domain still exists.
    let (mw, domain) = unsafe { (Box::from_raw(mw), FakePd::of((*mw).pd)) };
    domain.nic.lock().regions.remove_window(mw.rkey);
    domain.remove_user();
    COUNTERS.windows.fetch_sub(1, Ordering::Relaxed);
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_opens_what_it_was_bound_to_until_it_is_taken_back() {
        let mut windows = Windows::default();
        windows.add(1, 0x500);
        let access = IBV_ACCESS_REMOTE_WRITE;
        let bound = Bound { region: 9, address: 0x1000, length: 0x100, access, qp: 7 };
        assert!(!windows.bind(2, 0x501, bound) && !windows.bind(1, 0x500, bound));
        assert!(windows.bind(1, 0x501, bound) && windows.are_on(9));
        assert!(!windows.bind(1, 0x502, bound), "the window is already bound");
        let find = |windows: &Windows, key, qp, address, length, access| {
            windows.find(key, 1, qp, address, length, access)
        };
        assert_eq!(find(&windows, 0x501, 7, 0x1000, 0x100, access), Some(9));
        assert_eq!(find(&windows, 0x501, 7, 0x1000, 0x101, access), None);
        assert_eq!(find(&windows, 0x501, 7, 0xfff, 1, access), None);
        assert_eq!(find(&windows, 0x501, 8, 0x1000, 1, access), None);
        assert_eq!(find(&windows, 0x500, 7, 0x1000, 1, access), None);
        assert_eq!(find(&windows, 0x501, 7, 0x1000, 1, IBV_ACCESS_REMOTE_READ), None);
        assert!(!windows.invalidate(1, 0x500) && windows.invalidate(1, 0x501));
        assert!(!windows.invalidate(1, 0x501) && !windows.are_on(9));
        assert_eq!(find(&windows, 0x501, 7, 0x1000, 1, access), None);
        assert!(windows.bind(1, 0x502, bound));
        assert_eq!((windows.region(0x502), windows.region(0x501)), (9, 0x501));
        assert!(windows.are_of(7) && !windows.are_of(8));
        windows.forget(7);
        assert!(!windows.are_on(9));
    }
}
