//! Frames of a lane: how a sender cuts them from a request, and what a receiver reads in them.
//!
//! A sender cuts a frame from the shape of a request, within the room that the lane has
//! ([`FramePieces`], [`CutFrame`]). A receiver reads the header ([`Arrival`]), then the table
//! ([`TableAhead::read`]), and gets runs of its own memory. The runs come from the peer: the
//! receiver compares each with the grant ([`Run::check`]) before it places a byte. Every length is
//! capped before use, and nothing here allocates.

use zerocopy::{FromBytes, IntoBytes};

use super::acknowledgement::AppliedFrames;
use super::liveness::Beat;
use crate::ids::SlotId;
use crate::outcome::TransferError;
use crate::region::Span;
use crate::wire::{
    COUNTS, Checked, FrameError, HEADER_LEN, Header, Kind, MAX_PAYLOAD, MAX_PULL, MAX_SEGMENTS,
    PULL_SEGMENT_LEN, PullSegment, SEGMENT_LEN, Segment,
};
use crate::work::{Cursor, Pair, Shape};

/// The grant that a frame names, and the token that proves the right to use it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct GrantName {
    /// The owner's grant.
    pub id: SlotId,
    /// The token of the advertisement.
    pub token: [u8; 16],
}

/// The pieces of work that the next frame covers, in order. It takes at most `max` bytes and as
/// many pieces as a table has room for. A frame names one grant, so it ends where the next piece
/// lies in another region of the peer. The cursor advances behind each piece.
pub struct FramePieces<'a> {
    shape: &'a Shape,
    at: &'a mut Cursor,
    left: u64,
    segments: usize,
    region: u32,
}

impl<'a> FramePieces<'a> {
    /// The pieces of a frame that begins at `at`.
    #[inline]
    pub fn new(shape: &'a Shape, at: &'a mut Cursor, max: u64) -> Self {
        Self { shape, at, left: max, segments: 0, region: 0 }
    }
}

impl Iterator for FramePieces<'_> {
    type Item = Pair;

    #[inline]
    fn next(&mut self) -> Option<Pair> {
        if self.segments == MAX_SEGMENTS {
            return None;
        }
        let pair = self.shape.peek(self.at, self.left)?;
        if self.segments > 0 && self.region != pair.remote.region {
            return None;
        }
        self.region = pair.remote.region;
        self.segments += 1;
        self.left -= pair.len;
        self.shape.advance(self.at, pair.len);
        Some(pair)
    }
}

/// A frame that was cut from a request. Its table is in the caller's buffer, behind room for the
/// header, which [`Self::finish`] writes.
#[derive(Debug)]
pub struct CutFrame {
    kind: Kind,
    header: Header,
    segments: usize,
    bytes: u64,
}

impl CutFrame {
    /// Cuts a frame of these pieces.
    ///
    /// `name` gives the grant and the token of the first piece, and so of all. `source` gives the
    /// address of a piece in this process, which only a pull tells the peer. `head` is cleared and
    /// receives the table.
    #[inline]
    pub fn cut<'a>(
        kind: Kind,
        pieces: FramePieces<'_>,
        name: impl FnOnce(&Pair) -> (SlotId, &'a [u8; 16]),
        source: impl Fn(&Pair) -> u64,
        head: &mut Vec<u8>,
    ) -> Self {
        head.clear();
        head.resize(HEADER_LEN, 0);
        let mut header = Header::new(kind);
        let (mut segments, mut bytes) = (0, 0);
        let mut name = Some(name);
        for pair in pieces {
            if let Some(name) = name.take() {
                let (id, token) = name(&pair);
                header.grant = id.index.into();
                header.generation = id.generation.into();
                header.token = *token;
                header.offset = pair.remote.offset.into();
            }
            let (offset, len) = (pair.remote.offset.into(), (pair.len as u32).into());
            if kind == Kind::Pull {
                let source = source(&pair).into();
                head.extend_from_slice(PullSegment { offset, len, source }.as_bytes());
            } else {
                head.extend_from_slice(Segment { offset, len }.as_bytes());
            }
            segments += 1;
            bytes += pair.len;
        }
        Self { kind, header, segments, bytes }
    }

