//! Constructors for work requests.
//!
//! Each constructor only fills a structure. The queue pair reads it when it is posted;
//! [`Qp::post_send`](super::Qp::post_send) states the requirements. Requests start without flags:
//! add `IBV_SEND_SIGNALED`, `IBV_SEND_INLINE` or `IBV_SEND_FENCE` to `send_flags`.

use std::ffi::{c_int, c_uint};
use std::ptr;

use super::address::Ah;
use super::ffi::*;
use super::memory::{Mr, Mw};

impl ibv_send_wr {
    /// Writes local memory to `remote_addr` at the remote side.
    pub fn write(id: u64, local: &[ibv_sge], remote_addr: u64, rkey: u32) -> Self {
        Self::new(id, IBV_WR_RDMA_WRITE, local).to(remote_addr, rkey)
    }

    /// As [`write`](Self::write), and completes a receive of the remote side with `immediate`.
    pub fn write_with_immediate(
        id: u64,
        local: &[ibv_sge],
        remote_addr: u64,
        rkey: u32,
        immediate: u32,
    ) -> Self {
        let request = Self::new(id, IBV_WR_RDMA_WRITE_WITH_IMM, local).to(remote_addr, rkey);
        Self { imm_data: immediate.to_be(), ..request }
    }

    /// Reads `remote_addr` at the remote side into local memory.
    pub fn read(id: u64, local: &[ibv_sge], remote_addr: u64, rkey: u32) -> Self {
        Self::new(id, IBV_WR_RDMA_READ, local).to(remote_addr, rkey)
    }

    /// Sends local memory to a receive of the remote side.
    pub fn send(id: u64, local: &[ibv_sge]) -> Self {
        Self::new(id, IBV_WR_SEND, local)
    }

    /// As [`send`](Self::send), with `immediate`.
    pub fn send_with_immediate(id: u64, local: &[ibv_sge], immediate: u32) -> Self {
        Self { imm_data: immediate.to_be(), ..Self::new(id, IBV_WR_SEND_WITH_IMM, local) }
    }

    /// Invalidates the key of a memory window. After completion the key gives no access.
    pub fn invalidate(id: u64, rkey: u32) -> Self {
        Self { imm_data: rkey, ..Self::new(id, IBV_WR_LOCAL_INV, &[]) }
    }

    /// Binds a type 2 memory window to part of a region, under the key `rkey`
    /// ([`next_rkey`](super::next_rkey) of the previous one).
    pub fn bind_window(id: u64, mw: &Mw, rkey: u32, bind_info: ibv_mw_bind_info) -> Self {
        let bind_mw = ibv_wr_bind_mw { mw: mw.as_ptr(), rkey, bind_info };
        Self { bind_mw, ..Self::new(id, IBV_WR_BIND_MW, &[]) }
    }

    /// Adds a destination, for queue pairs without a connection. Only sends use it.
    #[must_use]
    pub fn to_datagram(self, ah: &Ah, remote_qpn: u32, remote_qkey: u32) -> Self {
        let ud = ibv_wr_ud { ah: ah.as_ptr(), remote_qpn, remote_qkey };
        Self { wr: ibv_wr_target { ud }, ..self }
    }

    /// Sets the flags (`IBV_SEND_*`).
    #[must_use]
    pub fn with_flags(self, send_flags: c_uint) -> Self {
        Self { send_flags, ..self }
    }

    /// Links the requests into one list, in slice order.
    pub fn chain(requests: &mut [Self]) {
        let (first, len) = (requests.as_mut_ptr(), requests.len());
        for index in 0..len {
            let next =
                if index + 1 < len { first.wrapping_add(index + 1) } else { ptr::null_mut() };
            // SAFETY: `index` is in the slice. The write goes through a raw pointer, because a
            // reference to an element would invalidate the pointers in the list.
            unsafe { (*first.add(index)).next = next };
        }
    }

    fn new(wr_id: u64, opcode: c_uint, local: &[ibv_sge]) -> Self {
        let (sg_list, num_sge) = list_of(local);
        Self { wr_id, opcode, sg_list, num_sge, ..Self::zeroed() }
    }

