//! The requester, without a connection.
//!
//! Invariant: `under_way` counts the packets of open messages that were sent and not answered. A
//! message that is paused (for a receive at the remote side) or completed counts none.

use std::time::{Duration, Instant};

use peerway_sys::verbs::ffi::*;

use crate::nic::Env;
use crate::qp::{Arrived, Local, Peer, Qp, Request};
use crate::rc::rnr_time;
use crate::silence::{Due, Silence};
use crate::stats::{COUNTERS, count};
use crate::wire::{Header, PAYLOAD, Sent, flag, kind};

/// Packets in flight at once. By default the kernel queues ten packets on an unconnected datagram
/// socket. A smaller window leaves room for acknowledgements.
const WINDOW: usize = 8;

/// EFA has no attributes for these. The requester gives an absent peer up after half a second in
/// all.
const TIMEOUT: Duration = Duration::from_millis(64);
const RETRIES: u8 = 7;

/// A request that has begun.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) request: Request,
    peer: Peer,
    qkey: u32,
    /// The packets that are acknowledged or, for a read, have arrived.
    arrived: Arrived,
    /// The next packet to send for the first time.
    next: u64,
    /// Packets sent and not answered.
    under_way: usize,
    silence: Option<Silence>,
    lost: bool,
    pause: Option<Instant>,
    rnr_retries: u8,
}

impl Open {
    fn offset(&self) -> u64 {
        self.next * PAYLOAD as u64
    }

    fn is_sent(&self) -> bool {
        self.next == self.request.packets()
    }
}

impl Qp {
    /// Sends as much as the window allows, checks the timers, and returns when to call again.
    pub(super) fn srd_transmit(&mut self, env: &mut Env<'_>) -> Option<Instant> {
        if self.state != IBV_QPS_RTS {
            return None;
        }
        let mut due: Option<Instant> = None;
        let numbers: Vec<u64> = self.datagrams.open.keys().copied().collect();
        for number in numbers {
            let at = self.srd_message(env, number);
            due = [due, at].into_iter().flatten().min();
        }
        while self.blocked_until.is_none() && self.datagrams.under_way < WINDOW {
            let Some(request) = self.datagrams.queue.pop_front() else { break };
            self.begun += 1;
            let script = &env.nic.device.fabric.script;
            if script.flush_after.is_some_and(|after| self.begun >= after) {
                self.datagrams.queue.push_front(request);
                self.fail(env);
                return None;
            }
            if let Some(number) = self.srd_begin(env, request) {
                let at = self.srd_message(env, number);
                due = [due, at].into_iter().flatten().min();
            }
        }
        due
    }

    /// Begins a request and returns its number; `None` if it failed at once.
    fn srd_begin(&mut self, env: &mut Env<'_>, mut request: Request) -> Option<u64> {
        if let Local::Memory(pieces) = &request.local {
            let access = if request.is_read() { IBV_ACCESS_LOCAL_WRITE } else { 0 };
            if !env.regions.check(pieces, self.pd, access) {
                request.error = request.error.or(Some(IBV_WC_LOC_PROT_ERR));
            }
        }
        let (peer, qkey) = match (request.error, request.to.take()) {
            (None, Some(to)) => to,
            (error, _) => {
                self.complete(env, &request, error.unwrap_or(IBV_WC_LOC_QP_OP_ERR));
                return None;
            }
        };
        self.datagrams.next += 1;
        let open = Open {
            arrived: Arrived::new(request.length),
            request,
            peer,
            qkey,
            next: 0,
            under_way: 0,
            silence: None,
            lost: false,
            pause: None,
            rnr_retries: 0,
        };
        self.datagrams.open.insert(self.datagrams.next, open);
        Some(self.datagrams.next)
    }

    /// Advances one message, and returns when to call again.
    fn srd_message(&mut self, env: &mut Env<'_>, number: u64) -> Option<Instant> {
        let open = self.datagrams.open.get_mut(&number)?;
        if let Some(until) = open.pause {
            if until > env.now {
                return Some(until);
            }
            open.pause = None;
            open.next = 0;
        }
        while self.blocked_until.is_none() {
            let open = self.datagrams.open.get_mut(&number)?;
            if open.is_sent() || self.datagrams.under_way >= WINDOW {
                break;
            }
            // Packets that were acknowledged before a pause are not sent again.
            if !open.request.is_read() && open.arrived.has(open.offset()) {
                open.next += 1;
                continue;
            }
            match self.srd_send(env, number) {
                Ok(Sent::Blocked) => self.block(env.now),
                Ok(sent) => {
                    self.blocks = 0;
                    let open = self.datagrams.open.get_mut(&number)?;
                    open.lost |= sent == Sent::Lost;
                    open.next += 1;
                    open.under_way += 1;
                    self.datagrams.under_way += 1;
                }
                Err(()) => {
                    self.srd_end(env, number, IBV_WC_LOC_PROT_ERR);
                    return None;
                }
            }
        }
        self.srd_timer(env, number)
    }

