//! `libplugin_PEERWAY.so`: the engine as a NIXL backend.
//!
//! NIXL's interface for backends is a C++ class, so the backend is written in C++ (`cpp/`), on top
//! of `include/peerway.h` alone. This crate links the backend and the engine into one
//! self-contained file, and exports the two entry points that NIXL calls.

#![allow(non_snake_case, reason = "NIXL dictates the file name")]

use std::ffi::c_void;

// The C++ code calls this crate's C functions.
use peerway_c as _;

unsafe extern "C" {
    fn peerway_nixl_plugin() -> *mut c_void;
}

/// NIXL's first call. Returns the table of the plugin's functions.
#[unsafe(no_mangle)]
pub extern "C" fn nixl_plugin_init() -> *mut c_void {
    // SAFETY: the function takes no argument, and returns the address of a static table.
    unsafe { peerway_nixl_plugin() }
}

/// NIXL's last call. It has nothing to do, because each engine cleans up when it is destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn nixl_plugin_fini() {}
