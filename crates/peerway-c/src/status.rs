//! The result of a call: a status for the program, and an error message for its user.

use std::ffi::CStr;

use peerway::driven::ProxyError;
use peerway::gpu::GpuError;
use peerway::{
    AcceptError, BuildError, ConnectError, Ended, ImportError, PostError, Reason, RegisterError,
    TransferError, WorkError,
};

/// The result of a call. For every status but OK, PENDING and NOTHING, peerway_last_error() returns
/// a message.
///
/// The numbers never change. Later versions may add some.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum peerway_status {
    /// Success.
    Ok = 0,
    /// Not yet: within the time-out the transfer has not ended, the counter has not reached its
    /// value, or no peer has connected.
    Pending = 1,
    /// There is none: no fault, or no object of that number.
    Nothing = 2,

    /// A pointer is null that must not be null.
    NullArgument = 10,
    /// The handle was freed, has another type, or is not a handle.
    BadHandle = 11,
    /// The size field of a struct is wrong, or fields are set that this library does not know.
    BadSize = 12,
    /// An argument has an invalid value.
    BadArgument = 13,
    /// The buffer is too small. The length argument holds the needed size.
    TooSmall = 14,
    /// The maximum number of handles of one type exists already.
    TooManyHandles = 15,
    /// The library has a bug and panicked. The message says where. The handle that was used may no
    /// longer work.
    Panic = 16,

    /// A setting has an unknown name or an invalid value.
    InvalidSetting = 20,
    /// The pinned transport is not part of this build.
    TransportUnavailable = 21,
    /// RDMA is pinned but cannot be used.
    NoRdma = 22,
    /// The endpoint cannot listen on the address.
    Listen = 23,
    /// No network interface has that name.
    NoInterface = 24,
    /// A system call failed.
    Os = 25,
    /// The endpoint is closed.
    EndpointClosed = 26,
    /// The endpoint belongs to the parent process.
    Forked = 27,

    /// The range exceeds its region.
    Outside = 30,
    /// The pointer and the length are not a range of memory.
    BadRange = 31,
    /// The table of advertisements is full.
    TooManyAdvertisements = 32,
    /// Memory cannot be allocated.
    Allocate = 33,
    /// The operating system returned no random bytes.
    NoRandomness = 34,

    /// There is no usable GPU driver.
    NoDriver = 40,
    /// There is no GPU with that number.
    NoSuchGpu = 41,
    /// A GPU operation failed, or the address is not GPU memory.
    Gpu = 42,

    /// The bytes are not endpoint metadata.
    InvalidMetadata = 50,
    /// No address of the peer can be reached.
    Unreachable = 51,
    /// The peer did not answer in time.
    TimedOut = 52,
    /// The peer has an incompatible version.
    PeerIncompatible = 53,
    /// The peer violated the protocol.
    PeerMisbehaved = 54,
    /// The metadata or descriptor comes from another incarnation: the endpoint was restarted.
    OtherIncarnation = 55,
    /// The peer accepts no more sessions.
    PeerFull = 56,
    /// A pinned path is not available.
    PathUnavailable = 57,
    /// The peer refused the connection.
    PeerRefuses = 58,
    /// The bytes are not a descriptor.
    InvalidDescriptor = 59,
    /// The peer's memory cannot be mapped.
    Map = 60,
    /// The connection cannot be secured: the peer did not prove its identity, or bytes were
    /// changed.
    NotSecure = 61,
    /// One of the two endpoints does not admit the other (PEERWAY_IDENTITY).
    NotAdmitted = 62,

    /// The batch is invalid: lengths or list lengths differ, or a list is too long.
    InvalidWork = 70,
    /// All transfer slots are in use.
    Busy = 71,
    /// The region was not advertised for that direction.
    Access = 72,
    /// The remote region belongs to another peer.
    OtherPeer = 73,
    /// The notification is longer than PEERWAY_MAX_NOTIFICATION.
    NotificationTooLong = 74,
    /// One transfer uses local memory of several GPUs.
    MixedGpus = 75,
    /// There is no stage with that number.
    NoSuchStage = 76,
    /// The stage was released already.
    AlreadyReleased = 77,

    /// The peer is gone: its process ended, or every lane to it broke.
    PeerGone = 80,
    /// The peer has sent nothing for too long.
    PeerSilent = 81,
    /// The owner refused: it has no such region, the token or the direction is wrong, or the region
    /// is advertised to another peer.
    RemoteAccess = 82,
    /// The range exceeds the memory that the peer advertised.
    OutOfBounds = 83,
    /// The peer revoked its region.
    Revoked = 84,
    /// The peer's queue of notifications is full.
    NotificationsFull = 85,
    /// The peer has no room for another counter.
    CountersFull = 86,
    /// Registered memory was unmapped.
    Fault = 87,
    /// A lane broke. The notification may or may not have been delivered.
    DeliveryUnknown = 88,
    /// A device refused or failed the request.
    Device = 89,
    /// The transfer was cancelled.
    Cancelled = 90,
    /// The transfer's deadline passed.
    Deadline = 91,

    /// A number for a proxy is out of range.
    OutOfRange = 100,
    /// A forwarding rule is invalid.
    BadRule = 101,
    /// There is no room for another window.
    NoRoom = 102,
    /// The peer number is in use.
    Taken = 103,
    /// The bytes are not the peer info of a proxy.
    NotPeerInfo = 104,
    /// The endpoint has no room for another proxy.
    TooManyProxies = 105,
    /// A thread cannot be started.
    Thread = 106,
    /// The proxy is not armed.
    NotArmed = 107,

    /// An error that this header has no number for. The message describes it.
    Other = 127,
}

