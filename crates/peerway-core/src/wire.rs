//! Frames: what travels on a lane, be it a TCP connection or a shared ring.
//!
//! A frame is a 64-byte header and `body` bytes: first a table of `segments` entries of 12 bytes
//! (20 for a pull), then the payload. Frames that change something at the peer carry a sequence
//! number; a lane processes them in order, so one cumulative acknowledgement covers many.
//!
//! Nothing here allocates by what a peer says: lengths are capped per kind by [`Header::check`].

use serde::{Deserialize, Serialize};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::descriptor::DESCRIPTOR_LEN;
use crate::ids::Incarnation;
use crate::region::{Access, MemoryKind};

/// `"PW"`.
pub const MAGIC: u16 = 0x5750;
/// The protocol spoken here. Peers of another version are refused at the handshake.
pub const VERSION: u8 = 2;
/// Bytes in a header.
pub const HEADER_LEN: usize = size_of::<Header>();
/// Bytes of payload in one data frame: one large socket send (512 KiB to 1 MiB measured best).
pub const MAX_PAYLOAD: u64 = 1 << 20;
/// Segments in one data frame: enough for 128 blocks of 4 KiB twice over, and well under IOV_MAX.
pub const MAX_SEGMENTS: usize = 256;
/// Bytes of one pull frame's work: large enough that two pullers stay busy, small enough that a
/// cancel waits for little.
pub const MAX_PULL: u64 = 16 << 20;
/// Longest notification.
pub const MAX_NOTIFICATION: usize = 1 << 20;
/// In the `status` of `Write` and `Pull`: when the frame has been applied, the counter `immediate` goes up
/// by one. Bytes and count are one frame, so they are applied together, once, or not at all.
pub const COUNTS: u16 = 1;
/// Longest control message.
pub const MAX_CONTROL: usize = 16 << 10;

/// What a frame is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub enum Kind {
    /// Payload for the peer's memory.
    Write = 1,
    /// Asks for bytes of the peer's memory.
    Read = 2,
    /// The bytes a read asked for.
    ReadData = 3,
    /// Asks the peer to copy from our memory into its own.
    Pull = 4,
    /// A message for the peer's notification queue.
    Notify = 5,
    /// Adds one to a counter of the peer.
    Count = 6,
    /// All sequenced frames up to `sequence` were applied.
    Ack = 7,
    /// The frame `sequence` was refused; `status` says why.
    Nack = 8,
    /// The pull `sequence` is done.
    Pulled = 9,
    /// Alive: `sequence` is our clock, `transfer` the last clock heard from the peer.
    Beat = 10,
    /// A control message, postcard-encoded.
    Control = 11,
    /// Stop working on `transfer`.
    Cancel = 12,
}

impl Kind {
    fn from_code(code: u8) -> Option<Self> {
        use Kind::*;
        [Write, Read, ReadData, Pull, Notify, Count, Ack, Nack, Pulled, Beat, Control, Cancel]
            .into_iter()
            .find(|k| *k as u8 == code)
    }

    /// Whether the lane counts this frame and the peer acknowledges it.
    pub fn is_sequenced(self) -> bool {
        use Kind::*;
        matches!(self, Write | Read | Pull | Notify | Count | Cancel)
    }
}

/// The head of every frame.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct Header {
    magic: U16,
    version: u8,
    kind: u8,
    /// Why a frame was refused (a `TransferError` code), in `Nack`; [`COUNTS`] in `Write` and `Pull`.
    pub status: U16,
    segments: U16,
    body: U32,
    /// The owner's grant.
    pub grant: U32,
    /// Its generation.
    pub generation: U32,
    /// Counter id, in `Count` and in frames that count.
    pub immediate: U32,
    /// Number of this frame on its lane, or of the one it answers.
    pub sequence: U64,
    /// The sender's transfer.
    pub transfer: U64,
    /// Where the payload starts in the advertisement when there is no table.
    pub offset: U64,
    /// The capability.
    pub token: [u8; 16],
}

