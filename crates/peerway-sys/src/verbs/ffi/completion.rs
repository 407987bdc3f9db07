//! Completion queues, their channels, and completions.

use std::ffi::{c_int, c_uint, c_void};

use super::context::ibv_context;
use super::queue_pair::ibv_qp;
use crate::layout::c_types;

c_types! {
    Exact struct ibv_comp_channel {
        context: *mut ibv_context,
        fd: c_int,
        refcnt: c_int,
    }

    Exact struct ibv_cq {
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        cq_context: *mut c_void,
        handle: u32,
        cqe: c_int,
        mutex: libc::pthread_mutex_t,
        cond: libc::pthread_cond_t,
        comp_events_completed: u32,
        async_events_completed: u32,
    }

    #[derive(Debug)]
    Exact struct ibv_wc {
        wr_id: u64,
        status: c_uint,
        opcode: c_uint,
        vendor_err: u32,
        byte_len: u32,
        /// Big-endian if it is an immediate, host order if it is an invalidated key.
        imm_data: u32,
        qp_num: u32,
        src_qp: u32,
        wc_flags: c_uint,
        pkey_index: u16,
        slid: u16,
        sl: u8,
        dlid_path_bits: u8,
    }

    Exact union ibv_async_element = "__typeof__(((struct ibv_async_event *)0)->element)" {
        cq: *mut ibv_cq,
        qp: *mut ibv_qp,
        srq: *mut c_void,
        wq: *mut c_void,
        port_num: c_int,
    }
}
