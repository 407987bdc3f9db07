//! Reliable connections.
//!
//! Requests are cut into packets that are numbered in one row from the agreed number on; the responder
//! executes them in that order and acknowledges by the number it expects next. A read is one packet of
//! the row, and its answers name that number. Requests end in the order in which they were posted.

mod requester;
mod responder;

use std::time::Instant;

use peerway_sys::verbs::ffi::*;

pub(crate) use self::requester::{Requester, rnr_time};
pub(crate) use self::responder::Responder;
use crate::nic::Env;
use crate::qp::Qp;
use crate::wire::{Header, kind};

/// Packets under way at once. Fewer than the ten that the kernel by default queues on a datagram socket,
/// so that acknowledgements fit too.
pub(crate) const WINDOW: u64 = 8;

impl Qp {
    pub(crate) fn rc_packet(&mut self, env: &mut Env<'_>, header: &Header, payload: &[u8]) {
        let Some(peer) = &self.peer else { return };
        if (header.source, header.device) != (peer.number, peer.device) {
            return;
        }
        let ready = matches!(self.state, IBV_QPS_RTR | IBV_QPS_RTS);
        let taken = ready && !env.nic.device.is_removed() && !env.wire.device.link_down(env.now);
        match header.kind {
            kind::DATA | kind::READ if taken => self.request_arrived(env, header, payload),
            kind::DATA | kind::READ => {
                let notice = self.header(kind::NOTICE, env.nic.device.index);
                env.wire.notice(&self.socket, &peer.address, &notice);
            }
            kind::NOTICE => self.tx.lost = true,
            _ if self.state == IBV_QPS_RTS && taken => self.answer_arrived(env, header, payload),
            _ => {}
        }
    }

    pub(crate) fn rc_work(&mut self, env: &mut Env<'_>) -> Option<Instant> {
        if !matches!(self.state, IBV_QPS_RTR | IBV_QPS_RTS) {
            return None;
        }
        if self.blocked_until.is_none_or(|until| until <= env.now) {
            self.blocked_until = None;
            self.respond(env);
            self.transmit(env);
            self.finish(env);
        }
        let timer = self.timers(env);
        [self.blocked_until, timer].into_iter().flatten().min()
    }
}
