//! The requester: it sends packets, receives answers and keeps the timers.
//!
//! Invariants: `unacked <= send <= next`, all of them sequence numbers. `at` is the queue position
//! of the request that packet `send` belongs to. Requests leave the queue only at its front, once
//! they are fully answered.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use peerway_sys::verbs::ffi::*;

use super::WINDOW;
use crate::memory::Regions;
use crate::nic::Env;
use crate::qp::{Arrived, Local, Qp, Request};
use crate::silence::{Due, Silence};
use crate::stats::{COUNTERS, count};
use crate::wire::{Header, PAYLOAD, Sent, flag, kind};

/// The sending half of a queue pair.
#[derive(Debug)]
pub(crate) struct Requester {
    /// Requests that have not completed.
    pub(crate) queue: VecDeque<Request>,
    next: u64,
    unacked: u64,
    send: u64,
    at: usize,
    /// Reads that have begun and are not fully answered.
    reads: u32,
    /// The peer had no receive: send nothing before this time.
    pause: Option<Instant>,
    /// The packet that the peer refused, and the status.
    refused: Option<(u64, u32)>,
    /// A packet is known to be lost since the last retry was counted.
    pub(crate) lost: bool,
    /// The silence of a peer that owes an answer.
    silent: Option<Silence>,
    rnr_retries: u8,
    /// The last packet that was retransmitted because later ones overtook it.
    filled: u64,
}

impl Requester {
    pub(crate) fn new(first: u64) -> Self {
        Self {
            queue: VecDeque::new(),
            next: first,
            unacked: first,
            send: first,
            at: 0,
            reads: 0,
            pause: None,
            refused: None,
            lost: false,
            silent: None,
            rnr_retries: 0,
            filled: u64::MAX,
        }
    }

    pub(crate) fn push(&mut self, mut request: Request) {
        request.first = self.next;
        self.next = request.end();
        self.queue.push_back(request);
    }

    fn rewind(&mut self) {
        self.seek(self.unacked);
    }

    fn seek(&mut self, packet: u64) {
        self.send = packet;
        // Requests without packets are passed only when they are done.
        let before = |request: &Request| request.begun && request.end() <= packet;
        self.at = self.queue.partition_point(before);
    }

    /// Resets the timers and counters after an answer of the peer.
    fn heard(&mut self) {
        self.silent = None;
        self.lost = false;
        self.rnr_retries = 0;
    }

    /// Records that the peer has executed everything before `packet`.
    fn acknowledge(&mut self, packet: u64) {
        if packet <= self.unacked || packet > self.next {
            return;
        }
        self.unacked = packet;
        self.heard();
        if self.send < packet {
            self.seek(packet);
        }
    }

    fn is_waiting(&self) -> bool {
        self.send > self.unacked || self.reads > 0
    }
}

impl Qp {
    /// Sends as much as the window and the peer's queue allow.
    pub(super) fn transmit(&mut self, env: &mut Env<'_>) {
        if self.state != IBV_QPS_RTS || self.tx.pause.is_some_and(|until| until > env.now) {
            return;
        }
        self.tx.pause = None;
        while let Some(request) = self.tx.queue.get(self.tx.at) {
            let local = request.is_local();
            if !local && self.tx.send >= self.tx.unacked + WINDOW {
                return;
            }
            if !self.begin(env) {
                return;
            }
            if local {
                self.tx.at += 1;
                continue;
            }
            match self.send_packet(env) {
                Sent::Blocked => {
                    self.block(env.now);
                    return;
                }
                Sent::Lost => self.tx.lost = true,
                Sent::Away => self.blocks = 0,
            }
            self.tx.send += 1;
            if self.tx.send == self.tx.queue[self.tx.at].end() {
                self.tx.at += 1;
            }
        }
    }