    /// The bytes of the request that it covers.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The bytes that it takes of the lane's window. A pull takes none: its bytes do not travel on
    /// the lane.
    #[inline]
    pub fn window(&self) -> u64 {
        if self.kind == Kind::Pull { 0 } else { self.bytes }
    }

    /// Writes the header in front of the table. `counts` is the counter that the peer raises when
    /// it has applied the frame. Returns the length of the payload that follows.
    #[inline]
    pub fn finish(
        mut self,
        sequence: u64,
        transfer: u64,
        counts: Option<u32>,
        head: &mut Vec<u8>,
    ) -> u64 {
        let payload = if self.kind == Kind::Write { self.bytes } else { 0 };
        if self.kind == Kind::Write && self.segments == 1 {
            // One run needs no table: the header has its offset and the body its length.
            head.truncate(HEADER_LEN);
            self.segments = 0;
        }
        let table = self.segments * entry_len(self.kind);
        self.header.set_body(self.segments, table, payload as usize);
        self.header.sequence = sequence.into();
        self.header.transfer = transfer.into();
        if let Some(id) = counts {
            (self.header.status, self.header.immediate) = (COUNTS.into(), id.into());
        }
        head[..HEADER_LEN].copy_from_slice(self.header.as_bytes());
        payload
    }
}

/// The most bytes of a frame of this kind, on a lane with `room` for a request that asks for pieces
/// of at most `piece` bytes.
#[inline]
pub fn max_frame(kind: Kind, piece: u64, room: u64) -> u64 {
    if kind == Kind::Pull { MAX_PULL } else { piece.min(room).min(MAX_PAYLOAD) }
}

#[inline]
fn entry_len(kind: Kind) -> usize {
    if kind == Kind::Pull { PULL_SEGMENT_LEN } else { SEGMENT_LEN }
}

/// The frames without a table.
impl Header {
    /// The bytes that a read asked for.
    #[inline]
    pub fn read_data(sequence: u64, transfer: u64, payload: u64) -> Self {
        let mut head = Self::answer(Kind::ReadData, sequence);
        head.transfer = transfer.into();
        head.set_body(0, 0, payload as usize);
        head
    }

    /// Every sequenced frame up to this number was applied.
    #[inline]
    pub fn ack(sequence: u64) -> Self {
        Self::answer(Kind::Ack, sequence)
    }

    /// The frame of this number was refused, with an error code.
    pub fn nack(sequence: u64, code: u8) -> Self {
        let mut head = Self::answer(Kind::Nack, sequence);
        head.status = u16::from(code).into();
        head
    }

    /// The pull of this number is done.
    pub fn pulled(sequence: u64) -> Self {
        Self::answer(Kind::Pulled, sequence)
    }

    /// A heartbeat.
    pub fn beat(beat: Beat, totals: OneSided) -> Self {
        let mut head = Self::answer(Kind::Beat, beat.clock);
        head.transfer = beat.echo.into();
        head.token = totals.to_bytes();
        head
    }

    /// A notification. Its payload is the message.
    pub fn notify(sequence: u64, transfer: u64, totals: OneSided) -> Self {
        let mut head = Self::answer(Kind::Notify, sequence);
        head.transfer = transfer.into();
        head.token = totals.to_bytes();
        head
    }

    /// A count of the counter `id`.
    pub fn count(sequence: u64, transfer: u64, id: u32, totals: OneSided) -> Self {
        let mut head = Self::answer(Kind::Count, sequence);
        head.transfer = transfer.into();
        head.immediate = id.into();
        head.token = totals.to_bytes();
        head
    }

    /// A request to stop the pulls of a transfer.
    pub fn cancel(sequence: u64, transfer: u64) -> Self {
        let mut head = Self::answer(Kind::Cancel, sequence);
        head.transfer = transfer.into();
        head
    }

    #[inline]
    fn answer(kind: Kind, sequence: u64) -> Self {
        let mut head = Self::new(kind);
        head.sequence = sequence.into();
        head
    }
}

