//! NVIDIA GPUs, by libcuda: the driver API, opened at run time.
//!
//! [`Cuda`] is the library, initialised. [`Gpu`] is one device with its primary context held; everything
//! that needs a context current makes it so for the call and puts back what was current before. The other
//! types own what they name and give it back when they are dropped, except in a forked child, where
//! the driver cannot be called.

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
