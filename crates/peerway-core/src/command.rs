//! Commands that a kernel writes into a ring: 16 bytes, of which one bit in each half says whose lap it is.
//!
//! | word | bits | what |
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
//! Source and destination are offsets in the address spaces of the two sides' windows, 256 GiB each. Units of four bytes
//! are what makes 16 bytes enough for windows as large as a GPU's memory; every element type worth sending is a multiple.
//!
//! Whatever bits come, decoding gives a command or a reason; nothing is indexed by it here.

/// Bytes of one unit of offsets and lengths.
pub const UNIT: u64 = 4;
/// Peers that can be named.
pub const MAX_PEERS: usize = 1 << PEER_BITS;
/// Counters that can be named.
pub const MAX_COUNTERS: usize = 1 << COUNTER_BITS;
/// Bytes of one side's windows together.
pub const MAX_SPACE: u64 = UNIT << OFFSET_BITS;
/// The longest put: 16 MiB less four bytes.
pub const MAX_LEN: u64 = ((1 << LEN_BITS) - 1) * UNIT;
/// The bit that says whose lap it is, in each half.
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

/// Where the fields are, for those who write commands in another language: of the first word, then of the second.
pub const SHIFTS: &[(&str, u32)] = &[
    ("PEER_AT", PEER_AT),
    ("COUNTER_AT", COUNTER_AT),
    ("LEN_AT", LEN_AT),
    ("DST_HIGH_AT", HIGH_AT),
    ("DST_LOW_AT", LOW_AT),
    ("DST_LOW_BITS", LOW_BITS),
];

const _: () = assert!(HIGH_AT + HIGH_BITS == 63 && LOW_AT + LOW_BITS == 63);

/// What is to be done.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u8)]
pub enum Op {
    /// Nothing. It is consumed and counted.
    Nop = 0,
    /// Bytes of ours into the peer's memory.
    Put = 1,
    /// The same, and a counter of the peer goes up by one after them.
    PutCount = 2,
    /// A counter of the peer goes up by one.
    Signal = 3,
    /// An answer when all earlier commands of this ring to the peer are done.
    Quiet = 4,
}

/// One command. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Command {
    /// What.
    pub op: Op,
    /// Whom it goes to, by number.
    pub peer: u16,
    /// The counter that follows, for those that have one.
    pub counter: u16,
    /// Where in our windows.
    pub src: u64,
    /// Where in the peer's.
    pub dst: u64,
    /// How much.
    pub len: u64,
}

/// A command that cannot be written down.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// No such peer can be named.
    #[error("peer {0} cannot be named in a command: there are at most {MAX_PEERS}")]
    Peer(u16),
    /// Offsets and lengths come in units.
    #[error("{what} {value} is no multiple of {UNIT} bytes")]
    Unaligned {
        /// Which of them.
        what: &'static str,
        /// As it was given.
        value: u64,
    },
    /// An offset or a length is too large.
    #[error("{what} {value} is too large for a command: less than {limit} bytes fit")]
    TooLarge {
        /// Which of them.
        what: &'static str,
        /// As it was given.
        value: u64,
        /// What it must be below.
        limit: u64,
    },
}

/// Bits that are no command: the operation is unknown.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("there is no operation {0}")]
pub struct UnknownOp(pub u8);

impl Command {
    /// A command that does nothing.
    pub const NOP: Self = Self { op: Op::Nop, peer: 0, counter: 0, src: 0, dst: 0, len: 0 };

    /// The two words, with the phase bits clear.
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

    /// What two words say; the phase bits are passed over.
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

/// The peer that a command's first word names.
#[inline]
pub fn peer_of(first: u64) -> u16 {
    ((first >> PEER_AT) & mask(PEER_BITS)) as u16
}

/// The phase bit of a position in a ring of `1 << log2` slots: it alternates from lap to lap and is set in the first, so that
/// zeroed memory holds no command, and what is left of the last lap none of this one.
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
        fn what_was_written_is_read(command in commands(), phases in 0..4u64) {
            let [first, second] = command.encode().unwrap();
            prop_assert_eq!((first | second) & PHASE, 0, "phases are the ring's");
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
    fn what_does_not_fit_is_named() {
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
