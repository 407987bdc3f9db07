//! A fake device for the tests of the handles. It records every call and injects failures.
//!
//! It moves no bytes. `tests/device.rs` tests the effects of verbs on soft-RoCE devices.
//!
//! SAFETY comments refer to these rules as the *fake contract*: the handles under test pass
//! pointers that are valid for the call, and every object comes from [`made`] and exists until
//! [`gone`].

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;

use super::completion::Cq;
use super::context::Context;
use super::ffi::*;
use super::memory::Pd;
use super::queue_pair::{Qp, QpConfig};
use super::table::{Symbols, Verbs};

/// Opens the fake's device. All its state belongs to the calling thread.
pub(crate) fn open() -> Context {
    // SAFETY: the functions below keep every object that they return until it is given back.
    let verbs = unsafe { Verbs::from_symbols(symbols()) };
    let devices = verbs.devices().expect("the fake has a list");
    devices.iter().next().expect("the list has one device").open().expect("the device opens")
}

/// A queue pair with room for four requests, and its queue and domain.
pub(crate) fn queue_pair() -> (Arc<Cq>, Arc<Pd>, Qp) {
    STATE.with_borrow_mut(|state| state.extended = false);
    let context = Arc::new(open());
    let pd = Arc::new(Pd::alloc(&context).expect("the fake gives one"));
    let cq = Arc::new(Cq::create(&context, 8, 0, None, 0).expect("the fake gives one"));
    let qp = Qp::create(&pd, &config(&cq)).expect("the fake gives one");
    (cq, pd, qp)
}

/// As [`queue_pair`], but extended: it has batches and supports writes.
pub(crate) fn extended_queue_pair() -> (Arc<Cq>, Arc<Pd>, Qp) {
    let (cq, pd, _) = queue_pair();
    STATE.with_borrow_mut(|state| state.extended = true);
    let qp = Qp::create(&pd, &config(&cq)).expect("the fake gives one");
    (cq, pd, qp)
}

pub(crate) fn config(cq: &Arc<Cq>) -> QpConfig<'_> {
    let cap = ibv_qp_cap { max_send_wr: 4, ..ibv_qp_cap::zeroed() };
    QpConfig { send_cq: cq, recv_cq: cq, cap, qp_type: IBV_QPT_RC, signal_all: false }
}

/// Makes the next call of `name` fail with `errno`.
pub(crate) fn fail(name: &'static str, errno: i32) {
    STATE.with_borrow_mut(|state| state.failures.push((name, errno)));
}

/// The calls since the previous `log()`.
pub(crate) fn log() -> Vec<&'static str> {
    STATE.with_borrow_mut(|state| std::mem::take(&mut state.log))
}

pub(crate) fn push_completions(ids: &[u64]) {
    STATE.with_borrow_mut(|state| state.completions.extend(ids));
}

pub(crate) fn push_cq_event(cq: &Cq) {
    STATE.with_borrow_mut(|state| state.cq_events.push_back(cq.as_ptr()));
}

pub(crate) fn push_port_event(event_type: c_uint, port_num: c_int) {
    let element = ibv_async_element { port_num };
    let event = ibv_async_event { element, event_type };
    STATE.with_borrow_mut(|state| state.async_events.push_back(event));
}

/// Creates a queue pair for a driver's own create call.
pub(crate) fn create_qp_for(pd: *mut ibv_pd, attr: &mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: fake contract: the domain is the fake's.
    unsafe { create_qp(pd, attr) }
}