use peerway_status as Status;

/// Every status with its name, without the prefix.
const NAMES: [(Status, &CStr); 68] = [
    (Status::Ok, c"OK"),
    (Status::Pending, c"PENDING"),
    (Status::Nothing, c"NOTHING"),
    (Status::NullArgument, c"NULL_ARGUMENT"),
    (Status::BadHandle, c"BAD_HANDLE"),
    (Status::BadSize, c"BAD_SIZE"),
    (Status::BadArgument, c"BAD_ARGUMENT"),
    (Status::TooSmall, c"TOO_SMALL"),
    (Status::TooManyHandles, c"TOO_MANY_HANDLES"),
    (Status::Panic, c"PANIC"),
    (Status::InvalidSetting, c"INVALID_SETTING"),
    (Status::TransportUnavailable, c"TRANSPORT_UNAVAILABLE"),
    (Status::NoRdma, c"NO_RDMA"),
    (Status::Listen, c"LISTEN"),
    (Status::NoInterface, c"NO_INTERFACE"),
    (Status::Os, c"OS"),
    (Status::EndpointClosed, c"ENDPOINT_CLOSED"),
    (Status::Forked, c"FORKED"),
    (Status::Outside, c"OUTSIDE"),
    (Status::BadRange, c"BAD_RANGE"),
    (Status::TooManyAdvertisements, c"TOO_MANY_ADVERTISEMENTS"),
    (Status::Allocate, c"ALLOCATE"),
    (Status::NoRandomness, c"NO_RANDOMNESS"),
    (Status::NoDriver, c"NO_DRIVER"),
    (Status::NoSuchGpu, c"NO_SUCH_GPU"),
    (Status::Gpu, c"GPU"),
    (Status::InvalidMetadata, c"INVALID_METADATA"),
    (Status::Unreachable, c"UNREACHABLE"),
    (Status::TimedOut, c"TIMED_OUT"),
    (Status::PeerIncompatible, c"PEER_INCOMPATIBLE"),
    (Status::PeerMisbehaved, c"PEER_MISBEHAVED"),
    (Status::OtherIncarnation, c"OTHER_INCARNATION"),
    (Status::PeerFull, c"PEER_FULL"),
    (Status::PathUnavailable, c"PATH_UNAVAILABLE"),
    (Status::PeerRefuses, c"PEER_REFUSES"),
    (Status::InvalidDescriptor, c"INVALID_DESCRIPTOR"),
    (Status::Map, c"MAP"),
    (Status::NotSecure, c"NOT_SECURE"),
    (Status::NotAdmitted, c"NOT_ADMITTED"),
    (Status::InvalidWork, c"INVALID_WORK"),
    (Status::Busy, c"BUSY"),
    (Status::Access, c"ACCESS"),
    (Status::OtherPeer, c"OTHER_PEER"),
    (Status::NotificationTooLong, c"NOTIFICATION_TOO_LONG"),
    (Status::MixedGpus, c"MIXED_GPUS"),
    (Status::NoSuchStage, c"NO_SUCH_STAGE"),
    (Status::AlreadyReleased, c"ALREADY_RELEASED"),
    (Status::PeerGone, c"PEER_GONE"),
    (Status::PeerSilent, c"PEER_SILENT"),
    (Status::RemoteAccess, c"REMOTE_ACCESS"),
    (Status::OutOfBounds, c"OUT_OF_BOUNDS"),
    (Status::Revoked, c"REVOKED"),
    (Status::NotificationsFull, c"NOTIFICATIONS_FULL"),
    (Status::CountersFull, c"COUNTERS_FULL"),
    (Status::Fault, c"FAULT"),
    (Status::DeliveryUnknown, c"DELIVERY_UNKNOWN"),
    (Status::Device, c"DEVICE"),
    (Status::Cancelled, c"CANCELLED"),
    (Status::Deadline, c"DEADLINE"),
    (Status::OutOfRange, c"OUT_OF_RANGE"),
    (Status::BadRule, c"BAD_RULE"),
    (Status::NoRoom, c"NO_ROOM"),
    (Status::Taken, c"TAKEN"),
    (Status::NotPeerInfo, c"NOT_PEER_INFO"),
    (Status::TooManyProxies, c"TOO_MANY_PROXIES"),
    (Status::Thread, c"THREAD"),
    (Status::NotArmed, c"NOT_ARMED"),
    (Status::Other, c"OTHER"),
];

