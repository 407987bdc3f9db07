//! The functions of libefa: SRD queue pairs, and the EFA attributes of a device.

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
/// The caller keeps the contract of libefa.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn efadv_create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
    efa: *mut efadv_qp_init_attr,
    size: u32,
) -> *mut ibv_qp {
    // SAFETY: by the handles contract.
    if !unsafe { FakeContext::nic(context) }.device.is_efa() {
        return fail(libc::EOPNOTSUPP);
    }
    let mut wanted = efadv_qp_init_attr::zeroed();
    // SAFETY: by the pointers contract, the program's structure has `size` bytes.
    unsafe { fill(efa, &mut wanted, size as usize) };
    // SAFETY: by the pointers contract.
    let attr = unsafe { &mut *attr };
    let kind = (attr.qp_type, wanted.driver_qp_type);
    if kind != (IBV_QPT_DRIVER, EFADV_QP_DRIVER_TYPE_SRD)
        || wanted.comp_mask != 0
        || wanted.flags != 0
    {
        return fail(libc::EINVAL);
    }
    // SAFETY: by this function's contract.
    unsafe { create(attr, Kind::Srd) }
}

/// # Safety
///
/// The caller keeps the contract of libefa.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn efadv_query_device(
    context: *mut ibv_context,
    attr: *mut efadv_device_attr,
    size: u32,
) -> c_int {
    // SAFETY: by the handles contract.
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
    // SAFETY: by the pointers contract, `attr` has space for `size` bytes.
    unsafe { fill(&full, attr, size as usize) };
    0
}

/// # Safety
///
/// The caller keeps the contract of libefa.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn efadv_query_ah(
    ah: *mut ibv_ah,
    attr: *mut efadv_ah_attr,
    size: u32,
) -> c_int {
    let mut full = efadv_ah_attr::zeroed();
    // SAFETY: by the handles and pointers contracts, `attr` has space for `size` bytes.
    unsafe {
        full.ahn = FakeAh::number(ah);
        fill(&full, attr, size as usize);
    }
    0
}
