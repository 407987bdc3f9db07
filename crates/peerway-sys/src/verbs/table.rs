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

/// A libibverbs that is ready to be called.
pub struct Verbs {
    pub(super) symbols: Symbols,
    found: Option<Found>,
}

impl Verbs {
    /// Opens libibverbs: first the file that is named, then `libibverbs.so.1`.
    ///
    /// The name comes from the caller's configuration (`PEERWAY_IBV_SO`, `UCCL_IBV_SO`); the
    /// environment is not read here.
    ///
    /// # Errors
    ///
    /// [`LoadError`] with every place that was tried; a library that lacks a function is named with it.
    pub fn load(named: Option<OsString>) -> Result<Arc<Self>, LoadError> {
        let (found, symbols) = load_with(Library::Ibverbs, named, Symbols::resolve)?;
        Ok(Arc::new(Self { symbols, found: Some(found) }))
    }

    /// Takes functions that the caller has, such as those of a simulated device.
    ///
    /// # Safety
    ///
    /// They behave as libibverbs documents them: what they return stays valid until it is given back,
    /// contexts carry the function pointers of [`ffi::context`](super::ffi::context), and all of it
    /// may be called from any thread.
    pub unsafe fn from_symbols(symbols: Symbols) -> Arc<Self> {
        Arc::new(Self { symbols, found: None })
    }

    /// Which file it is, and what was passed over before; nothing where the functions were given.
    pub fn found(&self) -> Option<&Found> {
        self.found.as_ref()
    }

    /// The functions themselves.
    pub fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    /// The devices that are here now.
    ///
    /// # Errors
    ///
    /// `ENOSYS` where the kernel has no RDMA at all; else what the library said.
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
    /// The optional ones came after version 1.1 of the library's interface; without them the device
    /// is used without what they do, or the call that needs one says that it is not supported.
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
    fn the_real_library_lists_its_devices_or_is_told_as_missing() {
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
            // The kernel has no RDMA at all.
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

    /// A libibverbs that has its landmark and nothing else, such as one of another age.
    #[test]
    fn a_library_that_lacks_one_function_is_refused_with_its_name() {
        let library = std::env::temp_dir().join(format!("libibverbs-{}.so", std::process::id()));
        let compiled = std::process::Command::new("sh")
            .arg("-c")
            .arg("echo 'void ibv_get_device_list(void) {}' | cc -shared -fPIC -x c - -o \"$0\"")
            .arg(&library)
            .status();
        // Rust itself links by it.
        assert!(compiled.expect("there is a shell").success(), "there is a C compiler");
        let tried = match Verbs::load(Some(library.clone().into())) {
            Ok(verbs) => verbs.found().expect("it was loaded").passed_over.clone(),
            Err(error) => error.tried,
        };
        let _ = std::fs::remove_file(&library);
        assert_eq!(tried[0].reason, "has no ibv_free_device_list");
    }
}
