//! Posting: it turns the program's structures into requests on a queue.
//!
//! Structures and inline bytes are read before the lock is taken; under the lock only the queue
//! grows. Errors that a driver would find are found here. The device finds the others.

use std::ffi::c_int;

use peerway_sys::verbs::ffi::*;

use crate::address::FakeAh;
use crate::device::{DATAGRAM, MAX_MESSAGE};
use crate::nic::wake_all;
use crate::qp::{FakeQp, Kind, Local, Receive, Request};
use crate::stats::{COUNTERS, count};
use crate::window::Bound;

/// # Safety
///
/// The caller keeps the contract of libibverbs.
pub(crate) unsafe extern "C" fn post_send(
    raw: *mut ibv_qp,
    first: *mut ibv_send_wr,
    rejected: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: by the handles contract.
    let qp = unsafe { FakeQp::of(raw) };
    count(&COUNTERS.doorbells, 1);
    let mut requests = Vec::new();
    let mut places = Vec::new();
    let mut returned = 0;
    let mut next = first;
    while !next.is_null() {
        // SAFETY: by the pointers contract, `next` is an entry of the program's list.
        match unsafe { read(qp, &*next) } {
            Ok(request) => {
                requests.push(request);
                places.push(next);
            }
            Err(errno) => {
                returned = errno;
                break;
            }
        }
        // SAFETY: by the pointers contract.
        next = unsafe { (*next).next };
    }
    let posted = submit(qp, requests, false);
    if let Err((errno, taken)) = posted {
        returned = errno;
        next = places.get(taken).copied().unwrap_or(next);
    }
    if returned != 0 {
        // SAFETY: by the pointers contract.
        unsafe { *rejected = next };
    }
    returned
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
pub(crate) unsafe extern "C" fn post_recv(
    raw: *mut ibv_qp,
    first: *mut ibv_recv_wr,
    rejected: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: by the handles contract.
    let fake = unsafe { FakeQp::of(raw) };
    count(&COUNTERS.receive_doorbells, 1);
    let mut state = fake.nic.lock();
    let (mut env, qps, _) = state.split(&fake.nic);
    let Some(qp) = qps.get_mut(&fake.number()) else { return libc::EINVAL };
    let mut next = first;
    let mut returned = 0;
    while !next.is_null() {
        // SAFETY: by the pointers contract, `next` is an entry of the program's list.
        let receive = unsafe { &*next };
        let pieces = usize::try_from(receive.num_sge).unwrap_or(usize::MAX);
        returned = if pieces > qp.cap.max_recv_sge as usize || qp.state == IBV_QPS_RESET {
            libc::EINVAL
        } else if fake.nic.device.is_removed() {
            libc::EIO
        } else if qp.receives.len() >= qp.cap.max_recv_wr as usize {
            libc::ENOMEM
        } else {
            0
        };
        if returned != 0 {
            // SAFETY: by the pointers contract.
            unsafe { *rejected = next };
            break;
        }
        // SAFETY: by the pointers contract, the list has `pieces` entries.
        let pieces = unsafe { list(receive.sg_list, pieces) };
        let posted = Receive { id: receive.wr_id, pieces };
        count(&COUNTERS.receives, 1);
        if qp.state == IBV_QPS_ERR {
            qp.complete_receive(&mut env, &posted, IBV_WC_WR_FLUSH_ERR);
        } else {
            qp.receives.push_back(posted);
        }
        next = receive.next;
    }
    if qp.state == IBV_QPS_ERR {
        // Flushed completions may be late. The device's thread then delivers them.
        fake.nic.activate(&mut state, fake.number());
    }
    returned
}

/// Puts requests on the send queue: all of them if `whole` is set, otherwise as many as fit.
///
/// # Errors
///
/// The error number, and how many requests were accepted.
pub(crate) fn submit(
    fake: &FakeQp,
    requests: Vec<Request>,
    whole: bool,
) -> Result<(), (c_int, usize)> {
    let (nic, number) = (&fake.nic, fake.number());
    if nic.device.is_removed() {
        return Err((libc::EIO, 0));
    }
    let mut state = nic.lock();
    let (mut env, qps, _) = state.split(nic);
    let Some(qp) = qps.get_mut(&number) else { return Err((libc::EINVAL, 0)) };
    if !matches!(qp.state, IBV_QPS_RTS | IBV_QPS_ERR) {
        return Err((libc::EINVAL, 0));
    }
    let room = (qp.cap.max_send_wr as usize).saturating_sub(qp.outstanding());
    let full = qp.state == IBV_QPS_RTS && requests.len() > room;
    if full && whole {
        return Err((libc::ENOMEM, 0));
    }
    let mut removed = false;
    let mut taken = 0;
    for request in requests {
        if full && taken == room {
            break;
        }
        taken += 1;
        count(&COUNTERS.requests, 1);
        count(&COUNTERS.signalled, u64::from(request.signalled));
        count(&COUNTERS.inlined, u64::from(matches!(request.local, Local::Inline(_))));
        removed |= nic.device.count_request();
        if qp.state == IBV_QPS_ERR {
            qp.complete(&mut env, &request, IBV_WC_WR_FLUSH_ERR);
        } else {
            qp.push(request);
        }
    }
    nic.activate(&mut state, number);
    drop(state);
    if removed {
        wake_all(nic.device);
    }
    while nic.device.fabric.script.prompt && fake.is_at_work() {
        std::thread::sleep(std::time::Duration::from_micros(20));
    }
    if full { Err((libc::ENOMEM, taken)) } else { Ok(()) }
}

/// Reads a work request as the program wrote it.
///
/// # Safety
///
/// The pointers and handles in `wr` are valid.
unsafe fn read(qp: &FakeQp, wr: &ibv_send_wr) -> Result<Request, c_int> {
    let count = usize::try_from(wr.num_sge).map_err(|_| libc::EINVAL)?;
    if count > qp.cap.max_send_sge as usize {
        return Err(libc::EINVAL);
    }
    // SAFETY: by this function's contract.
    let pieces = unsafe { list(wr.sg_list, count) };
    let local = if wr.send_flags & IBV_SEND_INLINE != 0 {
        // SAFETY: by this function's contract, the bytes of an inline request are readable now.
        Local::Inline(unsafe { copy(&pieces) })
    } else {
        Local::Memory(pieces)
    };
    let mut request = Request::new(wr.wr_id, wr.opcode, wr.send_flags, local);
    request.immediate = wr.imm_data;
    match qp.kind {
        Kind::Rc if wr.opcode == IBV_WR_LOCAL_INV => request.key = wr.imm_data,
        Kind::Rc if wr.opcode == IBV_WR_BIND_MW => {
            let ibv_wr_bind_mw { mw, rkey, bind_info } = wr.bind_mw;
            // SAFETY: window and region are of this library, by this function's contract.
            unsafe { request.bind(mw, rkey, &bind_info, qp.number()) };
        }
        Kind::Rc => {
            // SAFETY: every member of the union consists of integers; sends do not use the values.
            let rdma = unsafe { wr.wr.rdma };
            (request.address, request.key) = (rdma.remote_addr, rdma.rkey);
        }
        Kind::Ud | Kind::Srd => {
            // SAFETY: requests on these queue pairs fill this member of the union.
            let ud = unsafe { wr.wr.ud };
            // SAFETY: the address handle is of this library, by this function's contract.
            let to = unsafe { FakeAh::peer(ud.ah, ud.remote_qpn) }.ok_or(libc::EINVAL)?;
            request.to = Some((to, ud.remote_qkey));
        }
    }
    check(qp, request)
}

/// Checks a filled request and completes it.
///
/// # Errors
///
/// `EINVAL` for requests that a driver refuses.
pub(crate) fn check(qp: &FakeQp, mut request: Request) -> Result<Request, c_int> {
    let allowed = match qp.kind {
        Kind::Rc if request.opcode == IBV_WR_BIND_MW => request.bind.is_some(),
        Kind::Rc => request.opcode <= IBV_WR_RDMA_READ || request.opcode == IBV_WR_LOCAL_INV,
        Kind::Srd => request.opcode <= IBV_WR_RDMA_READ,
        Kind::Ud => matches!(request.opcode, IBV_WR_SEND | IBV_WR_SEND_WITH_IMM),
    };
    request.signalled |= qp.signal_all;
    request.length = match &request.local {
        Local::Memory(pieces) => pieces.iter().map(|piece| u64::from(piece.length)).sum(),
        Local::Inline(bytes) => bytes.len() as u64,
    };
    let inline = matches!(request.local, Local::Inline(_));
    let too_long = inline && request.length > u64::from(qp.cap.max_inline_data);
    let lost = qp.kind != Kind::Rc && request.to.is_none();
    if !allowed || too_long || lost || (inline && request.is_read()) {
        return Err(libc::EINVAL);
    }
    let send = matches!(request.opcode, IBV_WR_SEND | IBV_WR_SEND_WITH_IMM);
    let longest = if qp.kind != Kind::Rc && send { DATAGRAM } else { MAX_MESSAGE };
    if request.length > longest {
        request.error = Some(IBV_WC_LOC_LEN_ERR);
    }
    Ok(request)
}

impl Request {
    pub(crate) fn new(id: u64, opcode: u32, flags: u32, local: Local) -> Self {
        Self {
            id,
            opcode,
            signalled: flags & IBV_SEND_SIGNALED != 0,
            solicited: flags & IBV_SEND_SOLICITED != 0,
            fence: flags & IBV_SEND_FENCE != 0,
            immediate: 0,
            address: 0,
            key: 0,
            local,
            length: 0,
            bind: None,
            to: None,
            error: None,
            first: 0,
            begun: false,
            read: None,
        }
    }
}

impl Request {
    /// Sets what a window is to be bound to. Leaves the request without a binding if it is invalid.
    ///
    /// # Safety
    ///
    /// `mw` and `info.mr` are null or of this library.
    pub(crate) unsafe fn bind(
        &mut self,
        mw: *mut ibv_mw,
        rkey: u32,
        info: &ibv_mw_bind_info,
        qp: u32,
    ) {
        if mw.is_null() || info.mr.is_null() {
            return;
        }
        // SAFETY: by this function's contract.
        let (window, region) = unsafe { ((*mw).rkey, (*info.mr).lkey) };
        let &ibv_mw_bind_info { addr: address, length, mw_access_flags: access, .. } = info;
        if window >> 8 == rkey >> 8 {
            self.bind = Some((rkey, Bound { region, address, length, access, qp }));
        }
    }
}

/// # Safety
///
/// `start` has `count` entries, unless `count` is zero.
pub(crate) unsafe fn list(start: *const ibv_sge, count: usize) -> Vec<ibv_sge> {
    if count == 0 {
        return Vec::new();
    }
    // SAFETY: by this function's contract.
    unsafe { std::slice::from_raw_parts(start, count) }.to_vec()
}

/// # Safety
///
/// The memory that the pieces name is readable.
unsafe fn copy(pieces: &[ibv_sge]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in pieces.iter().filter(|piece| piece.length > 0) {
        let start = std::ptr::with_exposed_provenance::<u8>(piece.addr as usize);
        // SAFETY: by this function's contract.
        bytes
            .extend_from_slice(unsafe { std::slice::from_raw_parts(start, piece.length as usize) });
    }
    bytes
}
