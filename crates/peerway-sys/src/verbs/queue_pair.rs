//! Queue pairs.

use std::ffi::{c_int, c_uint};
use std::mem::offset_of;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::completion::Cq;
use super::context::Context;
use super::error::{PostError, VerbsError, errno_of};
use super::ffi::*;
use super::memory::Pd;
use super::owned::owned;

/// The parameters of a new queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpConfig<'a> {
    /// The queue for completions of sends.
    pub send_cq: &'a Arc<Cq>,
    /// The queue for completions of receives.
    pub recv_cq: &'a Arc<Cq>,
    /// The required capacity. The queue pair may have more.
    pub cap: ibv_qp_cap,
    /// `IBV_QPT_*`.
    pub qp_type: c_uint,
    /// Whether every request creates a completion, not only signalled ones.
    pub signal_all: bool,
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    raw: *mut ibv_qp,
    extended: Option<NonNull<ibv_qp_ex>>,
    number: u32,
    cap: ibv_qp_cap,
    /// Kept until the queue pair is destroyed, because the device writes to them.
    _queues: [Arc<Cq>; 2],
    pd: Arc<Pd>,
}

impl Qp {
    /// Creates a queue pair in the reset state. The caller posts with work request structures.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]; `EINVAL` if the device does not support the configuration, or if the queues
    /// belong to another device.
    pub fn create(pd: &Arc<Pd>, config: &QpConfig<'_>) -> Result<Self, VerbsError> {
        const CALL: &str = "ibv_create_qp";
        config.check(pd, CALL)?;
        let mut attr = ibv_qp_init_attr {
            send_cq: config.send_cq.as_ptr(),
            recv_cq: config.recv_cq.as_ptr(),
            cap: config.cap,
            qp_type: config.qp_type,
            sq_sig_all: c_int::from(config.signal_all),
            ..ibv_qp_init_attr::zeroed()
        };
        // SAFETY: `check` proved that domain and queues are of one device; `pd` and `config` keep
        // them alive.
        let raw = unsafe { (pd.context().verbs().symbols.ibv_create_qp)(pd.as_ptr(), &mut attr) };
        // SAFETY: the library has just created it in this domain and with these queues.
        unsafe { Self::made(raw, attr.cap, pd, config, CALL) }
    }

    /// Creates a queue pair for posting with a [`Batch`](super::Batch). `operations` holds the
    /// operations that it supports (`IBV_QP_EX_WITH_*`).
    ///
    /// # Errors
    ///
    /// [`VerbsError`]; `EOPNOTSUPP` if the driver has no extended queue pairs.
    pub fn create_extended(
        pd: &Arc<Pd>,
        config: &QpConfig<'_>,
        operations: u64,
    ) -> Result<Self, VerbsError> {
        const CALL: &str = "ibv_create_qp_ex";
        let mut attr = config.extended_attr(pd, operations, CALL)?;
        // SAFETY: `CreateQpEx` is the type of that field.
        let create: Option<CreateQpEx> =
            unsafe { pd.context().extended_op(offset_of!(verbs_context, create_qp_ex)) };
        let Some(create) = create else {
            return Err(VerbsError::unsupported(CALL, pd.context().name().to_owned()));
        };
        // SAFETY: `extended_attr` checked that domain and queues are of one device; `pd` and
        // `config` keep them alive.
        let raw = unsafe { create(pd.context().as_ptr(), &mut attr) };
        // SAFETY: the driver has just created it in this domain and with these queues.
        unsafe { Self::made(raw, attr.cap, pd, config, CALL) }
    }

    /// The queue pair number, which the remote side needs.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The capacity.
    pub fn cap(&self) -> &ibv_qp_cap {
        &self.cap
    }

    /// Modifies the attributes in `mask` (`IBV_QP_*`). Each state transition requires its own set;
    /// [`masks`] has the usual ones.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]; `EINVAL` if the set does not match the transition, or if the driver rejects
    /// a value.
    pub fn modify(&self, attr: &ibv_qp_attr, mask: c_uint) -> Result<(), VerbsError> {
        let mut attr = *attr;
        let modify = self.context().verbs().symbols.ibv_modify_qp;
        // SAFETY: handle contract: the queue pair exists. The library reads `attr`.
        let returned = unsafe { modify(self.raw, &mut attr, mask.cast_signed()) };
        match errno_of(returned) {
            None => Ok(()),
            Some(errno) => {
                let to = if mask & IBV_QP_STATE == 0 { None } else { Some(attr.qp_state) };
                let to = to.map_or("without a change of state", state_name);
                let on = format!("queue pair {} of {} ({to})", self.number, self.context().name());
                Err(VerbsError::new("ibv_modify_qp", on, errno))
            }
        }
    }

