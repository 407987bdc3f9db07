//! Queue pairs: what they are made of, how they come and go.
//!
//! The program holds a [`FakeQp`]; what the device works with is a [`Qp`] in the context's table, under
//! its lock. Numbers are unique on the fabric because a socket of the number's name is bound.

mod modify;

use std::collections::VecDeque;
use std::ffi::c_int;
use std::io;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use peerway_sys::verbs::ffi::*;
use rustix::event::epoll;

use crate::batch::Batch;
use crate::context::fail;
use crate::cq::CqShared;
use crate::device::{MAX_INLINE, MAX_SGE, MAX_WR};
use crate::memory::Target;
use crate::nic::{Env, Nic};
use crate::pd::FakePd;
use crate::rc::{Requester, Responder};
use crate::srd::Datagrams;
use crate::stats::{COUNTERS, count};
use crate::window::Bound;
use crate::wire::{self, Header};

pub(crate) use self::modify::peer;
pub use self::modify::{ibv_modify_qp, ibv_query_qp};

/// A queue pair. Begins with what the program sees of it.
#[repr(C)]
pub(crate) struct FakeQp {
    pub(crate) ex: ibv_qp_ex,
    pub(crate) nic: Arc<Nic>,
    pub(crate) kind: Kind,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) signal_all: bool,
    pub(crate) extended: bool,
    pub(crate) batch: Batch,
}

impl FakeQp {
    /// # Safety
    ///
    /// `raw` is a queue pair of this library, and stays for as long as the reference is used.
    pub(crate) unsafe fn of<'a>(raw: *mut ibv_qp) -> &'a Self {
        // SAFETY: by this function's contract.
        unsafe { &*raw.cast::<Self>() }
    }

    pub(crate) fn number(&self) -> u32 {
        self.ex.qp_base.qp_num
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    /// A reliable connection.
    Rc,
    /// Unreliable datagrams.
    Ud,
    /// Reliable datagrams in no order.
    Srd,
}

/// What the device has of a queue pair.
pub(crate) struct Qp {
    pub(crate) number: u32,
    pub(crate) kind: Kind,
    pub(crate) pd: u32,
    /// `IBV_QPS_*`.
    pub(crate) state: u32,
    pub(crate) cap: ibv_qp_cap,
    /// What was set by modifying it.
    pub(crate) attr: ibv_qp_attr,
    pub(crate) send_cq: Arc<CqShared>,
    pub(crate) recv_cq: Arc<CqShared>,
    pub(crate) socket: Arc<UnixDatagram>,
    /// It is in the list of those that have something to do.
    pub(crate) active: bool,
    /// Changes when it is reset, so that packets of the time before are known.
    pub(crate) life: u64,
    /// The other end of a connection.
    pub(crate) peer: Option<Peer>,
    pub(crate) receives: VecDeque<Receive>,
    /// Requests that were begun, for the script.
    pub(crate) begun: u64,
    /// The peer's queue is full: nothing is sent before this.
    pub(crate) blocked_until: Option<Instant>,
    /// How often in a row it was.
    pub(crate) blocks: u32,
    /// The two halves of a connection.
    pub(crate) tx: Requester,
    pub(crate) rx: Responder,
    /// What there is instead without a connection.
    pub(crate) datagrams: Datagrams,
}

/// A queue pair somewhere on the fabric.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    pub(crate) device: u32,
    pub(crate) number: u32,
}

/// A posted request.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) id: u64,
    /// `IBV_WR_*`.
    pub(crate) opcode: u32,
    pub(crate) signalled: bool,
    pub(crate) solicited: bool,
    pub(crate) fence: bool,
    pub(crate) immediate: u32,
    pub(crate) address: u64,
    pub(crate) key: u32,
    pub(crate) local: Local,
    pub(crate) length: u64,
    /// For a window: the key it has been given, and what it is bound to.
    pub(crate) bind: Option<(u32, Bound)>,
    /// Where it goes, without a connection.
    pub(crate) to: Option<(Peer, u32)>,
    /// What it ends with when its turn comes, known beforehand.
    pub(crate) error: Option<u32>,
    /// The number of its first packet.
    pub(crate) first: u64,
    pub(crate) begun: bool,
    /// For reads, once begun.
    pub(crate) read: Option<Arrived>,
}

