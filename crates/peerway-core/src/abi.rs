//! What kernels and the proxy agree on: structures by which a kernel finds rings, counters and answers.
//!
//! They are defined once, here. `include/peerway_abi.h` is written from this definition by `cargo xtask device-header`,
//! and a test compares the two.

use crate::command;

/// Says that memory holds a [`RawProxy`] of this layout.
pub const MAGIC: u32 = 0x5057_4456;
/// Of the layout.
pub const VERSION: u32 = 1;
/// Copies of every word that kernels wait for, a cache line each, over which warps spread: reads of one line by many are
/// served one after the other.
pub const LINES: usize = 4;
/// In a ring's cached credit: the ring has a hole, and is of no more use.
pub const DEAD: u64 = 1 << 63;
/// Bytes between those copies.
pub const LINE: usize = 64;

macro_rules! structures {
    ($($(#[doc = $doc:literal])+ $name:ident = $c:literal {
        $($(#[doc = $field_doc:literal])+ $field:ident: $type:ident,)*
    })*) => {
        $(
            $(#[doc = $doc])+
            #[derive(Clone, Copy, Debug, Default)]
            #[repr(C)]
            pub struct $name {
                $($(#[doc = $field_doc])+ pub $field: $type,)*
            }

            // No padding: both compilers lay it out alike.
            const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$type>())*);
        )*

        fn structures(into: &mut String) {
            $(
                $(into.push_str(concat!("//", $doc, "\n"));)+
                into.push_str(concat!("struct ", $c, " {\n"));
                $(
                    $(into.push_str(concat!("    //", $field_doc, "\n"));)+
                    let line = format!("    {} {};\n", c_type(stringify!($type)), stringify!($field));
                    into.push_str(&line);
                )*
                into.push_str("};\n");
                let size = size_of::<$name>();
                into.push_str(&format!("static_assert(sizeof({}) == {size}, \"layout\");\n\n", $c));
            )*
        }
    };
}

structures! {
    /// One ring. Addresses are the kernel's.
    RawRing = "peerway_ring" {
        /// Slots of 16 bytes, in host memory.
        slots: u64,
        /// Positions consumed, in host memory.
        credit: u64,
        /// Answers to `quiet`, of this ring: for each peer PEERWAY_LINES lines, in host memory.
        completed: u64,
        /// Positions claimed, in the kernel's memory.
        claim: u64,
        /// Credit as last read, in the kernel's memory; its top bit: the ring is dead.
        cached: u64,
        /// There are 1 << log2_slots slots.
        log2_slots: u32,
        /// Zero.
        reserved: u32,
    }

    /// All that a kernel is given.
    RawProxy = "peerway_proxy" {
        /// PEERWAY_MAGIC.
        magic: u32,
        /// PEERWAY_VERSION.
        version: u32,
        /// How many rings.
        rings: u32,
        /// Peers that may be named: numbers below this.
        peers: u32,
        /// Counters of our own that may be waited for.
        counters: u32,
        /// Zero.
        reserved: u32,
        /// The rings: an array of peerway_ring.
        ring_table: u64,
        /// Counters, PEERWAY_LINES lines each, in host memory.
        counter_words: u64,
        /// For each peer a word that is not zero once it has failed, in host memory.
        peer_faults: u64,
        /// The first fault, in host memory: a peerway_fault.
        fault: u64,
        /// Nanoseconds that a wait takes at most.
        timeout_ns: u64,
    }

    /// The first thing that went wrong, written by the proxy, the code last.
    RawFault = "peerway_fault" {
        /// One of PEERWAY_FAULT_*, or zero.
        code: u32,
        /// Whom the command was for.
        peer: u32,
        /// The ring it came from.
        ring: u32,
        /// Its operation.
        op: u32,
        /// Its position in that ring.
        position: u64,
        /// Faults so far, this one included.
        count: u64,
    }
}

/// Why a command failed.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
#[repr(u32)]
pub enum FaultCode {
    /// There is no such operation.
    Operation = 1,
    /// There is no peer of that number.
    Peer = 2,
    /// The source leaves our windows.
    Source = 3,
    /// The destination leaves the peer's windows.
    Destination = 4,
    /// The peer has no such counter.
    Counter = 5,
    /// The peer is gone.
    PeerGone = 6,
    /// The peer took its memory back, or does not allow it.
    Refused = 7,
    /// The transfer did not end in time.
    TimedOut = 8,
    /// The transfer failed otherwise; the log says how.
    Failed = 9,
    /// It did not end in time, and may still change the peer's memory.
    Unfenced = 10,
}

impl FaultCode {
    const ALL: [Self; 10] = [
        Self::Operation,
        Self::Peer,
        Self::Source,
        Self::Destination,
        Self::Counter,
        Self::PeerGone,
        Self::Refused,
        Self::TimedOut,
        Self::Failed,
        Self::Unfenced,
    ];

    /// The code of that number.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|code| *code as u32 == number)
    }

    fn c_name(self) -> &'static str {
        match self {
            Self::Operation => "OPERATION",
            Self::Peer => "PEER",
            Self::Source => "SOURCE",
            Self::Destination => "DESTINATION",
            Self::Counter => "COUNTER",
            Self::PeerGone => "PEER_GONE",
            Self::Refused => "REFUSED",
            Self::TimedOut => "TIMED_OUT",
            Self::Failed => "FAILED",
            Self::Unfenced => "UNFENCED",
        }
    }
}

impl std::fmt::Display for FaultCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Operation => "there is no such operation",
            Self::Peer => "there is no peer of that number",
            Self::Source => "the source is not inside one of our windows",
            Self::Destination => "the destination is not inside one of the peer's windows",
            Self::Counter => "the peer has no such counter",
            Self::PeerGone => "the peer is gone",
            Self::Refused => "the peer took its memory back, or does not allow it",
            Self::TimedOut => "it did not end in time",
            Self::Failed => "the transfer failed",
            Self::Unfenced => "it did not end in time, and may still change the peer's memory",
        })
    }
}