    fn srd_timer(&mut self, env: &mut Env<'_>, number: u64) -> Option<Instant> {
        let script = &env.nic.device.fabric.script;
        let blocked = self.blocked_until.is_some();
        let open = self.datagrams.open.get_mut(&number)?;
        if open.under_way == 0 && !blocked {
            open.silence = None;
            return None;
        }
        let fresh = || Silence::new(env.now, Some(TIMEOUT), script);
        let mut silence = open.silence.unwrap_or_else(fresh);
        let time = silence.check(env.now, &mut open.lost, Some(TIMEOUT), RETRIES, script);
        open.silence = Some(silence);
        match time {
            Due::Nothing => {}
            Due::End => {
                self.srd_end(env, number, IBV_WC_RESP_TIMEOUT_ERR);
                return None;
            }
            Due::Again => {
                count(&COUNTERS.retransmissions, 1);
                self.datagrams.under_way -= open.under_way;
                open.under_way = 0;
                open.next = 0;
                // The next turn, which follows at once, retransmits.
                return Some(env.now);
            }
        }
        Some(silence.resend)
    }

    /// Sends the next packet of a message.
    fn srd_send(&mut self, env: &mut Env<'_>, number: u64) -> Result<Sent, ()> {
        let floor = self.datagrams.open.keys().next().copied().unwrap_or(number);
        let mut header = self.header(kind::DATA, env.nic.device.index);
        let Some(open) = self.datagrams.open.get(&number) else { return Err(()) };
        let request = &open.request;
        header.seq = number;
        header.floor = floor;
        header.qkey = open.qkey;
        header.address = request.address;
        header.key = request.key;
        header.length = request.length;
        header.opcode = request.opcode as u8;
        header.immediate = request.immediate;
        header.flags = if request.solicited { flag::SOLICITED } else { 0 };
        let mut length = 0;
        if request.is_read() {
            let (first, run) = open.arrived.gap();
            header.kind = kind::READ;
            header.offset = (first * PAYLOAD) as u64;
            header.packets = run as u32;
        } else {
            header.offset = open.offset();
            length = (request.length - header.offset).min(PAYLOAD as u64) as usize;
        }
        let local = if length == 0 { &Local::Inline(Vec::new()) } else { &request.local };
        let offset = if length == 0 { 0 } else { header.offset };
        env.pack(&header, local, self.pd, offset, length)?;
        Ok(env.wire.send_scratch(&self.socket, &open.peer.address, env.now))
    }

    pub(super) fn srd_answer(&mut self, env: &mut Env<'_>, header: &Header, payload: &[u8]) {
        if header.kind != kind::NOTICE && header.life != self.life {
            return;
        }
        let number = header.seq;
        let Some(open) = self.datagrams.open.get_mut(&number) else { return };
        if (open.peer.device, open.peer.number) != (header.device, header.source) {
            return;
        }
        match header.kind {
            kind::NOTICE => open.lost = true,
            kind::NAK => self.srd_end(env, number, u32::from(header.status)),
            kind::ACK if header.has(flag::LAST) => self.srd_end(env, number, IBV_WC_SUCCESS),
            kind::ACK => {
                if open.arrived.note(header.offset) && open.under_way > 0 {
                    open.under_way -= 1;
                    self.datagrams.under_way -= 1;
                }
                open.silence = None;
                open.lost = false;
            }
            kind::RNR if open.pause.is_none() => {
                let endless = self.attr.rnr_retry == 7;
                open.rnr_retries = open.rnr_retries.saturating_add(1);
                if !endless && open.rnr_retries > self.attr.rnr_retry {
                    self.srd_end(env, number, IBV_WC_RNR_RETRY_EXC_ERR);
                    return;
                }
                self.datagrams.under_way -= open.under_way;
                open.under_way = 0;
                open.silence = None;
                open.pause = Some(env.now + rnr_time(header.status));
            }
            kind::RESPONSE => self.srd_response(env, header, payload),
            _ => {}
        }
    }

    fn srd_response(&mut self, env: &mut Env<'_>, header: &Header, payload: &[u8]) {
        let Some(open) = self.datagrams.open.get_mut(&header.seq) else { return };
        let Local::Memory(pieces) = &open.request.local else { return };
        let expected = open.request.length.saturating_sub(header.offset).min(PAYLOAD as u64);
        let asked = open.request.is_read() && payload.len() as u64 == expected;
        if !asked || !open.arrived.note(header.offset) {
            return;
        }
        open.silence = None;
        open.lost = false;
        if !env.regions.scatter(pieces, self.pd, header.offset, payload) {
            self.srd_end(env, header.seq, IBV_WC_LOC_PROT_ERR);
        } else if open.arrived.missing == 0 {
            self.srd_end(env, header.seq, IBV_WC_SUCCESS);
        }
    }

    fn srd_end(&mut self, env: &mut Env<'_>, number: u64, status: u32) {
        if let Some(open) = self.datagrams.open.remove(&number) {
            self.datagrams.under_way -= open.under_way;
            self.complete(env, &open.request, status);
        }
    }
}