impl Status {
    /// The name of a number that C passed, without the prefix.
    pub(crate) fn name(number: i32) -> Option<&'static CStr> {
        NAMES.iter().find(|(status, _)| *status as i32 == number).map(|(_, name)| *name)
    }
}

/// The result of a call that did not succeed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    /// The error message. `None` if the status is not an error.
    pub(crate) sentence: Option<String>,
}

impl Failure {
    pub(crate) fn new(status: Status, sentence: impl Into<String>) -> Self {
        Self { status, sentence: Some(sentence.into()) }
    }

    /// The result is not there yet.
    pub(crate) const PENDING: Self = Self { status: Status::Pending, sentence: None };
    /// There is no such object.
    pub(crate) const NOTHING: Self = Self { status: Status::Nothing, sentence: None };

    pub(crate) fn bad(sentence: impl Into<String>) -> Self {
        Self::new(Status::BadArgument, sentence)
    }
}

/// The result of the body of a call.
pub(crate) type Answer<T = ()> = Result<T, Failure>;

fn of_gpu(error: &GpuError) -> Status {
    match error {
        GpuError::NoDriver(_) => Status::NoDriver,
        GpuError::NoSuchGpu { .. } => Status::NoSuchGpu,
        GpuError::Allocate { .. } => Status::Allocate,
        _ => Status::Gpu,
    }
}

fn of_build(error: &BuildError) -> Status {
    match error {
        BuildError::Config(_) | BuildError::Identity(_) => Status::InvalidSetting,
        BuildError::TransportUnavailable(_) => Status::TransportUnavailable,
        BuildError::NoRdma { .. } => Status::NoRdma,
        BuildError::Listen { .. } => Status::Listen,
        BuildError::NoInterface(_) => Status::NoInterface,
        BuildError::Os { .. } => Status::Os,
        _ => Status::Other,
    }
}

fn of_register(error: &RegisterError) -> Status {
    match error {
        RegisterError::Outside { .. } => Status::Outside,
        RegisterError::BadRange { .. } => Status::BadRange,
        RegisterError::TooMany { .. } => Status::TooManyAdvertisements,
        RegisterError::Allocate { .. } => Status::Allocate,
        RegisterError::Gpu(error) => of_gpu(error),
        RegisterError::NoRandomness => Status::NoRandomness,
        RegisterError::EndpointClosed => Status::EndpointClosed,
        RegisterError::Forked => Status::Forked,
        _ => Status::Other,
    }
}

fn of_connect(error: &ConnectError) -> Status {
    match error {
        ConnectError::Metadata(_) => Status::InvalidMetadata,
        ConnectError::Unreachable { .. } => Status::Unreachable,
        ConnectError::PeerIncompatible { .. } => Status::PeerIncompatible,
        ConnectError::PeerMisbehaved { .. } => Status::PeerMisbehaved,
        ConnectError::NotSecure { .. } => Status::NotSecure,
        ConnectError::NotAdmitted { .. } => Status::NotAdmitted,
        ConnectError::OtherIncarnation { .. } => Status::OtherIncarnation,
        ConnectError::PeerFull { .. } => Status::PeerFull,
        ConnectError::PathUnavailable { .. } => Status::PathUnavailable,
        ConnectError::PeerRefuses { .. } => Status::PeerRefuses,
        ConnectError::TimedOut { .. } => Status::TimedOut,
        ConnectError::Os { .. } => Status::Os,
        ConnectError::EndpointClosed => Status::EndpointClosed,
        ConnectError::Forked => Status::Forked,
        _ => Status::Other,
    }
}

fn of_accept(error: &AcceptError) -> Status {
    match error {
        AcceptError::TimedOut => Status::Pending,
        AcceptError::EndpointClosed => Status::EndpointClosed,
        AcceptError::Forked => Status::Forked,
        _ => Status::Other,
    }
}

