//! Errors of verbs.

use std::borrow::Cow;
use std::ffi::c_int;
use std::fmt;
use std::io;

use super::ffi::{ibv_recv_wr, ibv_send_wr};

/// A verb that failed: the call, the object and the error number.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{call} on {on}: {}", io::Error::from_raw_os_error(*errno))]
#[non_exhaustive]
pub struct VerbsError {
    /// The function of the library.
    pub call: &'static str,
    /// The device and the parameters of the call.
    pub on: Cow<'static, str>,
    /// The error number, as in `errno`.
    pub errno: i32,
}

impl VerbsError {
    /// Whether the device, its driver or the library does not support the call.
    pub fn is_unsupported(&self) -> bool {
        matches!(self.errno, libc::EOPNOTSUPP | libc::ENOSYS)
    }

    /// A post that the queue pair with this number rejected.
    pub fn of_post(call: &'static str, queue_pair: u32, errno: i32) -> Self {
        Self::new(call, format!("queue pair {queue_pair}"), errno)
    }

    pub(crate) fn new(call: &'static str, on: impl Into<Cow<'static, str>>, errno: i32) -> Self {
        Self { call, on: on.into(), errno }
    }

    /// The error of a call that set `errno`.
    pub(crate) fn last(call: &'static str, on: impl Into<Cow<'static, str>>) -> Self {
        Self::new(call, on, last_errno())
    }

    pub(crate) fn unsupported(call: &'static str, on: impl Into<Cow<'static, str>>) -> Self {
        Self::new(call, on, libc::EOPNOTSUPP)
    }
}

/// A work request that was not accepted. Requests before it in the list were posted. It and the
/// requests after it were not.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct PostError<W> {
    /// The error number, as in `errno`. `ENOMEM` means that the queue is full.
    pub errno: i32,
    /// The first request of the list that was not posted, if the driver reported it.
    pub rejected: *mut W,
}

impl<W> PostError<W> {
    pub(crate) fn new(errno: i32, rejected: *mut W) -> Self {
        Self { errno, rejected }
    }
}

impl<W> fmt::Debug for PostError<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { errno, rejected } = self;
        f.debug_struct("PostError").field("errno", errno).field("rejected", rejected).finish()
    }
}

impl std::error::Error for PostError<ibv_send_wr> {}

impl std::error::Error for PostError<ibv_recv_wr> {}

impl fmt::Display for PostError<ibv_send_wr> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ibv_post_send: {}", io::Error::from_raw_os_error(self.errno))
    }
}

impl fmt::Display for PostError<ibv_recv_wr> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ibv_post_recv: {}", io::Error::from_raw_os_error(self.errno))
    }
}

/// The error number in the return value of a verb. Most verbs return it directly. Some return -1
/// and set `errno`, and some drivers return it negated.
pub(crate) fn errno_of(returned: c_int) -> Option<i32> {
    match returned {
        0 => None,
        -1 => Some(last_errno()),
        positive @ 1.. => Some(positive),
        negative => Some(negative.saturating_neg()),
    }
}

/// Never returns 0, even if the driver failed to set `errno`.
fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().filter(|errno| *errno != 0).unwrap_or(libc::EIO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_of_reporting_is_understood() {
        assert_eq!(errno_of(0), None);
        assert_eq!(errno_of(libc::EBUSY), Some(libc::EBUSY));
        assert_eq!(errno_of(-libc::EBUSY), Some(libc::EBUSY));
        assert_eq!(errno_of(c_int::MIN), Some(c_int::MAX));
    }

    #[test]
    fn an_error_is_one_sentence() {
        let error = VerbsError::new("ibv_reg_mr", "mlx5_0", libc::ENOMEM);
        assert!(error.to_string().starts_with("ibv_reg_mr on mlx5_0: Cannot allocate memory"));
        assert!(!error.is_unsupported());
        let full = PostError::<ibv_send_wr>::new(libc::ENOMEM, std::ptr::null_mut());
        assert!(full.to_string().starts_with("ibv_post_send: Cannot allocate memory"));
        let full = PostError::<ibv_recv_wr>::new(libc::ENOMEM, std::ptr::null_mut());
        assert!(full.to_string().starts_with("ibv_post_recv: Cannot allocate memory"));
    }
}
