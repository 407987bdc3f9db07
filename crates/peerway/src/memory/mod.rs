//! Registered memory: regions, the grants that give peers access to them, and the gates and
//! quarantine that keep both safe.

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
