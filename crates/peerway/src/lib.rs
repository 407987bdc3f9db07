//! Peerway moves bytes between the memories of two processes by one-sided reads and writes.
//!
//! An [`Endpoint`] listens and owns registered memory ([`Region`]). The owner advertises a region
//! as a 64-byte descriptor and sends the descriptor by any means. The other side connects
//! ([`Peer`]), imports the descriptor ([`RemoteRegion`]) and reads or writes without the owner's
//! code taking part.
//!
//! - Every transfer ends in bounded time, whatever the peer does ([`Ended`]).
//! - No byte lands after a transfer has ended, or the result says that it may: [`Fence`].
//! - A transfer that is done has its bytes in place. Its notification and its count become visible
//!   after the bytes, exactly once.
//! - A peer can access only the memory that was advertised.
//!
//! `ARCHITECTURE.md` in the repository describes the design.

mod address;
mod batch;
mod bugs;
mod clock;
mod connect;
pub mod driven;
mod endpoint;
mod error;
mod failure;
/// Fuzz targets, for the wrappers in `fuzz/`.
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz {
    pub use crate::connect::fuzz::{attach, handshake, host};
    pub use crate::simulation::hostile::session;
}
pub mod gpu;
#[doc(hidden)]
pub mod hooks;
mod identity;
mod inbox;
mod limits;
mod memory;
mod os;
mod path;
mod peer;
mod peers;
mod prepared;
mod progress;
mod quarantine;
mod region;
mod session;
#[cfg(any(test, fuzzing))]
mod simulation;
mod slots;
#[doc(hidden)]
pub mod threads;
mod transfer;
mod transport;
mod work;
mod worker;

pub use batch::{Batch, Class};
pub use endpoint::{Builder, Endpoint, EndpointStats};
pub use error::{
    AcceptError, AddressTried, BuildError, ConnectError, Error, IdentityError, ImportError,
    PostError, RdmaError, RegisterError,
};
pub use failure::{Failure, LaneEvent, Operation};
pub use inbox::Notification;
pub use limits::RefusalStats;
pub use memory::{OwnedMemory, SharedMemory};
pub use os::copy;
pub use os::net::{Interface, interfaces};
pub use os::topology;
pub use path::{Path, PathKind};
pub use peer::Peer;
pub use peerway_core::config::{DataProtection, IdentityMode, Pin};
pub use peerway_core::descriptor::{DESCRIPTOR_LEN, Descriptor};
pub use peerway_core::ids::Incarnation;
pub use peerway_core::outcome::{Ended, EndedError, Fence, Reason, TransferError};
pub use peerway_core::region::Access;
pub use peerway_core::wire::MAX_NOTIFICATION;
pub use peerway_core::work::WorkError;
pub use prepared::{Enqueued, Prepared, Staged};
pub use quarantine::{QuarantineStats, quarantine};
pub use region::{LocalBlocks, LocalSlice, Region};
pub use session::remote::{RemoteBlocks, RemoteRegion, RemoteSlice};
pub use session::stats::PeerStats;
pub use slots::TransferStats;
pub use transfer::Transfer;
pub use work::Direction;
