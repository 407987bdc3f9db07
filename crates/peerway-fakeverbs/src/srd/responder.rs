//! The responder, without a connection.
//!
//! Packets of a message take effect in the order in which they arrive. The immediate, and the
//! receive that it completes, take effect only after all packets have arrived.

use std::collections::{BTreeMap, HashMap};

use peerway_sys::verbs::ffi::*;
use zerocopy::IntoBytes as _;

use crate::nic::Env;
use crate::qp::{Arrived, Peer, Qp};
use crate::wire::{Header, PAYLOAD, Sent, flag, kind};

/// Responses sent per turn, so that a long read does not delay the others.
const TURN: usize = 16;

/// The RNR timer code, 0.64 ms. EFA has no attribute for it.
const RNR_TIMER: u8 = 12;

/// A queue pair that sends to this one.
#[derive(Debug, Default)]
pub(crate) struct Source {
    floor: u64,
    /// Messages that have completed, and their status.
    done: BTreeMap<u64, u32>,
    open: HashMap<u64, Arrived>,
}

/// A read that is being answered.
#[derive(Debug)]
pub(crate) struct Answer {
    peer: Peer,
    request: Header,
    next: u64,
    end: u64,
}

impl Qp {
    pub(super) fn srd_request(
        &mut self,
        env: &mut Env<'_>,
        peer: &Peer,
        header: &Header,
        payload: &[u8],
    ) {
        if header.kind == kind::READ {
            self.srd_read(env, peer, header);
            return;
        }
        let key = (peer.device, peer.number, header.life);
        let source = self.datagrams.sources.entry(key).or_default();
        if header.floor > source.floor {
            source.floor = header.floor;
            source.done = source.done.split_off(&header.floor);
            source.open.retain(|number, _| *number >= header.floor);
        }
        // The sender has completed this message: a packet that was delayed for long.
        if header.seq < source.floor {
            return;
        }
        let status = match source.done.get(&header.seq) {
            Some(status) => Some(*status),
            None => self.srd_take(env, key, peer, header, payload),
        };
        let Some(status) = status else { return };
        let mut reply = reply(self, env, if status == 0 { kind::ACK } else { kind::NAK }, header);
        reply.flags = flag::LAST;
        reply.status = status as u8;
        self.datagrams.replies.push_back((peer.clone(), reply));
    }

    /// Applies a packet. Returns the status of the message if this packet completes it.
    fn srd_take(
        &mut self,
        env: &mut Env<'_>,
        key: (u32, u32, u64),
        peer: &Peer,
        header: &Header,
        payload: &[u8],
    ) -> Option<u32> {
        let opcode = u32::from(header.opcode);
        let write = matches!(opcode, IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM);
        let target = self.target(header);
        let source = self.datagrams.sources.get_mut(&key)?;
        let arrived = source.open.entry(header.seq).or_insert_with(|| Arrived::new(header.length));
        let mut status = IBV_WC_SUCCESS;
        if arrived.note(header.offset)
            && write
            && !env.regions.write(&target, header.offset, payload)
        {
            status = IBV_WC_REM_ACCESS_ERR;
        }
        let complete = arrived.missing == 0;
        if status == IBV_WC_SUCCESS && !complete {
            let acknowledgement = reply(self, env, kind::ACK, header);
            self.datagrams.replies.push_back((peer.clone(), acknowledgement));
            return None;
        }
        if status == IBV_WC_SUCCESS && opcode != IBV_WR_RDMA_WRITE {
            let spurious = env.wire.dice.hit(env.nic.device.fabric.script.rnr);
            let Some(receive) = self.receives.pop_front_if(|_| !spurious) else {
                let mut refusal = reply(self, env, kind::RNR, header);
                refusal.status = RNR_TIMER;
                self.datagrams.replies.push_back((peer.clone(), refusal));
                return None;
            };
            if write {
                self.deliver(env, &receive, header, IBV_WC_RECV_RDMA_WITH_IMM);
            } else if header.length > receive.room() {
                self.complete_receive(env, &receive, IBV_WC_LOC_LEN_ERR);
                status = IBV_WC_REM_INV_REQ_ERR;
            } else if !env.regions.scatter(&receive.pieces, self.pd, 0, payload) {
                self.complete_receive(env, &receive, IBV_WC_LOC_PROT_ERR);
                status = IBV_WC_REM_OP_ERR;
            } else {
                self.deliver(env, &receive, header, IBV_WC_RECV);
            }
        }
        let source = self.datagrams.sources.get_mut(&key)?;
        source.open.remove(&header.seq);
        source.done.insert(header.seq, status);
        Some(status)
    }

    /// Begins to answer a read. Reading bytes twice is harmless, so reads are not remembered.
    fn srd_read(&mut self, env: &mut Env<'_>, peer: &Peer, header: &Header) {
        if !env.regions.read(&self.target(header), 0, 0, &mut Vec::new()) {
            let mut refusal = reply(self, env, kind::NAK, header);
            refusal.status = IBV_WC_REM_ACCESS_ERR as u8;
            self.datagrams.replies.push_back((peer.clone(), refusal));
            return;
        }
        let same = |answer: &Answer| {
            (answer.request.seq, answer.request.life) == (header.seq, header.life)
        };
        self.datagrams.answers.retain(|answer| !same(answer));
        let run = u64::from(header.packets) * PAYLOAD as u64;
        let end = header.offset.saturating_add(run).min(header.length);
        let answer = Answer { peer: peer.clone(), request: *header, next: header.offset, end };
        self.datagrams.answers.push_back(answer);
    }

    pub(super) fn srd_answers(&mut self, env: &mut Env<'_>) {
        for _ in 0..TURN {
            let Some(mut answer) = self.datagrams.answers.pop_front() else { return };
            let length = answer.end.saturating_sub(answer.next).min(PAYLOAD as u64);
            let mut header = reply(self, env, kind::RESPONSE, &answer.request);
            header.offset = answer.next;
            let target = self.target(&answer.request);
            let packet = &mut env.wire.scratch;
            packet.clear();
            packet.extend_from_slice(header.as_bytes());
            if !env.regions.read(&target, answer.next, length as usize, packet) {
                // The program has deregistered the memory during the read.
                header.kind = kind::NAK;
                header.status = IBV_WC_REM_ACCESS_ERR as u8;
                self.datagrams.replies.push_back((answer.peer, header));
                continue;
            }
            let sent = env.wire.send_scratch(&self.socket, &answer.peer.address, env.now);
            if sent == Sent::Blocked {
                self.datagrams.answers.push_front(answer);
                self.block(env.now);
                return;
            }
            self.blocks = 0;
            answer.next += length;
            if answer.next < answer.end {
                // Pending answers take turns.
                self.datagrams.answers.push_back(answer);
            }
        }
        self.blocked_until = Some(env.now);
    }
}

/// A reply to a packet. It carries the life of the sender, so that the sender recognizes it.
fn reply(qp: &Qp, env: &Env<'_>, kind: u8, to: &Header) -> Header {
    let mut header = qp.header(kind, env.nic.device.index);
    header.life = to.life;
    header.seq = to.seq;
    header.offset = to.offset;
    header
}
