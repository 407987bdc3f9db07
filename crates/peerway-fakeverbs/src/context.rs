//! Open devices: the structure with the function tables, and asynchronous events.
//!
//! The memory layout is the interface: `ibv_context` is the last part of a `verbs_context`, and
//! programs find the other parts at negative offsets from it.

use std::ffi::c_int;
use std::mem::offset_of;
use std::ptr;
use std::sync::Arc;

use peerway_sys::verbs::ffi::*;

use crate::device::Device;
use crate::events::Event;
use crate::nic::Nic;
use crate::{cq, lists, lock, post, qp, window};

/// An open device. It starts with the structure that the program sees.
#[repr(C)]
pub(crate) struct FakeContext {
    table: verbs_context,
    nic: Arc<Nic>,
}

impl FakeContext {
    /// # Safety
    ///
    /// `context` was opened by this library and is not closed.
    pub(crate) unsafe fn nic(context: *mut ibv_context) -> Arc<Nic> {
        // SAFETY: by this function's contract.
        unsafe { Arc::clone(&(*Self::around(context)).nic) }
    }

    fn around(context: *mut ibv_context) -> *mut Self {
        context.wrapping_byte_sub(offset_of!(verbs_context, context)).cast()
    }
}

/// Sets `errno` and returns a null pointer.
pub(crate) fn fail<T>(errno: c_int) -> *mut T {
    // SAFETY: `errno` belongs to the calling thread.
    unsafe { *libc::__errno_location() = errno };
    ptr::null_mut()
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: by the handles contract.
    let device = unsafe { Device::of(device) };
    if device.is_removed() {
        return fail(libc::ENODEV);
    }
    let nic = match Nic::start(device) {
        Ok(nic) => nic,
        Err(error) => return fail(error.raw_os_error().unwrap_or(libc::EIO)),
    };
    let mut table = verbs_context::zeroed();
    table.sz = size_of::<verbs_context>();
    table.query_port = Some(lists::query_port);
    table.query_device_ex = Some(lists::query_device_ex);
    table.create_qp_ex = Some(qp::create_qp_ex);
    table.context.device = device.as_ptr();
    table.context.num_comp_vectors = 4;
    table.context.cmd_fd = nic.wake_fd();
    table.context.async_fd = nic.events.fd();
    table.context.abi_compat = ptr::without_provenance_mut(usize::MAX);
    table.context.ops.poll_cq = Some(cq::poll_cq);
    table.context.ops.req_notify_cq = Some(cq::req_notify_cq);
    table.context.ops.alloc_mw = Some(window::alloc_mw);
    table.context.ops.dealloc_mw = Some(window::dealloc_mw);
    table.context.ops.post_send = Some(post::post_send);
    table.context.ops.post_recv = Some(post::post_recv);
    let context = Box::into_raw(Box::new(FakeContext { table, nic }));
    // SAFETY: `Box::into_raw` returned this pointer.
    unsafe { &raw mut (*context).table.context }
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: by the handles and destroy contracts.
    let context = unsafe { Box::from_raw(FakeContext::around(context)) };
    context.nic.stop();
    0
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    // SAFETY: by the handles contract.
    let nic = unsafe { FakeContext::nic(context) };
    loop {
        let Event { kind, port, id } = match nic.events.take() {
            Ok(event) => event,
            Err(error) => {
                fail::<()>(error.raw_os_error().unwrap_or(libc::EIO));
                return -1;
            }
        };
        let mut element = ibv_async_element::zeroed();
        if kind == IBV_EVENT_CQ_ERR {
            let queues = lock(&nic.cqs);
            let Some(found) = queues.get(&id) else { continue };
            found.event_taken();
            element.cq = found.place();
        } else {
            element.port_num = port.cast_signed();
        }
        // SAFETY: by the pointers contract.
        unsafe { event.write(ibv_async_event { element, event_type: kind }) };
        return 0;
    }
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: the program passes an event that `ibv_get_async_event` filled. A completion queue in
    // it lives until this acknowledgement.
    unsafe {
        if (*event).event_type == IBV_EVENT_CQ_ERR {
            cq::CqShared::of((*event).element.cq).events_acknowledged(1);
        }
    }
}
