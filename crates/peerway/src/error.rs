//! Errors, one type per operation: what was attempted, which side is at fault, and what to do.

use std::fmt::Write as _;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

use peerway_core::config::ConfigError;
use peerway_core::descriptor::DescriptorError;
use peerway_core::ids::Incarnation;
use peerway_core::metadata::MetadataError;
use peerway_core::outcome::TransferError;
use peerway_core::wire::FrameError;
use peerway_core::work::WorkError;

use crate::failure::Failure;
use crate::gpu::GpuError;
pub use crate::identity::IdentityError;
pub use crate::transport::error::RdmaError;

/// The endpoint could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A setting is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The pinned transport is not part of this build.
    #[error(
        "transport '{0}' is pinned (PEERWAY_TRANSPORT or UCCL_P2P_TRANSPORT) but not part of \
         this build; unset the pin or choose local or tcp"
    )]
    TransportUnavailable(String),
    /// An RDMA transport is pinned and cannot be used.
    #[error("PEERWAY_TRANSPORT={pin} (UCCL_P2P_TRANSPORT) cannot be met: {error}")]
    NoRdma {
        /// The pin.
        pin: String,
        /// Why it cannot be used.
        error: RdmaError,
    },
    /// The listening address could not be used.
    #[error("cannot listen on {addr}: {source}; choose another address or port 0")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// The operating system's reason.
        source: io::Error,
    },
    /// Every port of the range is in use.
    #[error(
        "cannot listen on {ip} with any port of PEERWAY_PORTS={}-{}: {source}; end another program \
         or choose more ports",
        ports.start(), ports.end()
    )]
    PortsInUse {
        /// The ports.
        ports: RangeInclusive<u16>,
        /// The address.
        ip: IpAddr,
        /// The operating system's reason, for the last port.
        source: io::Error,
    },
    /// No interface matches the filter.
    #[error("no interface matches '{0}'; `peerway doctor` lists the interfaces")]
    NoInterface(String),
    /// The endpoint cannot make its key pair, or cannot show that it may take part.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// Another operation of the operating system failed.
    #[error("{what}: {source}")]
    Os {
        /// What was attempted.
        what: &'static str,
        /// The operating system's reason.
        source: io::Error,
    },
}

/// Memory could not be registered, allocated or advertised.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The range lies outside the region.
    #[error("range {offset}+{len} leaves the region")]
    Outside {
        /// Offset of the first byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A null pointer or a length that wraps around the address space.
    #[error("{ptr:#x} + {len} is not a range of memory")]
    BadRange {
        /// Start address.
        ptr: usize,
        /// Length in bytes.
        len: usize,
    },
    /// The table of advertisements is full.
    #[error("all {max} advertisements are in use; revoke or drop some")]
    TooMany {
        /// The table's size.
        max: usize,
    },
    /// The operating system has no memory or no file descriptor left.
    #[error("cannot allocate {len} bytes of shareable memory: {source}")]
    Allocate {
        /// Length in bytes.
        len: usize,
        /// The operating system's reason.
        source: io::Error,
    },
    /// GPU memory could not be allocated, or the address is not GPU memory.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The random number generator failed.
    #[error("the operating system gave no random bytes")]
    NoRandomness,
    /// The endpoint is closed.
    #[error("the endpoint is closed")]
    EndpointClosed,
    /// The endpoint was inherited through fork.
    #[error("the endpoint belongs to the parent process; create one after the fork")]
    Forked,
}

