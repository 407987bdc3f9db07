//! Errors by boundary: what was attempted, who is at fault, what to do.

use std::io;
use std::net::SocketAddr;

use peerway_core::config::ConfigError;
use peerway_core::descriptor::DescriptorError;
use peerway_core::ids::Incarnation;
use peerway_core::metadata::MetadataError;
use peerway_core::outcome::{EndedError, TransferError};
use peerway_core::wire::FrameError;
use peerway_core::work::WorkError;

use crate::gpu::GpuError;
pub use crate::transport::verbs::RdmaError;

/// An endpoint could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A setting makes no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The pinned transport does not exist here.
    #[error(
        "transport '{0}' is pinned (PEERWAY_TRANSPORT or UCCL_P2P_TRANSPORT) but not part of this build; \
         unset the pin or choose local or tcp"
    )]
    TransportUnavailable(String),
    /// A pin to RDMA that cannot be met.
    #[error("PEERWAY_TRANSPORT={pin} (UCCL_P2P_TRANSPORT) cannot be met: {error}")]
    NoRdma {
        /// The pin.
        pin: String,
        /// Why not.
        error: RdmaError,
    },
    /// The listening address could not be used.
    #[error("cannot listen on {addr}: {source}; choose another address or port 0")]
    Listen {
        /// Which address.
        addr: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// No interface matches the filter.
    #[error("no interface matches '{0}'; `peerway doctor` lists the interfaces")]
    NoInterface(String),
    /// The operating system refused something else.
    #[error("{what}: {source}")]
    Os {
        /// What was attempted.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// Memory could not be registered, allocated or advertised.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The range leaves the region.
    #[error("range {offset}+{len} leaves the region")]
    Outside {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// A null pointer or a length that wraps around the address space.
    #[error("{ptr:#x} + {len} is not a range of memory")]
    BadRange {
        /// Address.
        ptr: usize,
        /// Bytes.
        len: usize,
    },
    /// The table of advertisements is full.
    #[error("{max} advertisements exist already; revoke or drop some")]
    TooMany {
        /// The table's size.
        max: usize,
    },
    /// The operating system has no memory or no file descriptor for it.
    #[error("cannot allocate {len} bytes of shareable memory: {source}")]
    Allocate {
        /// Bytes.
        len: usize,
        /// Why not.
        source: io::Error,
    },
    /// GPU memory could not be had, or is none.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The random number generator failed.
    #[error("the operating system gave no random bytes")]
    NoRandomness,
    /// The endpoint is closed.
    #[error("the endpoint is closed")]
    EndpointClosed,
    /// The endpoint was inherited through fork.
    #[error("the endpoint belongs to the parent process; make one after the fork")]
    Forked,
}

/// A peer could not be reached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The bytes are no metadata.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// No address of the peer answered.
    #[error("cannot reach the peer at {addr}: {source}")]
    Unreachable {
        /// The last address tried.
        addr: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// Something answered in time but it does not speak this protocol version.
    #[error("the peer at {addr} is incompatible: {why}")]
    PeerIncompatible {
        /// Where.
        addr: SocketAddr,
        /// How.
        why: FrameError,
    },
    /// It broke the handshake.
    #[error("the peer at {addr} broke the handshake: {why}")]
    PeerMisbehaved {
        /// Where.
        addr: SocketAddr,
        /// How.
        why: &'static str,
    },
    /// The peer restarted: another endpoint lives at its address now.
    #[error("the endpoint {expected} no longer lives at {addr}; get its new metadata")]
    OtherIncarnation {
        /// Where.
        addr: SocketAddr,
        /// Who was meant.
        expected: Incarnation,
    },
    /// The peer takes no more sessions.
    #[error("the peer at {addr} takes no more sessions")]
    PeerFull {
        /// Where.
        addr: SocketAddr,
    },
    /// A pinned path cannot be had.
    #[error("path '{pin}' is pinned but cannot be had to {addr}: {why}")]
    PathUnavailable {
        /// The pin.
        pin: String,
        /// To whom.
        addr: SocketAddr,
        /// Why not.
        why: String,
    },
    /// The peer's own pin refuses.
    #[error("the peer at {addr} refuses: {why}")]
    PeerRefuses {
        /// Where.
        addr: SocketAddr,
        /// Why.
        why: String,
    },
    /// The connect time-out passed.
    #[error("connecting to {addr} timed out after {millis} ms while {stage}")]
    TimedOut {
        /// Where.
        addr: SocketAddr,
        /// The time that the whole connect was given.
        millis: u64,
        /// What the connect was doing at the end of that time, such as "opening the TCP connection".
        stage: &'static str,
    },
    /// The operating system refused something local.
    #[error("{what}: {source}")]
    Os {
        /// What was attempted.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The endpoint is closed.
    #[error("the endpoint is closed")]
    EndpointClosed,
    /// The endpoint was inherited through fork.
    #[error("the endpoint belongs to the parent process; make one after the fork")]
    Forked,
}

/// Nobody was accepted.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AcceptError {
    /// Nobody came in time.
    #[error("no peer connected in time")]
    TimedOut,
    /// The endpoint is closed.
    #[error("the endpoint is closed")]
    EndpointClosed,
    /// The endpoint was inherited through fork.
    #[error("the endpoint belongs to the parent process; make one after the fork")]
    Forked,
}

/// A descriptor could not be turned into a remote region.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The bytes are no descriptor.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// It was made by another endpoint, or by an earlier life of this one.
    #[error("the descriptor was not made by this peer, or by an earlier life of it")]
    OtherIncarnation,
    /// The owner says no.
    #[error(transparent)]
    Refused(TransferError),
    /// The peer is pinned to a path that cannot reach this memory.
    #[error("path '{pin}' is pinned but cannot reach this region: {why}")]
    PathUnavailable {
        /// The pin.
        pin: String,
        /// Why not.
        why: String,
    },
    /// The owner did not answer within the connect time-out.
    #[error("the peer did not answer the import in time")]
    TimedOut,
    /// What it sent cannot be mapped.
    #[error("the peer's memory cannot be mapped: {0}")]
    Map(io::Error),
    /// The endpoint is closed.
    #[error("the endpoint is closed")]
    EndpointClosed,
    /// The endpoint was inherited through fork.
    #[error("the endpoint belongs to the parent process; make one after the fork")]
    Forked,
}

/// A transfer could not be posted.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The work makes no sense.
    #[error(transparent)]
    Work(#[from] WorkError),
    /// Every transfer slot is taken, by transfers under way or by ended ones that nobody has looked at.
    #[error(
        "all {slots} transfer slots are in use; wait for some to end, look at those that have, or raise \
         PEERWAY_SLOTS"
    )]
    Busy {
        /// How many there are.
        slots: usize,
    },
    /// The region was not advertised for this direction.
    #[error("the peer advertised this region for {allowed:?} only")]
    Access {
        /// What is allowed.
        allowed: peerway_core::region::Access,
    },
    /// The remote region belongs to another peer.
    #[error("a remote region of another peer was used")]
    OtherPeer,
    /// The peer is gone.
    #[error("the peer is gone")]
    PeerGone,
    /// The notification is longer than the cap.
    #[error("a notification of {len} bytes is over the cap of {max}")]
    NotificationTooLong {
        /// Bytes.
        len: usize,
        /// Cap.
        max: usize,
    },
    /// Local memory of several GPUs in one transfer.
    #[error("the transfer names local memory of GPU {first} and of GPU {other}: post one for each")]
    MixedGpus {
        /// The first that is named.
        first: u32,
        /// One that is not the same.
        other: u32,
    },
    /// A stream was named, and the driver refused it, or the transfer has nothing to do with a GPU.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// A stage number that does not exist.
    #[error("there is no stage {stage}; there are {stages}")]
    NoSuchStage {
        /// Asked for.
        stage: usize,
        /// How many exist.
        stages: usize,
    },
    /// A stage released twice.
    #[error("stage {0} was released already")]
    AlreadyReleased(usize),
    /// The endpoint is closed.
    #[error("the endpoint is closed")]
    EndpointClosed,
    /// The endpoint was inherited through fork.
    #[error("the endpoint belongs to the parent process; make one after the fork")]
    Forked,
}

/// A blocking read or write failed.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It could not be posted.
    #[error(transparent)]
    Post(#[from] PostError),
    /// It ended otherwise than done.
    #[error(transparent)]
    Ended(#[from] EndedError),
}
