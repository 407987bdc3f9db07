//! Creation and destruction of queue pairs.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use peerway_sys::verbs::ffi::*;
use rustix::event::epoll;

use super::{FakeQp, Kind, Qp, next_life};
use crate::batch::Batch;
use crate::context::fail;
use crate::cq::CqShared;
use crate::device::{MAX_INLINE, MAX_SGE, MAX_WR};
use crate::nic::Nic;
use crate::pd::FakePd;
use crate::rc::{Requester, Responder};
use crate::srd::Datagrams;
use crate::stats::{COUNTERS, count};
use crate::wire;

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    // SAFETY: by the pointers contract.
    let plain = unsafe { &mut *attr };
    let mut full = ibv_qp_init_attr_ex::zeroed();
    full.qp_context = plain.qp_context;
    full.send_cq = plain.send_cq;
    full.recv_cq = plain.recv_cq;
    full.srq = plain.srq;
    full.cap = plain.cap;
    full.qp_type = plain.qp_type;
    full.sq_sig_all = plain.sq_sig_all;
    full.comp_mask = IBV_QP_INIT_ATTR_PD;
    full.pd = pd;
    let kind = match plain.qp_type {
        IBV_QPT_RC => Kind::Rc,
        IBV_QPT_UD => Kind::Ud,
        _ => return fail(libc::EOPNOTSUPP),
    };
    // SAFETY: by this function's contract.
    let qp = unsafe { create(&mut full, kind) };
    plain.cap = full.cap;
    qp
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
pub(crate) unsafe extern "C" fn create_qp_ex(
    _context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: by the pointers contract.
    let attr = unsafe { &mut *attr };
    let kind = match attr.qp_type {
        IBV_QPT_RC => Kind::Rc,
        IBV_QPT_UD => Kind::Ud,
        _ => return fail(libc::EOPNOTSUPP),
    };
    // SAFETY: by this function's contract.
    unsafe { create(attr, kind) }
}

/// # Safety
///
/// The domain and the queues in `attr` are of this library.
pub(crate) unsafe fn create(attr: &mut ibv_qp_init_attr_ex, kind: Kind) -> *mut ibv_qp {
    const KNOWN: u32 = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    let missing = attr.pd.is_null() || attr.send_cq.is_null() || attr.recv_cq.is_null();
    if missing || attr.comp_mask & IBV_QP_INIT_ATTR_PD == 0 || !attr.srq.is_null() {
        return fail(libc::EINVAL);
    }
    if attr.comp_mask & !KNOWN != 0 {
        return fail(libc::EOPNOTSUPP);
    }
    // SAFETY: by this function's contract.
    let domain = unsafe { FakePd::of(attr.pd) };
    // SAFETY: by this function's contract.
    let (send_cq, recv_cq) = unsafe { (CqShared::of(attr.send_cq), CqShared::of(attr.recv_cq)) };
    let nic = Arc::clone(&domain.nic);
    if nic.device.is_removed() {
        return fail(libc::EIO);
    }
    if nic.device.is_efa() && kind == Kind::Rc {
        return fail(libc::EOPNOTSUPP);
    }
    let cap = &mut attr.cap;
    let too_much = cap.max_send_wr > MAX_WR
        || cap.max_recv_wr > MAX_WR
        || cap.max_send_sge > MAX_SGE
        || cap.max_recv_sge > MAX_SGE
        || cap.max_inline_data > MAX_INLINE;
    if too_much {
        return fail(libc::EINVAL);
    }
    cap.max_send_sge = cap.max_send_sge.max(1);
    cap.max_recv_sge = cap.max_recv_sge.max(1);
    let (number, socket) = match bind(&nic) {
        Ok(bound) => bound,
        Err(error) => return fail(error.raw_os_error().unwrap_or(libc::EIO)),
    };
    let signal_all = attr.sq_sig_all != 0;
    let qp = Qp {
        number,
        kind,
        pd: domain.id,
        state: IBV_QPS_RESET,
        cap: attr.cap,
        attr: ibv_qp_attr::zeroed(),
        send_cq,
        recv_cq,
        socket: Arc::new(socket),
        active: false,
        life: next_life(),
        peer: None,
        receives: VecDeque::new(),
        begun: 0,
        blocked_until: None,
        blocks: 0,
        tx: Requester::new(0),
        rx: Responder::new(0),
        datagrams: Datagrams::default(),
    };
    let data = epoll::EventData::new_u64(u64::from(number));
    if let Err(error) = epoll::add(&nic.epoll, &*qp.socket, data, epoll::EventFlags::IN) {
        return fail(error.raw_os_error());
    }
    qp.send_cq.add_user();
    qp.recv_cq.add_user();
    domain.add_user();
    count(&COUNTERS.queue_pairs, 1);
    let mut ex = ibv_qp_ex::zeroed();
    ex.qp_base.context = nic_context(attr.pd);
    ex.qp_base.qp_context = attr.qp_context;
    ex.qp_base.pd = attr.pd;
    ex.qp_base.send_cq = attr.send_cq;
    ex.qp_base.recv_cq = attr.recv_cq;
    ex.qp_base.handle = number;
    ex.qp_base.qp_num = number;
    ex.qp_base.state = IBV_QPS_RESET;
    ex.qp_base.qp_type = attr.qp_type;
    let extended = attr.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
    if extended {
        crate::batch::fill(&mut ex, attr.send_ops_flags, kind);
    }
    nic.lock().qps.insert(number, qp);
    let batch = Batch::default();
    let fake = FakeQp { ex, nic, kind, cap: attr.cap, signal_all, extended, batch };
    Box::into_raw(Box::new(fake)).cast()
}

