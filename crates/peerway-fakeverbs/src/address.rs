//! Address handles: they name a remote port, for requests without a connection.

use std::ffi::c_int;

use peerway_sys::verbs::ffi::*;

use crate::context::fail;
use crate::pd::FakePd;
use crate::qp::{Peer, peer};
use crate::wire;

/// An address handle. It starts with the structure that the program sees.
#[repr(C)]
pub(crate) struct FakeAh {
    raw: ibv_ah,
    /// The remote device and its fabric.
    device: u32,
    fabric: &'static str,
}

impl FakeAh {
    /// The queue pair `number` behind the address; `None` if there is no address.
    ///
    /// # Safety
    ///
    /// `raw` is null or a handle of this library.
    pub(crate) unsafe fn peer(raw: *mut ibv_ah, number: u32) -> Option<Peer> {
        if raw.is_null() {
            return None;
        }
        // SAFETY: by this function's contract.
        let ah = unsafe { &*raw.cast::<Self>() };
        let address = wire::address(ah.fabric, ah.device, number).ok()?;
        Some(Peer { address, device: ah.device, number })
    }

    /// The number by which the device names the remote port.
    ///
    /// # Safety
    ///
    /// `raw` is a handle of this library.
    pub(crate) unsafe fn number(raw: *mut ibv_ah) -> u16 {
        // SAFETY: by this function's contract.
        unsafe { (*raw.cast::<Self>()).device as u16 }
    }
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: by the handles and pointers contracts.
    let (domain, attr) = unsafe { (FakePd::of(pd), &*attr) };
    let device = domain.nic.device;
    if device.is_removed() {
        return fail(libc::EIO);
    }
    let found = match peer(device, attr, 0) {
        Ok(found) => found,
        Err(errno) => return fail(errno),
    };
    domain.add_user();
    // SAFETY: by the handles contract.
    let context = unsafe { (*pd).context };
    let raw = ibv_ah { context, pd, handle: found.device };
    let fabric = device.fabric.name.as_str();
    Box::into_raw(Box::new(FakeAh { raw, device: found.device, fabric })).cast()
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: by the handles and destroy contracts. The handle counts as a user of its domain, so
    // the domain still exists.
    let (ah, domain) = unsafe { (Box::from_raw(ah.cast::<FakeAh>()), FakePd::of((*ah).pd)) };
    drop(ah);
    domain.remove_user();
    0
}
