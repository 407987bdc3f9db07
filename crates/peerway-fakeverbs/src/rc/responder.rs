//! The responder: it executes packets in sequence, whatever order they arrive in.
//!
//! Invariants: a packet is executed once, when its number is the expected one. The responder keeps
//! early packets, acknowledges duplicates again, and answers a duplicate read again. After a
//! refused request, nothing is executed. The refusal is sent after the responses before it, and
//! then the queue pair fails.

use std::collections::{BTreeMap, VecDeque};

use peerway_sys::verbs::ffi::*;
use zerocopy::IntoBytes as _;

use super::WINDOW;
use crate::nic::Env;
use crate::qp::Qp;
use crate::wire::{Header, PAYLOAD, Sent, flag, kind};

/// Responses sent per turn, so that a long read does not delay the others.
const TURN: usize = 16;

/// The receiving half of a queue pair.
#[derive(Debug)]
pub(crate) struct Responder {
    expected: u64,
    /// Packets that arrived early.
    early: BTreeMap<u64, (Header, Vec<u8>)>,
    acknowledge: bool,
    /// The packet to refuse for now, because no receive was posted.
    not_ready: Option<u64>,
    /// Reads that are being answered.
    answers: VecDeque<Answer>,
    refused: Option<(u64, u32)>,
}

#[derive(Debug)]
struct Answer {
    request: Header,
    /// The offset of the next packet, and the end of the last.
    next: u64,
    end: u64,
}

/// Why a packet was not executed.
enum Refusal {
    /// No receive is posted. The requester may send the same packet again.
    NotReady,
    /// An `IBV_WC_REM_*` status for the requester.
    Fatal(u32),
}

impl Responder {
    pub(crate) fn new(expected: u64) -> Self {
        Self {
            expected,
            early: BTreeMap::new(),
            acknowledge: false,
            not_ready: None,
            answers: VecDeque::new(),
            refused: None,
        }
    }
}

impl Qp {
    pub(super) fn request_arrived(&mut self, env: &mut Env<'_>, header: &Header, payload: &[u8]) {
        if self.rx.refused.is_some() {
            return;
        }
        if header.seq < self.rx.expected {
            self.rx.acknowledge = true;
            if header.kind == kind::READ
                && let Err(Refusal::Fatal(status)) = self.answer(env, header)
            {
                self.rx.refused = Some((header.seq, status));
            }
            return;
        }
        if header.seq > self.rx.expected {
            if header.seq < self.rx.expected + 2 * WINDOW {
                self.rx.early.insert(header.seq, (*header, payload.to_vec()));
                self.rx.acknowledge = true;
            } else {
                self.rc_notice(env, header);
            }
            return;
        }
        let mut outcome = self.execute(env, header, payload);
        while outcome.is_ok() {
            self.rx.expected += 1;
            self.rx.acknowledge = true;
            let Some((header, payload)) = self.rx.early.remove(&self.rx.expected) else { return };
            outcome = self.execute(env, &header, &payload);
        }
        match outcome {
            Ok(()) => {}
            Err(Refusal::NotReady) => self.rx.not_ready = Some(self.rx.expected),
            Err(Refusal::Fatal(status)) => self.rx.refused = Some((self.rx.expected, status)),
        }
    }

    fn execute(
        &mut self,
        env: &mut Env<'_>,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Refusal> {
        let last = header.has(flag::LAST);
        match u32::from(header.opcode) {
            IBV_WR_RDMA_READ => self.answer(env, header),
            IBV_WR_RDMA_WRITE => self.write(env, header, payload),
            IBV_WR_RDMA_WRITE_WITH_IMM => {
                if last {
                    self.ready(env)?;
                }
                self.write(env, header, payload)?;
                if last && let Some(receive) = self.receives.pop_front() {
                    self.deliver(env, &receive, header, IBV_WC_RECV_RDMA_WITH_IMM);
                }
                Ok(())
            }
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM => {
                // The first packet of a message checks for the receive; later packets use the same
                // one.
                if header.offset == 0 {
                    self.ready(env)?;
                }
                self.take_in(env, header, payload)?;
                if last && let Some(receive) = self.receives.pop_front() {
                    self.deliver(env, &receive, header, IBV_WC_RECV);
                }
                Ok(())
            }
            _ => Err(Refusal::Fatal(IBV_WC_REM_INV_REQ_ERR)),
        }
    }

    fn ready(&mut self, env: &mut Env<'_>) -> Result<(), Refusal> {
        let spurious = env.wire.dice.hit(env.nic.device.fabric.script.rnr);
        if spurious || self.receives.is_empty() { Err(Refusal::NotReady) } else { Ok(()) }
    }

    fn write(&self, env: &Env<'_>, header: &Header, payload: &[u8]) -> Result<(), Refusal> {
        let allowed = self.attr.qp_access_flags & IBV_ACCESS_REMOTE_WRITE != 0;
        if header.length > 0 && !allowed {
            return Err(Refusal::Fatal(IBV_WC_REM_INV_REQ_ERR));
        }
        if !env.regions.write(&self.target(header), header.offset, payload) {
            return Err(Refusal::Fatal(IBV_WC_REM_ACCESS_ERR));
        }
        Ok(())
    }

