//! An open device and its tables of function pointers.
//!
//! `ibv_post_send`, `ibv_post_recv`, `ibv_poll_cq` and `ibv_req_notify_cq` are not symbols of the
//! library. In the C header they are inline functions that jump through `ibv_context.ops`, and
//! Peerway does the same. The pointer from `ibv_open_device` points to an `ibv_context`. The rest
//! of a `verbs_context` lies in front of it in memory. New releases of the library extend the
//! `verbs_context` at its front. Its `sz`, directly before the `ibv_context`, is its size.

use std::ffi::{c_int, c_uint, c_void};

use super::completion::{ibv_async_element, ibv_cq, ibv_wc};
use super::device::{ibv_device, ibv_device_attr_ex, ibv_port_attr, ibv_query_device_ex_input};
use super::memory::{ibv_mw, ibv_pd};
use super::queue_pair::{ibv_qp, ibv_qp_init_attr_ex};
use super::work::{ibv_recv_wr, ibv_send_wr};
use crate::layout::c_types;

/// An entry of a table that Peerway does not call.
pub type Unused = Option<unsafe extern "C" fn()>;

pub type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
pub type ReqNotifyCq = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;
pub type PostSend =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
pub type PostRecv =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
pub type AllocMw = unsafe extern "C" fn(*mut ibv_pd, c_uint) -> *mut ibv_mw;
pub type DeallocMw = unsafe extern "C" fn(*mut ibv_mw) -> c_int;
pub type QueryPort = unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int;
pub type QueryDeviceEx = unsafe extern "C" fn(
    *mut ibv_context,
    *const ibv_query_device_ex_input,
    *mut ibv_device_attr_ex,
    usize,
) -> c_int;
pub type CreateQpEx =
    unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp;

c_types! {
    Exact struct ibv_context_ops {
        _compat_query_device: Unused,
        _compat_query_port: Unused,
        _compat_alloc_pd: Unused,
        _compat_dealloc_pd: Unused,
        _compat_reg_mr: Unused,
        _compat_rereg_mr: Unused,
        _compat_dereg_mr: Unused,
        alloc_mw: Option<AllocMw>,
        bind_mw: Unused,
        dealloc_mw: Option<DeallocMw>,
        _compat_create_cq: Unused,
        poll_cq: Option<PollCq>,
        req_notify_cq: Option<ReqNotifyCq>,
        _compat_cq_event: Unused,
        _compat_resize_cq: Unused,
        _compat_destroy_cq: Unused,
        _compat_create_srq: Unused,
        _compat_modify_srq: Unused,
        _compat_query_srq: Unused,
        _compat_destroy_srq: Unused,
        post_srq_recv: Unused,
        _compat_create_qp: Unused,
        _compat_query_qp: Unused,
        _compat_modify_qp: Unused,
        _compat_destroy_qp: Unused,
        post_send: Option<PostSend>,
        post_recv: Option<PostRecv>,
        _compat_create_ah: Unused,
        _compat_destroy_ah: Unused,
        _compat_attach_mcast: Unused,
        _compat_detach_mcast: Unused,
        _compat_async_event: Unused,
    }

    Exact struct ibv_context {
        device: *mut ibv_device,
        ops: ibv_context_ops,
        cmd_fd: c_int,
        async_fd: c_int,
        num_comp_vectors: c_int,
        mutex: libc::pthread_mutex_t,
        /// All ones if a `verbs_context` surrounds this structure.
        abi_compat: *mut c_void,
    }

    Tail struct verbs_context {
        query_port: Option<QueryPort>,
        advise_mr: Unused,
        alloc_null_mr: Unused,
        read_counters: Unused,
        attach_counters_point_flow: Unused,
        create_counters: Unused,
        destroy_counters: Unused,
        reg_dm_mr: Unused,
        alloc_dm: Unused,
        free_dm: Unused,
        modify_flow_action_esp: Unused,
        destroy_flow_action: Unused,
        create_flow_action_esp: Unused,
        modify_qp_rate_limit: Unused,
        alloc_parent_domain: Unused,
        dealloc_td: Unused,
        alloc_td: Unused,
        modify_cq: Unused,
        post_srq_ops: Unused,
        destroy_rwq_ind_table: Unused,
        create_rwq_ind_table: Unused,
        destroy_wq: Unused,
        modify_wq: Unused,
        create_wq: Unused,
        query_rt_values: Unused,
        create_cq_ex: Unused,
        r#priv = "priv": *mut c_void,
        query_device_ex: Option<QueryDeviceEx>,
        ibv_destroy_flow: Unused,
        ABI_placeholder2: Unused,
        ibv_create_flow: Unused,
        ABI_placeholder1: Unused,
        open_qp: Unused,
        create_qp_ex: Option<CreateQpEx>,
        get_srq_num: Unused,
        create_srq_ex: Unused,
        open_xrcd: Unused,
        close_xrcd: Unused,
        _ABI_placeholder3: u64,
        sz: usize,
        context: ibv_context,
    }

    Exact struct ibv_async_event {
        element: ibv_async_element,
        event_type: c_uint,
    }
}