    /// Whether the next request may be sent. Checks the conditions before its first packet.
    fn begin(&mut self, env: &mut Env<'_>) -> bool {
        let (pd, reads) = (self.pd, self.tx.reads);
        let Some(request) = self.tx.queue.get_mut(self.tx.at) else { return false };
        if request.begun {
            return request.error.is_none();
        }
        let limit = u32::from(self.attr.max_rd_atomic);
        if reads > 0 && (request.fence || request.is_read() && reads >= limit) {
            return false;
        }
        request.begun = true;
        if request.is_local() && !window(env.regions, pd, request) {
            let bind = request.bind.is_some();
            request.error = Some(if bind { IBV_WC_MW_BIND_ERR } else { IBV_WC_LOC_QP_OP_ERR });
        }
        if let Local::Memory(pieces) = &request.local {
            let access = if request.is_read() { IBV_ACCESS_LOCAL_WRITE } else { 0 };
            if !env.regions.check(pieces, pd, access) {
                request.error = request.error.or(Some(IBV_WC_LOC_PROT_ERR));
            }
        }
        if request.is_read() && request.error.is_none() {
            if limit == 0 {
                request.error = Some(IBV_WC_LOC_QP_OP_ERR);
            } else {
                request.read = Some(Arrived::new(request.length));
                self.tx.reads += 1;
            }
        }
        let fine = request.error.is_none();
        self.begun += 1;
        if env.nic.device.fabric.script.flush_after.is_some_and(|after| self.begun >= after) {
            self.fail(env);
            return false;
        }
        fine
    }

    /// Sends the next packet.
    fn send_packet(&mut self, env: &mut Env<'_>) -> Sent {
        let Some(peer) = &self.peer else { return Sent::Lost };
        let mut header = self.header(kind::DATA, env.nic.device.index);
        let request = &mut self.tx.queue[self.tx.at];
        if request.is_read() {
            return send_read(env, header, request, &self.socket, &peer.address);
        }
        let offset = (self.tx.send - request.first) * PAYLOAD as u64;
        let length = (request.length - offset).min(PAYLOAD as u64) as usize;
        header.seq = self.tx.send;
        header.address = request.address;
        header.key = request.key;
        header.length = request.length;
        header.offset = offset;
        header.opcode = request.opcode as u8;
        header.immediate = request.immediate;
        if request.end() == self.tx.send + 1 {
            header.flags |= flag::LAST;
        }
        if request.solicited {
            header.flags |= flag::SOLICITED;
        }
        let packed = env.pack(&header, &request.local, self.pd, offset, length);
        if packed.is_err() {
            // The program has deregistered the memory since the request began.
            request.error = Some(IBV_WC_LOC_PROT_ERR);
            return Sent::Blocked;
        }
        env.wire.send_scratch(&self.socket, &peer.address, env.now)
    }

    pub(super) fn answer_arrived(&mut self, env: &mut Env<'_>, header: &Header, payload: &[u8]) {
        match header.kind {
            kind::ACK => {
                self.tx.acknowledge(header.seq);
                // Either this is a late acknowledgement, or the two sides count from different
                // numbers.
                self.tx.lost |= header.seq != self.tx.unacked;
                let overtaken = header.has(flag::GAP) && header.seq == self.tx.unacked;
                if overtaken && self.tx.filled != header.seq && self.tx.pause.is_none() {
                    self.tx.filled = header.seq;
                    count(&COUNTERS.retransmissions, 1);
                    self.tx.rewind();
                }
            }
            kind::NAK if header.seq < self.tx.next => {
                self.tx.acknowledge(header.seq);
                self.tx.refused = Some((header.seq, u32::from(header.status)));
            }
            kind::RNR if header.seq < self.tx.next => {
                self.tx.acknowledge(header.seq);
                if header.seq == self.tx.unacked && self.tx.pause.is_none() {
                    self.pause(env, header.status);
                }
            }
            kind::RESPONSE => self.response_arrived(env, header, payload),
            _ => {}
        }
        self.finish(env);
    }

    /// Pauses sending because the peer had no receive.
    fn pause(&mut self, env: &mut Env<'_>, timer: u8) {
        if self.attr.rnr_retry != 7 {
            self.tx.rnr_retries += 1;
            if self.tx.rnr_retries > self.attr.rnr_retry {
                self.tx.refused = Some((self.tx.unacked, IBV_WC_RNR_RETRY_EXC_ERR));
                return;
            }
        }
        self.tx.pause = Some(env.now + rnr_time(timer));
        self.tx.silent = None;
        self.tx.rewind();
    }

    fn response_arrived(&mut self, env: &mut Env<'_>, header: &Header, payload: &[u8]) {
        let pd = self.pd;
        let index = self.tx.queue.partition_point(|request| request.end() <= header.seq);
        let Some(request) = self.tx.queue.get_mut(index) else { return };
        // A duplicate response may belong to a read that has completed.
        if request.first != header.seq {
            return;
        }
        let length = request.length;
        let (Some(arrived), Local::Memory(pieces)) = (&mut request.read, &request.local) else {
            return;
        };
        let expected = length.saturating_sub(header.offset).min(PAYLOAD as u64);
        if arrived.missing == 0 || payload.len() as u64 != expected {
            return;
        }
        if !arrived.note(header.offset) {
            return;
        }
        if !env.regions.scatter(pieces, pd, header.offset, payload) {
            request.error = Some(IBV_WC_LOC_PROT_ERR);
        }
        if arrived.missing == 0 {
            self.tx.reads -= 1;
        }
        self.tx.heard();
    }