/// Where a request's bytes are or go.
#[derive(Debug)]
pub(crate) enum Local {
    Memory(Vec<ibv_sge>),
    Inline(Vec<u8>),
}

/// Which packets of a message have arrived.
#[derive(Debug)]
pub(crate) struct Arrived {
    packets: Vec<bool>,
    pub(crate) missing: usize,
}

impl Arrived {
    pub(crate) fn new(length: u64) -> Self {
        let count = wire::packets(length) as usize;
        Self { packets: vec![false; count], missing: count }
    }

    /// Notes the packet at an offset; false where it is there already, or belongs nowhere.
    pub(crate) fn note(&mut self, offset: u64) -> bool {
        let index = (offset / wire::PAYLOAD as u64) as usize;
        match self.packets.get_mut(index) {
            Some(there) if !*there && offset.is_multiple_of(wire::PAYLOAD as u64) => {
                *there = true;
                self.missing -= 1;
                true
            }
            _ => false,
        }
    }

    /// Whether the packet at an offset is there.
    pub(crate) fn has(&self, offset: u64) -> bool {
        let index = (offset / wire::PAYLOAD as u64) as usize;
        self.packets.get(index).copied().unwrap_or(false)
    }

    /// The first packets that are missing: where they begin and how many in a row.
    pub(crate) fn gap(&self) -> (usize, usize) {
        let first = self.packets.iter().position(|there| !there).unwrap_or(0);
        let run = self.packets[first..].iter().take_while(|there| !**there).count();
        (first, run)
    }
}

/// A posted receive.
#[derive(Debug)]
pub(crate) struct Receive {
    pub(crate) id: u64,
    pub(crate) pieces: Vec<ibv_sge>,
}

impl Receive {
    pub(crate) fn room(&self) -> u64 {
        self.pieces.iter().map(|piece| u64::from(piece.length)).sum()
    }
}

impl Request {
    pub(crate) fn packets(&self) -> u64 {
        match self.opcode {
            IBV_WR_BIND_MW | IBV_WR_LOCAL_INV => 0,
            IBV_WR_RDMA_READ => 1,
            _ => wire::packets(self.length),
        }
    }

    /// Whether it is done here, without a packet.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.opcode, IBV_WR_BIND_MW | IBV_WR_LOCAL_INV)
    }

    /// The number after its last packet's.
    pub(crate) fn end(&self) -> u64 {
        self.first + self.packets()
    }

    pub(crate) fn is_read(&self) -> bool {
        self.opcode == IBV_WR_RDMA_READ
    }
}

impl Qp {
    pub(crate) fn header(&self, kind: u8, device: u32) -> Header {
        Header::new(kind, self.number, device, self.life)
    }

    /// A packet has come.
    pub(crate) fn packet(&mut self, env: &mut Env<'_>, header: &Header, payload: &[u8]) {
        match self.kind {
            Kind::Rc => self.rc_packet(env, header, payload),
            Kind::Ud => self.ud_packet(env, header, payload),
            Kind::Srd => self.srd_packet(env, header, payload),
        }
    }

    /// Does what there is to do now, and says when to look again; nothing where it is idle.
    pub(crate) fn work(&mut self, env: &mut Env<'_>) -> Option<Instant> {
        match self.kind {
            Kind::Rc => self.rc_work(env),
            Kind::Ud => self.ud_work(env),
            Kind::Srd => self.srd_work(env),
        }
    }