const _: () = assert!(size_of::<Header>() == 64);

/// A header that passed [`Header::check`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Checked {
    /// What it is.
    pub kind: Kind,
    /// Entries in the table.
    pub segments: usize,
    /// Bytes of the table.
    pub table: usize,
    /// Bytes after the table.
    pub payload: usize,
}

impl Header {
    /// A header of this kind, everything else zero.
    pub fn new(kind: Kind) -> Self {
        Self {
            magic: MAGIC.into(),
            version: VERSION,
            kind: kind as u8,
            status: 0.into(),
            segments: 0.into(),
            body: 0.into(),
            grant: 0.into(),
            generation: 0.into(),
            immediate: 0.into(),
            sequence: 0.into(),
            transfer: 0.into(),
            offset: 0.into(),
            token: [0; 16],
        }
    }

    /// The counter that a `Write` or `Pull` adds to when it has been applied.
    pub fn counts(&self) -> Option<u32> {
        (self.status.get() == COUNTS).then(|| self.immediate.get())
    }

    /// Sets the lengths of what follows.
    pub fn set_body(&mut self, segments: usize, table: usize, payload: usize) {
        debug_assert!(segments <= MAX_SEGMENTS);
        self.segments = (segments as u16).into();
        self.body = ((table + payload) as u32).into();
    }

    /// Whether these bytes can be a header of ours, and what follows it. All later arithmetic on
    /// the lengths relies on the caps checked here.
    pub fn check(&self) -> Result<Checked, FrameError> {
        if self.magic.get() != MAGIC {
            return Err(FrameError::NotPeerway);
        }
        if self.version != VERSION {
            return Err(FrameError::Version(self.version));
        }
        let kind = Kind::from_code(self.kind).ok_or(FrameError::Kind(self.kind))?;
        let segments = usize::from(self.segments.get());
        let body = self.body.get() as usize;
        let entry = if kind == Kind::Pull { PULL_SEGMENT_LEN } else { SEGMENT_LEN };
        let table = segments * entry;
        let too_long = FrameError::TooLong { kind: self.kind, body };
        let payload = body.checked_sub(table).ok_or(too_long)?;
        let (max_segments, min_segments, max_payload) = match kind {
            Kind::Write => (MAX_SEGMENTS, 0, MAX_PAYLOAD as usize),
            Kind::Read => (MAX_SEGMENTS, 1, 0),
            Kind::ReadData => (0, 0, MAX_PAYLOAD as usize),
            Kind::Pull => (MAX_SEGMENTS, 1, 0),
            Kind::Notify => (0, 0, MAX_NOTIFICATION),
            Kind::Control => (0, 0, MAX_CONTROL),
            _ => (0, 0, 0),
        };
        if payload > max_payload || !(min_segments..=max_segments).contains(&segments) {
            return Err(too_long);
        }
        Ok(Checked { kind, segments, table, payload })
    }
}

/// A table entry of `Write` and `Read`: a run of the peer's memory.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct Segment {
    /// First byte in the advertisement.
    pub offset: U64,
    /// How many bytes.
    pub len: U32,
}

/// Bytes of a [`Segment`].
pub const SEGMENT_LEN: usize = size_of::<Segment>();

/// A table entry of `Pull`: a run of the peer's memory and where its bytes are in ours.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct PullSegment {
    /// First byte in the advertisement.
    pub offset: U64,
    /// How many bytes.
    pub len: U32,
    /// Address in the sender of the frame.
    pub source: U64,
}

/// Bytes of a [`PullSegment`].
pub const PULL_SEGMENT_LEN: usize = size_of::<PullSegment>();
const _: () = assert!(SEGMENT_LEN == 12 && PULL_SEGMENT_LEN == 20);

