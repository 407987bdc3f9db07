//! Extended queue pairs: function calls build work requests, which are posted together.
//!
//! From `wr_start` to `wr_complete` or `wr_abort` the calling thread holds the queue pair's own
//! mutex, as drivers do. The requests of two threads therefore do not mix. A mistake is recorded
//! and reported at the end, and then nothing is posted.
//!
//! **Batch contract.** Verbs demand that a program calls the functions of this file only for a
//! queue pair of this library. All but `wr_start` require that the same thread has called
//! `wr_start` before and holds the mutex. SAFETY comments refer to this by name.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};

use peerway_sys::verbs::ffi::*;

use crate::address::FakeAh;
use crate::post::{check, list, submit};
use crate::qp::{FakeQp, Kind, Local, Request};
use crate::stats::{COUNTERS, count};

/// Requests under construction. Only the thread that holds the queue pair's mutex may touch them.
#[derive(Default)]
pub(crate) struct Batch(UnsafeCell<Building>);

#[derive(Default)]
struct Building {
    requests: Vec<Request>,
    mistake: bool,
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: by the handles contract.
    let extended = unsafe { FakeQp::of(qp) }.extended;
    if extended { qp.cast() } else { std::ptr::null_mut() }
}

/// Fills the function table with the operations that the program requested.
pub(crate) fn fill(ex: &mut ibv_qp_ex, operations: u64, kind: Kind) {
    let asked = |bit: u64| operations & bit != 0;
    ex.wr_start = Some(start);
    ex.wr_complete = Some(complete);
    ex.wr_abort = Some(abort);
    ex.wr_set_sge = Some(set_sge);
    ex.wr_set_sge_list = Some(set_sge_list);
    ex.wr_set_inline_data = Some(set_inline_data);
    ex.wr_set_inline_data_list = Some(set_inline_data_list);
    if kind != Kind::Rc {
        ex.wr_set_ud_addr = Some(set_ud_addr);
    }
    if asked(IBV_QP_EX_WITH_SEND) {
        ex.wr_send = Some(send);
    }
    if asked(IBV_QP_EX_WITH_SEND_WITH_IMM) {
        ex.wr_send_imm = Some(send_imm);
    }
    if kind == Kind::Ud {
        return;
    }
    if kind == Kind::Rc && asked(IBV_QP_EX_WITH_BIND_MW) {
        ex.wr_bind_mw = Some(bind_mw);
    }
    if kind == Kind::Rc && asked(IBV_QP_EX_WITH_LOCAL_INV) {
        ex.wr_local_inv = Some(local_inv);
    }
    if asked(IBV_QP_EX_WITH_RDMA_WRITE) {
        ex.wr_rdma_write = Some(rdma_write);
    }
    if asked(IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM) {
        ex.wr_rdma_write_imm = Some(rdma_write_imm);
    }
    if asked(IBV_QP_EX_WITH_RDMA_READ) {
        ex.wr_rdma_read = Some(rdma_read);
    }
}

/// The requests under construction.
///
/// # Safety
///
/// The batch contract holds, and the calling thread holds the mutex.
unsafe fn building<'a>(qp: *mut ibv_qp_ex) -> &'a mut Building {
    // SAFETY: by this function's contract, the mutex makes this the only reference.
    unsafe { &mut *(*qp.cast::<FakeQp>()).batch.0.get() }
}

unsafe extern "C" fn start(qp: *mut ibv_qp_ex) {
    // SAFETY: by the batch contract. A zeroed pthread mutex is initialized and free.
    unsafe {
        libc::pthread_mutex_lock(&raw mut (*qp).qp_base.mutex);
        *building(qp) = Building::default();
    }
}

unsafe extern "C" fn complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: by the batch contract.
    let (built, fake) = unsafe { (std::mem::take(building(qp)), FakeQp::of(qp.cast())) };
    count(&COUNTERS.doorbells, 1);
    let finished: Result<Vec<Request>, c_int> =
        built.requests.into_iter().map(|request| check(fake, request)).collect();
    let returned = match finished {
        Ok(_) if built.mistake => libc::EINVAL,
        Ok(requests) => submit(fake, requests, true).map_or_else(|(errno, _)| errno, |()| 0),
        Err(errno) => errno,
    };
    // SAFETY: this thread locked the mutex in `start`.
    unsafe { libc::pthread_mutex_unlock(&raw mut (*qp).qp_base.mutex) };
    returned
}

unsafe extern "C" fn abort(qp: *mut ibv_qp_ex) {
    // SAFETY: by the batch contract.
    unsafe {
        *building(qp) = Building::default();
        libc::pthread_mutex_unlock(&raw mut (*qp).qp_base.mutex);
    }
}

