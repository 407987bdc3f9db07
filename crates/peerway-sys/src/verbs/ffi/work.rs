//! Classic work requests, posted as linked lists.

use std::ffi::{c_int, c_uint, c_void};

use super::memory::{ibv_mw, ibv_mw_bind_info};
use super::queue_pair::ibv_ah;
use crate::layout::c_types;

c_types! {
    #[derive(Debug, Eq, PartialEq)]
    Exact struct ibv_sge {
        addr: u64,
        length: u32,
        lkey: u32,
    }

    Exact struct ibv_wr_rdma = "__typeof__(((struct ibv_send_wr *)0)->wr.rdma)" {
        remote_addr: u64,
        rkey: u32,
    }

    Exact struct ibv_wr_atomic = "__typeof__(((struct ibv_send_wr *)0)->wr.atomic)" {
        remote_addr: u64,
        compare_add: u64,
        swap: u64,
        rkey: u32,
    }

    Exact struct ibv_wr_ud = "__typeof__(((struct ibv_send_wr *)0)->wr.ud)" {
        ah: *mut ibv_ah,
        remote_qpn: u32,
        remote_qkey: u32,
    }

    Exact union ibv_wr_target = "__typeof__(((struct ibv_send_wr *)0)->wr)" {
        rdma: ibv_wr_rdma,
        atomic: ibv_wr_atomic,
        ud: ibv_wr_ud,
    }

    Exact struct ibv_wr_bind_mw = "__typeof__(((struct ibv_send_wr *)0)->bind_mw)" {
        mw: *mut ibv_mw,
        rkey: u32,
        bind_info: ibv_mw_bind_info,
    }

    Exact struct ibv_wr_tso = "__typeof__(((struct ibv_send_wr *)0)->tso)" {
        hdr: *mut c_void,
        hdr_sz: u16,
        mss: u16,
    }

    Exact struct ibv_send_wr {
        wr_id: u64,
        next: *mut ibv_send_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
        opcode: c_uint,
        send_flags: c_uint,
        /// Big-endian if it is an immediate, host order if it is a key to invalidate.
        imm_data: u32,
        wr: ibv_wr_target,
        remote_srqn = "qp_type.xrc.remote_srqn": u32,
        /// In C this is a union with `tso`, which is smaller.
        bind_mw: ibv_wr_bind_mw,
    }

    Exact struct ibv_recv_wr {
        wr_id: u64,
        next: *mut ibv_recv_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
    }

    Exact struct ibv_data_buf {
        addr: *mut c_void,
        length: usize,
    }
}
