//! The functions of libibverbs.

use std::ffi::{OsString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::Arc;

use super::device::DeviceList;
use super::error::VerbsError;
use super::ffi::*;
use crate::probe::load_with;
use crate::symbols::symbol_table;
use crate::{Found, Library, LoadError};

/// A loaded libibverbs.
pub struct Verbs {
    pub(super) symbols: Symbols,
    found: Option<Found>,
}

impl Verbs {
    /// Opens libibverbs: first the file `named`, then `libibverbs.so.1`.
    ///
    /// The caller takes `named` from its configuration (`PEERWAY_IBV_SO`, `UCCL_IBV_SO`). This
    /// function does not read the environment.
    ///
    /// # Errors
    ///
    /// [`LoadError`] with every candidate. If a library lacks a function, the error names the
    /// function.
    pub fn load(named: Option<OsString>) -> Result<Arc<Self>, LoadError> {
        let (found, symbols) = load_with(Library::Ibverbs, named, Symbols::resolve)?;
        Ok(Arc::new(Self { symbols, found: Some(found) }))
    }

    /// Uses the caller's functions, such as those of a simulated device.
    ///
    /// # Safety
    ///
    /// The functions behave as libibverbs documents them. Objects that they return stay valid until
    /// they are given back. Contexts carry the function pointers of
    /// [`ffi::context`](super::ffi::context). Any thread may call all of them.
    pub unsafe fn from_symbols(symbols: Symbols) -> Arc<Self> {
        Arc::new(Self { symbols, found: None })
    }

    /// The file and the candidates that were skipped before it. `None` if the caller passed the
    /// functions.
    pub fn found(&self) -> Option<&Found> {
        self.found.as_ref()
    }

    /// The functions.
    pub fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    /// The devices that are present now.
    ///
    /// # Errors
    ///
    /// `ENOSYS` if the kernel has no RDMA support, otherwise the error of the library.
    pub fn devices(self: &Arc<Self>) -> Result<DeviceList, VerbsError> {
        DeviceList::read(self)
    }
}

impl fmt::Debug for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verbs").field("found", &self.found).finish_non_exhaustive()
    }
}

symbol_table! {
    /// The functions that libibverbs exports and Peerway calls.
    ///
    /// The optional functions came after version 1.1 of the library's interface. Without one,
    /// Peerway does not use its feature, or the call that needs it reports that it is not
    /// supported.
    pub struct Symbols {
        required {
            fn ibv_get_device_list(*mut c_int) -> *mut *mut ibv_device;
            fn ibv_free_device_list(*mut *mut ibv_device);
            fn ibv_get_device_name(*mut ibv_device) -> *const c_char;
            fn ibv_get_device_guid(*mut ibv_device) -> u64;
            fn ibv_open_device(*mut ibv_device) -> *mut ibv_context;
            fn ibv_close_device(*mut ibv_context) -> c_int;
            fn ibv_get_async_event(*mut ibv_context, *mut ibv_async_event) -> c_int;
            fn ibv_ack_async_event(*mut ibv_async_event);
            fn ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
            // Fills the structure up to `flags`; the caller zeroes the rest.
            fn ibv_query_port(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
            fn ibv_query_gid(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
            fn ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
            fn ibv_dealloc_pd(*mut ibv_pd) -> c_int;
            fn ibv_reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
            fn ibv_dereg_mr(*mut ibv_mr) -> c_int;
            fn ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
            fn ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
            fn ibv_create_cq(
                *mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int,
            ) -> *mut ibv_cq;
            fn ibv_resize_cq(*mut ibv_cq, c_int) -> c_int;
            fn ibv_destroy_cq(*mut ibv_cq) -> c_int;
            fn ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
            fn ibv_ack_cq_events(*mut ibv_cq, c_uint);
            fn ibv_create_qp(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
            fn ibv_modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
            fn ibv_query_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
            fn ibv_destroy_qp(*mut ibv_qp) -> c_int;
            fn ibv_create_ah(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
            fn ibv_destroy_ah(*mut ibv_ah) -> c_int;
        }
        optional {
            fn ibv_fork_init() -> c_int;
            fn ibv_qp_to_qp_ex(*mut ibv_qp) -> *mut ibv_qp_ex;
            fn ibv_reg_mr_iova2(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
            fn _ibv_query_gid_ex(
                *mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize,
            ) -> c_int;
            fn ibv_reg_dmabuf_mr(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
            fn ibv_query_qp_data_in_order(*mut ibv_qp, c_uint, u32) -> c_int;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_real_library_lists_its_devices_or_is_reported_as_missing() {
        let verbs = match Verbs::load(None) {
            Ok(verbs) => verbs,
            Err(error) => {
                assert!(error.tried.iter().any(|tried| tried.name == "libibverbs.so.1"), "{error}");
                return;
            }
        };
        assert!(verbs.found().is_some_and(|found| found.passed_over.is_empty()));
        match verbs.devices() {
            Ok(devices) => {
                for device in devices.iter() {
                    assert!(!device.name().is_empty());
                }
                eprintln!("{:?}: {} devices", verbs, devices.iter().count());
            }
            // The kernel has no RDMA support.
            Err(error) => assert_eq!(error.errno, libc::ENOSYS, "{error}"),
        }
    }

    #[test]
    fn a_wrong_path_is_passed_over_and_named() {
        let missing = "/nonexistent/libibverbs.so.1";
        let tried = match Verbs::load(Some(missing.into())) {
            Ok(verbs) => verbs.found().expect("it was loaded").passed_over.clone(),
            Err(error) => error.tried,
        };
        assert_eq!(tried[0].name, missing);
        assert!(tried[0].to_string().contains("No such file"), "{}", tried[0]);
    }

    #[test]
    fn a_library_without_the_functions_is_passed_over_with_the_first_one_it_lacks() {
        let tried = match Verbs::load(Some("libc.so.6".into())) {
            Ok(verbs) => verbs.found().expect("it was loaded").passed_over.clone(),
            Err(error) => error.tried,
        };
        assert_eq!(tried[0].to_string(), "libc.so.6: has no ibv_get_device_list");
    }

    /// A libibverbs with its landmark and no other function, such as one of another version.
    #[test]
    fn a_library_that_lacks_one_function_is_refused_with_its_name() {
        let library = std::env::temp_dir().join(format!("libibverbs-{}.so", std::process::id()));
        let compiled = std::process::Command::new("sh")
            .arg("-c")
            .arg("echo 'void ibv_get_device_list(void) {}' | cc -shared -fPIC -x c - -o \"$0\"")
            .arg(&library)
            .status();
        // Rust itself needs a C compiler to link.
        assert!(compiled.expect("there is a shell").success(), "there is a C compiler");
        let tried = match Verbs::load(Some(library.clone().into())) {
            Ok(verbs) => verbs.found().expect("it was loaded").passed_over.clone(),
            Err(error) => error.tried,
        };
        let _ = std::fs::remove_file(&library);
        assert_eq!(tried[0].reason, "has no ibv_free_device_list");
    }
}
