//! Registered memory: regions, what of them is granted to peers, and what keeps both safe.

pub(crate) mod gate;
pub(crate) mod grants;
pub(crate) mod quarantine;
mod region;
mod remote;
mod shared;

pub(crate) use region::{Backing, RegionInner};
pub use region::{LocalBlocks, LocalSlice, OwnedMemory, Region};
pub(crate) use remote::{Direct, RemoteInner};
pub use remote::{RemoteBlocks, RemoteRegion, RemoteSlice};
pub use shared::SharedMemory;
