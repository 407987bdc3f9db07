//! Address handles: a far port, for requests without a connection.

use std::ffi::c_int;

use peerway_sys::verbs::ffi::*;

use crate::context::fail;
use crate::pd::FakePd;
use crate::qp::{Peer, peer};
use crate::wire;

/// An address handle. Begins with what the program sees of it.
#[repr(C)]
pub(crate) struct FakeAh {
    raw: ibv_ah,
    /// The far device, and the fabric it is on.
    device: u32,
    fabric: &'static str,
}

impl FakeAh {
    /// A queue pair behind the address; nothing where there is no address.
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

    /// The number by which the device names the far port.
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
/// As libibverbs documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: the caller's domain is one of this library, and the attributes are there.
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
    // SAFETY: as above.
    let context = unsafe { (*pd).context };
    let raw = ibv_ah { context, pd, handle: found.device };
    let fabric = device.fabric.name.as_str();
    Box::into_raw(Box::new(FakeAh { raw, device: found.device, fabric })).cast()
}

/// # Safety
///
/// As libibverbs documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: made above and not used again; its domain is still there.
    let (ah, domain) = unsafe { (Box::from_raw(ah.cast::<FakeAh>()), FakePd::of((*ah).pd)) };
    drop(ah);
    domain.remove_user();
    0
}
