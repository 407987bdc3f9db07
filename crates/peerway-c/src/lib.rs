//! `libpeerway`: the engine for C and C++.
//!
//! Each file wraps one concept of the engine under the names of `include/peerway.h`, which is made from these files by
//! `cargo xtask c-header`; their comments are the header's. Nothing here decides anything. What every call has in common:
//!
//! - `entry`: panics are caught, a failure becomes a status and a sentence.
//! - `handles`: what C holds are numbers and no addresses, so one that was freed, or is of another kind, is found out.
//! - `arguments`: pointers are checked as far as that can be done; structs carry their sizes.

#![allow(non_camel_case_types, reason = "the names are those of the header")]
#![allow(
    clippy::missing_safety_doc,
    reason = "what a caller owes is said once, in the header's introduction"
)]
#![allow(unreachable_pub, reason = "what is public is what the header is made of")]

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
mod region;
mod remote;
mod staged;
mod status;
mod stream;
mod transfer;
mod version;
