//! Queue pairs, their attributes, and addresses of remote ports.

use std::ffi::{c_int, c_uint, c_void};

use super::completion::ibv_cq;
use super::context::ibv_context;
use super::device::ibv_gid;
use super::memory::ibv_pd;
use crate::layout::c_types;

c_types! {
    Exact struct ibv_qp {
        context: *mut ibv_context,
        qp_context: *mut c_void,
        pd: *mut ibv_pd,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut c_void,
        handle: u32,
        qp_num: u32,
        state: c_uint,
        qp_type: c_uint,
        mutex: libc::pthread_mutex_t,
        cond: libc::pthread_cond_t,
        events_completed: u32,
    }

    #[derive(Debug, Eq, PartialEq)]
    Exact struct ibv_qp_cap {
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        max_recv_sge: u32,
        max_inline_data: u32,
    }

    Exact struct ibv_qp_init_attr {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut c_void,
        cap: ibv_qp_cap,
        qp_type: c_uint,
        sq_sig_all: c_int,
    }

    Exact struct ibv_rx_hash_conf {
        rx_hash_function: u8,
        rx_hash_key_len: u8,
        rx_hash_key: *mut u8,
        rx_hash_fields_mask: u64,
    }

    Exact struct ibv_qp_init_attr_ex {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut c_void,
        cap: ibv_qp_cap,
        qp_type: c_uint,
        sq_sig_all: c_int,
        comp_mask: u32,
        pd: *mut ibv_pd,
        xrcd: *mut c_void,
        create_flags: u32,
        max_tso_header: u16,
        rwq_ind_tbl: *mut c_void,
        rx_hash_conf: ibv_rx_hash_conf,
        source_qpn: u32,
        send_ops_flags: u64,
    }

    Exact struct ibv_global_route {
        dgid: ibv_gid,
        flow_label: u32,
        sgid_index: u8,
        hop_limit: u8,
        traffic_class: u8,
    }

    /// The header in front of the payload in the receive buffer of an unreliable datagram.
    Exact struct ibv_grh {
        /// Big-endian.
        version_tclass_flow: u32,
        /// Big-endian.
        paylen: u16,
        next_hdr: u8,
        hop_limit: u8,
        sgid: ibv_gid,
        dgid: ibv_gid,
    }

    Exact struct ibv_ah_attr {
        grh: ibv_global_route,
        dlid: u16,
        sl: u8,
        src_path_bits: u8,
        static_rate: u8,
        is_global: u8,
        port_num: u8,
    }

    Exact struct ibv_ah {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        handle: u32,
    }

    Exact struct ibv_qp_attr {
        qp_state: c_uint,
        cur_qp_state: c_uint,
        path_mtu: c_uint,
        path_mig_state: c_uint,
        qkey: u32,
        rq_psn: u32,
        sq_psn: u32,
        dest_qp_num: u32,
        qp_access_flags: c_uint,
        cap: ibv_qp_cap,
        ah_attr: ibv_ah_attr,
        alt_ah_attr: ibv_ah_attr,
        pkey_index: u16,
        alt_pkey_index: u16,
        en_sqd_async_notify: u8,
        sq_draining: u8,
        max_rd_atomic: u8,
        max_dest_rd_atomic: u8,
        min_rnr_timer: u8,
        port_num: u8,
        timeout: u8,
        retry_cnt: u8,
        rnr_retry: u8,
        alt_port_num: u8,
        alt_timeout: u8,
        rate_limit: u32,
    }
}
