//! Peerway moves bytes between the memories of two processes by one-sided reads and writes.
//!
//! An [`Endpoint`] listens and owns registered memory ([`Region`]). A region is advertised as a
//! 64-byte descriptor, handed over by any means; the other side connects ([`Peer`]), imports it
//! ([`RemoteRegion`]) and reads or writes without the owner's code taking part.
//!
//! - Every transfer ends, in bounded time, whatever the peer does ([`Ended`]).
//! - Nothing lands late, or it is said: [`Fence`].
//! - Done means there: notifications and counters are seen after the bytes they speak of, once.
//! - A peer reaches only what was advertised.
//!
//! `ARCHITECTURE.md` in the repository is the map of how.

mod address;
mod batch;
mod builder;
mod clock;
pub mod driven;
mod endpoint;
mod error;
pub mod gpu;
#[doc(hidden)]
pub mod hooks;
mod inbox;
mod inner;
mod memory;
mod os;
mod path;
mod peer;
mod peers;
mod progress;
mod session;
mod shards;
mod slots;
mod staged;
mod stats;
#[doc(hidden)]
pub mod threads;
mod transfer;
mod transport;
mod worker;

pub use batch::{Batch, Class, Direction};
pub use builder::Builder;
pub use endpoint::Endpoint;
pub use error::{
    AcceptError, BuildError, ConnectError, Error, ImportError, PostError, RdmaError, RegisterError,
};
pub use inbox::Notification;
pub use memory::quarantine::{QuarantineStats, quarantine};
pub use memory::{
    LocalBlocks, LocalSlice, OwnedMemory, Region, RemoteBlocks, RemoteRegion, RemoteSlice,
    SharedMemory,
};
pub use os::copy;
pub use os::net::{Interface, interfaces};
pub use os::topology;
pub use path::{Path, PathKind};
pub use peer::{Peer, PeerStats, Prepared};
pub use peerway_core::config::Pin;
pub use peerway_core::descriptor::{DESCRIPTOR_LEN, Descriptor};
pub use peerway_core::ids::Incarnation;
pub use peerway_core::outcome::{Ended, EndedError, Fence, Reason, TransferError};
pub use peerway_core::region::Access;
pub use peerway_core::wire::MAX_NOTIFICATION;
pub use peerway_core::work::WorkError;
pub use slots::TransferStats;
pub use staged::Staged;
pub use stats::EndpointStats;
pub use transfer::Transfer;
