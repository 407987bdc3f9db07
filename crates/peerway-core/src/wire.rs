//! Frames: the units that travel on a lane, over a TCP connection or a shared ring.
//!
//! A frame is a 64-byte header and `body` bytes. The body starts with a table of `segments` entries
//! of 12 bytes (20 for a pull); the payload follows. Frames that change something at the peer carry
//! a sequence number. A lane processes them in order, so one cumulative acknowledgement covers
//! many.
//!
//! This module never allocates a length that a peer announces: [`Header::check`] caps lengths per
//! kind.

use serde::{Deserialize, Serialize};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::config::DataProtection;
use crate::descriptor::DESCRIPTOR_LEN;
use crate::ids::Incarnation;
use crate::region::{Access, MemoryKind};

/// `"PW"`.
pub const MAGIC: u16 = 0x5750;
/// The protocol version of this build. The handshake refuses peers of another version.
pub const VERSION: u8 = 5;
/// Bytes in a header.
pub const HEADER_LEN: usize = size_of::<Header>();
/// The maximum payload of one data frame: one large socket send (512 KiB to 1 MiB measured best).
pub const MAX_PAYLOAD: u64 = 1 << 20;
/// The maximum number of segments in one data frame: enough for 128 blocks of 4 KiB twice over, and
/// well under IOV_MAX.
pub const MAX_SEGMENTS: usize = 256;
/// The maximum bytes that one pull frame moves: large enough to keep two pullers busy, small enough
/// that a cancel waits only briefly.
pub const MAX_PULL: u64 = 16 << 20;
/// The maximum length of a notification.
pub const MAX_NOTIFICATION: usize = 1 << 20;
/// A flag in the `status` of `Write` and `Pull`: after the peer applies the frame, it adds one to
/// the counter `immediate`. Bytes and count are one frame, so the peer applies both once or
/// neither.
pub const COUNTS: u16 = 1;
/// The maximum length of a control message.
pub const MAX_CONTROL: usize = 16 << 10;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub enum Kind {
    /// Payload for the peer's memory.
    Write = 1,
    /// Requests bytes of the peer's memory.
    Read = 2,
    /// The bytes that a read requested.
    ReadData = 3,
    /// Asks the peer to copy from the sender's memory into its own.
    Pull = 4,
    /// A message for the peer's notification queue.
    Notify = 5,
    /// Adds one to a counter of the receiver.
    Count = 6,
    /// The receiver applied all sequenced frames up to `sequence`.
    Ack = 7,
    /// The receiver refused the frame `sequence`; `status` holds the reason.
    Nack = 8,
    /// The pull `sequence` is done.
    Pulled = 9,
    /// Heartbeat: `sequence` is the sender's clock, `transfer` is the last clock it received from
    /// the peer.
    Beat = 10,
    /// A control message, encoded with postcard.
    Control = 11,
    /// Asks the peer to stop working on `transfer`.
    Cancel = 12,
}

impl Kind {
    fn from_code(code: u8) -> Option<Self> {
        use Kind::*;
        [Write, Read, ReadData, Pull, Notify, Count, Ack, Nack, Pulled, Beat, Control, Cancel]
            .into_iter()
            .find(|k| *k as u8 == code)
    }

    /// Whether the frame has a sequence number and the peer acknowledges it.
    pub fn is_sequenced(self) -> bool {
        use Kind::*;
        matches!(self, Write | Read | Pull | Notify | Count | Cancel)
    }
}

/// The header of every frame.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct Header {
    magic: U16,
    version: u8,
    kind: u8,
    /// In `Nack`, the reason for the refusal (a `TransferError` code). In `Write` and `Pull`,
    /// [`COUNTS`] or 0.
    pub status: U16,
    segments: U16,
    body: U32,
    /// The index of the owner's grant.
    pub grant: U32,
    /// The generation of the grant.
    pub generation: U32,
    /// The counter id, in `Count` and in frames with [`COUNTS`].
    pub immediate: U32,
    /// The number of this frame on its lane, or of the frame that it answers.
    pub sequence: U64,
    /// The sender's transfer id.
    pub transfer: U64,
    /// The offset of the payload in the advertisement if the frame has no table.
    pub offset: U64,
    /// The token of the grant.
    pub token: [u8; 16],
}

