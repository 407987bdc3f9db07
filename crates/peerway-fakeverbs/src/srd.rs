//! EFA's reliable datagrams: every request arrives once, in no order among requests.
//!
//! A request is a message with its own number. Its packets are acknowledged one by one. If it
//! fails, only this request fails; the queue pair continues. A message takes effect once: the
//! responder remembers the completed numbers, down to the lowest number that the requester has not
//! completed. Every packet carries that number.

mod requester;
mod responder;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Instant;

use peerway_sys::verbs::ffi::*;

use self::requester::Open;
use self::responder::{Answer, Source};
use crate::nic::Env;
use crate::qp::{Peer, Qp, Request};
use crate::wire::{self, Header, Sent, kind};

/// The pending work of a queue pair without a connection.
#[derive(Debug, Default)]
pub(crate) struct Datagrams {
    /// Requests that have not begun.
    pub(crate) queue: VecDeque<Request>,
    /// Requests that have begun, by number.
    open: BTreeMap<u64, Open>,
    next: u64,
    /// Packets that are not answered.
    under_way: usize,
    /// The senders, by device, number and life.
    sources: HashMap<(u32, u32, u64), Source>,
    /// Acknowledgements and refusals to send.
    replies: VecDeque<(Peer, Header)>,
    answers: VecDeque<Answer>,
}

impl Datagrams {
    pub(crate) fn outstanding(&self) -> usize {
        self.queue.len() + self.open.len()
    }

    /// All requests, in the order in which they were posted.
    pub(crate) fn into_requests(self) -> impl Iterator<Item = Request> {
        self.open.into_values().map(|open| open.request).chain(self.queue)
    }
}

impl Qp {
    pub(crate) fn srd_packet(&mut self, env: &mut Env<'_>, header: &Header, payload: &[u8]) {
        let ready = matches!(self.state, IBV_QPS_RTR | IBV_QPS_RTS);
        let taken = ready && !env.nic.device.is_removed() && !env.nic.device.link_down(env.now);
        match header.kind {
            kind::DATA | kind::READ => {
                let fabric = &env.nic.device.fabric.name;
                let (device, number) = (header.device, header.source);
                let Ok(address) = wire::address(fabric, device, number) else { return };
                if taken && header.qkey == self.attr.qkey {
                    self.srd_request(env, &Peer { address, device, number }, header, payload);
                } else {
                    let mut notice = self.header(kind::NOTICE, env.nic.device.index);
                    notice.seq = header.seq;
                    env.wire.notice(&self.socket, &address, &notice);
                }
            }
            _ if self.state == IBV_QPS_RTS && (taken || header.kind == kind::NOTICE) => {
                self.srd_answer(env, header, payload);
            }
            _ => {}
        }
    }

    pub(crate) fn srd_work(&mut self, env: &mut Env<'_>) -> Option<Instant> {
        if !matches!(self.state, IBV_QPS_RTR | IBV_QPS_RTS) {
            return None;
        }
        if self.blocked_until.is_none_or(|until| until <= env.now) {
            self.blocked_until = None;
            self.srd_respond(env);
        }
        let timer = self.srd_transmit(env);
        [self.blocked_until, timer].into_iter().flatten().min()
    }

    /// Sends pending replies to requesters: acknowledgements first, then read responses.
    fn srd_respond(&mut self, env: &mut Env<'_>) {
        while let Some((peer, header)) = self.datagrams.replies.pop_front() {
            let sent = env.wire.send_header(&self.socket, &peer.address, &header, env.now);
            if sent == Sent::Blocked {
                self.datagrams.replies.push_front((peer, header));
                self.block(env.now);
                return;
            }
            self.blocks = 0;
        }
        self.srd_answers(env);
    }
}
