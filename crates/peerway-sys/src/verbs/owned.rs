//! How handles give themselves back.

/// Gives a handle `close` and `Drop`. The handle has a pointer `raw`, null once it was given back, and
/// a `context()`; the last argument calls the library.
macro_rules! owned {
    ($handle:ident, $call:literal, |$this:ident| $destroy:expr) => {
        impl $handle {
            /// Gives it back now and says whether the library agreed, as dropping cannot.
            ///
            /// # Errors
            ///
            /// The handle, untouched, and why it could not be given back.
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
                // There is nobody to tell. What the device would not give back is freed by the kernel
                // with the context.
                let _ = self.release();
            }
        }

        // SAFETY: verbs objects may be used and given back by any thread; the library and its drivers
        // lock where they must.
        unsafe impl Send for $handle {}
        // SAFETY: as above.
        unsafe impl Sync for $handle {}
    };
}

pub(super) use owned;
