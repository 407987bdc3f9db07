//! The states of a queue pair, and the attributes of each transition.
//!
//! A transition fails with `EINVAL` if a required attribute is missing, an attribute is not
//! allowed, or a value is out of range. The queue pair is then unchanged.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use peerway_sys::verbs::ffi::*;

use super::{FakeQp, Kind, Peer, Qp};
use crate::device::{Device, MAX_READS, device_of};
use crate::rc::{Requester, Responder};
use crate::stats::{COUNTERS, count};
use crate::wire;

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(
    raw: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: by the handles and pointers contracts.
    let (fake, attr) = unsafe { (FakeQp::of(raw), &*attr) };
    let (nic, number) = (&fake.nic, fake.number());
    if nic.device.is_removed() && mask.cast_unsigned() != IBV_QP_STATE {
        return libc::EIO;
    }
    let connects = mask.cast_unsigned() & IBV_QP_STATE != 0 && attr.qp_state == IBV_QPS_RTR;
    if connects {
        let number = COUNTERS.connects.fetch_add(1, Ordering::Relaxed) + 1;
        let slow = nic.device.fabric.script.modify_qp.filter(|(_, which)| *which == number);
        if let Some((delay, _)) = slow {
            // As a kernel that resolves the address of the far end: under no lock of the device.
            std::thread::sleep(delay);
        }
    }
    let mut state = nic.lock();
    let (mut env, qps, _) = state.split(nic);
    let Some(qp) = qps.get_mut(&number) else { return libc::EINVAL };
    let returned = match qp.step(nic.device, attr, mask.cast_unsigned()) {
        Err(errno) => errno,
        Ok(Step::Stay) => 0,
        Ok(Step::Reset) => {
            qp.reset(&mut env);
            0
        }
        Ok(Step::Fail) => {
            qp.fail(&mut env);
            0
        }
    };
    let now = qp.state;
    nic.activate(&mut state, number);
    drop(state);
    if connects {
        count(&COUNTERS.connected, 1);
    }
    // SAFETY: by the handles contract; verbs do not allow concurrent modification of a queue pair.
    unsafe { (*raw).state = now };
    returned
}

/// # Safety
///
/// The caller keeps the contract of libibverbs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp(
    raw: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: by the handles contract.
    let fake = unsafe { FakeQp::of(raw) };
    let state = fake.nic.lock();
    let Some(qp) = state.qps.get(&fake.number()) else { return libc::EINVAL };
    let mut found = qp.attr;
    found.qp_state = qp.state;
    found.cur_qp_state = qp.state;
    found.cap = qp.cap;
    drop(state);
    let mut made = ibv_qp_init_attr::zeroed();
    let base = &fake.ex.qp_base;
    made.qp_context = base.qp_context;
    made.send_cq = base.send_cq;
    made.recv_cq = base.recv_cq;
    made.cap = fake.cap;
    made.qp_type = base.qp_type;
    made.sq_sig_all = c_int::from(fake.signal_all);
    // SAFETY: by the pointers contract.
    unsafe {
        attr.write(found);
        init.write(made);
    }
    0
}

/// What remains to be done after a transition was accepted.
enum Step {
    Stay,
    Reset,
    Fail,
}

impl Qp {
    fn step(&mut self, device: &Device, attr: &ibv_qp_attr, mask: u32) -> Result<Step, c_int> {
        let target = if mask & IBV_QP_STATE == 0 { self.state } else { attr.qp_state };
        if mask & IBV_QP_CUR_STATE != 0 && attr.cur_qp_state != self.state {
            return Err(libc::EINVAL);
        }
        match target {
            IBV_QPS_RESET if mask == IBV_QP_STATE => return Ok(Step::Reset),
            IBV_QPS_ERR if mask == IBV_QP_STATE && self.state != IBV_QPS_RESET => {
                return Ok(Step::Fail);
            }
            _ => {}
        }
        let (required, optional) = masks(self.kind, self.state, target).ok_or(libc::EINVAL)?;
        let given = mask & !(IBV_QP_STATE | IBV_QP_CUR_STATE);
        if given & required != required || given & !(required | optional) != 0 {
            return Err(libc::EINVAL);
        }
        let peer = self.check(device, attr, given)?;
        self.take(attr, given);
        if let Some(peer) = peer {
            self.peer = Some(peer);
        }
        match (self.state, target) {
            (IBV_QPS_INIT, IBV_QPS_RTR) => {
                if let Some(peer) = &self.peer {
                    wire::connect(&self.socket, &peer.address);
                }
                self.rx = Responder::new(u64::from(self.attr.rq_psn));
            }
            // Retry for ever, unless the program asked for something else.
            (IBV_QPS_RTR, IBV_QPS_RTS)
                if self.kind == Kind::Srd && given & IBV_QP_RNR_RETRY == 0 =>
            {
                self.attr.rnr_retry = 7;
            }
            (IBV_QPS_RTR, IBV_QPS_RTS) => self.tx = Requester::new(u64::from(self.attr.sq_psn)),
            _ => {}
        }
        self.state = target;
        Ok(Step::Stay)
    }