/// Bytes that are no frame of ours. A lane that carries them is closed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Some other protocol.
    #[error(
        "the other side does not speak Peerway's protocol (is this the port of something else?)"
    )]
    NotPeerway,
    /// Another version.
    #[error("the other side speaks protocol version {0}, this is version {VERSION}")]
    Version(u8),
    /// An unknown kind of frame.
    #[error("unknown frame kind {0}")]
    Kind(u8),
    /// Longer than its kind may be, or with a table that does not fit.
    #[error("frame of kind {kind} with a body of {body} bytes is out of bounds")]
    TooLong {
        /// Kind code.
        kind: u8,
        /// Bytes announced.
        body: usize,
    },
    /// A control message that does not parse, or comes at the wrong time.
    #[error("malformed or misplaced control message")]
    Control,
    /// A frame that makes no sense here (wrong sequence, answer to nothing).
    #[error("frame out of order")]
    Order,
}

/// Control messages: rare, versioned by the header, capped by [`MAX_CONTROL`].
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[non_exhaustive]
pub enum Control {
    /// Opens a session: the first frame on a connection.
    Hello(Hello),
    /// Adds a lane to a session: the first frame on a further connection.
    OpenLane {
        /// Which session.
        session: [u8; 16],
        /// Which lane of it.
        lane: u16,
    },
    /// The session (or lane) is open.
    Welcome(Welcome),
    /// The lane has been added.
    LaneOpened,
    /// Sent by the opener when it has tried every way, and returned when the acceptor agrees.
    Ready(Ready),
    /// It is not, and why.
    Refuse(Refusal),
    /// Asks what a descriptor grants and how it can be reached directly.
    Import {
        /// Chosen by the asker, returned in the answer.
        request: u64,
        /// The descriptor's bytes.
        descriptor: Vec<u8>,
    },
    /// The answer takes time: the memory is being registered with devices.
    Importing {
        /// The request that is being answered.
        request: u64,
    },
    /// The answer.
    Imported {
        /// The request answered.
        request: u64,
        /// What was granted, or why not (a `TransferError` code).
        result: Result<Import, u8>,
    },
    /// The sender lost this lane; what was the last frame that was applied from it?
    LaneLost {
        /// Which lane.
        lane: u16,
    },
    /// Nothing more is applied from that lane; this was the last.
    LaneFenced {
        /// Which lane.
        lane: u16,
        /// Sequence of the last frame that was dealt with.
        applied: u64,
        /// Those among the last of them that were refused, and why (a `TransferError` code).
        refused: Vec<(u64, u8)>,
        /// How many immediates came by it; only queue pairs bring any.
        immediates: u64,
    },
    /// Asks for a queue pair at the far end of each of these: on the opener's handshake connection,
    /// and later for lanes that were lost.
    OpenQueues {
        /// What they are to be lanes of, and our end of each.
        queues: Vec<QueueOffer>,
    },
    /// The far ends, in the same order, or why there is none.
    QueuesOpened {
        /// One for each offer.
        queues: Vec<(u16, Result<QueueEnd, String>)>,
    },
    /// The sender closes the session on purpose.
    Bye,
}

impl Control {
    /// Encodes into at most [`MAX_CONTROL`] bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        // Serialising into a Vec of plain data cannot fail.
        postcard::to_allocvec(self).unwrap_or_default()
    }

    /// Parses; every byte must be used.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, FrameError> {
        if bytes.len() > MAX_CONTROL {
            return Err(FrameError::Control);
        }
        match postcard::take_from_bytes(bytes) {
            Ok((control, [])) => Ok(control),
            _ => Err(FrameError::Control),
        }
    }
}

/// One more session between two endpoints.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct SubSession {
    /// From 1 on.
    pub number: u16,
    /// The session that it belongs to. Only the two know its name, so nobody else can add to it.
    pub of: [u8; 16],
}

