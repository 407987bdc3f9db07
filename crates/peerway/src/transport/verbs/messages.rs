//! The messages of a queue pair: pieces of an ordered stream of bytes.
//!
//! Each message has a number, which restores the order where the device does not keep it. Each also
//! says how many messages its sender has taken in. These credits guarantee that a sender always
//! finds a posted receive.

use std::io;
use std::os::fd::RawFd;

use peerway_sys::verbs::ffi::*;
use peerway_sys::verbs::{VerbsError, WcStatus};

use super::queue::{
    BUFFER, GroupKind, HEAD, KEPT_CREDITS, LAST, Message, Queue, QueueState, RECEIVE,
};
use crate::os::Piece;
use crate::os::copy::{CopyKind, copy};
use crate::transport::Wire;
use crate::transport::device::{Completed, Completion, DeviceQueue};

impl Queue {
    /// Handles the completion of a receive.
    pub(super) fn received(&mut self, completion: &Completion, buffer: u32) -> Completed {
        if buffer == LAST {
            return self.over(false);
        }
        let status = WcStatus(completion.status);
        if !status.is_success() {
            return self.failed(status);
        }
        if let Some(counter) = completion.immediate {
            self.immediates += 1;
            if let Err(error) = self.give_back(buffer as u16) {
                tracing::debug!(%error, "could not repost a receive");
            }
            return Completed::Immediate(counter);
        }
        let end = (completion.len as usize).min(BUFFER);
        let head = self.head_of(buffer as u16);
        let number = u64::from_le_bytes(*head.first_chunk().unwrap_or(&[0; 8]));
        let taken = u64::from_le_bytes(*head.last_chunk().unwrap_or(&[0; 8]));
        // A peer cannot have taken in more than was sent to it. A smaller number than before is out
        // of date.
        if taken <= self.sent {
            self.taken_by_peer = self.taken_by_peer.max(taken);
        }
        let old = number < self.next_message || self.inbox.contains_key(&number);
        if end < HEAD || old {
            return self.failed(WcStatus(IBV_WC_BAD_RESP_ERR));
        }
        self.inbox.insert(number, Message { buffer: buffer as u16, at: HEAD, end });
        if end == HEAD {
            self.skip_empty();
        }
        if self.holds_input() { Completed::Input } else { Completed::Room }
    }

    pub(super) fn holds_input(&self) -> bool {
        self.inbox.contains_key(&self.next_message)
    }

