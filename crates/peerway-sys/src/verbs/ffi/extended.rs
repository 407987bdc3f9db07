//! Extended queue pairs, whose work requests are built by calls instead of structures.
//!
//! An `ibv_qp_ex` starts with its `ibv_qp`. `ibv_qp_to_qp_ex` returns it for queue pairs that were
//! created with `send_ops_flags`. Pointers of operations that were not requested there may be null.

use std::ffi::{c_int, c_uint, c_void};

use super::context::Unused;
use super::memory::{ibv_mw, ibv_mw_bind_info};
use super::queue_pair::{ibv_ah, ibv_qp};
use super::work::{ibv_data_buf, ibv_sge};
use crate::layout::c_types;

c_types! {
    Prefix struct ibv_qp_ex {
        qp_base: ibv_qp,
        comp_mask: u64,
        wr_id: u64,
        wr_flags: c_uint,
        wr_atomic_cmp_swp: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u64, u64)>,
        wr_atomic_fetch_add: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u64)>,
        wr_bind_mw: Option<
            unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_mw, u32, *const ibv_mw_bind_info),
        >,
        wr_local_inv: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32)>,
        wr_rdma_read: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64)>,
        wr_rdma_write: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64)>,
        wr_rdma_write_imm: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u32)>,
        wr_send: Option<unsafe extern "C" fn(*mut ibv_qp_ex)>,
        wr_send_imm: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32)>,
        wr_send_inv: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32)>,
        wr_send_tso: Unused,
        wr_set_ud_addr: Option<unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_ah, u32, u32)>,
        wr_set_xrc_srqn: Unused,
        wr_set_inline_data: Option<unsafe extern "C" fn(*mut ibv_qp_ex, *mut c_void, usize)>,
        wr_set_inline_data_list: Option<
            unsafe extern "C" fn(*mut ibv_qp_ex, usize, *const ibv_data_buf),
        >,
        wr_set_sge: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u32)>,
        wr_set_sge_list: Option<unsafe extern "C" fn(*mut ibv_qp_ex, usize, *const ibv_sge)>,
        wr_start: Option<unsafe extern "C" fn(*mut ibv_qp_ex)>,
        wr_complete: Option<unsafe extern "C" fn(*mut ibv_qp_ex) -> c_int>,
        wr_abort: Option<unsafe extern "C" fn(*mut ibv_qp_ex)>,
        wr_atomic_write: Unused,
    }
}
