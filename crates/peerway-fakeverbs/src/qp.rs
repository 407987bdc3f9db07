//! Queue pairs: their parts, and the behaviour that all kinds share.
//!
//! The program holds a [`FakeQp`]. The device works with a [`Qp`] in the context's table, under the
//! context's lock. Numbers are unique on the fabric, because each queue pair binds a socket with
//! its number as the name.

mod create;
mod modify;
mod request;

use std::collections::VecDeque;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use peerway_sys::verbs::ffi::*;

use crate::batch::Batch;
use crate::cq::CqShared;
use crate::memory::Target;
use crate::nic::{Env, Nic};
use crate::rc::{Requester, Responder};
use crate::srd::Datagrams;
use crate::wire::{self, Header};

pub(crate) use self::create::{create, create_qp_ex};
pub use self::create::{ibv_create_qp, ibv_destroy_qp, ibv_query_qp_data_in_order};
pub(crate) use self::modify::peer;
pub use self::modify::{ibv_modify_qp, ibv_query_qp};
pub(crate) use self::request::{Arrived, Local, Receive, Request};

/// A queue pair. It starts with the structure that the program sees.
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

    /// Whether some requests have not completed.
    pub(crate) fn is_at_work(&self) -> bool {
        self.nic.lock().qps.get(&self.number()).is_some_and(|qp| qp.outstanding() > 0)
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    /// A reliable connection.
    Rc,
    /// Unreliable datagrams.
    Ud,
    /// Reliable datagrams without an order.
    Srd,
}

/// The device's part of a queue pair.
pub(crate) struct Qp {
    pub(crate) number: u32,
    pub(crate) kind: Kind,
    pub(crate) pd: u32,
    /// `IBV_QPS_*`.
    pub(crate) state: u32,
    pub(crate) cap: ibv_qp_cap,
    /// Attributes set by `ibv_modify_qp`.
    pub(crate) attr: ibv_qp_attr,
    pub(crate) send_cq: Arc<CqShared>,
    pub(crate) recv_cq: Arc<CqShared>,
    pub(crate) socket: Arc<UnixDatagram>,
    /// Whether it is in the list of active queue pairs.
    pub(crate) active: bool,
    /// Changes at every reset, so that packets from before a reset can be recognized.
    pub(crate) life: u64,
    /// The other end of a connection.
    pub(crate) peer: Option<Peer>,
    pub(crate) receives: VecDeque<Receive>,
    /// Number of requests begun, for the script.
    pub(crate) begun: u64,
    /// The peer's socket queue is full: send nothing before this time.
    pub(crate) blocked_until: Option<Instant>,
    /// How many times in a row the peer's queue was full.
    pub(crate) blocks: u32,
    /// The two halves of a connection.
    pub(crate) tx: Requester,
    pub(crate) rx: Responder,
    /// The state of a queue pair without a connection.
    pub(crate) datagrams: Datagrams,
}

/// A queue pair somewhere on the fabric.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    pub(crate) device: u32,
    pub(crate) number: u32,
}

impl Qp {
    pub(crate) fn header(&self, kind: u8, device: u32) -> Header {
        Header::new(kind, self.number, device, self.life)
    }

    /// Handles a packet that has arrived.
    pub(crate) fn packet(&mut self, env: &mut Env<'_>, header: &Header, payload: &[u8]) {
        match self.kind {
            Kind::Rc => self.rc_packet(env, header, payload),
            Kind::Ud => self.ud_packet(env, header, payload),
            Kind::Srd => self.srd_packet(env, header, payload),
        }
    }

    /// Does the work that is due, and returns when to call again; `None` if the queue pair is idle.
    pub(crate) fn work(&mut self, env: &mut Env<'_>) -> Option<Instant> {
        match self.kind {
            Kind::Rc => self.rc_work(env),
            Kind::Ud => self.ud_work(env),
            Kind::Srd => self.srd_work(env),
        }
    }

    /// Puts a request on the send queue.
    pub(crate) fn push(&mut self, request: Request) {
        match self.kind {
            Kind::Rc => self.tx.push(request),
            Kind::Ud | Kind::Srd => self.datagrams.queue.push_back(request),
        }
    }

    /// Number of requests that have not completed.
    pub(crate) fn outstanding(&self) -> usize {
        self.tx.queue.len() + self.datagrams.outstanding()
    }

    /// Sends nothing to a full peer for a while, and for longer if it stays full.
    pub(crate) fn block(&mut self, now: Instant) {
        self.blocked_until = Some(now + wire::BLOCKED * (1 << self.blocks.min(5)));
        self.blocks += 1;
    }

    /// Completes a request.
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

    /// Completes a receive that got no message.
    pub(crate) fn complete_receive(&self, env: &mut Env<'_>, receive: &Receive, status: u32) {
        let mut wc = ibv_wc::zeroed();
        wc.wr_id = receive.id;
        wc.status = status;
        wc.opcode = IBV_WC_RECV;
        wc.qp_num = self.number;
        env.complete(&self.recv_cq, wc, false);
    }

    /// Completes a receive with a message.
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

    /// The memory that a peer's packet names.
    pub(crate) fn target(&self, header: &Header) -> Target {
        Target {
            pd: self.pd,
            qp: self.number,
            key: header.key,
            address: header.address,
            length: header.length,
        }
    }

    /// Enters the error state: everything posted is flushed in order, including unsignalled
    /// requests.
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

    /// Enters the reset state: everything posted is dropped without a completion.
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