    /// Completes the answered requests at the front of the queue.
    pub(super) fn finish(&mut self, env: &mut Env<'_>) {
        while let Some(first) = self.tx.queue.front() {
            let refused = self
                .tx
                .refused
                .filter(|(packet, _)| (first.first..first.end()).contains(packet))
                .map(|(_, status)| status);
            let known = first.error.filter(|_| first.begun).or(refused);
            let answered = first.read.as_ref().is_none_or(|read| read.missing == 0);
            let done = first.begun && first.end() <= self.tx.unacked && answered;
            if known.is_none() && !done {
                return;
            }
            let Some(first) = self.tx.queue.pop_front() else { return };
            self.complete(env, &first, known.unwrap_or(IBV_WC_SUCCESS));
            if known.is_some() {
                self.fail(env);
                return;
            }
            self.tx.at -= 1;
        }
    }

    /// Retransmits unanswered packets, gives up after enough retries, and returns when to call
    /// again.
    pub(super) fn timers(&mut self, env: &mut Env<'_>) -> Option<Instant> {
        if self.state != IBV_QPS_RTS {
            return None;
        }
        if let Some(until) = self.tx.pause {
            return Some(until);
        }
        let stuck = self.blocked_until.is_some() && self.tx.send < self.tx.next;
        if !self.tx.is_waiting() && !stuck {
            self.tx.silent = None;
            return None;
        }
        let script = &env.nic.device.fabric.script;
        let timeout = timeout(self.attr.timeout);
        let fresh = || Silence::new(env.now, timeout, script);
        let mut silence = self.tx.silent.unwrap_or_else(fresh);
        let retries = self.attr.retry_cnt;
        match silence.check(env.now, &mut self.tx.lost, timeout, retries, script) {
            Due::Nothing => {}
            Due::Again => self.resend(env),
            Due::End => {
                let first = self.tx.queue.front().map_or(self.tx.unacked, |first| first.first);
                self.tx.refused = Some((first, IBV_WC_RETRY_EXC_ERR));
                self.finish(env);
                return None;
            }
        }
        self.tx.silent = Some(silence);
        Some(silence.resend)
    }

    fn resend(&mut self, env: &mut Env<'_>) {
        count(&COUNTERS.retransmissions, 1);
        let Some(peer) = self.peer.clone() else { return };
        let header = self.header(kind::READ, env.nic.device.index);
        for request in &mut self.tx.queue {
            let open = request.read.as_ref().is_some_and(|read| read.missing > 0);
            if open && request.first < self.tx.unacked {
                let sent = send_read(env, header, request, &self.socket, &peer.address);
                self.tx.lost |= sent == Sent::Lost;
            }
        }
        self.tx.rewind();
        self.transmit(env);
    }
}

/// Binds a window or invalidates its key.
fn window(regions: &mut Regions, pd: u32, request: &Request) -> bool {
    match request.bind {
        Some((key, bound)) => regions.bind(pd, key, bound),
        None => regions.invalidate(pd, request.key),
    }
}

/// Requests the first run of missing packets.
fn send_read(
    env: &mut Env<'_>,
    mut header: Header,
    request: &Request,
    from: &std::sync::Arc<std::os::unix::net::UnixDatagram>,
    to: &std::os::unix::net::SocketAddr,
) -> Sent {
    let (first, run) = request.read.as_ref().map_or((0, 1), Arrived::gap);
    header.kind = kind::READ;
    header.seq = request.first;
    header.address = request.address;
    header.key = request.key;
    header.length = request.length;
    header.offset = (first * PAYLOAD) as u64;
    header.packets = run as u32;
    header.opcode = IBV_WR_RDMA_READ as u8;
    header.flags = flag::LAST;
    env.wire.send_header(from, to, &header, env.now)
}

/// The time-out of a queue pair; `None` waits for ever.
fn timeout(exponent: u8) -> Option<Duration> {
    (exponent > 0).then(|| Duration::from_nanos(4096 << exponent))
}

/// The time of an RNR timer code, from the table of the specification.
pub(crate) fn rnr_time(code: u8) -> Duration {
    const HUNDREDTHS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(10 * u64::from(HUNDREDTHS[usize::from(code & 31)]))
}