    /// Writes part of a message to the first receive.
    fn take_in(
        &mut self,
        env: &mut Env<'_>,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Refusal> {
        let Some(receive) = self.receives.front() else { return Err(Refusal::NotReady) };
        let (ours, theirs) = if header.length > receive.room() {
            (IBV_WC_LOC_LEN_ERR, IBV_WC_REM_INV_REQ_ERR)
        } else if !env.regions.scatter(&receive.pieces, self.pd, header.offset, payload) {
            (IBV_WC_LOC_PROT_ERR, IBV_WC_REM_OP_ERR)
        } else {
            return Ok(());
        };
        if let Some(receive) = self.receives.pop_front() {
            self.complete_receive(env, &receive, ours);
        }
        Err(Refusal::Fatal(theirs))
    }

    /// Begins to answer a read.
    fn answer(&mut self, env: &Env<'_>, header: &Header) -> Result<(), Refusal> {
        let allowed = self.attr.qp_access_flags & IBV_ACCESS_REMOTE_READ != 0;
        if (header.length > 0 && !allowed) || self.attr.max_dest_rd_atomic == 0 {
            return Err(Refusal::Fatal(IBV_WC_REM_INV_REQ_ERR));
        }
        if !env.regions.read(&self.target(header), 0, 0, &mut Vec::new()) {
            return Err(Refusal::Fatal(IBV_WC_REM_ACCESS_ERR));
        }
        // A repeated request replaces the pending answer.
        self.rx.answers.retain(|answer| answer.request.seq != header.seq);
        let run = u64::from(header.packets) * PAYLOAD as u64;
        let end = header.offset.saturating_add(run).min(header.length);
        self.rx.answers.push_back(Answer { request: *header, next: header.offset, end });
        Ok(())
    }

    /// Sends pending responses, then acknowledgements and refusals.
    pub(super) fn respond(&mut self, env: &mut Env<'_>) {
        for _ in 0..TURN {
            if self.rx.answers.is_empty() {
                break;
            }
            if !self.answer_packet(env) {
                self.block(env.now);
                return;
            }
        }
        if !self.rx.answers.is_empty() {
            // Continue in the next turn.
            self.blocked_until = Some(env.now);
        }
        let Some(peer) = &self.peer else { return };
        let device = env.nic.device.index;
        if let Some(seq) = self.rx.not_ready {
            let mut header = self.header(kind::RNR, device);
            header.seq = seq;
            header.status = self.attr.min_rnr_timer;
            if env.wire.send_header(&self.socket, &peer.address, &header, env.now) == Sent::Blocked
            {
                self.block(env.now);
                return;
            }
            self.rx.not_ready = None;
            self.rx.acknowledge = false;
        }
        if let Some((seq, status)) = self.rx.refused.filter(|_| self.rx.answers.is_empty()) {
            let mut header = self.header(kind::NAK, device);
            header.seq = seq;
            header.status = status as u8;
            if env.wire.send_header(&self.socket, &peer.address, &header, env.now) == Sent::Blocked
            {
                self.block(env.now);
                return;
            }
            self.fail(env);
            return;
        }
        if self.rx.acknowledge {
            let mut header = self.header(kind::ACK, device);
            header.seq = self.rx.expected;
            // Several packets after a missing one mean that it is lost rather than late.
            if self.rx.early.len() >= 3 {
                header.flags = flag::GAP;
            }
            if env.wire.send_header(&self.socket, &peer.address, &header, env.now) == Sent::Blocked
            {
                self.block(env.now);
                return;
            }
            self.rx.acknowledge = false;
        }
    }

    /// Sends the next packet of the first answer. Returns false if the peer's queue is full.
    fn answer_packet(&mut self, env: &mut Env<'_>) -> bool {
        let (Some(answer), Some(peer)) = (self.rx.answers.front(), &self.peer) else { return true };
        let (request, offset, end) = (answer.request, answer.next, answer.end);
        let length = end.saturating_sub(offset).min(PAYLOAD as u64);
        let mut header = self.header(kind::RESPONSE, env.nic.device.index);
        header.seq = request.seq;
        header.offset = offset;
        let packet = &mut env.wire.scratch;
        packet.clear();
        packet.extend_from_slice(header.as_bytes());
        if !env.regions.read(&self.target(&request), offset, length as usize, packet) {
            // The program has deregistered the memory during the read.
            self.rx.refused = Some((request.seq, IBV_WC_REM_ACCESS_ERR));
            self.rx.answers.clear();
            return true;
        }
        if env.wire.send_scratch(&self.socket, &peer.address, env.now) == Sent::Blocked {
            return false;
        }
        if offset + length >= end {
            self.rx.answers.pop_front();
        } else if let Some(answer) = self.rx.answers.front_mut() {
            answer.next += length;
        }
        true
    }
}
