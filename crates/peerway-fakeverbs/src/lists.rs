//! The list of devices, and queries about a device that need no lock.

use std::ffi::{c_char, c_int};
use std::ptr;

use peerway_sys::verbs::ffi::*;

use crate::context::{FakeContext, fail};
use crate::device::{Device, devices};

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(len: *mut c_int) -> *mut *mut ibv_device {
    let mut list: Vec<*mut ibv_device> =
        devices().iter().filter(|device| !device.is_removed()).map(Device::as_ptr).collect();
    if !len.is_null() {
        // SAFETY: by the pointers contract.
        unsafe { *len = list.len() as c_int };
    }
    list.push(ptr::null_mut());
    Box::into_raw(list.into_boxed_slice()).cast()
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    let mut length = 1;
    // SAFETY: `ibv_get_device_list` created the list, with a null at its end. It is freed once by
    // the destroy contract.
    unsafe {
        while !(*list.add(length - 1)).is_null() {
            length += 1;
        }
        drop(Box::from_raw(ptr::slice_from_raw_parts_mut(list, length)));
    }
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: by the handles contract.
    unsafe { (&raw const (*device).name).cast() }
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    // SAFETY: by the handles contract.
    unsafe { Device::of(device) }.guid().to_be()
}

/// This library does not mind a fork, as long as the child does not use it.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_fork_init() -> c_int {
    0
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_device(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr,
) -> c_int {
    // SAFETY: by the handles contract.
    let device = unsafe { FakeContext::nic(context) }.device;
    if device.is_removed() {
        return libc::EIO;
    }
    // SAFETY: by the pointers contract.
    unsafe { attr.write(device.attr()) };
    0
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
pub(crate) unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    _input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    // SAFETY: by the handles contract.
    let device = unsafe { FakeContext::nic(context) }.device;
    if device.is_removed() {
        return libc::EIO;
    }
    let mut full = ibv_device_attr_ex::zeroed();
    full.orig_attr = device.attr();
    full.phys_port_cnt_ex = 1;
    // SAFETY: by the pointers contract, `attr` has space for `size` bytes.
    unsafe { fill(&full, attr, size) };
    0
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: by this function's contract. The version without a size has space up to the last
    // field.
    unsafe { query_port(context, port, attr, std::mem::offset_of!(ibv_port_attr, port_cap_flags2)) }
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
pub(crate) unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    size: usize,
) -> c_int {
    // SAFETY: by the handles contract.
    let device = unsafe { FakeContext::nic(context) }.device;
    if device.is_removed() {
        return libc::EIO;
    }
    if port != 1 {
        return libc::EINVAL;
    }
    // SAFETY: by the pointers contract, `attr` has space for `size` bytes.
    unsafe { fill(&device.port_attr(), attr, size) };
    0
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    // SAFETY: by the handles contract.
    let device = unsafe { FakeContext::nic(context) }.device;
    let found = u32::try_from(index).ok().and_then(|index| device.gid(index));
    let Some(raw) = found.filter(|_| port == 1) else {
        fail::<()>(libc::EINVAL);
        return -1;
    };
    // SAFETY: by the pointers contract.
    unsafe { gid.write(ibv_gid { raw }) };
    0
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    _flags: u32,
    size: usize,
) -> c_int {
    // SAFETY: by the handles contract.
    let device = unsafe { FakeContext::nic(context) }.device;
    let Some(raw) = device.gid(index).filter(|_| port == 1) else { return libc::EINVAL };
    let mut full = ibv_gid_entry::zeroed();
    full.gid.raw = raw;
    full.gid_index = index;
    full.port_num = port;
    full.gid_type = if device.is_efa() { IBV_GID_TYPE_IB } else { IBV_GID_TYPE_ROCE_V2 };
    // Interface 1 is the loopback interface in every network namespace.
    full.ndev_ifindex = if device.is_efa() { 0 } else { 1 };
    // SAFETY: by the pointers contract, `entry` has space for `size` bytes.
    unsafe { fill(&full, entry, size) };
    0
}

/// Copies as many bytes as `size` allows. The structures grow only at their end.
///
/// # Safety
///
/// `from` and `into` each have `size` bytes, or a whole `T`.
pub(crate) unsafe fn fill<T>(from: *const T, into: *mut T, size: usize) {
    let count = size.min(size_of::<T>());
    // SAFETY: by this function's contract.
    unsafe { ptr::copy_nonoverlapping(from.cast::<u8>(), into.cast(), count) };
}
