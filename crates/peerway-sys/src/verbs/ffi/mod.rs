//! `<infiniband/verbs.h>` in Rust: structures and constants, with the header's names.
//!
//! The manual pages of rdma-core document them (`man ibv_post_send`). Comments here add only what
//! those pages omit. The test in `layout.rs` compares every size, offset and value with the header.
//! Enumerations are integers, because a library may return a value that is newer than this list.
#![allow(missing_docs)]

pub mod completion;
pub mod constants;
pub mod context;
pub mod device;
pub mod extended;
pub mod memory;
pub mod queue_pair;
pub mod work;

pub use completion::*;
pub use constants::*;
pub use context::*;
pub use device::*;
pub use extended::*;
pub use memory::*;
pub use queue_pair::*;
pub use work::*;