#[derive(Default)]
struct State {
    log: Vec<&'static str>,
    failures: Vec<(&'static str, i32)>,
    completions: VecDeque<u64>,
    cq_events: VecDeque<*mut ibv_cq>,
    async_events: VecDeque<ibv_async_event>,
    posted: u32,
    qp_state: c_uint,
    extended: bool,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

/// Records a call and returns the injected error, if any.
fn enter(name: &'static str) -> Option<i32> {
    STATE.with_borrow_mut(|state| {
        state.log.push(name);
        let at = state.failures.iter().position(|(failing, _)| *failing == name)?;
        let (_, errno) = state.failures.remove(at);
        // SAFETY: errno belongs to this thread.
        unsafe { *libc::__errno_location() = errno };
        Some(errno)
    })
}

/// A call that returns 0 or the injected error number.
fn simple(name: &'static str) -> c_int {
    enter(name).unwrap_or(0)
}

fn made<T>(name: &'static str, object: T) -> *mut T {
    if enter(name).is_some() { ptr::null_mut() } else { Box::into_raw(Box::new(object)) }
}

/// Frees an object.
///
/// # Safety
///
/// [`made`] created `object`, and no code uses it again.
unsafe fn gone<T>(name: &'static str, object: *mut T) -> c_int {
    let returned = simple(name);
    if returned == 0 {
        // SAFETY: the caller guarantees it.
        drop(unsafe { Box::from_raw(object) });
    }
    returned
}

macro_rules! functions {
    ($( fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block )*) => {
        $( unsafe extern "C" fn $name($($arg: $ty),*) $(-> $ret)? $body )*
    };
}

functions! {
    fn get_device_list(len: *mut c_int) -> *mut *mut ibv_device {
        let mut device = ibv_device::zeroed();
        for (to, from) in device.name.iter_mut().zip(b"fake0") {
            *to = *from as c_char;
        }
        for (to, from) in device.ibdev_path.iter_mut().zip(b"/sys/class/infiniband/fake0") {
            *to = *from as c_char;
        }
        // SAFETY: fake contract.
        unsafe { *len = 1 };
        Box::into_raw(Box::new([Box::into_raw(Box::new(device)), ptr::null_mut()])).cast()
    }
    fn free_device_list(list: *mut *mut ibv_device) {
        // SAFETY: `get_device_list` created the list. The device itself stays, because an open
        // context may still name it.
        drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_device; 2]>()) });
    }
    fn get_device_name(device: *mut ibv_device) -> *const c_char {
        // SAFETY: fake contract.
        unsafe { (*device).name.as_ptr() }
    }
    fn get_device_guid(_device: *mut ibv_device) -> u64 {
        1u64.to_be()
    }
    fn open_device(device: *mut ibv_device) -> *mut ibv_context {
        let mut table = verbs_context::zeroed();
        table.context.device = device;
        table.context.num_comp_vectors = 3;
        // SAFETY: creates a new descriptor that belongs to this process, so that tests can make it
        // non-blocking.
        table.context.async_fd = unsafe { libc::eventfd(0, 0) };
        table.context.ops.poll_cq = Some(poll_cq);
        table.context.ops.req_notify_cq = Some(req_notify_cq);
        table.context.ops.post_send = Some(post_send);
        table.context.ops.post_recv = Some(post_recv);
        table.context.ops.alloc_mw = Some(alloc_mw);
        table.context.ops.dealloc_mw = Some(dealloc_mw);
        let table = made("ibv_open_device", table);
        // SAFETY: fake contract: it was just created.
        unsafe { &raw mut (*table).context }
    }
    fn close_device(context: *mut ibv_context) -> c_int {
        // SAFETY: fake contract: every context lies in a `verbs_context` from `open_device`.
        unsafe {
            libc::close((*context).async_fd);
            let table = context.byte_sub(std::mem::offset_of!(verbs_context, context));
            gone("ibv_close_device", table.cast::<verbs_context>())
        }
    }
    fn get_async_event(_context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
        if enter("ibv_get_async_event").is_some() {
            return -1;
        }
        match STATE.with_borrow_mut(|state| state.async_events.pop_front()) {
            Some(next) => {
                // SAFETY: fake contract.
                unsafe { *event = next };
                0
            }
            None => again(),
        }
    }
    fn ack_async_event(_event: *mut ibv_async_event) {
        enter("ibv_ack_async_event");
    }
    fn query_device(_context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
        // SAFETY: fake contract.
        unsafe { (*attr).max_qp = 7 };
        simple("ibv_query_device")
    }
    fn query_port(_context: *mut ibv_context, _port: u8, attr: *mut ibv_port_attr) -> c_int {
        // SAFETY: fake contract.
        unsafe { (*attr).state = IBV_PORT_ACTIVE };
        simple("ibv_query_port")
    }
    fn query_gid(_context: *mut ibv_context, _port: u8, _index: c_int, gid: *mut ibv_gid) -> c_int {
        // SAFETY: fake contract.
        unsafe { (*gid).raw = [1; 16] };
        if enter("ibv_query_gid").is_some() { -1 } else { 0 }
    }
    fn query_gid_ex(
        _context: *mut ibv_context,
        _port: u32,
        _index: u32,
        entry: *mut ibv_gid_entry,
        _flags: u32,
        size: usize,
    ) -> c_int {
        assert_eq!(size, size_of::<ibv_gid_entry>());
        // SAFETY: fake contract.
        unsafe {
            (*entry).gid_type = IBV_GID_TYPE_ROCE_V2;
            (*entry).ndev_ifindex = 5;
        }
        simple("_ibv_query_gid_ex")
    }
    fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
        made("ibv_alloc_pd", ibv_pd { context, handle: 0 })
    }
    fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
        // SAFETY: fake contract.
        unsafe { gone("ibv_dealloc_pd", pd) }
    }
    fn reg_mr(_pd: *mut ibv_pd, _address: *mut c_void, _length: usize, access: c_int) -> *mut ibv_mr {
        assert_eq!(access.cast_unsigned() & IBV_ACCESS_OPTIONAL_RANGE, 0);
        made("ibv_reg_mr", ibv_mr { lkey: 11, rkey: 12, ..ibv_mr::zeroed() })
    }
    fn reg_mr_iova2(
        _pd: *mut ibv_pd,
        _address: *mut c_void,
        _length: usize,
        _iova: u64,
        _access: c_uint,
    ) -> *mut ibv_mr {
        made("ibv_reg_mr_iova2", ibv_mr { lkey: 11, rkey: 12, ..ibv_mr::zeroed() })
    }
    fn dereg_mr(mr: *mut ibv_mr) -> c_int {
        // SAFETY: fake contract.
        unsafe { gone("ibv_dereg_mr", mr) }
    }
    fn alloc_mw(_pd: *mut ibv_pd, kind: c_uint) -> *mut ibv_mw {
        assert_eq!(kind, IBV_MW_TYPE_2);
        made("ibv_alloc_mw", ibv_mw::zeroed())
    }
    fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
        // SAFETY: fake contract.
        unsafe { gone("ibv_dealloc_mw", mw) }
    }
    fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
        made("ibv_create_comp_channel", ibv_comp_channel { context, fd: -1, refcnt: 0 })
    }
    fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
        // SAFETY: fake contract.
        unsafe { gone("ibv_destroy_comp_channel", channel) }
    }
    fn create_cq(
        context: *mut ibv_context,
        cqe: c_int,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        _vector: c_int,
    ) -> *mut ibv_cq {
        made("ibv_create_cq", ibv_cq { context, cqe, cq_context, channel, ..ibv_cq::zeroed() })
    }
    fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
        // SAFETY: fake contract.
        unsafe { (*cq).cqe = cqe };
        simple("ibv_resize_cq")
    }
    fn destroy_cq(cq: *mut ibv_cq) -> c_int {
        // SAFETY: fake contract.
        unsafe { gone("ibv_destroy_cq", cq) }
    }
    fn get_cq_event(
        _channel: *mut ibv_comp_channel,
        cq: *mut *mut ibv_cq,
        cookie: *mut *mut c_void,
    ) -> c_int {
        if enter("ibv_get_cq_event").is_some() {
            return -1;
        }
        match STATE.with_borrow_mut(|state| state.cq_events.pop_front()) {
            Some(next) => {
                // SAFETY: fake contract.
                unsafe {
                    *cq = next;
                    *cookie = (*next).cq_context;
                }
                0
            }
            None => again(),
        }
    }
    fn ack_cq_events(_cq: *mut ibv_cq, count: c_uint) {
        assert_eq!(count, 1);
        enter("ibv_ack_cq_events");
    }
    fn poll_cq(_cq: *mut ibv_cq, room: c_int, into: *mut ibv_wc) -> c_int {
        if let Some(errno) = enter("ibv_poll_cq") {
            return -errno;
        }
        STATE.with_borrow_mut(|state| {
            let count = state.completions.len().min(room as usize);
            for (index, wr_id) in state.completions.drain(..count).enumerate() {
                // SAFETY: the caller has room for `room` completions.
                unsafe { into.add(index).write(ibv_wc { wr_id, ..ibv_wc::zeroed() }) };
            }
            count as c_int
        })
    }
    fn req_notify_cq(_cq: *mut ibv_cq, _solicited_only: c_int) -> c_int {
        simple("ibv_req_notify_cq")
    }
    fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
        STATE.with_borrow_mut(|state| state.posted = 0);
        // SAFETY: fake contract.
        let (context, attr) = unsafe { ((*pd).context, *attr) };
        let mut qp = ibv_qp_ex::zeroed();
        qp.qp_base = ibv_qp { context, pd, qp_num: 42, ..ibv_qp::zeroed() };
        (qp.qp_base.send_cq, qp.qp_base.recv_cq) = (attr.send_cq, attr.recv_cq);
        qp.wr_start = Some(wr_start);
        qp.wr_complete = Some(wr_complete);
        qp.wr_abort = Some(wr_abort);
        qp.wr_rdma_write = Some(wr_rdma_write);
        qp.wr_set_sge = Some(wr_set_sge);
        made("ibv_create_qp", qp).cast()
    }
    fn qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
        if STATE.with_borrow(|state| state.extended) { qp.cast() } else { ptr::null_mut() }
    }
    fn modify_qp(_qp: *mut ibv_qp, attr: *mut ibv_qp_attr, _mask: c_int) -> c_int {
        // SAFETY: fake contract.
        let qp_state = unsafe { (*attr).qp_state };
        STATE.with_borrow_mut(|state| state.qp_state = qp_state);
        simple("ibv_modify_qp")
    }
    fn query_qp(
        _qp: *mut ibv_qp,
        attr: *mut ibv_qp_attr,
        _mask: c_int,
        _init: *mut ibv_qp_init_attr,
    ) -> c_int {
        // SAFETY: fake contract.
        unsafe { (*attr).qp_state = STATE.with_borrow(|state| state.qp_state) };
        simple("ibv_query_qp")
    }
    fn destroy_qp(qp: *mut ibv_qp) -> c_int {
        // SAFETY: fake contract: `create_qp` created it as an extended queue pair.
        unsafe { gone("ibv_destroy_qp", qp.cast::<ibv_qp_ex>()) }
    }
    fn post_send(
        _qp: *mut ibv_qp,
        first: *mut ibv_send_wr,
        rejected: *mut *mut ibv_send_wr,
    ) -> c_int {
        enter("ibv_post_send");
        let mut request = first;
        while !request.is_null() {
            let posted = STATE.with_borrow_mut(|state| {
                state.posted += 1;
                state.posted
            });
            if posted > 4 {
                // SAFETY: fake contract.
                unsafe { *rejected = request };
                return libc::ENOMEM;
            }
            // SAFETY: fake contract: the caller passes a valid list.
            request = unsafe { (*request).next };
        }
        0
    }
    fn post_recv(
        _qp: *mut ibv_qp,
        request: *mut ibv_recv_wr,
        rejected: *mut *mut ibv_recv_wr,
    ) -> c_int {
        // SAFETY: fake contract.
        unsafe { *rejected = request };
        simple("ibv_post_recv")
    }
    fn create_ah(pd: *mut ibv_pd, _attr: *mut ibv_ah_attr) -> *mut ibv_ah {
        made("ibv_create_ah", ibv_ah { pd, ..ibv_ah::zeroed() })
    }
    fn destroy_ah(ah: *mut ibv_ah) -> c_int {
        // SAFETY: fake contract.
        unsafe { gone("ibv_destroy_ah", ah) }
    }
    fn wr_start(_qp: *mut ibv_qp_ex) {
        enter("wr_start");
    }
    fn wr_complete(_qp: *mut ibv_qp_ex) -> c_int {
        simple("wr_complete")
    }
    fn wr_abort(_qp: *mut ibv_qp_ex) {
        enter("wr_abort");
    }
    fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
        // SAFETY: fake contract.
        let (id, flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
        assert_eq!((id, flags, rkey, remote_addr), (1, IBV_SEND_SIGNALED, 5, 0x1000));
        enter("wr_rdma_write");
    }
    fn wr_set_sge(_qp: *mut ibv_qp_ex, lkey: u32, address: u64, length: u32) {
        assert_eq!((lkey, address, length), (3, 0x10, 2));
        enter("wr_set_sge");
    }
}