    /// Takes a request onto the send queue.
    pub(crate) fn push(&mut self, request: Request) {
        match self.kind {
            Kind::Rc => self.tx.push(request),
            Kind::Ud | Kind::Srd => self.datagrams.queue.push_back(request),
        }
    }

    /// Requests that have not ended.
    pub(crate) fn outstanding(&self) -> usize {
        self.tx.queue.len() + self.datagrams.outstanding()
    }

    /// Leaves a full peer alone for a while, and for longer if it stays full.
    pub(crate) fn block(&mut self, now: Instant) {
        self.blocked_until = Some(now + wire::BLOCKED * (1 << self.blocks.min(5)));
        self.blocks += 1;
    }

    /// Ends a request.
    pub(crate) fn complete(&self, env: &mut Env<'_>, request: &Request, status: u32) {
        if status == IBV_WC_SUCCESS && !request.signalled {
            return;
        }
        let mut wc = ibv_wc::zeroed();
        wc.wr_id = request.id;
        wc.status = status;
        wc.qp_num = self.number;
        wc.opcode = match request.opcode {
            IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM => IBV_WC_RDMA_WRITE,
            IBV_WR_RDMA_READ => IBV_WC_RDMA_READ,
            IBV_WR_BIND_MW => IBV_WC_BIND_MW,
            IBV_WR_LOCAL_INV => IBV_WC_LOCAL_INV,
            _ => IBV_WC_SEND,
        };
        if request.is_read() && status == IBV_WC_SUCCESS {
            wc.byte_len = request.length as u32;
        }
        env.complete(&self.send_cq, wc, false);
    }

    /// Ends a receive that did not get what it was for.
    pub(crate) fn complete_receive(&self, env: &mut Env<'_>, receive: &Receive, status: u32) {
        let mut wc = ibv_wc::zeroed();
        wc.wr_id = receive.id;
        wc.status = status;
        wc.opcode = IBV_WC_RECV;
        wc.qp_num = self.number;
        env.complete(&self.recv_cq, wc, false);
    }

    /// Ends a receive with a message.
    pub(crate) fn deliver(
        &self,
        env: &mut Env<'_>,
        receive: &Receive,
        header: &Header,
        opcode: u32,
    ) {
        let mut wc = ibv_wc::zeroed();
        wc.wr_id = receive.id;
        wc.status = IBV_WC_SUCCESS;
        wc.opcode = opcode;
        wc.byte_len = header.length as u32;
        wc.qp_num = self.number;
        wc.src_qp = header.source;
        let with_immediate = [IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND_WITH_IMM];
        if with_immediate.contains(&u32::from(header.opcode)) {
            wc.wc_flags = IBV_WC_WITH_IMM;
            wc.imm_data = header.immediate;
        }
        match self.kind {
            Kind::Rc => {}
            Kind::Ud => {
                wc.wc_flags |= IBV_WC_GRH;
                wc.byte_len += size_of::<ibv_grh>() as u32;
            }
            // The number that an address handle for the sender has.
            Kind::Srd => wc.slid = header.device as u16,
        }
        env.complete(&self.recv_cq, wc, header.has(wire::flag::SOLICITED));
    }

    /// What a peer's packet is about.
    pub(crate) fn target(&self, header: &Header) -> Target {
        Target {
            pd: self.pd,
            qp: self.number,
            key: header.key,
            address: header.address,
            length: header.length,
        }
    }

    /// Goes to the error state: whatever is posted ends, in order, unsignalled requests too.
    pub(crate) fn fail(&mut self, env: &mut Env<'_>) {
        if matches!(self.state, IBV_QPS_RESET) {
            return;
        }
        self.state = IBV_QPS_ERR;
        let open = std::mem::take(&mut self.datagrams).into_requests();
        for request in std::mem::take(&mut self.tx.queue).into_iter().chain(open) {
            self.complete(env, &request, IBV_WC_WR_FLUSH_ERR);
        }
        for receive in std::mem::take(&mut self.receives) {
            self.complete_receive(env, &receive, IBV_WC_WR_FLUSH_ERR);
        }
        self.tx = Requester::new(0);
        self.rx = Responder::new(0);
    }

