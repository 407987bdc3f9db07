//! `<infiniband/verbs.h>` in Rust: structures and constants, with the names they have there.
//!
//! Documented by rdma-core's manual pages (`man ibv_post_send`); here stands only what they leave
//! open. Every size, offset and value is compared with the header by the test in `layout.rs`.
//! Enumerations are integers: a library may answer with a value that is newer than this list.
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
