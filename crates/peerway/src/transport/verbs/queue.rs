//! A queue pair to one peer: messages both ways (see `messages`), and our work requests.
//!
//! **Groups** of work requests are posted with one doorbell each. On a connection only the last
//! request of a group asks for a completion, which implies those before it. Datagrams complete in
//! any order, so each request asks for one.
//!
//! A queue fails as a whole. The driver then *shuts* it: it moves the queue pair to the error state
//! and posts one last request and one last receive. Their completions prove that nothing else will
//! complete. Everything received until then counts.
//!
//! Only the driver touches a queue.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use peerway_core::ids::SlotId;
use peerway_core::outcome::TransferError;
use peerway_core::wire::{QueueEnd, RdmaPort};
use peerway_sys::efadv::ffi::efadv_qp_init_attr;
use peerway_sys::verbs::ffi::*;
use peerway_sys::verbs::{Ah, Batch, Mr, Qp, QpConfig, VerbsError, WcStatus, masks};

use super::nic::Nic;
use super::port::{Key, PortCq};
use super::window::Window;
use super::work_requests::WorkRequests;
use crate::os::pages::Pages;
use crate::os::random;
use crate::transport::device::{
    Completed, Completion, DevicePart, DeviceQueue, DeviceWork, FlushWord, KeyTable, KeyWindow,
    PART_REQUESTS, QueueEnds, Unfinished,
};

/// Work requests per queue pair: a few groups, so that the device has the next one when one is
/// done.
const DEPTH: u32 = 160;
/// The part of `DEPTH` that is reserved for messages, flushes and the last request.
const RESERVE: u32 = 24;
/// Bytes of a message with its header.
pub(super) const BUFFER: usize = 4096;
/// Send and receive buffers for messages, of a queue for small transfers and of one for large ones.
const LATENCY_BUFFERS: (u16, u16) = (12, 128);
const BULK_BUFFERS: (u16, u16) = (4, 32);
/// Limit of bytes in posted parts. A cancel has to wait for them, and 400 Gbit/s carry fewer in 30
/// µs.
const WINDOW: u64 = 2 << 20;
/// Credits that are kept back for messages which only return credits.
pub(super) const KEPT_CREDITS: u64 = 2;
/// Limit of bytes that a small write carries inline in the request.
const INLINE: u32 = 128;
/// Bit in the lower half of an id: the id is of a receive, and the other bits name its buffer.
pub(super) const RECEIVE: u32 = 1 << 31;
/// The buffer number of the last receive.
pub(super) const LAST: u32 = 0x7FFF_FFFF;

/// Limit of memories that a flush reads besides the flush word: the GPUs of one host. Their work
/// requests are part of the reserve.
const MOST_WORDS: usize = 8;

/// Bytes of a message header.
pub(super) const HEAD: usize = 16;

/// See the module.
pub(super) struct Queue {
    /// Destroyed before the resources that its requests use.
    pub(super) qp: ManuallyDrop<Qp>,
    ah: Option<Ah>,
    key: Key,
    far: Option<Far>,
    latency: bool,
    /// Whether the device may carry out requests in any order.
    is_unordered: bool,

    pub(super) depth: u32,
    pub(super) used: u32,
    /// Bytes of the parts in progress.
    bytes: u64,
    /// Limit of groups in progress when another part is posted.
    most: usize,
    pub(super) inline: u32,
    groups: VecDeque<Group>,
    /// The number of the first group in `groups`.
    first: u32,
    /// The windows whose binds are in `groups`, in order.
    binding: VecDeque<Arc<Window>>,
    /// The group being built.
    pub(super) work: WorkRequests,

    pub(super) sent: u64,
    pub(super) taken_by_peer: u64,
    pub(super) messages_sent: u64,
    pub(super) free: Vec<u16>,
    immediates_sent: u64,

    pub(super) inbox: BTreeMap<u64, Message>,
    pub(super) next_message: u64,
    pub(super) taken: u64,
    pub(super) taken_told: u64,
    pub(super) immediates: u64,
    receives: u16,

    pub(super) state: QueueState,
    pub(super) buffers_mr: ManuallyDrop<Mr>,
    pub(super) buffers: Pages,
    pub(super) sends: u16,
    config: Parameters,
}

