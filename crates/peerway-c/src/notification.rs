//! Notifications.

use std::ffi::c_void;

use peerway::Notification;

use crate::arguments::Out;
use crate::endpoint::peerway_incarnation;
use crate::entry::call;
use crate::handles::{self, get, handle};
use crate::status::peerway_status;

/// The longest notification.
pub const PEERWAY_MAX_NOTIFICATION: usize = 1 << 20;

const _: () = assert!(PEERWAY_MAX_NOTIFICATION == peerway::MAX_NOTIFICATION);

/// A message from a peer.
pub struct peerway_notification {
    _private: (),
}

handle!(peerway_notification, Notification, "a notification", 2);

/// What a notification says, until it is freed, and who sent it, where that is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_notification_message(
    notification: *const peerway_notification,
    message: *mut *const c_void,
    len: *mut usize,
    from: *mut peerway_incarnation,
) -> peerway_status {
    call(|| {
        // SAFETY: the caller's promise, for all of these.
        let (message, len) =
            unsafe { (Out::new(message, "message", std::ptr::null())?, Out::new(len, "len", 0)?) };
        let notification = get(notification)?;
        // It does not move, and the handle keeps it.
        message.set(notification.message.as_ptr().cast());
        len.set(notification.message.len());
        if !from.is_null() {
            // SAFETY: the caller's promise.
            unsafe { Out::new(from, "from", notification.from.into()) }?;
        }
        Ok(())
    })
}

/// Frees a notification.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_notification_free(
    notification: *mut peerway_notification,
) -> peerway_status {
    call(|| handles::free(notification).map(drop))
}
