//! Values of enumerations and flags.

use std::ffi::{c_int, c_uint};

use crate::layout::c_constants;

c_constants! {
    IBV_NODE_UNKNOWN: c_int = -1;
    IBV_NODE_CA: c_int = 1;
    IBV_NODE_RNIC: c_int = 4;
    IBV_NODE_UNSPECIFIED: c_int = 7;

    IBV_TRANSPORT_UNKNOWN: c_int = -1;
    IBV_TRANSPORT_IB: c_int = 0;
    IBV_TRANSPORT_IWARP: c_int = 1;
    /// The value that EFA devices report.
    IBV_TRANSPORT_UNSPECIFIED: c_int = 4;

    IBV_GID_TYPE_IB: u32 = 0;
    IBV_GID_TYPE_ROCE_V1: u32 = 1;
    IBV_GID_TYPE_ROCE_V2: u32 = 2;

    IBV_LINK_LAYER_UNSPECIFIED: u8 = 0;
    IBV_LINK_LAYER_INFINIBAND: u8 = 1;
    IBV_LINK_LAYER_ETHERNET: u8 = 2;

    IBV_MTU_256: c_uint = 1;
    IBV_MTU_512: c_uint = 2;
    IBV_MTU_1024: c_uint = 3;
    IBV_MTU_2048: c_uint = 4;
    IBV_MTU_4096: c_uint = 5;

    IBV_PORT_NOP: c_uint = 0;
    IBV_PORT_DOWN: c_uint = 1;
    IBV_PORT_INIT: c_uint = 2;
    IBV_PORT_ARMED: c_uint = 3;
    IBV_PORT_ACTIVE: c_uint = 4;
    IBV_PORT_ACTIVE_DEFER: c_uint = 5;

    IBV_DEVICE_RC_RNR_NAK_GEN: c_uint = 1 << 12;
    IBV_DEVICE_MEM_WINDOW: c_uint = 1 << 17;
    IBV_DEVICE_MEM_MGT_EXTENSIONS: c_uint = 1 << 21;
    IBV_DEVICE_MEM_WINDOW_TYPE_2A: c_uint = 1 << 23;
    IBV_DEVICE_MEM_WINDOW_TYPE_2B: c_uint = 1 << 24;

    IBV_ATOMIC_NONE: c_uint = 0;
    IBV_ATOMIC_HCA: c_uint = 1;
    IBV_ATOMIC_GLOB: c_uint = 2;

    IBV_ODP_SUPPORT: u64 = 1;
    IBV_ODP_SUPPORT_IMPLICIT: u64 = 2;

    IBV_ACCESS_LOCAL_WRITE: c_uint = 1;
    IBV_ACCESS_REMOTE_WRITE: c_uint = 1 << 1;
    IBV_ACCESS_REMOTE_READ: c_uint = 1 << 2;
    IBV_ACCESS_REMOTE_ATOMIC: c_uint = 1 << 3;
    IBV_ACCESS_MW_BIND: c_uint = 1 << 4;
    IBV_ACCESS_ZERO_BASED: c_uint = 1 << 5;
    IBV_ACCESS_ON_DEMAND: c_uint = 1 << 6;
    IBV_ACCESS_HUGETLB: c_uint = 1 << 7;
    IBV_ACCESS_RELAXED_ORDERING: c_uint = 1 << 20;
    /// The flags that a kernel may ignore if it does not know them.
    IBV_ACCESS_OPTIONAL_RANGE: c_uint = 0x3ff0_0000;

    IBV_MW_TYPE_1: c_uint = 1;
    IBV_MW_TYPE_2: c_uint = 2;

    IBV_QPT_RC: c_uint = 2;
    IBV_QPT_UC: c_uint = 3;
    IBV_QPT_UD: c_uint = 4;
    /// A type that only the driver knows: SRD on EFA.
    IBV_QPT_DRIVER: c_uint = 0xff;

    IBV_QP_INIT_ATTR_PD: u32 = 1;
    IBV_QP_INIT_ATTR_SEND_OPS_FLAGS: u32 = 1 << 6;

    IBV_QP_EX_WITH_RDMA_WRITE: u64 = 1;
    IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM: u64 = 1 << 1;
    IBV_QP_EX_WITH_SEND: u64 = 1 << 2;
    IBV_QP_EX_WITH_SEND_WITH_IMM: u64 = 1 << 3;
    IBV_QP_EX_WITH_RDMA_READ: u64 = 1 << 4;
    IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP: u64 = 1 << 5;
    IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD: u64 = 1 << 6;
    IBV_QP_EX_WITH_LOCAL_INV: u64 = 1 << 7;
    IBV_QP_EX_WITH_BIND_MW: u64 = 1 << 8;
    IBV_QP_EX_WITH_SEND_WITH_INV: u64 = 1 << 9;

    IBV_QP_STATE: c_uint = 1;
    IBV_QP_CUR_STATE: c_uint = 1 << 1;
    IBV_QP_EN_SQD_ASYNC_NOTIFY: c_uint = 1 << 2;
    IBV_QP_ACCESS_FLAGS: c_uint = 1 << 3;
    IBV_QP_PKEY_INDEX: c_uint = 1 << 4;
    IBV_QP_PORT: c_uint = 1 << 5;
    IBV_QP_QKEY: c_uint = 1 << 6;
    IBV_QP_AV: c_uint = 1 << 7;
    IBV_QP_PATH_MTU: c_uint = 1 << 8;
    IBV_QP_TIMEOUT: c_uint = 1 << 9;
    IBV_QP_RETRY_CNT: c_uint = 1 << 10;
    IBV_QP_RNR_RETRY: c_uint = 1 << 11;
    IBV_QP_RQ_PSN: c_uint = 1 << 12;
    IBV_QP_MAX_QP_RD_ATOMIC: c_uint = 1 << 13;
    IBV_QP_ALT_PATH: c_uint = 1 << 14;
    IBV_QP_MIN_RNR_TIMER: c_uint = 1 << 15;
    IBV_QP_SQ_PSN: c_uint = 1 << 16;
    IBV_QP_MAX_DEST_RD_ATOMIC: c_uint = 1 << 17;
    IBV_QP_PATH_MIG_STATE: c_uint = 1 << 18;
    IBV_QP_CAP: c_uint = 1 << 19;
    IBV_QP_DEST_QPN: c_uint = 1 << 20;
    IBV_QP_RATE_LIMIT: c_uint = 1 << 25;

    IBV_QPS_RESET: c_uint = 0;
    IBV_QPS_INIT: c_uint = 1;
    IBV_QPS_RTR: c_uint = 2;
    IBV_QPS_RTS: c_uint = 3;
    IBV_QPS_SQD: c_uint = 4;
    IBV_QPS_SQE: c_uint = 5;
    IBV_QPS_ERR: c_uint = 6;
    IBV_QPS_UNKNOWN: c_uint = 7;

    IBV_MIG_MIGRATED: c_uint = 0;
    IBV_MIG_REARM: c_uint = 1;
    IBV_MIG_ARMED: c_uint = 2;

    IBV_WR_RDMA_WRITE: c_uint = 0;
    IBV_WR_RDMA_WRITE_WITH_IMM: c_uint = 1;
    IBV_WR_SEND: c_uint = 2;
    IBV_WR_SEND_WITH_IMM: c_uint = 3;
    IBV_WR_RDMA_READ: c_uint = 4;
    IBV_WR_ATOMIC_CMP_AND_SWP: c_uint = 5;
    IBV_WR_ATOMIC_FETCH_AND_ADD: c_uint = 6;
    IBV_WR_LOCAL_INV: c_uint = 7;
    IBV_WR_BIND_MW: c_uint = 8;
    IBV_WR_SEND_WITH_INV: c_uint = 9;

    IBV_SEND_FENCE: c_uint = 1;
    IBV_SEND_SIGNALED: c_uint = 1 << 1;
    IBV_SEND_SOLICITED: c_uint = 1 << 2;
    IBV_SEND_INLINE: c_uint = 1 << 3;

    IBV_WC_SUCCESS: c_uint = 0;
    IBV_WC_LOC_LEN_ERR: c_uint = 1;
    IBV_WC_LOC_QP_OP_ERR: c_uint = 2;
    IBV_WC_LOC_EEC_OP_ERR: c_uint = 3;
    IBV_WC_LOC_PROT_ERR: c_uint = 4;
    IBV_WC_WR_FLUSH_ERR: c_uint = 5;
    IBV_WC_MW_BIND_ERR: c_uint = 6;
    IBV_WC_BAD_RESP_ERR: c_uint = 7;
    IBV_WC_LOC_ACCESS_ERR: c_uint = 8;
    IBV_WC_REM_INV_REQ_ERR: c_uint = 9;
    IBV_WC_REM_ACCESS_ERR: c_uint = 10;
    IBV_WC_REM_OP_ERR: c_uint = 11;
    IBV_WC_RETRY_EXC_ERR: c_uint = 12;
    IBV_WC_RNR_RETRY_EXC_ERR: c_uint = 13;
    IBV_WC_LOC_RDD_VIOL_ERR: c_uint = 14;
    IBV_WC_REM_INV_RD_REQ_ERR: c_uint = 15;
    IBV_WC_REM_ABORT_ERR: c_uint = 16;
    IBV_WC_INV_EECN_ERR: c_uint = 17;
    IBV_WC_INV_EEC_STATE_ERR: c_uint = 18;
    IBV_WC_FATAL_ERR: c_uint = 19;
    IBV_WC_RESP_TIMEOUT_ERR: c_uint = 20;
    IBV_WC_GENERAL_ERR: c_uint = 21;
    IBV_WC_TM_ERR: c_uint = 22;
    IBV_WC_TM_RNDV_INCOMPLETE: c_uint = 23;

    IBV_WC_SEND: c_uint = 0;
    IBV_WC_RDMA_WRITE: c_uint = 1;
    IBV_WC_RDMA_READ: c_uint = 2;
    IBV_WC_COMP_SWAP: c_uint = 3;
    IBV_WC_FETCH_ADD: c_uint = 4;
    IBV_WC_BIND_MW: c_uint = 5;
    IBV_WC_LOCAL_INV: c_uint = 6;
    /// Set in the opcode of every completion of a receive.
    IBV_WC_RECV: c_uint = 1 << 7;
    IBV_WC_RECV_RDMA_WITH_IMM: c_uint = (1 << 7) + 1;

    IBV_WC_GRH: c_uint = 1;
    IBV_WC_WITH_IMM: c_uint = 1 << 1;
    IBV_WC_WITH_INV: c_uint = 1 << 3;

    IBV_EVENT_CQ_ERR: c_uint = 0;
    IBV_EVENT_QP_FATAL: c_uint = 1;
    IBV_EVENT_QP_REQ_ERR: c_uint = 2;
    IBV_EVENT_QP_ACCESS_ERR: c_uint = 3;
    IBV_EVENT_COMM_EST: c_uint = 4;
    IBV_EVENT_SQ_DRAINED: c_uint = 5;
    IBV_EVENT_PATH_MIG: c_uint = 6;
    IBV_EVENT_PATH_MIG_ERR: c_uint = 7;
    IBV_EVENT_DEVICE_FATAL: c_uint = 8;
    IBV_EVENT_PORT_ACTIVE: c_uint = 9;
    IBV_EVENT_PORT_ERR: c_uint = 10;
    IBV_EVENT_LID_CHANGE: c_uint = 11;
    IBV_EVENT_PKEY_CHANGE: c_uint = 12;
    IBV_EVENT_SM_CHANGE: c_uint = 13;
    IBV_EVENT_SRQ_ERR: c_uint = 14;
    IBV_EVENT_SRQ_LIMIT_REACHED: c_uint = 15;
    IBV_EVENT_QP_LAST_WQE_REACHED: c_uint = 16;
    IBV_EVENT_CLIENT_REREGISTER: c_uint = 17;
    IBV_EVENT_GID_CHANGE: c_uint = 18;
    IBV_EVENT_WQ_FATAL: c_uint = 19;
    IBV_EVENT_DEVICE_SPEED_CHANGE newer: c_uint = 20;

    IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS newer: u32 = 1;
    IBV_QUERY_QP_DATA_IN_ORDER_WHOLE_MSG newer: c_int = 1;
    IBV_QUERY_QP_DATA_IN_ORDER_ALIGNED_128_BYTES newer: c_int = 2;
}
