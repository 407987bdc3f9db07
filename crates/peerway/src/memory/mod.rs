//! Registered memory, and the grants that give peers access to it.

pub(crate) mod grants;
mod region;
mod shared;

pub use region::OwnedMemory;
pub(crate) use region::{Backing, RegionInner, range_len};
pub use shared::SharedMemory;