/// Who wants to open a session.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Hello {
    /// The opener.
    pub incarnation: Incarnation,
    /// The incarnation it means to reach, when it knows it.
    pub expects: Option<Incarnation>,
    /// Random name of the session.
    pub session: [u8; 16],
    /// The session between the two that is over for the opener. Only the two know its name, so it
    /// proves to the acceptor that its goodbye is on the way.
    pub replaces: Option<[u8; 16]>,
    /// Set where it is one more session for a thread that wants lanes of its own.
    pub sub_session: Option<SubSession>,
    /// How many bulk lanes it will open.
    pub lanes: u16,
    /// Its detection time in milliseconds; both use the longer one.
    pub detect_ms: u32,
    /// The opener's metadata bytes, so that the acceptor knows its address.
    pub metadata: Vec<u8>,
    /// What it says of its host: for local paths.
    pub host: Vec<u8>,
    /// The local socket on which it could pass file descriptors; empty when it offers no local path.
    pub local: String,
    /// Its RDMA ports; none when it offers none.
    pub rdma: Vec<RdmaPort>,
}

/// A port of an RDMA device, as its peer must know it.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct RdmaPort {
    /// Its address.
    pub gid: [u8; 16],
    /// Its address on an InfiniBand subnet; 0 on Ethernet.
    pub lid: u16,
    /// The largest packet, as verbs number it (1: 256 bytes ... 5: 4096).
    pub mtu: u8,
    /// Whether it is reached through the global address only.
    pub ethernet: bool,
    /// Whether its queue pairs are reliable datagrams (EFA) and not connections.
    pub datagrams: bool,
}

/// One end of a queue pair.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct QueueEnd {
    /// Which of its owner's ports it uses.
    pub port: u8,
    /// Its number.
    pub number: u32,
    /// The number of its first packet.
    pub first_packet: u32,
    /// What datagrams to it must carry.
    pub key: u32,
    /// The number of the end that it is connected to; 0 in an offer.
    pub to: u32,
    /// Reads that it serves at a time.
    pub reads: u8,
    /// Receives that are always posted.
    pub receives: u16,
    /// Eight bytes that the far side may read to learn that what it wrote before has arrived.
    pub flush_addr: u64,
    /// Their key.
    pub flush_key: u32,
}

/// An end of a queue pair that looks for another.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct QueueOffer {
    /// The lane that the pair is to be.
    pub lane: u16,
    /// Which of the far side's ports it is meant for.
    pub to_port: u8,
    /// It is for small transfers.
    pub latency: bool,
    /// Our end.
    pub end: QueueEnd,
}

/// The answer to a hello.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Welcome {
    /// The acceptor.
    pub incarnation: Incarnation,
    /// Its detection time in milliseconds.
    pub detect_ms: u32,
    /// The acceptor's metadata bytes.
    pub metadata: Vec<u8>,
    /// What it says of its host.
    pub host: Vec<u8>,
    /// Its local socket; empty when it offers no local path.
    pub local: String,
    /// Why it offers none.
    pub local_why: String,
    /// Its RDMA ports; none when it offers none.
    pub rdma: Vec<RdmaPort>,
    /// Why it offers none.
    pub rdma_why: String,
}

/// What the opener found out about local paths.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Ready {
    /// Both endpoints live in one process.
    pub same_process: bool,
    /// The shared segment is attached.
    pub linked: bool,
    /// The opener can and may copy from the acceptor's memory.
    pub opener_pulls: bool,
    /// The queue pairs that were opened are the path.
    pub queues: bool,
    /// Why there is no better path.
    pub why: String,
}

/// Why a session was refused.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub enum Refusal {
    /// Another incarnation lives here: the one that was meant is gone.
    OtherIncarnation,
    /// There is a session between the two already, or one being opened the other way. The acceptor
    /// names itself, since the opener may only know its address.
    Exists(Incarnation),
    /// No such session to add a lane to.
    UnknownSession,
    /// The endpoint takes no more peers.
    Full,
    /// The transport pins of the two sides cannot both be met.
    Pinned(String),
}