/// A connect failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The bytes are not metadata.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// No address of the peer answered.
    #[error("cannot reach the peer at {addr}: {source}{}", list(others))]
    Unreachable {
        /// The peer's best address.
        addr: SocketAddr,
        /// The operating system's reason.
        source: io::Error,
        /// The peer's other addresses, and what happened to each.
        others: Vec<AddressTried>,
    },
    /// An endpoint answered in time, but it does not speak this protocol version.
    #[error("the peer at {addr} is incompatible: {why}")]
    PeerIncompatible {
        /// The peer's address.
        addr: SocketAddr,
        /// What differs.
        why: FrameError,
    },
    /// The peer broke the handshake protocol.
    #[error("the peer at {addr} broke the handshake: {why}")]
    PeerMisbehaved {
        /// The peer's address.
        addr: SocketAddr,
        /// What it did wrong.
        why: &'static str,
    },
    /// TLS failed: the other side is not what it claims, or a third party changed bytes.
    #[error("the connection to {addr} cannot be secured: {why}")]
    NotSecure {
        /// The address.
        addr: SocketAddr,
        /// What failed.
        why: String,
    },
    /// One of the two endpoints does not admit the other (`PEERWAY_IDENTITY`).
    #[error("no session with the peer at {addr}: {why}")]
    NotAdmitted {
        /// The address.
        addr: SocketAddr,
        /// Which side does not admit the other, and why.
        why: String,
    },
    /// Another endpoint listens at the peer's address: the peer restarted, or a stranger answers in
    /// its place. It has not proven the expected identity, and it has been told nothing.
    #[error(
        "the endpoint at {addr} did not prove to be {expected}: the peer has restarted, or \
         another endpoint has its address; get its new metadata"
    )]
    OtherIncarnation {
        /// The address.
        addr: SocketAddr,
        /// The incarnation that the metadata named.
        expected: Incarnation,
    },
    /// The peer accepts no more sessions.
    #[error("the peer at {addr} accepts no more sessions: {why}")]
    PeerFull {
        /// The peer's address.
        addr: SocketAddr,
        /// The limit that is reached, as the peer says it.
        why: String,
    },
    /// The pinned path is not available.
    #[error("path '{pin}' is pinned but not available to {addr}: {why}")]
    PathUnavailable {
        /// The pin.
        pin: String,
        /// The peer's address.
        addr: SocketAddr,
        /// Why it is not available.
        why: String,
    },
    /// The peer refuses because of its own pin.
    #[error("the peer at {addr} refuses: {why}")]
    PeerRefuses {
        /// The peer's address.
        addr: SocketAddr,
        /// The peer's reason.
        why: String,
    },
    /// The connect time-out passed.
    #[error("connecting to {addr} timed out after {millis} ms while {stage}{}", list(others))]
    TimedOut {
        /// The peer's address.
        addr: SocketAddr,
        /// The time limit of the whole connect.
        millis: u64,
        /// What the connect was doing when the time ran out, such as "opening the TCP connection".
        stage: &'static str,
        /// The peer's other addresses, and what happened to each.
        others: Vec<AddressTried>,
    },
    /// A local operation of the operating system failed.
    #[error("{what}: {source}")]
    Os {
        /// What was attempted.
        what: &'static str,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The endpoint is closed.
    #[error("the endpoint is closed")]
    EndpointClosed,
    /// The endpoint was inherited through fork.
    #[error("the endpoint belongs to the parent process; create one after the fork")]
    Forked,
}

/// An address of a peer that gave no session.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct AddressTried {
    /// The address.
    pub addr: SocketAddr,
    /// How long the attempt took. Zero if there was none.
    pub took: Duration,
    /// What happened.
    pub why: String,
}

/// The end of a sentence that lists further addresses.
fn list(others: &[AddressTried]) -> String {
    let mut text = String::new();
    for AddressTried { addr, took, why } in others {
        let before = if text.is_empty() { "; other addresses of it: " } else { ", " };
        // Writing to a string cannot fail.
        let _ = write!(text, "{before}{addr} ({why}");
        let _ = match took.as_secs_f64() {
            0.0 => write!(text, ")"),
            seconds => write!(text, ", after {seconds:.1} s)"),
        };
    }
    text
}

