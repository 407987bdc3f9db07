//! Asynchronous events: changes of a device other than completions.

use std::fmt;

use super::ffi::*;

/// A change of a device, a port, a queue pair or a completion queue.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct AsyncEvent {
    /// `IBV_EVENT_*`.
    pub kind: u32,
    /// The object that changed.
    pub subject: Subject,
}

/// The object of an event.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Subject {
    /// The queue pair with this number.
    Qp(u32),
    /// The completion queue with this cookie.
    Cq(usize),
    /// The port with this number.
    Port(i32),
    /// The device, or an object that Peerway does not use.
    Device,
}

/// # Safety
///
/// The library filled `event` and it is not yet acknowledged. Until then the library keeps the
/// object that it names.
pub(super) unsafe fn read(event: &ibv_async_event) -> AsyncEvent {
    let element = event.element;
    let subject = match event.event_type {
        IBV_EVENT_QP_FATAL
        | IBV_EVENT_QP_REQ_ERR
        | IBV_EVENT_QP_ACCESS_ERR
        | IBV_EVENT_COMM_EST
        | IBV_EVENT_SQ_DRAINED
        | IBV_EVENT_PATH_MIG
        | IBV_EVENT_PATH_MIG_ERR
        | IBV_EVENT_QP_LAST_WQE_REACHED => {
            // SAFETY: these events name a queue pair, and the caller guarantees that it still
            // exists.
            Subject::Qp(unsafe { (*element.qp).qp_num })
        }
        IBV_EVENT_CQ_ERR => {
            // SAFETY: this event names a completion queue, and the caller guarantees that it still
            // exists.
            Subject::Cq(unsafe { (*element.cq).cq_context }.addr())
        }
        IBV_EVENT_PORT_ACTIVE
        | IBV_EVENT_PORT_ERR
        | IBV_EVENT_LID_CHANGE
        | IBV_EVENT_PKEY_CHANGE
        | IBV_EVENT_SM_CHANGE
        | IBV_EVENT_CLIENT_REREGISTER
        | IBV_EVENT_GID_CHANGE => {
            // SAFETY: these events carry a number, and any four bytes are a valid number.
            Subject::Port(unsafe { element.port_num })
        }
        _ => Subject::Device,
    };
    AsyncEvent { kind: event.event_type, subject }
}

impl fmt::Display for AsyncEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = match self.kind {
            IBV_EVENT_CQ_ERR => "completion queue overrun",
            IBV_EVENT_QP_FATAL => "queue pair failed",
            IBV_EVENT_QP_REQ_ERR => "invalid request",
            IBV_EVENT_QP_ACCESS_ERR => "access violation",
            IBV_EVENT_COMM_EST => "communication established",
            IBV_EVENT_SQ_DRAINED => "send queue drained",
            IBV_EVENT_PATH_MIG => "path migrated",
            IBV_EVENT_PATH_MIG_ERR => "path migration failed",
            IBV_EVENT_DEVICE_FATAL => "device failed",
            IBV_EVENT_PORT_ACTIVE => "port active",
            IBV_EVENT_PORT_ERR => "port error",
            IBV_EVENT_LID_CHANGE => "LID changed",
            IBV_EVENT_PKEY_CHANGE => "partition keys changed",
            IBV_EVENT_SM_CHANGE => "subnet manager changed",
            IBV_EVENT_QP_LAST_WQE_REACHED => "last receive request reached",
            IBV_EVENT_CLIENT_REREGISTER => "subnet manager requests re-registration",
            IBV_EVENT_GID_CHANGE => "GID changed",
            IBV_EVENT_DEVICE_SPEED_CHANGE => "speed changed",
            other => return write!(f, "event {other}"),
        };
        f.write_str(words)?;
        match self.subject {
            Subject::Qp(number) => write!(f, " on queue pair {number}"),
            Subject::Cq(cookie) => write!(f, " on completion queue {cookie:#x}"),
            Subject::Port(number) => write!(f, " on port {number}"),
            Subject::Device => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_name_their_object() {
        let mut qp = ibv_qp { qp_num: 17, ..ibv_qp::zeroed() };
        let mut cq =
            ibv_cq { cq_context: std::ptr::without_provenance_mut(0x20), ..ibv_cq::zeroed() };
        let text = |element, event_type| {
            // SAFETY: the objects of the elements below live until the end of this test.
            unsafe { read(&ibv_async_event { element, event_type }) }.to_string()
        };
        let about_qp = ibv_async_element { qp: &mut qp };
        assert_eq!(text(about_qp, IBV_EVENT_QP_FATAL), "queue pair failed on queue pair 17");
        let about_cq = ibv_async_element { cq: &mut cq };
        assert_eq!(
            text(about_cq, IBV_EVENT_CQ_ERR),
            "completion queue overrun on completion queue 0x20"
        );
        let about_port = ibv_async_element { port_num: 2 };
        assert_eq!(text(about_port, IBV_EVENT_PORT_ERR), "port error on port 2");
        let nothing = ibv_async_element::zeroed();
        assert_eq!(text(nothing, IBV_EVENT_DEVICE_FATAL), "device failed");
        assert_eq!(text(nothing, 999), "event 999");
    }
}
