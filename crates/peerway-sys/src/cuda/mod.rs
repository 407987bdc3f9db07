//! NVIDIA GPUs, through libcuda: the driver API, opened at run time.
//!
//! [`Cuda`] is the initialised library. [`Gpu`] is one device with a reference to its primary
//! context. A call that needs a current context makes it current and restores the previous one
//! afterwards. The other types own their driver object and release it on drop. In a forked child
//! they release nothing, because the driver cannot be called there.
//!
//! # The driver contract
//!
//! SAFETY comments in this module refer to these rules as the *driver contract*:
//!
//! - `Gpu::with` makes the GPU's context current in this thread before a call that needs one.
//! - A driver call writes only its out-parameters, and each has the type of the C header.
//!   `layout.rs` compares the structures with the header.
//! - A type owns its driver object: the constructor creates it once, and `Drop` releases it once.
//!   The owner drops it only after all use has ended.
//! - The driver takes its own locks, so any thread may call it.

mod error;
pub mod ffi;
mod gpu;
mod graph;
mod memory;
mod stream;
mod table;

pub use error::CudaError;
pub use gpu::{Facts, Gpu};
pub use graph::Graph;
pub use memory::{
    Exported, HostMemory, Mapped, Opened, Physical, PinnedRange, Plain, Pointer, Shared,
};
pub use stream::{Event, Function, Grid, Module, Stream};
pub use table::{Cuda, NoCuda, Symbols};
