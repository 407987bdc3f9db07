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
    use std::ptr;

    use super::*;
    use crate::verbs::fake;
    use crate::verbs::ffi::{IBV_QP_EX_WITH_RDMA_WRITE, IBV_QPT_RC, ibv_ah_attr, ibv_qp_init_attr};

    unsafe extern "C" fn create_qp_ex(
        _: *mut ibv_context,
        attr: *mut ibv_qp_init_attr_ex,
        efa: *mut efadv_qp_init_attr,
        size: u32,
    ) -> *mut ibv_qp {
        // SAFETY: the caller passes two valid structures.
        let (attr, efa) = unsafe { (&mut *attr, &*efa) };
        assert_eq!((attr.qp_type, attr.comp_mask), (IBV_QPT_DRIVER, 0x41));
        assert_eq!((attr.send_ops_flags, efa.sl, size), (IBV_QP_EX_WITH_RDMA_WRITE, 8, 16));
        if attr.cap.max_send_wr > 4 {
            // SAFETY: errno belongs to this thread.
            unsafe { *libc::__errno_location() = libc::EINVAL };
            return ptr::null_mut();
        }
        let mut plain = ibv_qp_init_attr { qp_type: IBV_QPT_RC, ..ibv_qp_init_attr::zeroed() };
        (plain.send_cq, plain.recv_cq) = (attr.send_cq, attr.recv_cq);
        fake::create_qp_for(attr.pd, &mut plain)
    }

    unsafe extern "C" fn query_device(
        _: *mut ibv_context,
        attr: *mut efadv_device_attr,
        size: u32,
    ) -> c_int {
        assert_eq!(size as usize, size_of::<efadv_device_attr>());
        // SAFETY: the caller passes a structure to fill.
        unsafe { (*attr).device_caps = ffi::EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE };
        0
    }

    unsafe extern "C" fn query_ah(_: *mut ibv_ah, attr: *mut efadv_ah_attr, _: u32) -> c_int {
        // SAFETY: the caller passes a structure to fill.
        unsafe { (*attr).ahn = 9 };
        0
    }

    #[test]
    fn a_reliable_datagram_queue_pair_is_made_by_libefa_and_given_back_by_verbs() {
        let symbols = EfaSymbols {
            efadv_create_qp_ex: create_qp_ex,
            efadv_query_device: query_device,
            efadv_query_ah: Some(query_ah),
        };
        // SAFETY: the functions above behave as documented, on devices of the fake.
        let efa = unsafe { Efa::from_symbols(symbols) };
        let (cq, pd, _) = fake::queue_pair();
        let attr = efa.device_attr(pd.context()).expect("the fake answers");
        assert_eq!(attr.device_caps, ffi::EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE);

        let attr = efadv_qp_init_attr { sl: 8, ..efadv_qp_init_attr::zeroed() };
        let mut config = fake::config(&cq);
        let operations = IBV_QP_EX_WITH_RDMA_WRITE;
        let qp = efa.create_srd(&pd, &config, operations, &attr).expect("the fake gives one");
        fake::log();
        drop(qp);
        assert_eq!(fake::log(), ["ibv_destroy_qp"]);
        config.cap.max_send_wr = 5;
        let refused = efa.create_srd(&pd, &config, operations, &attr).map(drop);
        let error = refused.expect_err("more requests than the device supports");
        assert_eq!((error.call, error.errno), ("efadv_create_qp_ex", libc::EINVAL));

        let ah = Ah::create(&pd, &ibv_ah_attr::zeroed()).expect("the fake gives one");
        assert_eq!(efa.address_number(&ah), Ok(9));
        // SAFETY: as above.
        let older = unsafe { Efa::from_symbols(EfaSymbols { efadv_query_ah: None, ..symbols }) };
        assert!(older.address_number(&ah).is_err_and(|error| error.is_unsupported()));
    }

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