/// Appends a request to the batch.
///
/// # Safety
///
/// As for [`building`].
unsafe fn next<'a>(qp: *mut ibv_qp_ex, opcode: u32) -> &'a mut Request {
    // SAFETY: by this function's contract.
    let (id, flags, built) = unsafe { ((*qp).wr_id, (*qp).wr_flags, building(qp)) };
    built.requests.push(Request::new(id, opcode, flags, Local::Memory(Vec::new())));
    let last = built.requests.len() - 1;
    &mut built.requests[last]
}

/// Changes the last request. A call without a request is a mistake.
///
/// # Safety
///
/// As for [`building`].
unsafe fn last(qp: *mut ibv_qp_ex, change: impl FnOnce(&mut Request)) {
    // SAFETY: by this function's contract.
    let built = unsafe { building(qp) };
    match built.requests.last_mut() {
        Some(request) => change(request),
        None => built.mistake = true,
    }
}

unsafe extern "C" fn rdma_write(qp: *mut ibv_qp_ex, key: u32, address: u64) {
    // SAFETY: by the batch contract.
    let request = unsafe { next(qp, IBV_WR_RDMA_WRITE) };
    (request.key, request.address) = (key, address);
}

unsafe extern "C" fn rdma_write_imm(qp: *mut ibv_qp_ex, key: u32, address: u64, immediate: u32) {
    // SAFETY: by the batch contract.
    let request = unsafe { next(qp, IBV_WR_RDMA_WRITE_WITH_IMM) };
    (request.key, request.address, request.immediate) = (key, address, immediate);
}

unsafe extern "C" fn rdma_read(qp: *mut ibv_qp_ex, key: u32, address: u64) {
    // SAFETY: by the batch contract.
    let request = unsafe { next(qp, IBV_WR_RDMA_READ) };
    (request.key, request.address) = (key, address);
}

unsafe extern "C" fn send(qp: *mut ibv_qp_ex) {
    // SAFETY: by the batch contract.
    unsafe { next(qp, IBV_WR_SEND) };
}

unsafe extern "C" fn send_imm(qp: *mut ibv_qp_ex, immediate: u32) {
    // SAFETY: by the batch contract.
    unsafe { next(qp, IBV_WR_SEND_WITH_IMM) }.immediate = immediate;
}

unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: by the batch contract; window and region are valid by the handles contract.
    unsafe {
        let number = FakeQp::of(qp.cast()).number();
        next(qp, IBV_WR_BIND_MW).bind(mw, rkey, &*info, number);
    }
}

unsafe extern "C" fn local_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: by the batch contract.
    unsafe { next(qp, IBV_WR_LOCAL_INV) }.key = rkey;
}

unsafe extern "C" fn set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, number: u32, qkey: u32) {
    // SAFETY: by the handles contract.
    let peer = unsafe { FakeAh::peer(ah, number) };
    // SAFETY: by the batch contract.
    unsafe { last(qp, |request| request.to = peer.map(|peer| (peer, qkey))) };
}

unsafe extern "C" fn set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    let piece = ibv_sge { addr, length, lkey };
    // SAFETY: by the batch contract; the list has one piece.
    unsafe { set_sge_list(qp, 1, &piece) };
}

unsafe extern "C" fn set_sge_list(qp: *mut ibv_qp_ex, pieces: usize, first: *const ibv_sge) {
    // SAFETY: by the handles contract.
    let most = unsafe { FakeQp::of(qp.cast()) }.cap.max_send_sge as usize;
    if pieces > most {
        // SAFETY: by the batch contract.
        unsafe { building(qp) }.mistake = true;
        return;
    }
    // SAFETY: by the batch contract; the list has `pieces` entries by the pointers contract.
    unsafe {
        let pieces = list(first, pieces);
        last(qp, |request| request.local = Local::Memory(pieces));
    }
}

unsafe extern "C" fn set_inline_data(qp: *mut ibv_qp_ex, start: *mut c_void, length: usize) {
    let buffer = ibv_data_buf { addr: start, length };
    // SAFETY: by the batch contract; the list has one buffer.
    unsafe { set_inline_data_list(qp, 1, &buffer) };
}

unsafe extern "C" fn set_inline_data_list(
    qp: *mut ibv_qp_ex,
    buffers: usize,
    first: *const ibv_data_buf,
) {
    let mut bytes = Vec::new();
    for index in 0..buffers {
        // SAFETY: by the pointers contract, the list has `buffers` entries whose bytes are readable
        // now.
        unsafe {
            let buffer = &*first.add(index);
            if buffer.length > 0 {
                let start = buffer.addr.cast::<u8>();
                bytes.extend_from_slice(std::slice::from_raw_parts(start, buffer.length));
            }
        }
    }
    // SAFETY: by the batch contract.
    unsafe { last(qp, |request| request.local = Local::Inline(bytes)) };
}
