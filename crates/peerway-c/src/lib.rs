//! `libpeerway`: the engine for C and C++.
//!
//! Each file wraps one concept of the engine under the names of `include/peerway.h`. The command
//! `cargo xtask c-header` generates the header from these files, so their doc comments are the
//! header's comments. These files only translate; they make no decisions. All calls share:
//!
//! - `entry`: catches panics, and turns a failure into a status and an error message.
//! - `handles`: a handle is a number and not an address, so the library detects a handle that was
//!   freed or has another type.
//! - `arguments`: checks pointers as far as possible. Structs carry their sizes.
//!
//! # The C contract
//!
//! Many SAFETY comments refer to "the C contract". The C caller upholds it, and the introduction of
//! the header states it: every pointer is null or points to memory of the given length, which no
//! other thread changes during the call, and every text ends with a zero byte. The functions in
//! `arguments` check everything else.

#![allow(non_camel_case_types, reason = "the header uses these names")]
#![allow(
    clippy::missing_safety_doc,
    reason = "the header's introduction states the contract once, for all calls"
)]
#![allow(unreachable_pub, reason = "cbindgen generates the header from the public items")]

mod arguments;
mod batch;
mod completions;
mod endpoint;
mod entry;
mod handles;
mod log;
mod notification;
mod peer;
mod proxy;
mod quarantine;
mod refusals;
mod region;
mod remote;
mod staged;
mod status;
mod stream;
mod transfer;
mod version;
