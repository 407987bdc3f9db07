//! Protection domains, registered memory and memory windows.

use std::ffi::{c_uint, c_void};

use super::context::ibv_context;
use crate::layout::c_types;

c_types! {
    Exact struct ibv_pd {
        context: *mut ibv_context,
        handle: u32,
    }

    Exact struct ibv_mr {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        handle: u32,
        lkey: u32,
        rkey: u32,
    }

    Exact struct ibv_mw {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        rkey: u32,
        handle: u32,
        r#type = "type": c_uint,
    }

    Exact struct ibv_mw_bind_info {
        mr: *mut ibv_mr,
        addr: u64,
        length: u64,
        mw_access_flags: c_uint,
    }
}
