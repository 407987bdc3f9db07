//! Unreliable datagrams: one packet each, sent once, and lost if no receive is posted.

use std::time::Instant;

use peerway_sys::verbs::ffi::*;
use zerocopy::IntoBytes as _;

use crate::device::link_local;
use crate::nic::Env;
use crate::qp::{Local, Qp, Request};
use crate::wire::{Header, Sent, flag, kind};

impl Qp {
    pub(crate) fn ud_packet(&mut self, env: &mut Env<'_>, header: &Header, payload: &[u8]) {
        let ready = matches!(self.state, IBV_QPS_RTR | IBV_QPS_RTS);
        let taken = ready && !env.nic.device.is_removed() && !env.nic.device.link_down(env.now);
        if !taken || header.kind != kind::DATAGRAM || header.qkey != self.attr.qkey {
            return;
        }
        let Some(receive) = self.receives.pop_front() else { return };
        // The network header that hardware puts in front of the message.
        let mut bytes = [0; size_of::<ibv_grh>()];
        bytes[0] = 0x60;
        bytes[8..24].copy_from_slice(&link_local(header.device));
        bytes[24..].copy_from_slice(&link_local(env.nic.device.index));
        let message = [&bytes, payload].concat();
        if message.len() as u64 > receive.room() {
            self.complete_receive(env, &receive, IBV_WC_LOC_LEN_ERR);
        } else if !env.regions.scatter(&receive.pieces, self.pd, 0, &message) {
            self.complete_receive(env, &receive, IBV_WC_LOC_PROT_ERR);
        } else {
            self.deliver(env, &receive, header, IBV_WC_RECV);
        }
    }

    pub(crate) fn ud_work(&mut self, env: &mut Env<'_>) -> Option<Instant> {
        if self.state != IBV_QPS_RTS {
            return None;
        }
        while let Some(request) = self.datagrams.queue.pop_front() {
            let status = match self.datagram(env, &request) {
                Ok(Sent::Blocked) => {
                    self.datagrams.queue.push_front(request);
                    self.block(env.now);
                    return self.blocked_until;
                }
                Ok(Sent::Away | Sent::Lost) => IBV_WC_SUCCESS,
                Err(status) => status,
            };
            self.blocks = 0;
            self.complete(env, &request, status);
            if status != IBV_WC_SUCCESS {
                self.fail(env);
                return None;
            }
        }
        None
    }

    fn datagram(&self, env: &mut Env<'_>, request: &Request) -> Result<Sent, u32> {
        let Some((to, qkey)) = &request.to else { return Err(IBV_WC_LOC_QP_OP_ERR) };
        if let Some(status) = request.error {
            return Err(status);
        }
        let mut header = self.header(kind::DATAGRAM, env.nic.device.index);
        header.qkey = *qkey;
        header.length = request.length;
        header.opcode = request.opcode as u8;
        header.immediate = request.immediate;
        header.flags = flag::LAST | if request.solicited { flag::SOLICITED } else { 0 };
        env.pack(&header, &request.local, self.pd, 0, request.length as usize)
            .map_err(|()| IBV_WC_LOC_PROT_ERR)?;
        Ok(env.wire.send_scratch(&self.socket, &to.address, env.now))
    }
}

impl Env<'_> {
    /// Builds a packet in the wire's scratch buffer.
    ///
    /// # Errors
    ///
    /// The local memory is not accessible.
    pub(crate) fn pack(
        &mut self,
        header: &Header,
        local: &Local,
        pd: u32,
        offset: u64,
        length: usize,
    ) -> Result<(), ()> {
        let packet = &mut self.wire.scratch;
        packet.clear();
        packet.extend_from_slice(header.as_bytes());
        let gathered = match local {
            Local::Inline(bytes) => {
                packet.extend_from_slice(&bytes[offset as usize..][..length]);
                true
            }
            Local::Memory(pieces) => self.regions.gather(pieces, pd, offset, length, packet),
        };
        if gathered { Ok(()) } else { Err(()) }
    }
}
