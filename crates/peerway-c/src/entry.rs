//! The way in: every call of C's goes through [`call`].

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::status::{Answer, Failure, peerway_status};

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs a call's body: a failure is written down for this thread, a panic does not leave the library.
pub(crate) fn call(body: impl FnOnce() -> Answer) -> peerway_status {
    // Whatever a panic left half done is behind the engine's own locks, which refuse from then on.
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
            // What was thrown may itself panic when it is dropped.
            std::mem::forget(panic);
            peerway_status::Panic
        }
    }
}

fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a word")
}

fn remember(sentence: String) {
    let mut bytes = sentence.into_bytes();
    bytes.retain(|byte| *byte != 0);
    let sentence = CString::new(bytes).unwrap_or_default();
    // A thread that is ending has no place for it, and nobody to read it.
    let _ = LAST.try_with(|last| *last.borrow_mut() = sentence);
}

/// What went wrong in the last call of this thread that failed: a sentence, never null, and empty where none has. It stays until
/// the next call that fails in this thread.
#[unsafe(no_mangle)]
pub extern "C" fn peerway_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// The name of a status (PEERWAY_STATUS_BUSY is "BUSY"); "?" for a number that is none.
#[unsafe(no_mangle)]
pub extern "C" fn peerway_status_name(status: i32) -> *const c_char {
    peerway_status::name(status).unwrap_or(c"?").as_ptr()
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn last() -> String {
        // SAFETY: a string of this thread, and no call comes between.
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
        assert_eq!(last(), "zeroinside", "neither is a failure");
        std::thread::spawn(|| assert_eq!(last(), "")).join().unwrap();
    }
}