    fn head_of(&self, buffer: u16) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        let from = self.receive_addr(buffer);
        // SAFETY: the buffer belongs to this queue, and the device has finished with it.
        unsafe { std::ptr::copy_nonoverlapping(from, head.as_mut_ptr(), HEAD) };
        head
    }

    /// Removes messages that only carried credits.
    pub(super) fn skip_empty(&mut self) {
        while let Some(message) = self.inbox.get(&self.next_message) {
            if message.at < message.end {
                return;
            }
            let buffer = message.buffer;
            self.inbox.remove(&self.next_message);
            self.next_message += 1;
            if let Err(error) = self.give_back(buffer) {
                tracing::debug!(%error, "could not repost a receive");
            }
        }
    }

    /// Reposts a receive that a message or an immediate used.
    fn give_back(&mut self, buffer: u16) -> Result<(), VerbsError> {
        self.taken += 1;
        if self.state != QueueState::Open {
            return Ok(());
        }
        self.post_receive(RECEIVE | u32::from(buffer))
    }

    pub(super) fn post_receive(&self, lower: u32) -> Result<(), VerbsError> {
        let last = lower & !RECEIVE == LAST;
        let addr = if last { 0 } else { self.receive_addr(lower as u16) as u64 };
        let piece = [ibv_sge { addr, length: BUFFER as u32, lkey: self.buffers_mr.lkey() }];
        let mut request = ibv_recv_wr::new(self.id(lower), if last { &[] } else { &piece });
        // SAFETY: the list has one request. Its buffer belongs to this queue, is registered, and is
        // read only after its completion.
        unsafe { self.qp.post_recv(&mut request) }
            .map_err(|error| VerbsError::of_post("ibv_post_recv", self.qp.number(), error.errno))
    }

    fn send_addr(&self, buffer: u16) -> *mut u8 {
        // SAFETY: the area has `sends` send buffers, followed by the receive buffers.
        unsafe { self.buffers.ptr().add(usize::from(buffer) * BUFFER) }
    }

    fn receive_addr(&self, buffer: u16) -> *mut u8 {
        // SAFETY: as above.
        unsafe { self.buffers.ptr().add((usize::from(self.sends) + usize::from(buffer)) * BUFFER) }
    }

    /// Sends one message with as many bytes of the pieces as fit. Returns the number of bytes sent
    /// and the piece that was cut, if any.
    pub(super) fn send_message<'a>(
        &mut self,
        pieces: &mut impl Iterator<Item = &'a Piece>,
        within: &mut u64,
    ) -> io::Result<(usize, Option<&'a Piece>)> {
        let Some(buffer) = self.free.pop() else { return Ok((0, None)) };
        let into = self.send_addr(buffer);
        let mut at = HEAD;
        let mut rest = None;
        for piece in pieces {
            let take = ((piece.len - *within) as usize).min(BUFFER - at);
            // SAFETY: the buffer belongs to this queue and is free. The caller of `send` vouches
            // for the pieces.
            unsafe {
                let from = (piece.addr + *within) as *const u8;
                copy(CopyKind::Plain, into.add(at), from, take);
            }
            at += take;
            *within += take as u64;
            if *within < piece.len {
                rest = Some(piece);
                break;
            }
            *within = 0;
            if at == BUFFER {
                break;
            }
        }
        let mut head = [0; HEAD];
        head[..8].copy_from_slice(&self.messages_sent.to_le_bytes());
        head[8..].copy_from_slice(&self.taken.to_le_bytes());
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(head.as_ptr(), into, HEAD) };
        self.messages_sent += 1;
        self.sent += 1;
        self.taken_told = self.taken;
        let inline = if at as u32 <= self.inline { IBV_SEND_INLINE } else { 0 };
        let piece = ibv_sge { addr: into as u64, length: at as u32, lkey: self.buffers_mr.lkey() };
        // The solicited flag also wakes a peer that armed its completion queue for solicited events
        // only.
        let flags = IBV_SEND_SOLICITED | inline;
        self.work.add(self.id(self.next_group()), IBV_WR_SEND, flags, piece);
        // SAFETY: the buffer belongs to this queue, is registered, and is not touched again before
        // the group is done.
        unsafe { self.post(GroupKind::Message(buffer)) }.map_err(io::Error::other)?;
        Ok((at - HEAD, rest))
    }
}

impl Wire for Queue {
    unsafe fn send(&mut self, pieces: &[Piece]) -> io::Result<usize> {
        let mut sent = 0;
        let mut pieces = pieces.iter();
        let mut half: Option<&Piece> = None;
        let mut within = 0;
        while self.state == QueueState::Open
            && self.credits() > KEPT_CREDITS
            && !self.free.is_empty()
            && self.used < self.depth - 4
            && (half.is_some() || pieces.len() > 0)
        {
            let mut rest = half.into_iter().chain(&mut pieces);
            let (bytes, left) = self.send_message(&mut rest, &mut within)?;
            half = left;
            sent += bytes;
        }
        Ok(sent)
    }

    unsafe fn receive(&mut self, pieces: &[Piece]) -> io::Result<Option<usize>> {
        let mut moved = 0;
        for piece in pieces {
            let mut within = 0;
            while within < piece.len {
                let Some(message) = self.inbox.get_mut(&self.next_message) else {
                    return Ok((moved > 0).then_some(moved));
                };
                let (buffer, at) = (message.buffer, message.at);
                let take = ((piece.len - within) as usize).min(message.end - at);
                message.at += take;
                let from = self.receive_addr(buffer);
                // SAFETY: the device has finished with the buffer. The caller vouches for the
                // piece.
                unsafe {
                    let into = (piece.addr + within) as *mut u8;
                    copy(CopyKind::Plain, into, from.add(at), take);
                }
                within += take as u64;
                moved += take;
                self.skip_empty();
            }
        }
        Ok((moved > 0).then_some(moved))
    }

    fn socket(&self) -> Option<RawFd> {
        None
    }

    fn is_memory(&self) -> bool {
        false
    }

    fn has_input(&mut self) -> io::Result<bool> {
        Ok(self.holds_input())
    }

    /// The driver arms the shard's completion queues, which covers all their queue pairs.
    fn arm(&mut self, _blocked: bool) -> io::Result<bool> {
        Ok(false)
    }

    fn disarm(&mut self) {}

    fn queue(&mut self) -> Option<&mut dyn DeviceQueue> {
        Some(self)
    }
}