const _: () = assert!(size_of::<Header>() == 64);

/// A header that passed [`Header::check`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Checked {
    /// The kind of the frame.
    pub kind: Kind,
    /// The number of table entries.
    pub segments: usize,
    /// The length of the table in bytes.
    pub table: usize,
    /// The length of the payload after the table in bytes.
    pub payload: usize,
}

impl Header {
    /// Creates a header of this kind with all other fields zero.
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

    /// The counter that a `Write` or `Pull` raises after the receiver applies it.
    pub fn counts(&self) -> Option<u32> {
        (self.status.get() == COUNTS).then(|| self.immediate.get())
    }

    /// Sets the lengths of the table and the payload.
    pub fn set_body(&mut self, segments: usize, table: usize, payload: usize) {
        debug_assert!(segments <= MAX_SEGMENTS);
        self.segments = (segments as u16).into();
        self.body = ((table + payload) as u32).into();
    }

    /// Checks that these bytes are a valid header and returns the lengths of the body. All later
    /// arithmetic on the lengths relies on the caps that this function enforces.
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

/// A table entry of `Write` and `Read`: a range of the peer's memory.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct Segment {
    /// The offset in the advertisement.
    pub offset: U64,
    /// The length in bytes.
    pub len: U32,
}

/// Bytes of a [`Segment`].
pub const SEGMENT_LEN: usize = size_of::<Segment>();

/// A table entry of `Pull`: a range of the peer's memory and the address of its bytes in the
/// sender.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct PullSegment {
    /// The offset in the advertisement.
    pub offset: U64,
    /// The length in bytes.
    pub len: U32,
    /// The address in the process that sends the frame.
    pub source: U64,
}

/// Bytes of a [`PullSegment`].
pub const PULL_SEGMENT_LEN: usize = size_of::<PullSegment>();
const _: () = assert!(SEGMENT_LEN == 12 && PULL_SEGMENT_LEN == 20);

/// Why bytes are not a valid frame. The receiver closes a lane that carries such bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The bytes belong to another protocol.
    #[error("the remote side does not speak the Peerway protocol; check the address and the port")]
    NotPeerway,
    /// The remote side uses another protocol version.
    #[error("the remote side speaks protocol version {0}, but this build speaks version {VERSION}")]
    Version(u8),
    /// The kind of the frame is unknown.
    #[error("unknown frame kind {0}")]
    Kind(u8),
    /// The frame is longer than its kind allows, or its table does not fit in the body.
    #[error("a frame of kind {kind} has an invalid body length of {body} bytes")]
    TooLong {
        /// The kind code.
        kind: u8,
        /// The announced length of the body.
        body: usize,
    },
    /// A control message does not parse or arrives at the wrong time.
    #[error("malformed or unexpected control message")]
    Control,
    /// The frame is not valid in this state: a wrong sequence number, or an answer without a
    /// request.
    #[error("frame out of sequence, or an answer without a request")]
    Order,
}

