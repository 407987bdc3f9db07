//! `<infiniband/efadv.h>` in Rust, with the header's names.
//!
//! The manual pages of rdma-core document it (`man efadv_create_qp_ex`). Callers pass the size of
//! each structure, so all of them may grow. Fields that an older library does not know must be
//! zero.
#![allow(missing_docs)]

use crate::layout::{c_constants, c_types};

c_types! {
    Prefix struct efadv_qp_init_attr {
        comp_mask: u64,
        driver_qp_type: u32,
        flags newer: u16,
        sl newer: u8,
        _reserved ours: u8,
    }

    Prefix struct efadv_device_attr {
        comp_mask: u64,
        max_sq_wr: u32,
        max_rq_wr: u32,
        max_sq_sge: u16,
        max_rq_sge: u16,
        inline_buf_size: u16,
        inline_buf_size_ex newer: u16,
        device_caps: u32,
        max_rdma_size: u32,
    }

    Prefix struct efadv_ah_attr {
        comp_mask: u64,
        /// The address handle number that receive completions carry as `slid`.
        ahn: u16,
        reserved: [u8; 6],
    }
}

c_constants! {
    EFADV_QP_DRIVER_TYPE_SRD: u32 = 0;

    /// Writes with an immediate need no posted receive at the target.
    EFADV_QP_FLAGS_UNSOLICITED_WRITE_RECV newer: u16 = 1;

    EFADV_DEVICE_ATTR_CAPS_RDMA_READ: u32 = 1;
    EFADV_DEVICE_ATTR_CAPS_RNR_RETRY: u32 = 1 << 1;
    EFADV_DEVICE_ATTR_CAPS_CQ_WITH_SGID: u32 = 1 << 2;
    EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE newer: u32 = 1 << 3;
    EFADV_DEVICE_ATTR_CAPS_UNSOLICITED_WRITE_RECV newer: u32 = 1 << 4;
}