    /// Back to the beginning: whatever is posted is forgotten.
    pub(crate) fn reset(&mut self, env: &mut Env<'_>) {
        self.state = IBV_QPS_RESET;
        self.tx = Requester::new(0);
        self.rx = Responder::new(0);
        self.datagrams = Datagrams::default();
        self.receives.clear();
        self.peer = None;
        self.begun = 0;
        self.blocked_until = None;
        self.blocks = 0;
        self.life = next_life();
        self.send_cq.purge(self.number);
        self.recv_cq.purge(self.number);
        env.regions.forget(self.number);
        env.wire.forget(&self.socket);
        wire::disconnect(&self.socket);
        let mut packet = [0; Header::SIZE];
        while self.socket.recv(&mut packet).is_ok() {}
    }
}

fn next_life() -> u64 {
    static LIVES: AtomicU64 = AtomicU64::new(1);
    (u64::from(std::process::id()) << 32) | LIVES.fetch_add(1, Ordering::Relaxed)
}

/// # Safety
///
/// As libibverbs documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    // SAFETY: the caller's attributes.
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
    // SAFETY: the caller's contract.
    let qp = unsafe { create(&mut full, kind) };
    plain.cap = full.cap;
    qp
}

/// # Safety
///
/// As libibverbs documents it.
pub(crate) unsafe extern "C" fn create_qp_ex(
    _context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: the caller's attributes.
    let attr = unsafe { &mut *attr };
    let kind = match attr.qp_type {
        IBV_QPT_RC => Kind::Rc,
        IBV_QPT_UD => Kind::Ud,
        _ => return fail(libc::EOPNOTSUPP),
    };
    // SAFETY: the caller's contract.
    unsafe { create(attr, kind) }
}

/// # Safety
///
/// Domain and queues in `attr` are of this library.
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
    // SAFETY: as above.
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
    // SAFETY: a domain of this library, as the caller of `create` vouches.
    unsafe { (*pd).context }
}

/// Finds a number that nobody on the fabric has, by binding its name.
fn bind(nic: &Nic) -> io::Result<(u32, UnixDatagram)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Processes begin at different places, so that they seldom meet. Numbers have 24 bits, and the
    // first few are special.
    let start = std::process::id().wrapping_mul(0x9e5) & 0x007f_ffff;
    for _ in 0..1 << 20 {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let number = (start.wrapping_add(step) & 0x00ff_ffff).max(0x100);
        let address = wire::address(&nic.device.fabric.name, nic.device.index, number)?;
        match UnixDatagram::bind_addr(&address) {
            Ok(socket) => {
                socket.set_nonblocking(true)?;
                // As much as the system lets: the limit is per sender, and a window must fit.
                let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, 4 << 20);
                return Ok((number, socket));
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ENOMEM))
}

/// # Safety
///
/// As libibverbs documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: the caller's queue pair is one of this library, and is not used again.
    let fake = unsafe { Box::from_raw(qp.cast::<FakeQp>()) };
    // SAFETY: its domain is still there, as it could not be given back before.
    let domain = unsafe { FakePd::of(fake.ex.qp_base.pd) };
    let mut state = fake.nic.lock();
    state.forget(fake.number());
    state.regions.forget(fake.number());
    if let Some(qp) = state.qps.remove(&fake.number()) {
        // A forked child may hold the socket too, and then closing alone would not end this.
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

/// Nothing is promised about the order in which the bytes of a request land.
///
/// # Safety
///
/// As libibverbs documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp_data_in_order(
    _qp: *mut ibv_qp,
    _opcode: std::ffi::c_uint,
    _flags: u32,
) -> c_int {
    0
}