    /// Reads the attributes in `mask`. The driver may return more.
    ///
    /// # Errors
    ///
    /// [`VerbsError`] from the driver.
    pub fn query(&self, mask: c_uint) -> Result<(ibv_qp_attr, ibv_qp_init_attr), VerbsError> {
        let (mut attr, mut init) = (ibv_qp_attr::zeroed(), ibv_qp_init_attr::zeroed());
        let query = self.context().verbs().symbols.ibv_query_qp;
        // SAFETY: handle contract: the queue pair exists. The library fills both structures.
        let returned = unsafe { query(self.raw, &mut attr, mask.cast_signed(), &mut init) };
        self.context().check("ibv_query_qp", returned)?;
        Ok((attr, init))
    }

    /// Posts a list of work requests to the send queue, with one doorbell.
    ///
    /// # Errors
    ///
    /// [`PostError`] with the first request that was not accepted. Requests before it were posted.
    ///
    /// # Safety
    ///
    /// - `requests` is the first of a list that ends with a null `next`, and each `sg_list` has
    ///   `num_sge` entries. The caller may reuse the list when this function returns.
    /// - The entries name memory that is registered under their `lkey` in this domain. The
    ///   registration stays until the request has ended. So does the address handle that a request
    ///   names. Inline requests are exempt: this function reads their bytes, which need to be
    ///   readable only now.
    /// - The window and the region that a bind names exist until this function returns. If they are
    ///   given back before the device binds them, the bind fails.
    /// - Until the request has ended, no code writes memory that is being sent. No code reads or
    ///   writes the destination of a read through a Rust reference.
    /// - A request has ended when its completion was polled, or when the queue pair was given back
    ///   or reset. On a reliable connection it has also ended when the completion of a later
    ///   request on this queue was polled.
    #[inline]
    pub unsafe fn post_send(
        &self,
        requests: *mut ibv_send_wr,
    ) -> Result<(), PostError<ibv_send_wr>> {
        let mut rejected = ptr::null_mut();
        // SAFETY: handle contract: the queue pair exists and its device is open.
        let post = unsafe { (*(*self.raw).context).ops.post_send };
        let returned = match post {
            // SAFETY: the caller meets the requirements above, which are those of the driver.
            Some(post) => unsafe { post(self.raw, requests, &mut rejected) },
            None => libc::EOPNOTSUPP,
        };
        if returned == 0 { Ok(()) } else { Err(refused(returned, rejected)) }
    }

    /// Posts a list of work requests to the receive queue.
    ///
    /// # Errors
    ///
    /// [`PostError`] with the first request that was not accepted. Requests before it were posted.
    ///
    /// # Safety
    ///
    /// As for [`post_send`](Self::post_send): a valid list, and memory that is registered for local
    /// writes. The registration stays, and no code touches the memory through a Rust reference,
    /// until the receive has ended.
    #[inline]
    pub unsafe fn post_recv(
        &self,
        requests: *mut ibv_recv_wr,
    ) -> Result<(), PostError<ibv_recv_wr>> {
        let mut rejected = ptr::null_mut();
        // SAFETY: handle contract: the queue pair exists and its device is open.
        let post = unsafe { (*(*self.raw).context).ops.post_recv };
        let returned = match post {
            // SAFETY: the caller meets the requirements above, which are those of the driver.
            Some(post) => unsafe { post(self.raw, requests, &mut rejected) },
            None => libc::EOPNOTSUPP,
        };
        if returned == 0 { Ok(()) } else { Err(refused(returned, rejected)) }
    }

    /// Whether the bytes of `opcode` (`IBV_WR_*`) land in address order, as the driver reports it.
    /// 0 means no or unknown. With `IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS` in `flags` the result
    /// is a bit set, otherwise 1 means yes.
    pub fn data_in_order(&self, opcode: c_uint, flags: u32) -> c_int {
        let query = self.context().verbs().symbols.ibv_query_qp_data_in_order;
        // SAFETY: handle contract: the queue pair exists.
        query.map_or(0, |query| unsafe { query(self.raw, opcode, flags) })
    }

    /// The protection domain of the queue pair.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The raw structure, for calls without a wrapper.
    pub fn as_ptr(&self) -> *mut ibv_qp {
        self.raw
    }

