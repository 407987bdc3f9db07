//! `libplugin_PEERWAY.so`: the engine as a backend of NIXL.
//!
//! NIXL's interface for backends is a C++ class, so the backend is C++ (`cpp/`), written on `include/peerway.h` alone. This crate puts
//! it and the engine into one file that needs nothing else, and shows the two calls by which NIXL finds its way in.

#![allow(non_snake_case, reason = "the file's name is NIXL's to choose")]

use std::ffi::c_void;

// What the C++ half calls.
use peerway_c as _;

unsafe extern "C" {
    fn peerway_nixl_plugin() -> *mut c_void;
}

/// NIXL's first call: the table of what the plugin does.
#[unsafe(no_mangle)]
pub extern "C" fn nixl_plugin_init() -> *mut c_void {
    // SAFETY: takes nothing and gives the address of a table that is never freed.
    unsafe { peerway_nixl_plugin() }
}

/// NIXL's last call. Nothing is left to be done: engines clean up after themselves.
#[unsafe(no_mangle)]
pub extern "C" fn nixl_plugin_fini() {}