/// The far end, once it is known.
#[derive(Clone, Copy)]
struct Far {
    end: QueueEnd,
    receives: u64,
    /// Whether the keys of its memory are for one queue pair each.
    windows: bool,
}

#[derive(Clone, Copy)]
struct Parameters {
    first_packet: u32,
    qkey: u32,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum QueueState {
    /// Not connected yet, or in use.
    Open,
    /// Shut down, and waiting for the completions of the last request and the last receive.
    Shut { send_over: bool, receive_over: bool },
}

/// A received message, of which the bytes from `at` to `end` are not taken yet.
pub(super) struct Message {
    pub(super) buffer: u16,
    pub(super) at: usize,
    pub(super) end: usize,
}

/// The requests posted with one doorbell.
struct Group {
    kind: GroupKind,
    requests: u16,
    /// Completions still to come.
    left: u16,
}

pub(super) enum GroupKind {
    Message(u16),
    Part(DevicePart),
    Flush(SlotId),
    Bind,
    Last,
    Over,
}

// SAFETY: the raw pointers are those in `work`. They are followed only between `add` and `post`,
// inside one call of the driver. Any thread may use the verbs handles.
unsafe impl Send for Queue {}

impl Queue {
    /// Creates an unconnected queue and posts its receives.
    pub(super) fn new(port: &Arc<PortCq>, latency: bool) -> Result<Self, VerbsError> {
        let nic = &port.nic;
        let depth =
            DEPTH.min(nic.limits.max_qp_wr.cast_unsigned()).max(RESERVE + PART_REQUESTS as u32);
        let (sends, receives) = if latency { LATENCY_BUFFERS } else { BULK_BUFFERS };
        let key = port.reserve(depth + u32::from(receives) + 1)?;
        let cap = ibv_qp_cap {
            max_send_wr: depth,
            max_recv_wr: u32::from(receives) + 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: INLINE,
        };
        let qp = create(nic, &port.cq, cap)
            // Devices differ in how much inline data they accept, and some accept none.
            .or_else(|_| create(nic, &port.cq, ibv_qp_cap { max_inline_data: 0, ..cap }))?;
        let inline = qp.cap().max_inline_data.min(INLINE);
        let buffers = Pages::new(BUFFER * (usize::from(sends) + usize::from(receives)), nic.node);
        // SAFETY: `drop` ends the registration before the pages are freed, and no Rust reference to
        // them exists.
        let mr = unsafe {
            Mr::register(&nic.pd, buffers.ptr().cast(), buffers.len(), IBV_ACCESS_LOCAL_WRITE)
        }?;
        let config = Parameters {
            first_packet: u32::from_le_bytes(random()) & 0xFF_FFFF,
            qkey: u32::from_le_bytes(random()) & 0x7FFF_FFFF,
        };
        let queue = Self {
            qp: ManuallyDrop::new(qp),
            ah: None,
            key,
            far: None,
            latency,
            is_unordered: nic.efa.is_some(),
            depth,
            used: 0,
            bytes: 0,
            most: usize::MAX,
            inline,
            groups: VecDeque::with_capacity(depth as usize),
            first: 0,
            binding: VecDeque::new(),
            work: WorkRequests::new(PART_REQUESTS),
            sent: 0,
            taken_by_peer: 0,
            messages_sent: 0,
            free: (0..sends).collect(),
            immediates_sent: 0,
            inbox: BTreeMap::new(),
            next_message: 0,
            taken: 0,
            taken_told: 0,
            immediates: 0,
            receives,
            state: QueueState::Open,
            buffers_mr: ManuallyDrop::new(mr),
            buffers,
            sends,
            config,
        };
        queue.initialise()?;
        for buffer in 0..receives {
            queue.post_receive(RECEIVE | u32::from(buffer))?;
        }
        Ok(queue)
    }

    fn nic(&self) -> &Arc<Nic> {
        &self.key.port().nic
    }

    /// The number of reads that it serves at a time.
    fn reads(&self) -> u8 {
        let nic = self.nic();
        at_most(nic.config.max_dest_rd_atomic, nic.limits.max_qp_rd_atom)
    }

