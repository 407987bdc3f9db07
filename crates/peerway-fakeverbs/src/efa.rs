//! What libefa adds: SRD queue pairs, and what the device says about them.

use std::ffi::c_int;

use peerway_sys::efadv::ffi::*;
use peerway_sys::verbs::ffi::*;

use crate::address::FakeAh;
use crate::context::{FakeContext, fail};
use crate::device::{MAX_INLINE, MAX_MESSAGE, MAX_SGE, MAX_WR};
use crate::lists::fill;
use crate::qp::{Kind, create};

/// # Safety
///
/// As libefa documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn efadv_create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
    efa: *mut efadv_qp_init_attr,
    size: u32,
) -> *mut ibv_qp {
    // SAFETY: the caller's context is one of this library.
    if !unsafe { FakeContext::nic(context) }.device.is_efa() {
        return fail(libc::EOPNOTSUPP);
    }
    let mut wanted = efadv_qp_init_attr::zeroed();
    // SAFETY: the caller's structure has `size` bytes.
    unsafe { fill(efa, &mut wanted, size as usize) };
    // SAFETY: the caller's attributes.
    let attr = unsafe { &mut *attr };
    let kind = (attr.qp_type, wanted.driver_qp_type);
    if kind != (IBV_QPT_DRIVER, EFADV_QP_DRIVER_TYPE_SRD)
        || wanted.comp_mask != 0
        || wanted.flags != 0
    {
        return fail(libc::EINVAL);
    }
    // SAFETY: the caller's contract.
    unsafe { create(attr, Kind::Srd) }
}

/// # Safety
///
/// As libefa documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn efadv_query_device(
    context: *mut ibv_context,
    attr: *mut efadv_device_attr,
    size: u32,
) -> c_int {
    // SAFETY: the caller's context is one of this library.
    let device = unsafe { FakeContext::nic(context) }.device;
    if !device.is_efa() {
        return libc::EOPNOTSUPP;
    }
    let mut full = efadv_device_attr::zeroed();
    full.max_sq_wr = MAX_WR;
    full.max_rq_wr = MAX_WR;
    full.max_sq_sge = MAX_SGE as u16;
    full.max_rq_sge = MAX_SGE as u16;
    full.inline_buf_size = MAX_INLINE as u16;
    full.device_caps = EFADV_DEVICE_ATTR_CAPS_RDMA_READ
        | EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE
        | EFADV_DEVICE_ATTR_CAPS_RNR_RETRY;
    full.max_rdma_size = MAX_MESSAGE as u32;
    // SAFETY: the caller has room for `size` bytes.
    unsafe { fill(&full, attr, size as usize) };
    0
}

/// # Safety
///
/// As libefa documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn efadv_query_ah(
    ah: *mut ibv_ah,
    attr: *mut efadv_ah_attr,
    size: u32,
) -> c_int {
    let mut full = efadv_ah_attr::zeroed();
    // SAFETY: the caller's handle is one of this library, and there is room for `size` bytes.
    unsafe {
        full.ahn = FakeAh::number(ah);
        fill(&full, attr, size as usize);
    }
    0
}