/// What an import gives.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Import {
    /// Rights.
    pub access: Access,
    /// Advertised bytes.
    pub len: u64,
    /// Address of the first one in the owner: for CMA.
    pub base: u64,
    /// Entry of the session's gate table that guards direct access; `None` when there is none.
    pub gate: Option<u32>,
    /// The gate's value while the grant lives.
    pub pass: u32,
    /// A mapping is offered: the file descriptor follows on the local socket.
    pub mapping: Option<MappingOffer>,
    /// The key of the memory on each of the owner's RDMA ports; none when it is not reached by them.
    pub keys: Vec<u32>,
    /// What RDMA devices wrote into it is there only once some of it was read.
    pub flush: bool,
    /// Where it lives.
    pub kind: MemoryKind,
    /// It is memory of a GPU that the importer may map.
    pub gpu: Option<GpuOffer>,
}

impl Import {
    /// Whether a file descriptor follows on the local socket.
    pub fn has_descriptor(&self) -> bool {
        let of_gpu = self.gpu.is_some_and(|offer| offer.handle == GpuHandle::PosixFd);
        self.mapping.is_some() || of_gpu
    }
}

/// How to map advertised memory of a GPU.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct GpuOffer {
    /// Which GPU, by the name that it has everywhere.
    pub uuid: [u8; 16],
    /// What opens the allocation.
    pub handle: GpuHandle,
    /// Length of the allocation.
    pub len: u64,
    /// Where the advertisement starts in it.
    pub offset: u64,
    /// The allocation's name in its owner, never given to another.
    pub buffer: u64,
}

/// What opens an allocation of a GPU in another process. Handles have 64 bytes.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum GpuHandle {
    /// For an NVLink fabric.
    Fabric([[u8; 32]; 2]),
    /// A file descriptor, which follows on the local socket.
    PosixFd,
    /// For the driver's own IPC.
    Ipc([[u8; 32]; 2]),
}

/// How to map advertised memory.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct MappingOffer {
    /// Length of the file.
    pub file_len: u64,
    /// Where the advertisement starts in it.
    pub offset: u64,
}

const _: () = assert!(MAX_CONTROL > 2 * DESCRIPTOR_LEN);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn caps_hold() {
        let mut head = Header::new(Kind::Write);
        head.set_body(2, 2 * SEGMENT_LEN, 100);
        let checked = head.check().unwrap();
        assert_eq!((checked.segments, checked.table, checked.payload), (2, 24, 100));
        head.body = u32::MAX.into();
        assert!(matches!(head.check(), Err(FrameError::TooLong { .. })));
        head.body = 10.into();
        assert!(head.check().is_err(), "table longer than the body");
        let read = Header::new(Kind::Read);
        assert!(read.check().is_err(), "a read without segments");
    }

    #[test]
    fn other_protocols_are_named() {
        let head = Header::read_from_bytes(&[b'G'; HEADER_LEN]).unwrap();
        assert_eq!(head.check(), Err(FrameError::NotPeerway));
        let mut head = Header::new(Kind::Beat);
        head.version = 9;
        assert_eq!(head.check(), Err(FrameError::Version(9)));
    }

    #[test]
    fn control_uses_every_byte() {
        let message =
            Control::LaneFenced { lane: 3, applied: 1 << 40, refused: vec![(7, 3)], immediates: 2 };
        let mut bytes = message.to_bytes();
        assert_eq!(Control::from_bytes(&bytes), Ok(message));
        bytes.push(0);
        assert_eq!(Control::from_bytes(&bytes), Err(FrameError::Control));
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered(bytes in prop::array::uniform32(any::<u8>()), tail in any::<[u8; 32]>()) {
            let mut all = [0u8; 64];
            all[..32].copy_from_slice(&bytes);
            all[32..].copy_from_slice(&tail);
            let head = Header::read_from_bytes(&all).unwrap();
            if let Ok(checked) = head.check() {
                prop_assert!(checked.payload <= MAX_PAYLOAD as usize);
                prop_assert!(checked.segments <= MAX_SEGMENTS);
            }
        }
    }
}