    fn initialise(&self) -> Result<(), VerbsError> {
        let attr = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            pkey_index: 0,
            port_num: self.nic().port,
            qkey: self.config.qkey,
            qp_access_flags: IBV_ACCESS_LOCAL_WRITE
                | IBV_ACCESS_REMOTE_READ
                | IBV_ACCESS_REMOTE_WRITE,
            ..ibv_qp_attr::zeroed()
        };
        let mask = if self.is_unordered { masks::UD_INIT } else { masks::RC_INIT };
        self.qp.modify(&attr, mask)
    }

    fn connect_to(&mut self, far: QueueEnd, at: &RdmaPort) -> Result<(), VerbsError> {
        let nic = self.nic().clone();
        let config = &nic.config;
        let mut gid = ibv_gid::zeroed();
        gid.raw = at.gid;
        let ah_attr = ibv_ah_attr {
            grh: ibv_global_route {
                dgid: gid,
                flow_label: 0,
                sgid_index: nic.gid_index,
                hop_limit: 255,
                traffic_class: config.traffic_class,
            },
            dlid: at.lid,
            sl: nic.service_level(),
            is_global: u8::from(at.ethernet || at.datagrams || at.lid == 0),
            port_num: nic.port,
            ..ibv_ah_attr::zeroed()
        };
        if self.is_unordered {
            self.qp.modify(&state(IBV_QPS_RTR), masks::UD_RTR)?;
            let ready = ibv_qp_attr { sq_psn: self.config.first_packet, ..state(IBV_QPS_RTS) };
            self.qp.modify(&ready, masks::UD_RTS)?;
            self.ah = Some(Ah::create(&nic.pd, &ah_attr)?);
        } else {
            let receive = ibv_qp_attr {
                ah_attr,
                path_mtu: u32::from(at.mtu.min(nic.address.mtu)).max(IBV_MTU_256),
                dest_qp_num: far.number,
                rq_psn: far.first_packet,
                max_dest_rd_atomic: self.reads(),
                // 0.64 ms. Credits make a missing receive rare.
                min_rnr_timer: 12,
                ..state(IBV_QPS_RTR)
            };
            self.qp.modify(&receive, masks::RC_RTR)?;
            let send = ibv_qp_attr {
                timeout: timeout_code(config.timeout),
                retry_cnt: config.retries,
                rnr_retry: 7,
                sq_psn: self.config.first_packet,
                // The far side rejects more reads than it serves as an invalid request.
                max_rd_atomic: at_most(config.max_rd_atomic, nic.limits.max_qp_init_rd_atom)
                    .min(far.reads.max(1)),
                ..state(IBV_QPS_RTS)
            };
            self.qp.modify(&send, masks::RC_RTS)?;
        }
        let receives = u64::from(far.receives);
        self.far = Some(Far { end: far, receives, windows: at.windows });
        Ok(())
    }

    /// Discards the group being built.
    fn discard(&mut self) {
        self.work.clear();
    }

    /// Adds a work request to the group being built. With `readable`, the CPU can read the local
    /// memory, and a small write goes inline.
    #[inline]
    fn add(&mut self, read: bool, local: ibv_sge, readable: bool, remote: u64, rkey: u32) {
        let id = self.id(self.next_group());
        let opcode = if read { IBV_WR_RDMA_READ } else { IBV_WR_RDMA_WRITE };
        let inline = !read && readable && local.length <= self.inline;
        self.work.add(id, opcode, if inline { IBV_SEND_INLINE } else { 0 }, local);
        self.work.towards(remote, rkey);
    }

    pub(super) fn credits(&self) -> u64 {
        let receives = self.far.map_or(0, |far| far.receives);
        (receives + self.taken_by_peer).saturating_sub(self.sent)
    }

    /// Posts the group that was built.
    ///
    /// # Safety
    ///
    /// The memory that the requests name stays registered until the group is done or the queue is
    /// dropped.
    #[inline]
    pub(super) unsafe fn post(&mut self, kind: GroupKind) -> Result<(), VerbsError> {
        let unordered = self.is_unordered;
        let requests = self.work.len();
        self.work.sign(unordered);
        let left = if unordered { requests } else { 1 };
        self.groups.push_back(Group { kind, requests: requests as u16, left: left as u16 });
        self.used += requests as u32;
        let posted = if unordered {
            // SAFETY: this function's caller upholds the same contract.
            unsafe { self.post_datagrams() }
        } else {
            // SAFETY: `linked` has just built this list. The caller vouches for the memory.
            unsafe { self.qp.post_send(self.work.linked()) }.map_err(|error| {
                VerbsError::of_post("ibv_post_send", self.qp.number(), error.errno)
            })
        };
        self.discard();
        posted
    }

