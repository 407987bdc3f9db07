//! Address handles of remote ports, for queue pairs without a connection.

use std::sync::Arc;

use super::context::Context;
use super::error::VerbsError;
use super::ffi::*;
use super::memory::Pd;
use super::owned::owned;

/// The address of a remote port. Together with the number and key of a queue pair there, it is the
/// destination of a datagram.
#[derive(Debug)]
pub struct Ah {
    raw: *mut ibv_ah,
    pd: Arc<Pd>,
}

impl Ah {
    /// Resolves an address.
    ///
    /// # Errors
    ///
    /// [`VerbsError`] from the driver, for example no route or a bad GID index.
    pub fn create(pd: &Arc<Pd>, attr: &ibv_ah_attr) -> Result<Self, VerbsError> {
        let mut attr = *attr;
        // SAFETY: handle contract: the domain exists. The library reads `attr`.
        let raw = unsafe { (pd.context().verbs().symbols.ibv_create_ah)(pd.as_ptr(), &mut attr) };
        if raw.is_null() {
            return Err(VerbsError::last("ibv_create_ah", pd.context().name().to_owned()));
        }
        Ok(Self { raw, pd: Arc::clone(pd) })
    }

    /// The raw structure, for work requests and for calls without a wrapper.
    pub fn as_ptr(&self) -> *mut ibv_ah {
        self.raw
    }

    pub(crate) fn context(&self) -> &Context {
        self.pd.context()
    }
}

owned!(Ah, "ibv_destroy_ah", |this| {
    // SAFETY: handle contract: `owned!` gives it back once.
    unsafe { (this.context().verbs().symbols.ibv_destroy_ah)(this.raw) }
});