/// Control messages. They are rare, versioned by the header, and capped by [`MAX_CONTROL`].
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[non_exhaustive]
pub enum Control {
    /// Opens a session: the first message on a connection, inside TLS.
    Hello(Hello),
    /// Adds a lane to a session: the first frame on an additional connection, without TLS.
    OpenLane {
        /// The session.
        session: [u8; 16],
        /// The lane of the session.
        lane: u16,
        /// Only the two ends of the session's TLS connection can compute it for this lane.
        proof: Proof,
    },
    /// The session is open.
    Welcome(Welcome),
    /// The lane is open.
    LaneOpened {
        /// The acceptor's own proof for this lane.
        proof: Proof,
    },
    /// The opener sends it after it has tried all paths. The acceptor returns it when it agrees.
    Ready(Ready),
    /// The acceptor refuses the session or the lane, with the reason.
    Refuse(Refusal),
    /// Asks what a descriptor grants and how to reach the memory directly.
    Import {
        /// Chosen by the requester, returned in the answer.
        request: u64,
        /// The descriptor's bytes.
        descriptor: Vec<u8>,
    },
    /// The answer takes time because the owner is registering the memory with devices.
    Importing {
        /// The request in progress.
        request: u64,
    },
    /// The answer to an import request.
    Imported {
        /// The answered request.
        request: u64,
        /// The grant, or the reason for the refusal (a `TransferError` code).
        result: Result<Import, u8>,
    },
    /// The sender lost this lane and asks for the last frame that the receiver applied from it.
    LaneLost {
        /// The lane.
        lane: u16,
        /// How often the lane had been replaced before. A repeated question may be late.
        generation: u32,
    },
    /// The sender applies no more frames from that lane.
    LaneFenced {
        /// The lane.
        lane: u16,
        /// The generation that the receiver asked about.
        generation: u32,
        /// The sequence number of the last frame that the sender processed.
        applied: u64,
        /// The refused frames among the most recent ones, with the reason (a `TransferError` code).
        refused: Vec<(u64, u8)>,
        /// The number of immediates that arrived on the lane. Only queue pairs carry immediates.
        immediates: u64,
    },
    /// Asks the peer to create a queue pair for each offer. The opener sends it on its handshake
    /// connection, and later to replace lost lanes.
    OpenQueues {
        /// One offer for each lane, with the sender's queue pair.
        queues: Vec<QueueOffer>,
    },
    /// The peer's queue pairs, in the order of the offers, or the reason for each failure.
    QueuesOpened {
        /// One entry for each offer: the lane and the result.
        queues: Vec<(u16, Result<QueueEnd, String>)>,
    },
    /// The sender closes the session deliberately.
    Bye,
    /// Shows that the sender may take part. The opener sends it before its hello, inside TLS, and
    /// the acceptor answers with its own.
    Admit(Admission),
    /// Replaces a lost lane of an open session: the first frame on a new connection, without TLS.
    /// The answer is `LaneOpened`.
    ReplaceLane {
        /// The session.
        session: [u8; 16],
        /// The lane of the session.
        lane: u16,
        /// The number of this attempt, from 1. Each attempt has a new one, and new secrets.
        generation: u32,
        /// Only the two ends of the session's TLS connection can compute it for this attempt.
        proof: Proof,
    },
    /// Keys to imported memory for the queue pair on which this message travels. They replace
    /// earlier ones.
    Keys {
        /// The grant of the memory ([`SlotId::to_bits`](crate::ids::SlotId::to_bits)), and the key.
        /// 0 if the memory is revoked.
        keys: Vec<(u64, u32)>,
    },
}

/// What an endpoint shows to be admitted.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[non_exhaustive]
pub enum Admission {
    /// A MAC under the secret of the cluster, over keying material of the TLS connection.
    Secret(Proof),
    /// A certificate, and a signature with its key over keying material of the TLS connection.
    Certificate {
        /// The certificate, then those between it and the authority, as DER.
        chain: Vec<Vec<u8>>,
        /// The algorithm of the signature, in the numbering of TLS.
        scheme: u16,
        /// The signature.
        signature: Vec<u8>,
    },
}

impl Control {
    /// Encodes into at most [`MAX_CONTROL`] bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        // Serialising plain data into a Vec cannot fail.
        postcard::to_allocvec(self).unwrap_or_default()
    }

    /// Parses a control message. Every byte must be part of the encoding.
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

