//! The work requests that go out with the next doorbell.
//!
//! They are built in place and reused: most fields of a request are the same every time, and
//! outweigh the fields that differ.

use std::ptr;

use peerway_sys::verbs::ffi::*;

/// See the module.
pub(super) struct WorkRequests {
    /// All places. The ones in use come first.
    requests: Box<[ibv_send_wr]>,
    /// The memory of each request.
    pieces: Box<[ibv_sge]>,
    count: usize,
}

impl WorkRequests {
    /// Allocates `places` places.
    pub(super) fn new(places: usize) -> Self {
        let requests = vec![ibv_send_wr::zeroed(); places].into_boxed_slice();
        let pieces = vec![ibv_sge { addr: 0, length: 0, lkey: 0 }; places].into_boxed_slice();
        Self { requests, pieces, count: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Adds a request. Its bytes go inline where `flags` say so.
    #[inline]
    pub(super) fn add(&mut self, id: u64, opcode: u32, flags: u32, local: ibv_sge) {
        let request = &mut self.requests[self.count];
        request.wr_id = id;
        request.opcode = opcode;
        request.send_flags = flags;
        request.num_sge = i32::from(local.length > 0);
        self.pieces[self.count] = local;
        self.count += 1;
    }

    /// Sets the peer memory of the last request.
    #[inline]
    pub(super) fn towards(&mut self, remote_addr: u64, rkey: u32) {
        if let Some(last) = self.last() {
            last.wr = ibv_wr_target { rdma: ibv_wr_rdma { remote_addr, rkey } };
        }
    }

    /// The last request, if any.
    #[inline]
    pub(super) fn last(&mut self) -> Option<&mut ibv_send_wr> {
        self.requests[..self.count].last_mut()
    }

    /// Requests a completion for each request, or only for the last.
    #[inline]
    pub(super) fn sign(&mut self, each: bool) {
        let used = &mut self.requests[..self.count];
        match used.split_last_mut() {
            Some((last, _)) if !each => last.send_flags |= IBV_SEND_SIGNALED,
            _ => used.iter_mut().for_each(|request| request.send_flags |= IBV_SEND_SIGNALED),
        }
    }

    /// Links the requests to each other and to their memory. Returns the head of the list, which
    /// stays valid until the next call.
    #[inline]
    pub(super) fn linked(&mut self) -> *mut ibv_send_wr {
        let used = &mut self.requests[..self.count];
        if let ([one], Some(piece)) = (&mut *used, self.pieces.first_mut()) {
            (one.sg_list, one.next) = (piece, ptr::null_mut());
            return one;
        }
        for (request, piece) in used.iter_mut().zip(&mut self.pieces) {
            request.sg_list = piece;
        }
        ibv_send_wr::chain(used);
        used.as_mut_ptr()
    }

    /// The requests, each with its memory.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&ibv_send_wr, &ibv_sge)> {
        self.requests[..self.count].iter().zip(&self.pieces)
    }

    pub(super) fn clear(&mut self) {
        self.count = 0;
    }
}