    fn to(self, remote_addr: u64, rkey: u32) -> Self {
        Self { wr: ibv_wr_target { rdma: ibv_wr_rdma { remote_addr, rkey } }, ..self }
    }
}

impl ibv_mw_bind_info {
    /// The target of a bind: `length` bytes at `addr` in a region that was registered with
    /// `IBV_ACCESS_MW_BIND`. `access` holds `IBV_ACCESS_REMOTE_*`.
    pub fn new(mr: &Mr, addr: u64, length: u64, access: c_uint) -> Self {
        Self { mr: mr.as_ptr(), addr, length, mw_access_flags: access }
    }
}

impl ibv_recv_wr {
    /// Receives a message into local memory, or only an immediate if `local` is empty.
    pub fn new(wr_id: u64, local: &[ibv_sge]) -> Self {
        let (sg_list, num_sge) = list_of(local);
        Self { wr_id, sg_list, num_sge, next: ptr::null_mut() }
    }

    /// Links the requests into one list, in slice order.
    pub fn chain(requests: &mut [Self]) {
        let (first, len) = (requests.as_mut_ptr(), requests.len());
        for index in 0..len {
            let next =
                if index + 1 < len { first.wrapping_add(index + 1) } else { ptr::null_mut() };
            // SAFETY: `index` is in the slice. The write goes through a raw pointer, because a
            // reference to an element would invalidate the pointers in the list.
            unsafe { (*first.add(index)).next = next };
        }
    }
}

/// Drivers read the entries through a mutable pointer. A count that exceeds `int` is clamped to its
/// maximum. No device accepts that many, so the device refuses the request.
fn list_of(local: &[ibv_sge]) -> (*mut ibv_sge, c_int) {
    (local.as_ptr().cast_mut(), c_int::try_from(local.len()).unwrap_or(c_int::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_say_what_they_were_made_for() {
        let local = [ibv_sge { addr: 1, length: 2, lkey: 3 }; 2];
        let request = ibv_send_wr::write_with_immediate(7, &local, 0x1000, 9, 0x0a0b_0c0d);
        assert_eq!((request.wr_id, request.opcode), (7, IBV_WR_RDMA_WRITE_WITH_IMM));
        assert_eq!((request.num_sge, request.sg_list.cast_const()), (2, local.as_ptr()));
        assert_eq!(request.imm_data.to_ne_bytes(), [0x0a, 0x0b, 0x0c, 0x0d]);
        // SAFETY: a write initialises this field of the union.
        let target = unsafe { request.wr.rdma };
        assert_eq!((target.remote_addr, target.rkey), (0x1000, 9));
        assert!(request.next.is_null() && request.send_flags == 0);

        assert_eq!(ibv_send_wr::write(1, &local, 0, 0).opcode, IBV_WR_RDMA_WRITE);
        assert_eq!(ibv_send_wr::read(1, &local, 0, 0).opcode, IBV_WR_RDMA_READ);
        assert_eq!(ibv_send_wr::send_with_immediate(1, &[], 0).opcode, IBV_WR_SEND_WITH_IMM);
        let invalidate = ibv_send_wr::invalidate(1, 0x1234);
        assert_eq!((invalidate.opcode, invalidate.imm_data), (IBV_WR_LOCAL_INV, 0x1234));
    }

    #[test]
    fn chains_end() {
        let mut requests = [ibv_send_wr::send(1, &[]); 3];
        ibv_send_wr::chain(&mut requests);
        assert_eq!(requests[0].next.cast_const(), &raw const requests[1]);
        assert_eq!(requests[1].next.cast_const(), &raw const requests[2]);
        assert!(requests[2].next.is_null());
        let mut receives = [ibv_recv_wr::new(1, &[]); 2];
        ibv_recv_wr::chain(&mut receives);
        assert_eq!(receives[0].next.cast_const(), &raw const receives[1]);
        assert!(receives[1].next.is_null());
        ibv_send_wr::chain(&mut []);
        ibv_recv_wr::chain(&mut []);
    }
}
