//! What Peerway calls in other people's libraries, opened at run time.
//!
//! Nothing here is linked: a machine without RDMA, GPU or vendor software builds and runs all of it,
//! and learns from [`probe`] in a sentence what is missing. Probing maps a library and asks for its
//! version where that is harmless; it initialises nothing, creates no context and opens no device.
//!
//! - [`verbs`]: RDMA devices, by libibverbs.
//! - [`cuda`]: NVIDIA GPUs, by libcuda.
//! - [`nvrtc`]: kernels, compiled at run time.
//! - [`efadv`]: what AWS EFA devices need beyond verbs, by libefa.

pub mod cuda;
pub mod efadv;
mod layout;
mod library;
pub mod nvrtc;
mod probe;
mod symbols;
pub mod verbs;

pub use library::Library;
pub use probe::{Found, LoadError, Tried, probe, probe_with};
