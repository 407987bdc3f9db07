//! Reliable connections.
//!
//! Requests are split into packets with consecutive sequence numbers, beginning at the negotiated
//! one. The responder executes them in that order and acknowledges with the number that it expects
//! next. A read is one packet of the sequence, and its responses name its number. Requests complete
//! in the order in which they were posted.

mod requester;
mod responder;

use std::time::Instant;

use peerway_sys::verbs::ffi::*;

pub(crate) use self::requester::{Requester, rnr_time};
pub(crate) use self::responder::Responder;
use crate::nic::Env;
use crate::qp::Qp;
use crate::wire::{self, Header, kind};

/// Packets in flight at once. Two connected sockets queue as much as the sender's buffer holds; a
/// megabyte keeps both sides busy.
pub(crate) const WINDOW: u64 = 32;

impl Qp {
    pub(crate) fn rc_packet(&mut self, env: &mut Env<'_>, header: &Header, payload: &[u8]) {
        let asks = matches!(header.kind, kind::DATA | kind::READ);
        let ours = (header.source, header.device);
        if self.peer.as_ref().is_none_or(|peer| (peer.number, peer.device) != ours) {
            if asks {
                self.rc_notice(env, header);
            }
            return;
        }
        let ready = matches!(self.state, IBV_QPS_RTR | IBV_QPS_RTS);
        let taken = ready && !env.nic.device.is_removed() && !env.wire.device.link_down(env.now);
        match header.kind {
            _ if asks && taken => self.request_arrived(env, header, payload),
            _ if asks => self.rc_notice(env, header),
            kind::NOTICE => self.tx.lost = true,
            _ if self.state == IBV_QPS_RTS && taken => self.answer_arrived(env, header, payload),
            _ => {}
        }
    }

    /// Tells a requester that its packets are not accepted here.
    fn rc_notice(&self, env: &mut Env<'_>, header: &Header) {
        let fabric = &env.nic.device.fabric.name;
        let Ok(address) = wire::address(fabric, header.device, header.source) else { return };
        let notice = self.header(kind::NOTICE, env.nic.device.index);
        env.wire.notice(&self.socket, &address, &notice);
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
