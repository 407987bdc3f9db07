//! Commands that a GPU kernel writes into a ring. A command has 16 bytes; one bit in each half is
//! its phase bit.
//!
//! | word | bits | content |
//! |---|---|---|
//! | 0 | 0-3 | operation |
//! | 0 | 4-15 | peer, by its number |
//! | 0 | 16-31 | counter |
//! | 0 | 32-53 | length, in units of four bytes |
//! | 0 | 54-62 | destination, upper 9 bits |
//! | 1 | 0-35 | source, in units of four bytes |
//! | 1 | 36-62 | destination, lower 27 bits |
//! | both | 63 | phase: see [`phase`] |
//!
//! Source and destination are offsets in the address spaces of the two sides' windows, 256 GiB
//! each. Units of four bytes make 16 bytes enough for windows as large as a GPU's memory. The sizes
//! of all element types in use are multiples of four bytes.
//!
//! Decoding accepts any bits: it returns a command or an error. This module uses no decoded value
//! as an index.

/// Bytes of one unit of offsets and lengths.
pub const UNIT: u64 = 4;
/// The number of peers that a command can name.
pub const MAX_PEERS: usize = 1 << PEER_BITS;
/// The number of counters that a command can name.
pub const MAX_COUNTERS: usize = 1 << COUNTER_BITS;
/// The size of all windows of one side together, in bytes.
pub const MAX_SPACE: u64 = UNIT << OFFSET_BITS;
/// The longest put: 16 MiB less four bytes.
pub const MAX_LEN: u64 = ((1 << LEN_BITS) - 1) * UNIT;
/// The phase bit in each half: see [`phase`].
pub const PHASE: u64 = 1 << 63;

const OP_BITS: u32 = 4;
const PEER_BITS: u32 = 12;
const COUNTER_BITS: u32 = 16;
const LEN_BITS: u32 = 22;
const OFFSET_BITS: u32 = 36;
const HIGH_BITS: u32 = 9;
const LOW_BITS: u32 = OFFSET_BITS - HIGH_BITS;

const PEER_AT: u32 = OP_BITS;
const COUNTER_AT: u32 = PEER_AT + PEER_BITS;
const LEN_AT: u32 = COUNTER_AT + COUNTER_BITS;
const HIGH_AT: u32 = LEN_AT + LEN_BITS;
const LOW_AT: u32 = OFFSET_BITS;

/// The shifts of the fields, for producers in other languages. Fields of the first word come first.
pub const SHIFTS: &[(&str, u32)] = &[
    ("PEER_AT", PEER_AT),
    ("COUNTER_AT", COUNTER_AT),
    ("LEN_AT", LEN_AT),
    ("DST_HIGH_AT", HIGH_AT),
    ("DST_LOW_AT", LOW_AT),
    ("DST_LOW_BITS", LOW_BITS),
];

const _: () = assert!(HIGH_AT + HIGH_BITS == 63 && LOW_AT + LOW_BITS == 63);

/// The operation of a command.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u8)]
pub enum Op {
    /// Does nothing. The consumer still consumes and counts it.
    Nop = 0,
    /// Writes local bytes into the peer's memory.
    Put = 1,
    /// Writes local bytes into the peer's memory, then adds one to a counter of the peer.
    PutCount = 2,
    /// Adds one to a counter of the peer.
    Signal = 3,
    /// Asks for an answer when all earlier commands of this ring to the peer are done.
    Quiet = 4,
}

/// One command. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Command {
    /// The operation.
    pub op: Op,
    /// The number of the peer.
    pub peer: u16,
    /// The counter to raise, for operations that raise one.
    pub counter: u16,
    /// The source offset in the local windows.
    pub src: u64,
    /// The destination offset in the peer's windows.
    pub dst: u64,
    /// The number of bytes.
    pub len: u64,
}

/// Why a command cannot be encoded.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The peer number does not fit.
    #[error("peer {0} does not fit in a command: peer numbers are below {MAX_PEERS}")]
    Peer(u16),
    /// An offset or a length is not a whole number of units.
    #[error("{what} {value} is not a multiple of {UNIT} bytes")]
    Unaligned {
        /// The field.
        what: &'static str,
        /// The value that the caller passed.
        value: u64,
    },
    /// An offset or a length is too large.
    #[error("{what} {value} is too large for a command: it must be below {limit} bytes")]
    TooLarge {
        /// The field.
        what: &'static str,
        /// The value that the caller passed.
        value: u64,
        /// The exclusive upper limit.
        limit: u64,
    },
}

/// Bits that encode no command, because the operation is unknown.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("unknown command operation {0}")]
pub struct UnknownOp(pub u8);

impl Command {
    /// A command that does nothing.
    pub const NOP: Self = Self { op: Op::Nop, peer: 0, counter: 0, src: 0, dst: 0, len: 0 };