/// What a received header announces. Sequence numbers of sequenced frames have been checked.
#[derive(Clone, Copy, Debug)]
pub enum Arrival {
    /// A write of one run. Its payload follows.
    Write(Named, Run),
    /// A write, a read or a pull whose table follows.
    Table(TableAhead),
    /// The answer to one of our reads. Its payload follows.
    ReadData {
        /// The number of the read.
        sequence: u64,
        /// The length of the payload.
        payload: usize,
    },
    /// A control message of this length follows.
    Control(usize),
    /// A notification of this length follows.
    Notify {
        /// Its number.
        sequence: u64,
        /// Its length.
        len: usize,
        /// What the peer has moved.
        totals: OneSided,
    },
    /// A count.
    Count {
        /// Its number.
        sequence: u64,
        /// The counter.
        id: u32,
        /// What the peer has moved.
        totals: OneSided,
    },
    /// The peer applied all frames up to this number.
    Ack(u64),
    /// The peer refused the frame of this number.
    Nack(u64, TransferError),
    /// The peer finished the pull of this number.
    Pulled(u64),
    /// A heartbeat.
    Beat(Beat, OneSided),
    /// The peer no longer wants the pulls of a transfer.
    Cancel {
        /// Its number.
        sequence: u64,
        /// The transfer.
        transfer: u64,
    },
}

/// Bytes that a side has moved into and out of the peer's memory without the peer's processor,
/// since the session began. The peer cannot count them, so frames that name no grant tell it, in
/// place of the token.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct OneSided {
    /// Bytes written to the peer.
    pub written: u64,
    /// Bytes read from the peer.
    pub read: u64,
}

impl OneSided {
    fn to_bytes(self) -> [u8; 16] {
        (u128::from(self.written) | u128::from(self.read) << 64).to_le_bytes()
    }

    fn from_bytes(bytes: &[u8; 16]) -> Self {
        let both = u128::from_le_bytes(*bytes);
        Self { written: both as u64, read: (both >> 64) as u64 }
    }
}

/// What a write, a read or a pull names.
#[derive(Clone, Copy, Debug)]
pub struct Named {
    /// The number of the frame.
    pub sequence: u64,
    /// The peer's transfer.
    pub transfer: u64,
    /// The grant.
    pub grant: GrantName,
    /// The counter to raise when the frame has been applied.
    pub counts: Option<u32>,
}

impl Named {
    #[inline]
    fn of(head: &Header) -> Self {
        let id = SlotId { index: head.grant.get(), generation: head.generation.get() };
        Self {
            sequence: head.sequence.get(),
            transfer: head.transfer.get(),
            grant: GrantName { id, token: head.token },
            counts: head.counts(),
        }
    }
}

impl Arrival {
    /// Reads a header. `applied` knows which sequence number is due.
    #[inline]
    pub fn read(header: &[u8; HEADER_LEN], applied: &AppliedFrames) -> Result<Self, FrameError> {
        let head = Header::ref_from_bytes(header).map_err(|_| FrameError::Control)?;
        let checked = head.check()?;
        let (sequence, transfer) = (head.sequence.get(), head.transfer.get());
        if checked.kind.is_sequenced() && !applied.is_next(sequence) {
            return Err(FrameError::Order);
        }
        let totals = OneSided::from_bytes(&head.token);
        Ok(match checked.kind {
            Kind::Write if checked.segments == 0 => {
                let (offset, len) = (head.offset.get(), checked.payload as u64);
                Self::Write(Named::of(head), Run { offset, len, source: 0 })
            }
            Kind::Write | Kind::Read | Kind::Pull => {
                Self::Table(TableAhead { named: Named::of(head), checked })
            }
            Kind::ReadData => Self::ReadData { sequence, payload: checked.payload },
            Kind::Control => Self::Control(checked.payload),
            Kind::Notify => Self::Notify { sequence, len: checked.payload, totals },
            Kind::Count => Self::Count { sequence, id: head.immediate.get(), totals },
            Kind::Ack => Self::Ack(sequence),
            Kind::Nack => Self::Nack(sequence, TransferError::from_code(head.status.get() as u8)),
            Kind::Pulled => Self::Pulled(sequence),
            Kind::Beat => Self::Beat(Beat { clock: sequence, echo: transfer }, totals),
            Kind::Cancel => Self::Cancel { sequence, transfer },
        })
    }
}

