//! Bindings to vendor libraries that Peerway opens at run time.
//!
//! Peerway links none of them. It builds and runs on a machine without RDMA, GPU or vendor
//! software, and [`probe`] reports in a sentence which library is missing. Probing maps a library
//! and asks for its version if that is harmless. It initialises nothing, creates no context and
//! opens no device.
//!
//! - [`verbs`]: RDMA devices, through libibverbs.
//! - [`cuda`]: NVIDIA GPUs, through libcuda.
//! - [`nvrtc`]: kernels, compiled at run time.
//! - [`efadv`]: the extensions that AWS EFA devices need beyond verbs, through libefa.

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
