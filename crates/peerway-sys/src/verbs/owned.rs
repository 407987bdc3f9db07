//! How handles give their objects back.

/// Implements `close` and `Drop` for a handle. The handle has a `context()` and a pointer `raw`,
/// which is null after the object was given back. The last argument calls the library.
macro_rules! owned {
    ($handle:ident, $call:literal, |$this:ident| $destroy:expr) => {
        impl $handle {
            /// Gives the object back now and reports whether the library agreed. `drop` cannot
            /// report that.
            ///
            /// # Errors
            ///
            /// Returns the unchanged handle and the reason if the object could not be given back.
            pub fn close(mut self) -> Result<(), (Self, super::error::VerbsError)> {
                self.release().map_err(|error| (self, error))
            }

            fn release(&mut self) -> Result<(), super::error::VerbsError> {
                if self.raw.is_null() {
                    return Ok(());
                }
                let $this = &*self;
                if !$this.context().is_ours() {
                    return Err($this.context().failed($call, libc::ECHILD));
                }
                if let Some(errno) = super::error::errno_of($destroy) {
                    return Err($this.context().failed($call, errno));
                }
                self.raw = std::ptr::null_mut();
                Ok(())
            }
        }

        impl Drop for $handle {
            fn drop(&mut self) {
                // `drop` cannot report an error. If the device refuses, the kernel frees the object
                // together with the context.
                let _ = self.release();
            }
        }

        // SAFETY: the library and its drivers take their own locks, so any thread may use verbs
        // objects and give them back.
        unsafe impl Send for $handle {}
        // SAFETY: as above.
        unsafe impl Sync for $handle {}
    };
}

pub(super) use owned;