/// A frame whose table has not arrived yet.
#[derive(Clone, Copy, Debug)]
pub struct TableAhead {
    /// What the frame names.
    pub named: Named,
    checked: Checked,
}

/// What a frame with a table asks for. The total of its runs is within the limits of its kind.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Asked {
    /// To store this many bytes of payload in the runs.
    Write(u64),
    /// To send this many bytes from the runs.
    Read(u64),
    /// To copy this many bytes from the peer's memory into the runs.
    Pull(u64),
}

impl TableAhead {
    /// The length of the table in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.checked.table
    }

    /// Whether the table is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads the table into `runs`. `table` holds its [`Self::len`] bytes.
    #[inline]
    pub fn read(&self, table: &[u8], runs: &mut Vec<Run>) -> Result<Asked, FrameError> {
        let Checked { kind, payload, .. } = self.checked;
        runs.clear();
        if kind == Kind::Pull {
            let entries = table.chunks_exact(PULL_SEGMENT_LEN);
            runs.extend(entries.flat_map(PullSegment::read_from_bytes).map(|entry| Run {
                offset: entry.offset.get(),
                len: entry.len.get().into(),
                source: entry.source.get(),
            }));
        } else {
            let entries = table.chunks_exact(SEGMENT_LEN);
            runs.extend(entries.flat_map(Segment::read_from_bytes).map(|entry| Run {
                offset: entry.offset.get(),
                len: entry.len.get().into(),
                source: 0,
            }));
        }
        // The sum cannot overflow: there are at most 256 runs of 32-bit lengths.
        let total = runs.iter().map(|run| run.len).sum();
        match kind {
            Kind::Write if total == payload as u64 => Ok(Asked::Write(total)),
            Kind::Read if total <= MAX_PAYLOAD => Ok(Asked::Read(total)),
            Kind::Pull if total <= MAX_PULL => Ok(Asked::Pull(total)),
            _ => Err(FrameError::Order),
        }
    }
}

/// A run of granted memory that a frame names. For a pull, also the address of its bytes in the
/// peer's process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Run {
    /// The offset in the grant.
    pub offset: u64,
    /// The length in bytes.
    pub len: u64,
    /// The source of a pull.
    pub source: u64,
}