/// A value that only the two ends of one TLS connection can compute: exported keying material of
/// that connection, for one purpose, one side and one object. Compare it in constant time.
pub type Proof = [u8; 32];

/// An additional session between two endpoints.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct SubSession {
    /// The number of the sub-session. Numbers start at 1.
    pub number: u16,
    /// The session that it belongs to. Only its two endpoints know its name, so no other endpoint
    /// can add to it.
    pub of: [u8; 16],
}

/// The request to open a session.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Hello {
    /// The incarnation of the opener. The acceptor refuses a name that the opener's key does not
    /// prove.
    pub incarnation: Incarnation,
    /// The random name of the session.
    pub session: [u8; 16],
    /// The previous session between the two, if it is over for the opener. Only the two endpoints
    /// know its name. It proves to the acceptor that the opener's `Bye` is on its way.
    pub replaces: Option<[u8; 16]>,
    /// Set for a sub-session: a thread of the opener wants its own lanes.
    pub sub_session: Option<SubSession>,
    /// The number of bulk lanes that the opener will open.
    pub lanes: u16,
    /// The opener's detection time in milliseconds. Both sides use the longer one.
    pub detect_ms: u32,
    /// A proof over the id of the running boot of the opener's host. An acceptor on the same host
    /// computes the same value; any other learns nothing from it.
    pub host: Proof,
    /// Whether the opener offers local paths.
    pub local: bool,
    /// How the opener wants TCP connections protected. Both sides use the stricter setting.
    pub data: DataProtection,
    /// The opener's RDMA ports. Empty if it offers none.
    pub rdma: Vec<RdmaPort>,
}

/// The properties of an RDMA port that a peer needs.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct RdmaPort {
    /// The GID of the port.
    pub gid: [u8; 16],
    /// The LID on an InfiniBand subnet. 0 on Ethernet.
    pub lid: u16,
    /// The maximum packet size in the numbering of verbs (1: 256 bytes ... 5: 4096).
    pub mtu: u8,
    /// Whether the port is reachable only by its GID.
    pub ethernet: bool,
    /// Whether its queue pairs use reliable datagrams (EFA) instead of connections.
    pub datagrams: bool,
    /// Whether its keys open memory to one queue pair each. The owner then sends the keys of a
    /// queue pair on its lane ([`Control::Keys`]).
    pub windows: bool,
}

/// One end of a queue pair connection.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct QueueEnd {
    /// The index of the owner's port that it uses.
    pub port: u8,
    /// The queue pair number.
    pub number: u32,
    /// The sequence number of its first packet.
    pub first_packet: u32,
    /// The key that datagrams to it must carry.
    pub key: u32,
    /// The queue pair number of the connected end. 0 in an offer.
    pub to: u32,
    /// The number of outstanding reads that it serves.
    pub reads: u8,
    /// The number of receives that the owner keeps posted.
    pub receives: u16,
    /// The address of eight bytes. A read of them by the peer proves that the peer's earlier writes
    /// have arrived.
    pub flush_addr: u64,
    /// The key of those bytes.
    pub flush_key: u32,
}

/// A queue pair that the sender offers to connect.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct QueueOffer {
    /// The lane that the connection becomes.
    pub lane: u16,
    /// The index of the receiver's port that the offer is for.
    pub to_port: u8,
    /// Whether the lane is for small transfers.
    pub latency: bool,
    /// The sender's end.
    pub end: QueueEnd,
}

/// The answer to a `Hello`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Welcome {
    /// The acceptor's detection time in milliseconds.
    pub detect_ms: u32,
    /// How the acceptor wants TCP connections protected. Both sides use the stricter setting.
    pub data: DataProtection,
    /// The acceptor's metadata bytes.
    pub metadata: Vec<u8>,
    /// The acceptor's description of its host. Empty unless the opener is on the same host.
    pub host: Vec<u8>,
    /// The acceptor's local socket. Empty if it offers the opener no local path.
    pub local: String,
    /// Why the acceptor offers no local path.
    pub local_why: String,
    /// The acceptor's RDMA ports. Empty if it offers none.
    pub rdma: Vec<RdmaPort>,
    /// Why the acceptor offers no RDMA port.
    pub rdma_why: String,
}