fn of_import(error: &ImportError) -> Status {
    match error {
        ImportError::Descriptor(_) => Status::InvalidDescriptor,
        ImportError::OtherIncarnation => Status::OtherIncarnation,
        ImportError::Refused(why) => of_transfer(*why),
        ImportError::PathUnavailable { .. } => Status::PathUnavailable,
        ImportError::TimedOut => Status::TimedOut,
        ImportError::Map(_) => Status::Map,
        ImportError::EndpointClosed => Status::EndpointClosed,
        ImportError::Forked => Status::Forked,
        _ => Status::Other,
    }
}

fn of_work(error: &WorkError) -> Status {
    match error {
        WorkError::Outside { .. } => Status::Outside,
        WorkError::Device { .. } => Status::Device,
        _ => Status::InvalidWork,
    }
}

fn of_post(error: &PostError) -> Status {
    match error {
        PostError::Work(error) => of_work(error),
        PostError::Busy { .. } => Status::Busy,
        PostError::Access { .. } => Status::Access,
        PostError::OtherPeer => Status::OtherPeer,
        PostError::PeerGone { .. } => Status::PeerGone,
        PostError::NotificationTooLong { .. } => Status::NotificationTooLong,
        PostError::MixedGpus { .. } => Status::MixedGpus,
        PostError::Gpu(error) => of_gpu(error),
        PostError::NoSuchStage { .. } => Status::NoSuchStage,
        PostError::AlreadyReleased(_) => Status::AlreadyReleased,
        PostError::EndpointClosed => Status::EndpointClosed,
        PostError::Forked => Status::Forked,
        _ => Status::Other,
    }
}

fn of_transfer(error: TransferError) -> Status {
    match error {
        TransferError::PeerGone => Status::PeerGone,
        TransferError::PeerSilent => Status::PeerSilent,
        TransferError::RemoteAccess => Status::RemoteAccess,
        TransferError::OutOfBounds => Status::OutOfBounds,
        TransferError::Revoked => Status::Revoked,
        TransferError::NotificationsFull => Status::NotificationsFull,
        TransferError::CountersFull => Status::CountersFull,
        TransferError::Fault => Status::Fault,
        TransferError::PeerMisbehaved => Status::PeerMisbehaved,
        TransferError::EndpointClosed => Status::EndpointClosed,
        TransferError::DeliveryUnknown => Status::DeliveryUnknown,
        TransferError::Device => Status::Device,
        _ => Status::Other,
    }
}

fn of_proxy(error: &ProxyError) -> Status {
    match error {
        ProxyError::OutOfRange { .. } => Status::OutOfRange,
        ProxyError::Forward { .. } => Status::BadRule,
        ProxyError::NoRoom { .. } => Status::NoRoom,
        ProxyError::Taken { .. } => Status::Taken,
        ProxyError::NotPeerInfo => Status::NotPeerInfo,
        ProxyError::NoIds { .. } => Status::TooManyProxies,
        ProxyError::Register(error) => of_register(error),
        ProxyError::Import(error) => of_import(error),
        ProxyError::Gpu(error) => of_gpu(error),
        ProxyError::Thread(_) => Status::Thread,
        _ => Status::Other,
    }
}

/// The status that reports the end of a transfer.
pub(crate) fn of_end(ended: Ended) -> Status {
    match ended.reason {
        Reason::Done => Status::Ok,
        Reason::Cancelled => Status::Cancelled,
        Reason::TimedOut => Status::Deadline,
        Reason::Failed(why) => of_transfer(why),
    }
}

/// Converts errors of the engine. Each entry names an error and the function that gives its status.
macro_rules! failures {
    ($($error:ty => $status:expr,)*) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                let status = $status;
                Self::new(status(&error), error.to_string())
            }
        })*
    };
}

failures! {
    AcceptError => of_accept,
    BuildError => of_build,
    ConnectError => of_connect,
    GpuError => of_gpu,
    ImportError => of_import,
    PostError => of_post,
    ProxyError => of_proxy,
    RegisterError => of_register,
    WorkError => of_work,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_numbers() {
        assert!(NAMES.windows(2).all(|two| (two[0].0 as i32) < two[1].0 as i32));
        assert_eq!(Status::name(0), Some(c"OK"));
        assert_eq!(Status::name(Status::PeerGone as i32), Some(c"PEER_GONE"));
        assert_eq!(Status::name(3), None);
        assert_eq!(Status::name(-1), None);
    }

    #[test]
    fn errors_keep_their_kind_and_their_sentence() {
        let failure = Failure::from(PostError::Busy { slots: 4 });
        assert_eq!(failure.status, Status::Busy);
        assert!(failure.sentence.unwrap().contains("all 4 transfer slots"));
        let refused = ImportError::Refused(TransferError::Revoked);
        assert_eq!(Failure::from(refused).status, Status::Revoked);
        let nested = ProxyError::Register(RegisterError::EndpointClosed);
        assert_eq!(Failure::from(nested).status, Status::EndpointClosed);
    }
}