    fn check(
        &self,
        device: &Device,
        attr: &ibv_qp_attr,
        given: u32,
    ) -> Result<Option<Peer>, c_int> {
        let has = |bit: u32| given & bit != 0;
        let wrong = has(IBV_QP_PORT) && attr.port_num != 1
            || has(IBV_QP_PKEY_INDEX) && attr.pkey_index != 0
            || has(IBV_QP_PATH_MTU) && !(IBV_MTU_256..=IBV_MTU_4096).contains(&attr.path_mtu)
            || has(IBV_QP_MAX_DEST_RD_ATOMIC) && attr.max_dest_rd_atomic > MAX_READS
            || has(IBV_QP_MAX_QP_RD_ATOMIC) && attr.max_rd_atomic > MAX_READS
            || has(IBV_QP_MIN_RNR_TIMER) && attr.min_rnr_timer > 31
            || has(IBV_QP_TIMEOUT) && attr.timeout > 31
            || has(IBV_QP_RETRY_CNT) && attr.retry_cnt > 7
            || has(IBV_QP_RNR_RETRY) && attr.rnr_retry > 7
            || has(IBV_QP_DEST_QPN) && attr.dest_qp_num > 0x00ff_ffff;
        if wrong {
            return Err(libc::EINVAL);
        }
        if !has(IBV_QP_AV) {
            return Ok(None);
        }
        peer(device, &attr.ah_attr, attr.dest_qp_num).map(Some)
    }

    fn take(&mut self, attr: &ibv_qp_attr, given: u32) {
        let to = &mut self.attr;
        macro_rules! take {
            ($($bit:ident => $field:ident),* $(,)?) => {
                $( if given & $bit != 0 { to.$field = attr.$field; } )*
            };
        }
        take!(
            IBV_QP_ACCESS_FLAGS => qp_access_flags,
            IBV_QP_PKEY_INDEX => pkey_index,
            IBV_QP_PORT => port_num,
            IBV_QP_QKEY => qkey,
            IBV_QP_AV => ah_attr,
            IBV_QP_PATH_MTU => path_mtu,
            IBV_QP_TIMEOUT => timeout,
            IBV_QP_RETRY_CNT => retry_cnt,
            IBV_QP_RNR_RETRY => rnr_retry,
            IBV_QP_RQ_PSN => rq_psn,
            IBV_QP_MAX_QP_RD_ATOMIC => max_rd_atomic,
            IBV_QP_MIN_RNR_TIMER => min_rnr_timer,
            IBV_QP_SQ_PSN => sq_psn,
            IBV_QP_MAX_DEST_RD_ATOMIC => max_dest_rd_atomic,
            IBV_QP_DEST_QPN => dest_qp_num,
            IBV_QP_PATH_MIG_STATE => path_mig_state,
        );
        to.rq_psn &= 0x00ff_ffff;
        to.sq_psn &= 0x00ff_ffff;
    }
}

/// The queue pair `number` at an address.
pub(crate) fn peer(device: &Device, address: &ibv_ah_attr, number: u32) -> Result<Peer, c_int> {
    // RoCE addresses are always GIDs, and EFA addresses too.
    let grh = &address.grh;
    let source = device.gid(u32::from(grh.sgid_index));
    if address.is_global == 0 || address.port_num != 1 || source.is_none() {
        return Err(libc::EINVAL);
    }
    // SAFETY: any 16 bytes form a valid GID.
    let gid = unsafe { grh.dgid.raw };
    let index = device_of(&gid).ok_or(libc::EHOSTUNREACH)?;
    let address = wire::address(&device.fabric.name, index, number).map_err(|_| libc::EINVAL)?;
    Ok(Peer { address, device: index, number })
}

/// The attributes that a transition requires, and those that it also allows.
fn masks(kind: Kind, from: u32, to: u32) -> Option<(u32, u32)> {
    const INIT: u32 = IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    let connected = kind == Kind::Rc;
    Some(match (from, to) {
        (IBV_QPS_RESET, IBV_QPS_INIT) if connected => (INIT | IBV_QP_ACCESS_FLAGS, 0),
        (IBV_QPS_INIT, IBV_QPS_INIT) if connected => (0, INIT | IBV_QP_ACCESS_FLAGS),
        (IBV_QPS_INIT, IBV_QPS_RTR) if connected => (
            IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER,
            IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX,
        ),
        (IBV_QPS_RTR, IBV_QPS_RTS) if connected => (
            IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_SQ_PSN
                | IBV_QP_MAX_QP_RD_ATOMIC,
            IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE,
        ),
        (IBV_QPS_RTS, IBV_QPS_RTS) if connected => {
            (0, IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE)
        }
        (IBV_QPS_RESET, IBV_QPS_INIT) => (INIT | IBV_QP_QKEY, 0),
        (IBV_QPS_INIT, IBV_QPS_INIT) => (0, INIT | IBV_QP_QKEY),
        (IBV_QPS_INIT, IBV_QPS_RTR) => (0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY),
        (IBV_QPS_RTR, IBV_QPS_RTS) if kind == Kind::Srd => {
            (IBV_QP_SQ_PSN, IBV_QP_QKEY | IBV_QP_RNR_RETRY)
        }
        (IBV_QPS_RTR, IBV_QPS_RTS) => (IBV_QP_SQ_PSN, IBV_QP_QKEY),
        (IBV_QPS_RTS, IBV_QPS_RTS) => (0, IBV_QP_QKEY),
        _ => return None,
    })
}