    /// # Safety
    ///
    /// As for `post`.
    unsafe fn post_datagrams(&self) -> Result<(), VerbsError> {
        let (Some(ah), Some(far)) = (&self.ah, self.far) else { return Ok(()) };
        // SAFETY: only the driver posts, and it finishes a batch before it starts another. The
        // caller vouches for the memory.
        let mut batch = unsafe { Batch::start(&self.qp) }?;
        for (request, piece) in self.work.iter() {
            let flags = request.send_flags & !(IBV_SEND_INLINE | IBV_SEND_SOLICITED);
            let id = request.wr_id;
            // SAFETY: `add` fills this member for RDMA requests. For sends it is zeroed or left
            // over from an earlier request, so it is initialised too, and it is not used.
            let target = unsafe { request.wr.rdma };
            match request.opcode {
                IBV_WR_RDMA_READ => batch.read(id, flags, target.remote_addr, target.rkey)?,
                IBV_WR_RDMA_WRITE => batch.write(id, flags, target.remote_addr, target.rkey)?,
                _ => batch.send(id, flags)?,
            }
            batch.to(ah, far.end.number, far.end.key)?;
            batch.sge(*piece)?;
        }
        batch.complete()
    }

    pub(super) fn next_group(&self) -> u32 {
        self.first.wrapping_add(self.groups.len() as u32) & !RECEIVE
    }

    #[inline]
    pub(super) fn id(&self, lower: u32) -> u64 {
        u64::from(self.key.value()) << 32 | u64::from(lower)
    }

    pub(super) fn failed(&mut self, status: WcStatus) -> Completed {
        if self.state == QueueState::Open {
            Completed::Failed(status.to_string())
        } else {
            Completed::Nothing
        }
    }

    pub(super) fn over(&mut self, sends: bool) -> Completed {
        if let QueueState::Shut { send_over, receive_over } = &mut self.state {
            *(if sends { send_over } else { receive_over }) = true;
        }
        if self.is_drained() { Completed::Drained } else { Completed::Nothing }
    }
}

impl DeviceQueue for Queue {
    fn key(&self) -> u32 {
        self.key.value()
    }

    fn device(&self) -> usize {
        self.nic().index
    }

    fn ends(&self, lane: u16) -> QueueEnds {
        let key_index = match self.far {
            Some(far) if far.windows => KeyTable::of_lane(lane),
            far => KeyTable::of_device(far.map_or(0, |far| usize::from(far.end.port))),
        };
        QueueEnds { device: self.device(), key_index, is_unordered: self.is_unordered }
    }

    fn has_windows(&self) -> bool {
        self.nic().windows
    }

    fn device_name(&self) -> String {
        self.nic().context.name().to_owned()
    }

    fn is_for_latency(&self) -> bool {
        self.latency
    }

    fn end(&self) -> QueueEnd {
        let (flush_addr, flush_key) = self.nic().flush_word();
        QueueEnd {
            port: self.nic().index as u8,
            number: self.qp.number(),
            first_packet: self.config.first_packet,
            key: self.config.qkey,
            to: self.far.map_or(0, |far| far.end.number),
            reads: self.reads(),
            receives: self.receives,
            flush_addr,
            flush_key,
        }
    }

    fn connect(&mut self, far: QueueEnd, at: &RdmaPort) -> io::Result<()> {
        self.connect_to(far, at).map_err(io::Error::other)
    }

    fn has_room(&self) -> bool {
        self.state == QueueState::Open
            && self.bytes < WINDOW
            && self.groups.len() < self.most
            && self.used + PART_REQUESTS as u32 + RESERVE <= self.depth
    }

    fn limit_parts(&mut self, parts: u32) {
        self.most = parts.max(1) as usize;
    }

    fn has_credit(&self) -> bool {
        self.credits() > KEPT_CREDITS
    }