fn nic_context(pd: *mut ibv_pd) -> *mut ibv_context {
    // SAFETY: `create` requires a domain of this library.
    unsafe { (*pd).context }
}

/// Finds a number that is free on the fabric, by binding a socket with its name.
fn bind(nic: &Nic) -> io::Result<(u32, UnixDatagram)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Processes start at different numbers, so that they rarely collide. Numbers have 24 bits, and
    // the first few are special.
    let start = std::process::id().wrapping_mul(0x9e5) & 0x007f_ffff;
    for _ in 0..1 << 20 {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let number = (start.wrapping_add(step) & 0x00ff_ffff).max(0x100);
        let address = wire::address(&nic.device.fabric.name, nic.device.index, number)?;
        match UnixDatagram::bind_addr(&address) {
            Ok(socket) => {
                socket.set_nonblocking(true)?;
                // As large as the system allows: the limit applies per sender, and a window must
                // fit.
                let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, 4 << 20);
                return Ok((number, socket));
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ENOMEM))
}

/// Fails with `EBUSY` if a window is bound to the queue pair.
///
/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: by the handles contract.
    let whole = unsafe { &*qp.cast::<FakeQp>() };
    if whole.nic.lock().regions.has_windows_of(whole.number()) {
        return libc::EBUSY;
    }
    // SAFETY: by the handles and destroy contracts.
    let fake = unsafe { Box::from_raw(qp.cast::<FakeQp>()) };
    // SAFETY: the queue pair counts as a user of its domain, so the domain still exists.
    let domain = unsafe { FakePd::of(fake.ex.qp_base.pd) };
    let mut state = fake.nic.lock();
    state.forget(fake.number());
    state.regions.forget(fake.number());
    if let Some(qp) = state.qps.remove(&fake.number()) {
        // A forked child may also hold the socket. Closing it alone would then leave it in epoll.
        let _ = epoll::delete(&fake.nic.epoll, &*qp.socket);
        qp.send_cq.purge(qp.number);
        qp.recv_cq.purge(qp.number);
        qp.send_cq.remove_user();
        qp.recv_cq.remove_user();
    }
    drop(state);
    domain.remove_user();
    COUNTERS.queue_pairs.fetch_sub(1, Ordering::Relaxed);
    0
}

/// The order in which the bytes of a request land is not guaranteed.
///
/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp_data_in_order(
    _qp: *mut ibv_qp,
    _opcode: std::ffi::c_uint,
    _flags: u32,
) -> c_int {
    0
}