/// `include/peerway_abi.h`.
pub fn header() -> String {
    let mut text = String::from(
        "// What kernels and the proxy agree on. Written by `cargo xtask device-header` from crates/peerway-core/src/abi.rs;\n\
         // changes belong there.\n\
         #ifndef PEERWAY_ABI_H\n#define PEERWAY_ABI_H\n\n\
         typedef unsigned int peerway_u32;\ntypedef unsigned long long peerway_u64;\n\n",
    );
    let mut define = |name: &str, value: u64| {
        text.push_str(&format!("#define PEERWAY_{name} {value:#x}ull\n"));
    };
    define("MAGIC", MAGIC.into());
    define("VERSION", VERSION.into());
    define("LINES", LINES as u64);
    define("LINE", LINE as u64);
    define("DEAD", DEAD);
    define("UNIT", command::UNIT);
    define("MAX_LEN", command::MAX_LEN);
    define("MAX_SPACE", command::MAX_SPACE);
    define("PHASE", command::PHASE);
    for (name, op) in [
        ("OP_NOP", command::Op::Nop),
        ("OP_PUT", command::Op::Put),
        ("OP_PUT_COUNT", command::Op::PutCount),
        ("OP_SIGNAL", command::Op::Signal),
        ("OP_QUIET", command::Op::Quiet),
    ] {
        define(name, op as u64);
    }
    for (name, shift) in command::SHIFTS {
        define(name, u64::from(*shift));
    }
    for code in FaultCode::ALL {
        define(&format!("FAULT_{}", code.c_name()), code as u64);
    }
    text.push('\n');
    structures(&mut text);
    text.push_str("#endif\n");
    text
}

fn c_type(rust: &str) -> &'static str {
    match rust {
        "u32" => "peerway_u32",
        _ => "peerway_u64",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_header_is_this_definition() {
        let committed = include_str!("../../../include/peerway_abi.h");
        assert!(committed == header(), "run `cargo xtask device-header`");
    }

    #[test]
    fn codes_have_their_numbers() {
        for code in FaultCode::ALL {
            assert_eq!(FaultCode::from_number(code as u32), Some(code));
        }
        assert_eq!(FaultCode::from_number(0), None);
    }
}