/// The paths that the opener found.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Ready {
    /// Both endpoints are in one process.
    pub same_process: bool,
    /// The opener has attached the shared segment.
    pub linked: bool,
    /// The opener can and may copy from the acceptor's memory.
    pub opener_pulls: bool,
    /// The session uses the queue pairs that were opened.
    pub queues: bool,
    /// The opener's description of its host. Empty unless the acceptor is on the same host.
    pub host: Vec<u8>,
    /// Why there is no better path.
    pub why: String,
}

/// Why the acceptor refuses a session.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub enum Refusal {
    /// The opener claims an identity that its key does not prove. The text says which.
    Identity(String),
    /// A session between the two exists, or the acceptor is opening one in the other direction.
    Exists,
    /// The session that the lane belongs to does not exist.
    UnknownSession,
    /// The endpoint accepts no more peers.
    Full,
    /// No transport satisfies the pins of both sides.
    Pinned(String),
    /// A limit of the sender is reached. The text is a sentence that names it.
    Limit(String),
    /// The acceptor does not admit the opener. The text says why.
    NotAdmitted(String),
}

/// The result of an import.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Import {
    /// The granted rights.
    pub access: Access,
    /// The length of the advertised memory in bytes.
    pub len: u64,
    /// The address of the first byte in the owner's process, for CMA.
    pub base: u64,
    /// The entry of the session's gate table that guards direct access. `None` if there is no such
    /// entry.
    pub gate: Option<u32>,
    /// The value of the gate entry while the grant is live.
    pub pass: u32,
    /// The owner offers a mapping. The file descriptor follows on the local socket.
    pub mapping: Option<MappingOffer>,
    /// The key of the memory on each of the owner's RDMA ports. 0 for a port with a key for each
    /// queue pair. Empty if the ports cannot reach the memory.
    pub keys: Vec<u32>,
    /// RDMA writes to this memory become visible only after a read from it.
    pub flush: bool,
    /// Where the memory lives.
    pub kind: MemoryKind,
    /// Set if the memory belongs to a GPU and the importer may map it.
    pub gpu: Option<GpuOffer>,
}

impl Import {
    /// Whether a file descriptor follows on the local socket.
    pub fn has_descriptor(&self) -> bool {
        let of_gpu = self.gpu.is_some_and(|offer| offer.handle == GpuHandle::PosixFd);
        self.mapping.is_some() || of_gpu
    }
}

/// How to map advertised GPU memory.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct GpuOffer {
    /// The UUID of the GPU. It is the same in all processes.
    pub uuid: [u8; 16],
    /// The handle that opens the allocation.
    pub handle: GpuHandle,
    /// The length of the allocation in bytes.
    pub len: u64,
    /// The offset of the advertisement in the allocation.
    pub offset: u64,
    /// The owner's id of the allocation. The owner never reuses an id.
    pub buffer: u64,
}

/// The handle that opens a GPU allocation in another process. Handles have 64 bytes.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum GpuHandle {
    /// A handle for an NVLink fabric.
    Fabric([[u8; 32]; 2]),
    /// A file descriptor, which follows on the local socket.
    PosixFd,
    /// A handle for the driver's IPC.
    Ipc([[u8; 32]; 2]),
}

/// How to map advertised host memory.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct MappingOffer {
    /// The length of the file in bytes.
    pub file_len: u64,
    /// The offset of the advertisement in the file.
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
        let (lane, generation, refused) = (3, 1, vec![(7, 3)]);
        let message =
            Control::LaneFenced { lane, generation, applied: 1 << 40, refused, immediates: 2 };
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