    unsafe fn post_part(
        &mut self,
        work: &[DeviceWork],
        mut part: DevicePart,
        counts: Option<u32>,
    ) -> io::Result<()> {
        for &DeviceWork { local, local_key, len, remote, remote_key, of_host } in work {
            let local = ibv_sge { addr: local, length: len, lkey: local_key };
            self.add(part.read, local, of_host, remote, remote_key);
        }
        if let (Some(counter), Some(last)) = (counts, self.work.last()) {
            last.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
            last.send_flags |= IBV_SEND_SOLICITED;
            last.imm_data = counter.to_be();
            self.immediates_sent += 1;
            self.sent += 1;
            part.immediate = Some(self.immediates_sent);
        }
        self.bytes += part.part.left();
        // SAFETY: the caller vouches for the memory.
        unsafe { self.post(GroupKind::Part(part)) }.map_err(io::Error::other)
    }

    fn post_flush(&mut self, slot: SlotId, words: &[FlushWord]) -> io::Result<()> {
        let Some(Far { end, .. }) = self.far else { return Ok(()) };
        let target = self.nic().flush_target();
        for &FlushWord { addr, rkey, len } in words.iter().take(MOST_WORDS) {
            self.add(true, ibv_sge { length: len.min(target.length), ..target }, true, addr, rkey);
        }
        self.add(true, target, true, end.flush_addr, end.flush_key);
        // SAFETY: the target is the device's own word, which lives as long as the device.
        unsafe { self.post(GroupKind::Flush(slot)) }.map_err(io::Error::other)
    }

    fn can_bind(&self) -> bool {
        self.state == QueueState::Open && self.used + RESERVE <= self.depth
    }

    fn bind(&mut self, window: &Arc<dyn KeyWindow>) -> io::Result<bool> {
        let any: Arc<dyn Any + Send + Sync> = window.clone();
        let window = any.downcast::<Window>().map_err(|_| io::ErrorKind::InvalidInput)?;
        let id = self.id(self.next_group());
        if !window.bind(&self.qp, id).map_err(io::Error::other)? {
            return Ok(false);
        }
        self.groups.push_back(Group { kind: GroupKind::Bind, requests: 1, left: 1 });
        self.binding.push_back(window);
        self.used += 1;
        Ok(true)
    }

    fn complete(&mut self, completion: &Completion) -> Completed {
        let (lower, status) = (completion.work, WcStatus(completion.status));
        if lower & RECEIVE != 0 {
            return self.received(completion, lower & !RECEIVE);
        }
        let at = (lower.wrapping_sub(self.first) & !RECEIVE) as usize;
        let Some(group) = self.groups.get_mut(at) else { return Completed::Nothing };
        if !status.is_success() {
            if let GroupKind::Last = group.kind {
                return self.over(true);
            }
            match &mut group.kind {
                GroupKind::Part(part) if !status.is_flushed() => {
                    part.failed = part.failed.or_else(|| blame(status));
                }
                GroupKind::Bind if !status.is_flushed() => {
                    if let Some(window) = self.binding.pop_front() {
                        window.was_refused(&status);
                    }
                }
                _ => {}
            }
            return self.failed(status);
        }
        group.left = group.left.saturating_sub(1);
        if group.left > 0 {
            return Completed::Nothing;
        }
        let kind = std::mem::replace(&mut group.kind, GroupKind::Over);
        while let Some(Group { kind: GroupKind::Over, requests, .. }) = self.groups.front() {
            self.used -= u32::from(*requests);
            self.groups.pop_front();
            self.first = self.first.wrapping_add(1) & !RECEIVE;
        }
        match kind {
            GroupKind::Message(buffer) => {
                self.free.push(buffer);
                Completed::Room
            }
            GroupKind::Part(part) => {
                self.bytes -= part.part.left();
                Completed::Part(part)
            }
            GroupKind::Flush(slot) => Completed::Flushed(slot),
            GroupKind::Bind => {
                self.binding.pop_front();
                Completed::Bound
            }
            GroupKind::Last => self.over(true),
            GroupKind::Over => Completed::Nothing,
        }
    }

    fn return_credits(&mut self) -> io::Result<()> {
        let due = self.taken - self.taken_told >= u64::from(self.receives / 2);
        if due && self.state == QueueState::Open && self.credits() > 0 && !self.free.is_empty() {
            self.send_message(&mut [].iter(), &mut 0)?;
        }
        Ok(())
    }