impl Run {
    /// Checks that it lies inside a grant of `len` bytes.
    #[inline]
    pub fn check(&self, len: u64) -> Result<(), TransferError> {
        let granted = Span { offset: 0, len };
        let is_inside = granted.contains(Span { offset: self.offset, len: self.len });
        if is_inside { Ok(()) } else { Err(TransferError::OutOfBounds) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::region::MemoryKind;
    use crate::work::Place;

    const TRANSFER: u64 = 77;

    fn place(region: u32, offset: u64) -> Place {
        Place { region, offset, kind: MemoryKind::Host }
    }

    fn range(len: u64) -> Shape {
        let pair = Pair { local: place(0, 8), remote: place(0, 4), len };
        let extent = Span { offset: 0, len: len + 8 };
        Shape::range(pair, extent, extent).unwrap()
    }

    /// The grant of a region of the peer, and the address of a local place.
    fn grant(region: u32) -> GrantName {
        let id = SlotId { index: region, generation: 9 };
        GrantName { id, token: [region as u8; 16] }
    }

    fn address(place: &Place) -> u64 {
        (u64::from(place.region) << 32) + place.offset
    }

    /// Cuts the next frame into `head`. Returns the bytes covered and the length of the payload.
    fn cut(kind: Kind, shape: &Shape, at: &mut Cursor, max: u64, head: &mut Vec<u8>) -> (u64, u64) {
        let tokens: Vec<[u8; 16]> = (0..4).map(|region| grant(region).token).collect();
        let name = |pair: &Pair| {
            let region = pair.remote.region;
            (grant(region).id, &tokens[region as usize])
        };
        let pieces = FramePieces::new(shape, at, max);
        let frame = CutFrame::cut(kind, pieces, name, |pair| address(&pair.local), head);
        let bytes = frame.bytes();
        assert_eq!(frame.window(), if kind == Kind::Pull { 0 } else { bytes });
        (bytes, frame.finish(1, TRANSFER, None, head))
    }

    /// What the receiver reads in a frame: what it names, its runs and what it asks for.
    fn read(head: &[u8]) -> Result<(Named, Vec<Run>, Asked), FrameError> {
        let (header, table) = head.split_first_chunk().unwrap();
        match Arrival::read(header, &AppliedFrames::new(8))? {
            Arrival::Write(named, run) => Ok((named, vec![run], Asked::Write(run.len))),
            Arrival::Table(ahead) => {
                let mut runs = Vec::new();
                let asked = ahead.read(&table[..ahead.len()], &mut runs)?;
                Ok((ahead.named, runs, asked))
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_run_travels_without_a_table() {
        let (shape, mut head) = (range(100), Vec::new());
        let mut at = shape.start();
        assert_eq!(cut(Kind::Write, &shape, &mut at, 60, &mut head), (60, 60));
        assert_eq!((head.len(), at.left()), (HEADER_LEN, 40));
        let (named, runs, asked) = read(&head).unwrap();
        assert_eq!((named.sequence, named.transfer, named.grant), (1, TRANSFER, grant(0)));
        assert_eq!(runs, [Run { offset: 4, len: 60, source: 0 }]);
        assert_eq!((asked, named.counts), (Asked::Write(60), None));
    }

    #[test]
    fn a_count_travels_in_the_header() {
        let (shape, mut head) = (range(10), Vec::new());
        let mut at = shape.start();
        let token = [0; 16];
        let name = |_: &Pair| (grant(0).id, &token);
        let pieces = FramePieces::new(&shape, &mut at, 10);
        let frame = CutFrame::cut(Kind::Write, pieces, name, |_| 0, &mut head);
        assert_eq!(frame.finish(1, TRANSFER, Some(5), &mut head), 10);
        assert_eq!(read(&head).unwrap().0.counts, Some(5));
    }

    #[test]
    fn a_frame_out_of_order_is_refused() {
        let mut applied = AppliedFrames::new(8);
        let count = |sequence| Header::count(sequence, TRANSFER, 3, OneSided::default());
        let read = |head: &Header, applied: &AppliedFrames| {
            Arrival::read(head.as_bytes().first_chunk().unwrap(), applied).map(|_| ())
        };
        assert_eq!(read(&count(2), &applied), Err(FrameError::Order));
        assert_eq!(read(&count(1), &applied), Ok(()));
        applied.apply(1);
        assert_eq!(read(&count(1), &applied), Err(FrameError::Order), "it was applied before");
        assert_eq!(read(&Header::ack(9), &applied), Ok(()), "answers have the numbers of others");
    }

    #[test]
    fn a_table_that_does_not_fit_its_frame_is_refused() {
        let header = |kind, segments: usize, payload| {
            let mut head = Header::new(kind);
            head.sequence = 1.into();
            head.set_body(segments, segments * entry_len(kind), payload);
            head
        };
        let entry = |len: u32| Segment { offset: 0.into(), len: len.into() };
        let with = |head: Header, entries: &[Segment]| {
            let mut bytes = head.as_bytes().to_vec();
            entries.iter().for_each(|entry| bytes.extend_from_slice(entry.as_bytes()));
            read(&bytes).map(|(_, _, asked)| asked)
        };
        let entries = [entry(6), entry(4)];
        assert_eq!(with(header(Kind::Write, 2, 10), &entries), Ok(Asked::Write(10)));
        assert_eq!(with(header(Kind::Write, 2, 11), &entries), Err(FrameError::Order));
        let half = MAX_PAYLOAD as u32 / 2;
        let most = [entry(half), entry(half)];
        assert_eq!(with(header(Kind::Read, 2, 0), &most), Ok(Asked::Read(MAX_PAYLOAD)));
        let more = [entry(half), entry(half + 1)];
        assert_eq!(with(header(Kind::Read, 2, 0), &more), Err(FrameError::Order));
    }

    #[test]
    fn a_run_is_checked_against_its_grant() {
        let run = |offset, len| Run { offset, len, source: 0 };
        assert_eq!(run(4, 6).check(10), Ok(()));
        assert_eq!(run(10, 0).check(10), Ok(()));
        for bad in [run(4, 7), run(11, 0), run(u64::MAX, 2), run(2, u64::MAX)] {
            assert_eq!(bad.check(10), Err(TransferError::OutOfBounds), "{bad:?}");
        }
    }

    fn kinds() -> impl Strategy<Value = Kind> {
        prop_oneof![Just(Kind::Write), Just(Kind::Read), Just(Kind::Pull)]
    }

    proptest! {
        /// What one side cuts, the other side reads: the same bytes, in order, each once.
        #[test]
        fn the_receiver_reads_what_the_sender_cut(
            items in prop::collection::vec((0u32..2, 0u64..64, 0u32..3, 0u64..64, 0u64..16), 1..400),
            maxima in prop::collection::vec(1u64..3000, 1..6),
            kind in kinds(),
        ) {
            let pairs: Arc<[Pair]> = items
                .iter()
                .map(|&(lr, lo, rr, ro, len)| Pair {
                    local: place(lr, lo), remote: place(rr, ro), len,
                })
                .collect();
            let extent = |_| Span { offset: 0, len: 80 };
            let shape = Shape::vector(pairs, extent, extent).unwrap();
            let (mut at, mut walked) = (shape.start(), shape.start());
            let (mut head, mut turn) = (Vec::new(), 0);
            while at.left() > 0 {
                turn += 1;
                let max = max_frame(kind, maxima[turn % maxima.len()], u64::MAX);
                let (bytes, payload) = cut(kind, &shape, &mut at, max, &mut head);
                prop_assert!(bytes > 0 && bytes <= max);
                prop_assert_eq!(payload, if kind == Kind::Write { bytes } else { 0 });
                let (named, runs, asked) = read(&head).unwrap();
                prop_assert_eq!(asked, match kind {
                    Kind::Write => Asked::Write(bytes),
                    Kind::Read => Asked::Read(bytes),
                    _ => Asked::Pull(bytes),
                });
                prop_assert!(runs.len() <= MAX_SEGMENTS);
                for run in runs {
                    let pair = shape.peek(&walked, run.len).unwrap();
                    prop_assert_eq!((pair.remote.offset, pair.len), (run.offset, run.len));
                    prop_assert_eq!(grant(pair.remote.region), named.grant);
                    if kind == Kind::Pull {
                        prop_assert_eq!(run.source, address(&pair.local));
                    }
                    prop_assert_eq!(run.check(80), Ok(()));
                    shape.advance(&mut walked, run.len);
                }
                prop_assert_eq!(walked, at);
            }
        }

        /// Any bytes give an error or a frame within its limits.
        #[test]
        fn no_bytes_exceed_the_limits(
            kind in 1u8..=12,
            segments in prop_oneof![0u16..4, Just(256), Just(257), any::<u16>()],
            body in prop_oneof![0u32..100, any::<u32>()],
            table in prop::collection::vec(any::<u8>(), 20 * 257),
        ) {
            let mut head = Header::new(Kind::Beat);
            head.sequence = 1.into();
            head.as_mut_bytes()[3] = kind;
            head.as_mut_bytes()[6..8].copy_from_slice(&segments.to_le_bytes());
            head.as_mut_bytes()[8..12].copy_from_slice(&body.to_le_bytes());
            let header = head.as_bytes().first_chunk().unwrap();
            match Arrival::read(header, &AppliedFrames::new(8)) {
                Ok(Arrival::Write(_, run)) => prop_assert!(run.len <= MAX_PAYLOAD),
                Ok(Arrival::Table(ahead)) => {
                    prop_assert!(ahead.len() <= MAX_SEGMENTS * PULL_SEGMENT_LEN);
                    let mut runs = Vec::new();
                    let total = match ahead.read(&table[..ahead.len()], &mut runs) {
                        Ok(Asked::Write(total) | Asked::Read(total)) => {
                            prop_assert!(total <= MAX_PAYLOAD);
                            total
                        }
                        Ok(Asked::Pull(total)) => {
                            prop_assert!(total <= MAX_PULL);
                            total
                        }
                        Err(_) => return Ok(()),
                    };
                    prop_assert_eq!(total, runs.iter().map(|run| run.len).sum::<u64>());
                    prop_assert!(!runs.is_empty() && runs.len() <= MAX_SEGMENTS);
                }
                _ => {}
            }
        }
    }
}