/// No peer was accepted.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AcceptError {
    /// No peer connected in time.
    #[error("no peer connected in time")]
    TimedOut,
    /// The endpoint is closed.
    #[error("the endpoint is closed")]
    EndpointClosed,
    /// The endpoint was inherited through fork.
    #[error("the endpoint belongs to the parent process; create one after the fork")]
    Forked,
}

/// An import failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The bytes are not a descriptor.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// Another endpoint made the descriptor, or an earlier incarnation of this peer did.
    #[error(
        "the descriptor was not made by this peer, or an earlier incarnation of it made it; \
         get a new descriptor"
    )]
    OtherIncarnation,
    /// The owner refused the descriptor.
    #[error(transparent)]
    Refused(TransferError),
    /// The pinned path cannot access this memory.
    #[error("path '{pin}' is pinned but cannot reach this region: {why}")]
    PathUnavailable {
        /// The pin.
        pin: String,
        /// Why it cannot.
        why: String,
    },
    /// The owner did not answer within the connect time-out.
    #[error("the peer did not answer the import in time")]
    TimedOut,
    /// The peer's memory could not be mapped here.
    #[error("the peer's memory cannot be mapped: {0}")]
    Map(io::Error),
    /// The endpoint is closed.
    #[error("the endpoint is closed")]
    EndpointClosed,
    /// The endpoint was inherited through fork.
    #[error("the endpoint belongs to the parent process; create one after the fork")]
    Forked,
}

/// A post failed.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The work is invalid.
    #[error(transparent)]
    Work(#[from] WorkError),
    /// All transfer slots are in use, by transfers in progress or by ended ones whose result the
    /// caller has not taken.
    #[error(
        "all {slots} transfer slots are in use; wait for some transfers to end, take the results \
         of ended ones, or raise PEERWAY_SLOTS"
    )]
    Busy {
        /// The number of slots.
        slots: usize,
    },
    /// The peer did not advertise the region for this direction.
    #[error("the peer advertised this region for {allowed:?} only")]
    Access {
        /// The advertised access.
        allowed: peerway_core::region::Access,
    },
    /// The remote region belongs to another peer.
    #[error("a remote region of another peer was used; import the region from this peer")]
    OtherPeer,
    /// The session with the peer has ended. Connect again to reach the peer's next incarnation.
    #[error("the peer is gone: {peer} (incarnation {incarnation}); connect again to continue")]
    PeerGone {
        /// The address that the session was opened with.
        peer: SocketAddr,
        /// The incarnation of the peer.
        incarnation: Incarnation,
    },
    /// The notification is longer than allowed.
    #[error("a notification of {len} bytes is over the cap of {max}")]
    NotificationTooLong {
        /// Length of the notification in bytes.
        len: usize,
        /// The longest allowed length.
        max: usize,
    },
    /// The transfer names local memory of several GPUs.
    #[error("the transfer names local memory of GPU {first} and of GPU {other}: post one for each")]
    MixedGpus {
        /// The first GPU that it names.
        first: u32,
        /// Another GPU that it names.
        other: u32,
    },
    /// The GPU driver refused the stream, or the transfer has no GPU memory.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The stage does not exist.
    #[error("there is no stage {stage}; there are {stages}")]
    NoSuchStage {
        /// The requested stage.
        stage: usize,
        /// The number of stages.
        stages: usize,
    },
    /// The stage was released before.
    #[error("stage {0} was released already")]
    AlreadyReleased(usize),
    /// The endpoint is closed.
    #[error("the endpoint is closed")]
    EndpointClosed,
    /// The endpoint was inherited through fork.
    #[error("the endpoint belongs to the parent process; create one after the fork")]
    Forked,
}

/// A blocking read or write failed.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The transfer could not be posted.
    #[error(transparent)]
    Post(#[from] PostError),
    /// The transfer ended with another result than done.
    #[error(transparent)]
    Ended(#[from] Box<Failure>),
}

/// Wraps an error of the operating system.
pub(crate) fn os(what: &'static str) -> impl FnOnce(io::Error) -> BuildError {
    move |source| BuildError::Os { what, source }
}