    pub(super) fn extended(&self) -> Option<NonNull<ibv_qp_ex>> {
        self.extended
    }

    pub(crate) fn context(&self) -> &Context {
        self.pd.context()
    }

    /// Wraps the result of a create call.
    ///
    /// # Safety
    ///
    /// `raw` is null, with the reason in `errno`; or it was created in `pd` with the queues of
    /// `config`, and no other code gives it back.
    pub(crate) unsafe fn made(
        raw: *mut ibv_qp,
        cap: ibv_qp_cap,
        pd: &Arc<Pd>,
        config: &QpConfig<'_>,
        call: &'static str,
    ) -> Result<Self, VerbsError> {
        if raw.is_null() {
            return Err(VerbsError::last(call, pd.context().name().to_owned()));
        }
        let extended = pd.context().verbs().symbols.ibv_qp_to_qp_ex.and_then(|to_ex| {
            // SAFETY: the library has just created it.
            NonNull::new(unsafe { to_ex(raw) })
        });
        // SAFETY: the library has just created it, and its number does not change.
        let number = unsafe { (*raw).qp_num };
        let queues = [Arc::clone(config.send_cq), Arc::clone(config.recv_cq)];
        Ok(Self { raw, extended, number, cap, _queues: queues, pd: Arc::clone(pd) })
    }
}

owned!(Qp, "ibv_destroy_qp", |this| {
    // SAFETY: handle contract: `owned!` gives it back once.
    unsafe { (this.context().verbs().symbols.ibv_destroy_qp)(this.raw) }
});

impl QpConfig<'_> {
    /// Drivers do not check that domain and queues belong to one device, so this function does.
    fn check(&self, pd: &Arc<Pd>, call: &'static str) -> Result<(), VerbsError> {
        let ours = |cq: &Arc<Cq>| Arc::ptr_eq(cq.context(), pd.context());
        if ours(self.send_cq) && ours(self.recv_cq) {
            return Ok(());
        }
        Err(pd.context().failed(call, libc::EINVAL))
    }

    /// The attributes for the extended create calls.
    pub(crate) fn extended_attr(
        &self,
        pd: &Arc<Pd>,
        operations: u64,
        call: &'static str,
    ) -> Result<ibv_qp_init_attr_ex, VerbsError> {
        self.check(pd, call)?;
        Ok(ibv_qp_init_attr_ex {
            send_cq: self.send_cq.as_ptr(),
            recv_cq: self.recv_cq.as_ptr(),
            cap: self.cap,
            qp_type: self.qp_type,
            sq_sig_all: c_int::from(self.signal_all),
            comp_mask: IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            pd: pd.as_ptr(),
            send_ops_flags: operations,
            ..ibv_qp_init_attr_ex::zeroed()
        })
    }
}

/// The sets of attributes for state transitions.
pub mod masks {
    use super::*;

    /// A reliable connection, from reset to initialised.
    pub const RC_INIT: c_uint =
        IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    /// A reliable connection, to ready to receive.
    pub const RC_RTR: c_uint = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    /// A reliable connection, to ready to send.
    pub const RC_RTS: c_uint = IBV_QP_STATE
        | IBV_QP_TIMEOUT
        | IBV_QP_RETRY_CNT
        | IBV_QP_RNR_RETRY
        | IBV_QP_SQ_PSN
        | IBV_QP_MAX_QP_RD_ATOMIC;
    /// Datagrams (unreliable, or SRD on EFA), from reset to initialised.
    pub const UD_INIT: c_uint = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
    /// Datagrams, to ready to receive.
    pub const UD_RTR: c_uint = IBV_QP_STATE;
    /// Datagrams, to ready to send. SRD also takes `IBV_QP_RNR_RETRY` if the device reports
    /// support.
    pub const UD_RTS: c_uint = IBV_QP_STATE | IBV_QP_SQ_PSN;
}

fn state_name(state: c_uint) -> &'static str {
    match state {
        IBV_QPS_RESET => "to reset",
        IBV_QPS_INIT => "to initialised",
        IBV_QPS_RTR => "to ready to receive",
        IBV_QPS_RTS => "to ready to send",
        IBV_QPS_SQD => "to send queue drain",
        IBV_QPS_ERR => "to error",
        _ => "to another state",
    }
}

/// A separate function, so that posting stays small.
#[cold]
fn refused<W>(returned: c_int, rejected: *mut W) -> PostError<W> {
    PostError::new(errno_of(returned).unwrap_or(libc::EIO), rejected)
}
