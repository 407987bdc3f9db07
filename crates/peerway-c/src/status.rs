//! What a call answers: a status for programs, a sentence for people.

use std::ffi::CStr;

use peerway::driven::ProxyError;
use peerway::gpu::GpuError;
use peerway::{
    AcceptError, BuildError, ConnectError, Ended, ImportError, PostError, Reason, RegisterError,
    TransferError, WorkError,
};

/// How a call went. Everything but OK, PENDING and NOTHING has a sentence in peerway_last_error().
///
/// Numbers stay what they are; later versions may add some.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum peerway_status {
    /// Done.
    Ok = 0,
    /// Not yet: the transfer has not ended, the counter is not there, nobody has connected in the time given.
    Pending = 1,
    /// There is none: no notification, no fault, nothing of that number.
    Nothing = 2,

    /// A pointer that must not be null was.
    NullArgument = 10,
    /// A handle that was freed, is of another kind, or never was one.
    BadHandle = 11,
    /// A struct's size is none that this library knows, or it has fields set that this library does not know.
    BadSize = 12,
    /// A value that cannot be meant.
    BadArgument = 13,
    /// The buffer is too small; its length argument says what is needed.
    TooSmall = 14,
    /// More handles of one kind than there can be.
    TooManyHandles = 15,
    /// The library failed in a way it should not have; the sentence says where. The handle that was used may be of no more use.
    Panic = 16,

    /// A setting makes no sense.
    InvalidSetting = 20,
    /// The pinned transport is not part of this build.
    TransportUnavailable = 21,
    /// RDMA is pinned and cannot be used.
    NoRdma = 22,
    /// The address cannot be listened on.
    Listen = 23,
    /// No network interface has that name.
    NoInterface = 24,
    /// The operating system refused something.
    Os = 25,
    /// The endpoint is closed.
    EndpointClosed = 26,
    /// The endpoint belongs to the parent process.
    Forked = 27,

    /// A range that leaves its region.
    Outside = 30,
    /// Not a range of memory.
    BadRange = 31,
    /// The table of advertisements is full.
    TooManyAdvertisements = 32,
    /// Memory could not be allocated.
    Allocate = 33,
    /// The operating system gave no random bytes.
    NoRandomness = 34,

    /// No driver for GPUs, or none that can be used.
    NoDriver = 40,
    /// No GPU of that number.
    NoSuchGpu = 41,
    /// A GPU, or memory that is said to be one's.
    Gpu = 42,

    /// The bytes are no metadata.
    InvalidMetadata = 50,
    /// Nobody answers at the peer's addresses.
    Unreachable = 51,
    /// The peer did not answer in time.
    TimedOut = 52,
    /// The peer speaks another version.
    PeerIncompatible = 53,
    /// The peer does not follow the protocol.
    PeerMisbehaved = 54,
    /// Another life of the endpoint: it was restarted.
    OtherIncarnation = 55,
    /// The peer takes no more sessions.
    PeerFull = 56,
    /// A pinned path cannot be had.
    PathUnavailable = 57,
    /// The peer refuses.
    PeerRefuses = 58,
    /// The bytes are no descriptor.
    InvalidDescriptor = 59,
    /// The peer's memory cannot be mapped.
    Map = 60,

    /// The work makes no sense: lengths differ, lists are of different length, or too long.
    InvalidWork = 70,
    /// All transfer slots are in use.
    Busy = 71,
    /// The region was not advertised for that direction.
    Access = 72,
    /// A region of another peer.
    OtherPeer = 73,
    /// A notification over the cap.
    NotificationTooLong = 74,
    /// Local memory of several GPUs in one transfer.
    MixedGpus = 75,
    /// No stage of that number.
    NoSuchStage = 76,
    /// The stage was released already.
    AlreadyReleased = 77,

    /// The peer is gone.
    PeerGone = 80,
    /// The peer has been silent for too long.
    PeerSilent = 81,
    /// The owner refused: no such region, another token or direction, or not for us.
    RemoteAccess = 82,
    /// Outside what the peer advertised.
    OutOfBounds = 83,
    /// The peer took its region back.
    Revoked = 84,
    /// The peer's queue of notifications is full.
    NotificationsFull = 85,
    /// The peer has no room for another counter.
    CountersFull = 86,
    /// Registered memory was unmapped.
    Fault = 87,
    /// A lane broke, and whether the notification was delivered is not known.
    DeliveryUnknown = 88,
    /// A device refused or failed the request.
    Device = 89,
    /// The transfer was cancelled.
    Cancelled = 90,
    /// The transfer's deadline passed.
    Deadline = 91,

    /// A number for a proxy is out of its range.
    OutOfRange = 100,
    /// A rule about arrivals makes no sense.
    BadRule = 101,
    /// No room for another window.
    NoRoom = 102,
    /// The peer's number is taken.
    Taken = 103,
    /// The bytes are not the peer info of a proxy.
    NotPeerInfo = 104,
    /// The endpoint has no room for another proxy.
    TooManyProxies = 105,
    /// A thread could not be started.
    Thread = 106,
    /// The proxy is not armed.
    NotArmed = 107,

    /// An error of a kind that this library's header does not know; the sentence says what.
    Other = 127,
}

use peerway_status as Status;

/// Every status by the end of its name.
const NAMES: [(Status, &CStr); 66] = [
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
    /// The end of the name of a number that C holds.
    pub(crate) fn name(number: i32) -> Option<&'static CStr> {
        NAMES.iter().find(|(status, _)| *status as i32 == number).map(|(_, name)| *name)
    }
}

/// A call that did not do what it was asked for.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    /// `None` where it is an answer and no error.
    pub(crate) sentence: Option<String>,
}

impl Failure {
    pub(crate) fn new(status: Status, sentence: impl Into<String>) -> Self {
        Self { status, sentence: Some(sentence.into()) }
    }

    /// Not yet.
    pub(crate) const PENDING: Self = Self { status: Status::Pending, sentence: None };
    /// There is none.
    pub(crate) const NOTHING: Self = Self { status: Status::Nothing, sentence: None };

    pub(crate) fn bad(sentence: impl Into<String>) -> Self {
        Self::new(Status::BadArgument, sentence)
    }
}

/// What the body of a call returns.
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
        BuildError::Config(_) => Status::InvalidSetting,
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
        PostError::PeerGone => Status::PeerGone,
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

/// The status that an end is told by.
pub(crate) fn of_end(ended: Ended) -> Status {
    match ended.reason {
        Reason::Done => Status::Ok,
        Reason::Cancelled => Status::Cancelled,
        Reason::TimedOut => Status::Deadline,
        Reason::Failed(why) => of_transfer(why),
    }
}

/// An error of the engine with the function that gives its status.
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
