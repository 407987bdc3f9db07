//! The entry point: every call from C goes through [`call`].

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::status::{Answer, Failure, peerway_status};

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs the body of a call. Stores the message of a failure for this thread. A panic does not leave
/// the library.
pub(crate) fn call(body: impl FnOnce() -> Answer) -> peerway_status {
    // State that a panic leaves inconsistent is behind the engine's own locks, which refuse access
    // afterwards.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => peerway_status::Ok,
        Ok(Err(Failure { status, sentence })) => {
            if let Some(sentence) = sentence {
                remember(sentence);
            }
            status
        }
        Err(panic) => {
            remember(format!("the library panicked: {}", words(&*panic)));
            // The panic's payload may itself panic when it is dropped.
            std::mem::forget(panic);
            peerway_status::Panic
        }
    }
}

fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

fn remember(sentence: String) {
    let mut bytes = sentence.into_bytes();
    bytes.retain(|byte| *byte != 0);
    let sentence = CString::new(bytes).unwrap_or_default();
    // While a thread exits, its storage is gone. No later call of the thread can read the message.
    let _ = LAST.try_with(|last| *last.borrow_mut() = sentence);
}

/// The error message of the last call of this thread that failed. Never null; empty if no call has
/// failed. The text stays valid until the next call of this thread that fails.
#[unsafe(no_mangle)]
pub extern "C" fn peerway_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// The name of a status ("BUSY" for PEERWAY_STATUS_BUSY). "?" if the number is not a status.
#[unsafe(no_mangle)]
pub extern "C" fn peerway_status_name(status: i32) -> *const c_char {
    peerway_status::name(status).unwrap_or(c"?").as_ptr()
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn last() -> String {
        // SAFETY: the string belongs to this thread, and no call replaces it before the copy.
        unsafe { CStr::from_ptr(peerway_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_is_a_status_with_its_words() {
        assert_eq!(call(|| panic!("number {}", 7)), peerway_status::Panic);
        assert_eq!(last(), "the library panicked: number 7");
        assert_eq!(call(|| Err(Failure::bad("zero\0inside"))), peerway_status::BadArgument);
        assert_eq!(last(), "zeroinside");
        assert_eq!(call(|| Err(Failure::PENDING)), peerway_status::Pending);
        assert_eq!(call(|| Ok(())), peerway_status::Ok);
        assert_eq!(last(), "zeroinside", "neither OK nor PENDING is a failure");
        std::thread::spawn(|| assert_eq!(last(), "")).join().unwrap();
    }
}