    /// Encodes the command into two words with clear phase bits.
    pub fn encode(&self) -> Result<[u64; 2], CommandError> {
        if usize::from(self.peer) >= MAX_PEERS {
            return Err(CommandError::Peer(self.peer));
        }
        let src = units("source", self.src, MAX_SPACE)?;
        let dst = units("destination", self.dst, MAX_SPACE)?;
        let len = units("length", self.len, MAX_LEN + UNIT)?;
        let first = self.op as u64
            | u64::from(self.peer) << PEER_AT
            | u64::from(self.counter) << COUNTER_AT
            | len << LEN_AT
            | (dst >> LOW_BITS) << HIGH_AT;
        let second = src | (dst & mask(LOW_BITS)) << LOW_AT;
        Ok([first, second])
    }

    /// Decodes two words. Ignores the phase bits.
    #[inline]
    pub fn decode([first, second]: [u64; 2]) -> Result<Self, UnknownOp> {
        let op = match first & mask(OP_BITS) {
            0 => Op::Nop,
            1 => Op::Put,
            2 => Op::PutCount,
            3 => Op::Signal,
            4 => Op::Quiet,
            other => return Err(UnknownOp(other as u8)),
        };
        let high = (first >> HIGH_AT) & mask(HIGH_BITS);
        let low = (second >> LOW_AT) & mask(LOW_BITS);
        Ok(Self {
            op,
            peer: peer_of(first),
            counter: (first >> COUNTER_AT) as u16,
            src: (second & mask(OFFSET_BITS)) * UNIT,
            dst: (high << LOW_BITS | low) * UNIT,
            len: ((first >> LEN_AT) & mask(LEN_BITS)) * UNIT,
        })
    }
}

/// The peer number in a command's first word.
#[inline]
pub fn peer_of(first: u64) -> u16 {
    ((first >> PEER_AT) & mask(PEER_BITS)) as u16
}

/// The phase bit for a position in a ring of `1 << log2` slots.
///
/// The phase alternates from lap to lap and is set in the first lap. Zeroed memory therefore holds
/// no command, and a slot left over from the previous lap is not taken for one of this lap.
#[inline]
pub fn phase(position: u64, log2: u32) -> u64 {
    if (position >> log2) & 1 == 0 { PHASE } else { 0 }
}

fn units(what: &'static str, value: u64, limit: u64) -> Result<u64, CommandError> {
    if !value.is_multiple_of(UNIT) {
        return Err(CommandError::Unaligned { what, value });
    }
    if value >= limit {
        return Err(CommandError::TooLarge { what, value, limit });
    }
    Ok(value / UNIT)
}

const fn mask(bits: u32) -> u64 {
    (1 << bits) - 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn commands() -> impl Strategy<Value = Command> {
        let op = prop_oneof![
            Just(Op::Nop),
            Just(Op::Put),
            Just(Op::PutCount),
            Just(Op::Signal),
            Just(Op::Quiet)
        ];
        let peers = 0..MAX_PEERS as u16;
        let space = 0..MAX_SPACE / UNIT;
        (op, peers, any::<u16>(), space.clone(), space, 0..=MAX_LEN / UNIT).prop_map(
            |(op, peer, counter, src, dst, len)| Command {
                op,
                peer,
                counter,
                src: src * UNIT,
                dst: dst * UNIT,
                len: len * UNIT,
            },
        )
    }

    proptest! {
        #[test]
        fn an_encoded_command_decodes_to_itself(command in commands(), phases in 0..4u64) {
            let [first, second] = command.encode().unwrap();
            prop_assert_eq!((first | second) & PHASE, 0, "`encode` leaves the phase bits clear");
            let words = [first | phases << 63, second | (phases >> 1) << 63];
            prop_assert_eq!(Command::decode(words), Ok(command));
            prop_assert_eq!(peer_of(words[0]), command.peer);
        }

        #[test]
        fn any_bits_are_a_command_or_refused(words in any::<[u64; 2]>()) {
            if let Ok(command) = Command::decode(words) {
                let again = command.encode().unwrap();
                prop_assert_eq!(again, words.map(|word| word & !PHASE));
            }
        }
    }

    #[test]
    fn a_field_that_does_not_fit_is_named() {
        let put = Command { op: Op::Put, ..Command::NOP };
        let unaligned = CommandError::Unaligned { what: "source", value: 6 };
        assert_eq!(Command { src: 6, ..put }.encode(), Err(unaligned));
        let (what, value, limit) = ("length", MAX_LEN + UNIT, MAX_LEN + UNIT);
        let long = CommandError::TooLarge { what, value, limit };
        assert_eq!(Command { len: value, ..put }.encode(), Err(long));
        assert_eq!(Command { peer: 4096, ..put }.encode(), Err(CommandError::Peer(4096)));
        assert!(Command { dst: MAX_SPACE - UNIT, len: MAX_LEN, ..put }.encode().is_ok());
    }

    #[test]
    fn laps_alternate_and_zeroes_are_no_command() {
        assert_eq!([0, 3, 4, 7, 8].map(|at| phase(at, 2)), [PHASE, PHASE, 0, 0, PHASE]);
    }
}
