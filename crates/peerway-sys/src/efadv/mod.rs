//! Extensions of AWS EFA devices beyond verbs, through a libefa that is opened at run time.
//!
//! EFA devices appear as verbs devices. Their reliable datagrams (SRD) need a kind of queue pair
//! that only libefa creates. Afterwards it works like any other queue pair. The caller brings it up
//! with [`masks::UD_INIT`](crate::verbs::masks) and its successors and posts with a
//! [`Batch`](crate::verbs::Batch). Each request names an [`Ah`], a queue pair number and a key.
//! Requests to one peer may arrive in any order.

pub mod ffi;

use std::ffi::{OsString, c_int};
use std::fmt;
use std::sync::Arc;

use self::ffi::{efadv_ah_attr, efadv_device_attr, efadv_qp_init_attr};
use crate::probe::load_with;
use crate::symbols::symbol_table;
use crate::verbs::ffi::{IBV_QPT_DRIVER, ibv_ah, ibv_context, ibv_qp, ibv_qp_init_attr_ex};
use crate::verbs::{Ah, Context, Pd, Qp, QpConfig, VerbsError};
use crate::{Found, Library, LoadError};

/// A loaded libefa.
pub struct Efa {
    symbols: EfaSymbols,
    found: Option<Found>,
}

impl Efa {
    /// Opens libefa: first the file `named`, then `libefa.so.1`.
    ///
    /// The caller takes `named` from its configuration (`PEERWAY_EFA_SO`, `UCCL_EFA_SO`). This
    /// function does not read the environment.
    ///
    /// # Errors
    ///
    /// [`LoadError`] with every candidate. If a library lacks a function, the error names the
    /// function.
    pub fn load(named: Option<OsString>) -> Result<Arc<Self>, LoadError> {
        let (found, symbols) = load_with(Library::Efa, named, EfaSymbols::resolve)?;
        Ok(Arc::new(Self { symbols, found: Some(found) }))
    }

    /// Uses the caller's functions, such as those of a simulated device.
    ///
    /// # Safety
    ///
    /// The functions behave as libefa documents them. The contexts passed to them belong to the
    /// same library.
    pub unsafe fn from_symbols(symbols: EfaSymbols) -> Arc<Self> {
        Arc::new(Self { symbols, found: None })
    }

    /// The file and the candidates that were skipped before it. `None` if the caller passed the
    /// functions.
    pub fn found(&self) -> Option<&Found> {
        self.found.as_ref()
    }

    /// The device's capabilities beyond verbs: `EFADV_DEVICE_ATTR_CAPS_*` and the largest read or
    /// write.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]; `EOPNOTSUPP` if it is not an EFA device.
    pub fn device_attr(&self, context: &Context) -> Result<efadv_device_attr, VerbsError> {
        let mut attr = efadv_device_attr::zeroed();
        let size = size_of_val(&attr) as u32;
        // SAFETY: `context` keeps the device open; the library writes at most `size` bytes.
        let returned =
            unsafe { (self.symbols.efadv_query_device)(context.as_ptr(), &mut attr, size) };
        context.check("efadv_query_device", returned)?;
        Ok(attr)
    }

    /// Creates a queue pair for reliable datagrams and for the operations in `operations`
    /// (`IBV_QP_EX_WITH_*`). Ignores the type in `config`.
    ///
    /// Older libraries do not know the service level and the flags in `attr`. They refuse nonzero
    /// values there.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]; `EOPNOTSUPP` if it is not an EFA device.
    pub fn create_srd(
        &self,
        pd: &Arc<Pd>,
        config: &QpConfig<'_>,
        operations: u64,
        attr: &efadv_qp_init_attr,
    ) -> Result<Qp, VerbsError> {
        const CALL: &str = "efadv_create_qp_ex";
        let config = QpConfig { qp_type: IBV_QPT_DRIVER, ..*config };
        let mut init = config.extended_attr(pd, operations, CALL)?;
        let mut attr = *attr;
        let size = size_of_val(&attr) as u32;
        let context = pd.context().as_ptr();
        // SAFETY: `extended_attr` checked that domain and queues are of one device; `pd` and
        // `config` keep them alive. The library reads `size` bytes.
        let raw = unsafe { (self.symbols.efadv_create_qp_ex)(context, &mut init, &mut attr, size) };
        // SAFETY: the library has just created it in this domain and with these queues.
        unsafe { Qp::made(raw, init.cap, pd, &config, CALL) }
    }

    /// The number by which receive completions (`slid`) name the port behind an address.
    ///
    /// # Errors
    ///
    /// [`VerbsError`]; `EOPNOTSUPP` if it is not an EFA device or the library lacks the call.
    pub fn address_number(&self, ah: &Ah) -> Result<u16, VerbsError> {
        const CALL: &str = "efadv_query_ah";
        let Some(query) = self.symbols.efadv_query_ah else {
            return Err(ah.context().failed(CALL, libc::EOPNOTSUPP));
        };
        let mut attr = efadv_ah_attr::zeroed();
        let size = size_of_val(&attr) as u32;
        // SAFETY: `ah` keeps the handle alive; the library writes at most `size` bytes.
        let returned = unsafe { query(ah.as_ptr(), &mut attr, size) };
        ah.context().check(CALL, returned)?;
        Ok(attr.ahn)
    }
}

impl fmt::Debug for Efa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Efa").field("found", &self.found).finish_non_exhaustive()
    }
}

symbol_table! {
    /// The functions that libefa exports and Peerway calls.
    pub struct EfaSymbols {
        required {
            fn efadv_create_qp_ex(
                *mut ibv_context, *mut ibv_qp_init_attr_ex, *mut efadv_qp_init_attr, u32,
            ) -> *mut ibv_qp;
            fn efadv_query_device(*mut ibv_context, *mut efadv_device_attr, u32) -> c_int;
        }
        optional {
            fn efadv_query_ah(*mut ibv_ah, *mut efadv_ah_attr, u32) -> c_int;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_real_library_is_loaded_or_reported_as_missing() {
        match Efa::load(None) {
            Ok(efa) => assert!(efa.found().is_some_and(|found| found.passed_over.is_empty())),
            Err(error) => {
                assert!(error.tried.iter().any(|tried| tried.name == "libefa.so.1"), "{error}");
            }
        }
    }

    #[test]
    fn a_library_without_the_functions_is_passed_over_with_the_first_one_it_lacks() {
        let tried = match Efa::load(Some("libc.so.6".into())) {
            Ok(efa) => efa.found().expect("it was loaded").passed_over.clone(),
            Err(error) => error.tried,
        };
        assert_eq!(tried[0].to_string(), "libc.so.6: has no efadv_create_qp_ex");
    }
}