    fn immediates(&self) -> u64 {
        self.immediates
    }

    fn shut(&mut self) {
        if self.state != QueueState::Open {
            return;
        }
        // Post the last receive first: device drivers flush the receives when the state changes,
        // and not again.
        let received = self.post_receive(RECEIVE | LAST);
        self.state = QueueState::Shut { send_over: false, receive_over: received.is_err() };
        if let Err(error) = self.qp.modify(&state(IBV_QPS_ERR), IBV_QP_STATE) {
            tracing::debug!(%error, "could not move a queue pair to the error state");
        }
        self.discard();
        let nothing = ibv_sge { addr: 0, length: 0, lkey: 0 };
        self.add(false, nothing, true, 0, 0);
        // SAFETY: the request names no memory.
        if unsafe { self.post(GroupKind::Last) }.is_err() {
            // If the device does not accept the request, no further completion can be expected.
            self.over(true);
        }
    }

    fn is_drained(&self) -> bool {
        matches!(self.state, QueueState::Shut { send_over: true, receive_over: true })
    }

    fn has_part(&self, slot: SlotId) -> bool {
        let of = |group: &Group| matches!(&group.kind, GroupKind::Part(part) if part.slot == slot);
        self.groups.iter().any(of)
    }

    fn unfinished(&mut self) -> Unfinished {
        let mut left = Unfinished { parts: Vec::new(), flushes: Vec::new() };
        for group in self.groups.drain(..) {
            match group.kind {
                GroupKind::Part(part) => left.parts.push(part),
                GroupKind::Flush(slot) => left.flushes.push(slot),
                _ => {}
            }
        }
        left
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: each is dropped once, here. The queue pair is destroyed first, so that no device
        // uses the buffers afterwards.
        unsafe {
            ManuallyDrop::drop(&mut self.qp);
            ManuallyDrop::drop(&mut self.buffers_mr);
        }
    }
}

fn create(nic: &Nic, cq: &Arc<peerway_sys::verbs::Cq>, cap: ibv_qp_cap) -> Result<Qp, VerbsError> {
    let config = QpConfig { send_cq: cq, recv_cq: cq, cap, qp_type: IBV_QPT_RC, signal_all: false };
    let Some(efa) = &nic.efa else { return Qp::create(&nic.pd, &config) };
    let operations = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_SEND;
    let attr = efadv_qp_init_attr { sl: nic.service_level(), ..efadv_qp_init_attr::zeroed() };
    efa.create_srd(&nic.pd, &config, operations, &attr)
}

fn state(qp_state: u32) -> ibv_qp_attr {
    ibv_qp_attr { qp_state, ..ibv_qp_attr::zeroed() }
}

/// The requested number, or the device's limit if that is less.
fn at_most(asked: u8, limit: i32) -> u8 {
    asked.min(limit.clamp(1, 255) as u8)
}

/// The verbs timeout code: devices count in powers of two of 4.096 µs, up to 31.
fn timeout_code(timeout: std::time::Duration) -> u8 {
    let units = timeout.as_nanos().div_ceil(4096).max(1);
    (units.next_power_of_two().trailing_zeros() as u8).clamp(1, 31)
}

/// The error of a transfer that itself caused the failure. `None` means that the queue failed and
/// another queue can repeat the transfer.
fn blame(status: WcStatus) -> Option<TransferError> {
    match status.0 {
        // Extent and rights were checked when the work was made. So the owner's device refuses
        // access only if the owner revoked it, or if the owner's kernel is ending its process.
        IBV_WC_REM_ACCESS_ERR => Some(TransferError::Revoked),
        IBV_WC_LOC_PROT_ERR | IBV_WC_LOC_LEN_ERR | IBV_WC_LOC_QP_OP_ERR | IBV_WC_LOC_ACCESS_ERR => {
            Some(TransferError::Device)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn timeouts_are_rounded_up_to_what_devices_count_in() {
        assert_eq!(timeout_code(Duration::from_micros(8)), 1);
        assert_eq!(timeout_code(Duration::from_millis(67)), 14);
        assert_eq!(timeout_code(Duration::from_millis(68)), 15);
        assert_eq!(timeout_code(Duration::from_secs(60)), 24);
        assert_eq!(timeout_code(Duration::from_secs(1 << 40)), 31);
    }
}
