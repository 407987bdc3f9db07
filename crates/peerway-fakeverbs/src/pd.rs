//! Protection domains and the registration of memory.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use peerway_sys::verbs::ffi::*;

use crate::context::{FakeContext, fail};
use crate::memory::populate;
use crate::nic::Nic;
use crate::stats::{COUNTERS, count};

/// A protection domain. It starts with the structure that the program sees.
#[repr(C)]
pub(crate) struct FakePd {
    raw: ibv_pd,
    pub(crate) nic: Arc<Nic>,
    pub(crate) id: u32,
    /// Number of objects that were created in it and still exist.
    users: AtomicU32,
}

impl FakePd {
    /// # Safety
    ///
    /// `raw` is a domain of this library, and stays for as long as the reference is used.
    pub(crate) unsafe fn of<'a>(raw: *mut ibv_pd) -> &'a Self {
        // SAFETY: by this function's contract.
        unsafe { &*raw.cast::<Self>() }
    }

    pub(crate) fn add_user(&self) {
        self.users.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn remove_user(&self) {
        self.users.fetch_sub(1, Ordering::Relaxed);
    }
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: by the handles contract.
    let nic = unsafe { FakeContext::nic(context) };
    if nic.device.is_removed() {
        return fail(libc::EIO);
    }
    let id = nic.next_id() as u32;
    let raw = ibv_pd { context, handle: id };
    Box::into_raw(Box::new(FakePd { raw, nic, id, users: AtomicU32::new(0) })).cast()
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: by the handles contract.
    if unsafe { FakePd::of(pd) }.users.load(Ordering::Relaxed) > 0 {
        return libc::EBUSY;
    }
    // SAFETY: by the handles and destroy contracts.
    drop(unsafe { Box::from_raw(pd.cast::<FakePd>()) });
    0
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: by this function's contract.
    unsafe { ibv_reg_mr_iova2(pd, address, length, address.addr() as u64, access.cast_unsigned()) }
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: by this function's contract.
    unsafe { register(pd, address, length, iova, access, None) }
}

/// Maps the memory and registers the mapping. A real dma-buf has its own way into a device. Here a
/// mappable file such as a memfd stands in for it, starting at the position of the descriptor.
///
/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    const PAGE: u64 = 4096;
    // SAFETY: by the handles contract.
    if !unsafe { FakePd::of(pd) }.nic.device.fabric.script.dmabuf {
        return fail(libc::EOPNOTSUPP);
    }
    // SAFETY: lseek takes no pointers.
    let position = unsafe { libc::lseek(fd, 0, libc::SEEK_CUR) };
    if position < 0 {
        return fail(libc::EBADF);
    }
    let Some(offset) = offset.checked_add(position.cast_unsigned()) else {
        return fail(libc::EINVAL);
    };
    let within = (offset % PAGE) as usize;
    let Ok(start) = libc::off_t::try_from(offset - within as u64) else {
        return fail(libc::EINVAL);
    };
    let size = length.saturating_add(within);
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let place = std::ptr::null_mut();
    // SAFETY: without MAP_FIXED, mmap creates a new mapping and touches no existing one.
    let mapped = unsafe { libc::mmap(place, size, rights, libc::MAP_SHARED, fd, start) };
    if mapped == libc::MAP_FAILED {
        return std::ptr::null_mut();
    }
    let mapping = Mapping { start: mapped, size };
    let address = mapped.wrapping_byte_add(within);
    // SAFETY: by this function's contract; the mapping lives as long as the region.
    unsafe { register(pd, address, length, iova, access.cast_unsigned(), Some(mapping)) }
}

/// A region. It starts with the structure that the program sees.
#[repr(C)]
struct FakeMr {
    raw: ibv_mr,
    mapping: Option<Mapping>,
}

/// A mapping that was created for a region.
struct Mapping {
    start: *mut c_void,
    size: usize,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was created for one region, which is gone.
        unsafe { libc::munmap(self.start, self.size) };
    }
}

/// # Safety
///
/// As for `ibv_reg_mr`.
unsafe fn register(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
    mapping: Option<Mapping>,
) -> *mut ibv_mr {
    const REMOTE: c_uint = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    const KNOWN: c_uint = IBV_ACCESS_LOCAL_WRITE
        | IBV_ACCESS_REMOTE_WRITE
        | IBV_ACCESS_REMOTE_READ
        | IBV_ACCESS_MW_BIND
        | IBV_ACCESS_OPTIONAL_RANGE;
    // SAFETY: by the handles contract.
    let domain = unsafe { FakePd::of(pd) };
    if domain.nic.device.is_removed() {
        return fail(libc::EIO);
    }
    let local_write = access & IBV_ACCESS_LOCAL_WRITE != 0;
    if length == 0 || (access & REMOTE != 0 && !local_write) {
        return fail(libc::EINVAL);
    }
    if access & !KNOWN != 0 {
        return fail(libc::EOPNOTSUPP);
    }
    if !populate(address.addr(), length, local_write) {
        return fail(libc::EFAULT);
    }
    let place = address.expose_provenance();
    let mut state = domain.nic.lock();
    let locked = state.regions.bytes().saturating_add(length as u64);
    if locked > domain.nic.device.fabric.script.memlock {
        return fail(libc::ENOMEM);
    }
    let key = state.regions.add(domain.id, place, iova, length as u64, access);
    if mapping.is_some() && domain.nic.device.fabric.script.posted {
        state.regions.post_writes(key);
    }
    drop(state);
    domain.add_user();
    count(&COUNTERS.registrations, 1);
    let context = domain.raw.context;
    let raw = ibv_mr { context, pd, addr: address, length, handle: key, lkey: key, rkey: key };
    Box::into_raw(Box::new(FakeMr { raw, mapping })).cast()
}

/// Fails with `EBUSY` if a window is bound to the region. Otherwise no access touches the memory
/// after this returns: every copy happens under the lock that this function takes.
///
/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: by the handles contract. The region counts as a user of its domain, so the domain
    // still exists.
    let (key, domain) = unsafe { ((*mr.cast::<FakeMr>()).raw.lkey, FakePd::of((*mr).pd)) };
    if !domain.nic.lock().regions.remove(key) {
        return libc::EBUSY;
    }
    // SAFETY: by the destroy contract.
    let FakeMr { mapping, .. } = *unsafe { Box::from_raw(mr.cast::<FakeMr>()) };
    drop(mapping);
    domain.remove_user();
    count(&COUNTERS.deregistrations, 1);
    0
}
