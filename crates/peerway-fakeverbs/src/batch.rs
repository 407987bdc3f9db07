//! Extended queue pairs: requests that are built by calls and posted together.
//!
//! From `wr_start` to `wr_complete` or `wr_abort` the queue pair's own mutex is held, as drivers do, so the
//! requests of two threads do not mix. A mistake is noted and reported at the end; nothing is posted then.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};

use peerway_sys::verbs::ffi::*;

use crate::address::FakeAh;
use crate::post::{check, list, submit};
use crate::qp::{FakeQp, Kind, Local, Request};
use crate::stats::{COUNTERS, count};

/// Requests under construction. Belongs to the thread that holds the queue pair's mutex.
#[derive(Default)]
pub(crate) struct Batch(UnsafeCell<Building>);

#[derive(Default)]
struct Building {
    requests: Vec<Request>,
    mistake: bool,
}

/// # Safety
///
/// As libibverbs documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: the caller's queue pair is one of this library.
    let extended = unsafe { FakeQp::of(qp) }.extended;
    if extended { qp.cast() } else { std::ptr::null_mut() }
}

/// Fills the table, with the operations that were asked for.
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
/// The calling thread is between `wr_start` and the end of the batch on a queue pair of this library.
unsafe fn building<'a>(qp: *mut ibv_qp_ex) -> &'a mut Building {
    // SAFETY: by this function's contract the mutex makes this the only reference.
    unsafe { &mut *(*qp.cast::<FakeQp>()).batch.0.get() }
}

unsafe extern "C" fn start(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller's queue pair is one of this library; a mutex of zeros is one that is free.
    unsafe {
        libc::pthread_mutex_lock(&raw mut (*qp).qp_base.mutex);
        *building(qp) = Building::default();
    }
}

unsafe extern "C" fn complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the caller has started a batch, as verbs demand.
    let (built, fake) = unsafe { (std::mem::take(building(qp)), FakeQp::of(qp.cast())) };
    count(&COUNTERS.doorbells, 1);
    let finished: Result<Vec<Request>, c_int> =
        built.requests.into_iter().map(|request| check(fake, request)).collect();
    let returned = match finished {
        Ok(_) if built.mistake => libc::EINVAL,
        Ok(requests) => submit(fake, requests, true).map_or_else(|(errno, _)| errno, |()| 0),
        Err(errno) => errno,
    };
    // SAFETY: taken in `start` by this thread.
    unsafe { libc::pthread_mutex_unlock(&raw mut (*qp).qp_base.mutex) };
    returned
}

unsafe extern "C" fn abort(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller has started a batch, as verbs demand.
    unsafe {
        *building(qp) = Building::default();
        libc::pthread_mutex_unlock(&raw mut (*qp).qp_base.mutex);
    }
}

/// Begins a request.
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

/// Changes the last request; a call without one is a mistake.
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
    // SAFETY: the caller has started a batch, as verbs demand.
    let request = unsafe { next(qp, IBV_WR_RDMA_WRITE) };
    (request.key, request.address) = (key, address);
}

unsafe extern "C" fn rdma_write_imm(qp: *mut ibv_qp_ex, key: u32, address: u64, immediate: u32) {
    // SAFETY: as in `rdma_write`.
    let request = unsafe { next(qp, IBV_WR_RDMA_WRITE_WITH_IMM) };
    (request.key, request.address, request.immediate) = (key, address, immediate);
}

unsafe extern "C" fn rdma_read(qp: *mut ibv_qp_ex, key: u32, address: u64) {
    // SAFETY: as in `rdma_write`.
    let request = unsafe { next(qp, IBV_WR_RDMA_READ) };
    (request.key, request.address) = (key, address);
}

unsafe extern "C" fn send(qp: *mut ibv_qp_ex) {
    // SAFETY: as in `rdma_write`.
    unsafe { next(qp, IBV_WR_SEND) };
}

unsafe extern "C" fn send_imm(qp: *mut ibv_qp_ex, immediate: u32) {
    // SAFETY: as in `rdma_write`.
    unsafe { next(qp, IBV_WR_SEND_WITH_IMM) }.immediate = immediate;
}

unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: as in `rdma_write`; window and region are of this library.
    unsafe {
        let number = FakeQp::of(qp.cast()).number();
        next(qp, IBV_WR_BIND_MW).bind(mw, rkey, &*info, number);
    }
}

unsafe extern "C" fn local_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: as in `rdma_write`.
    unsafe { next(qp, IBV_WR_LOCAL_INV) }.key = rkey;
}

unsafe extern "C" fn set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, number: u32, qkey: u32) {
    // SAFETY: the caller's handle is one of this library.
    let peer = unsafe { FakeAh::peer(ah, number) };
    // SAFETY: as in `rdma_write`.
    unsafe { last(qp, |request| request.to = peer.map(|peer| (peer, qkey))) };
}

unsafe extern "C" fn set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    let piece = ibv_sge { addr, length, lkey };
    // SAFETY: as in `rdma_write`; the list is one piece long.
    unsafe { set_sge_list(qp, 1, &piece) };
}

unsafe extern "C" fn set_sge_list(qp: *mut ibv_qp_ex, pieces: usize, first: *const ibv_sge) {
    // SAFETY: the caller's queue pair is one of this library.
    let most = unsafe { FakeQp::of(qp.cast()) }.cap.max_send_sge as usize;
    if pieces > most {
        // SAFETY: as in `rdma_write`.
        unsafe { building(qp) }.mistake = true;
        return;
    }
    // SAFETY: the caller's list has so many pieces; else as in `rdma_write`.
    unsafe {
        let pieces = list(first, pieces);
        last(qp, |request| request.local = Local::Memory(pieces));
    }
}

unsafe extern "C" fn set_inline_data(qp: *mut ibv_qp_ex, start: *mut c_void, length: usize) {
    let buffer = ibv_data_buf { addr: start, length };
    // SAFETY: as in `rdma_write`; the list is one buffer long.
    unsafe { set_inline_data_list(qp, 1, &buffer) };
}

unsafe extern "C" fn set_inline_data_list(
    qp: *mut ibv_qp_ex,
    buffers: usize,
    first: *const ibv_data_buf,
) {
    let mut bytes = Vec::new();
    for index in 0..buffers {
        // SAFETY: the caller's list has so many buffers, and they can be read now.
        unsafe {
            let buffer = &*first.add(index);
            if buffer.length > 0 {
                let start = buffer.addr.cast::<u8>();
                bytes.extend_from_slice(std::slice::from_raw_parts(start, buffer.length));
            }
        }
    }
    // SAFETY: as in `rdma_write`.
    unsafe { last(qp, |request| request.local = Local::Inline(bytes)) };
}
