//! Notifications.

use std::ffi::c_void;

use peerway::Notification;

use crate::arguments::Out;
use crate::endpoint::peerway_incarnation;
use crate::entry::call;
use crate::handles::{self, get, handle};
use crate::status::peerway_status;

/// The maximum length of a notification in bytes.
pub const PEERWAY_MAX_NOTIFICATION: usize = 1 << 20;

const _: () = assert!(PEERWAY_MAX_NOTIFICATION == peerway::MAX_NOTIFICATION);

/// A message from a peer.
pub struct peerway_notification {
    _private: (),
}

handle!(peerway_notification, Notification, "a notification", 2);

/// Sets *message and *len to the bytes of a notification, which stay valid until it is freed. Sets
/// *from to its sender. `from` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerway_notification_message(
    notification: *const peerway_notification,
    message: *mut *const c_void,
    len: *mut usize,
    from: *mut peerway_incarnation,
) -> peerway_status {
    call(|| {
        // SAFETY: the C contract.
        let (message, len) =
            unsafe { (Out::new(message, "message", std::ptr::null())?, Out::new(len, "len", 0)?) };
        let notification = get(notification)?;
        // The handle keeps the notification alive, and its bytes do not move.
        message.set(notification.message.as_ptr().cast());
        len.set(notification.message.len());
        if !from.is_null() {
            // SAFETY: the C contract.
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