/// Fails like a read from an empty non-blocking descriptor.
fn again() -> c_int {
    // SAFETY: errno belongs to this thread.
    unsafe { *libc::__errno_location() = libc::EAGAIN };
    -1
}

fn symbols() -> Symbols {
    Symbols {
        ibv_get_device_list: get_device_list,
        ibv_free_device_list: free_device_list,
        ibv_get_device_name: get_device_name,
        ibv_get_device_guid: get_device_guid,
        ibv_open_device: open_device,
        ibv_close_device: close_device,
        ibv_get_async_event: get_async_event,
        ibv_ack_async_event: ack_async_event,
        ibv_query_device: query_device,
        ibv_query_port: query_port,
        ibv_query_gid: query_gid,
        ibv_alloc_pd: alloc_pd,
        ibv_dealloc_pd: dealloc_pd,
        ibv_reg_mr: reg_mr,
        ibv_dereg_mr: dereg_mr,
        ibv_create_comp_channel: create_comp_channel,
        ibv_destroy_comp_channel: destroy_comp_channel,
        ibv_create_cq: create_cq,
        ibv_resize_cq: resize_cq,
        ibv_destroy_cq: destroy_cq,
        ibv_get_cq_event: get_cq_event,
        ibv_ack_cq_events: ack_cq_events,
        ibv_create_qp: create_qp,
        ibv_modify_qp: modify_qp,
        ibv_query_qp: query_qp,
        ibv_destroy_qp: destroy_qp,
        ibv_create_ah: create_ah,
        ibv_destroy_ah: destroy_ah,
        ibv_fork_init: None,
        ibv_qp_to_qp_ex: Some(qp_to_qp_ex),
        ibv_reg_mr_iova2: Some(reg_mr_iova2),
        _ibv_query_gid_ex: Some(query_gid_ex),
        ibv_reg_dmabuf_mr: None,
        ibv_query_qp_data_in_order: None,
    }
}
