//! The interface between kernels and the proxy: the structures through which a kernel finds rings,
//! counters and answers.
//!
//! This module is the only definition. `cargo xtask device-header` generates
//! `include/peerway_abi.h` from it, and a test compares the two.

use crate::command;

/// Marks memory that holds a [`RawProxy`] of this layout.
pub const MAGIC: u32 = 0x5057_4456;
/// The version of the layout.
pub const VERSION: u32 = 1;
/// The number of copies of every word that kernels wait for, one cache line each. Warps spread over
/// the copies, because reads of one line by many warps are serialised.
pub const LINES: usize = 4;
/// A flag in a ring's cached credit. A producer abandoned a claim, so the ring has a hole and is
/// unusable.
pub const DEAD: u64 = 1 << 63;
/// The distance between those copies in bytes.
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

            // There is no padding, so both compilers use the same layout.
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
    /// One ring. Addresses are those of the kernel.
    RawRing = "peerway_ring" {
        /// Slots of 16 bytes, in host memory.
        slots: u64,
        /// The number of consumed positions, in host memory.
        credit: u64,
        /// Answers to `quiet` for this ring: PEERWAY_LINES lines for each peer, in host memory.
        completed: u64,
        /// The number of claimed positions, in the kernel's memory.
        claim: u64,
        /// The credit as last read, in the kernel's memory. The top bit is set if the ring is dead.
        cached: u64,
        /// The ring has 1 << log2_slots slots.
        log2_slots: u32,
        /// Always zero.
        reserved: u32,
    }

    /// The structure that a kernel receives.
    RawProxy = "peerway_proxy" {
        /// PEERWAY_MAGIC.
        magic: u32,
        /// PEERWAY_VERSION.
        version: u32,
        /// The number of rings.
        rings: u32,
        /// The number of peers. Valid peer numbers are below this.
        peers: u32,
        /// The number of local counters that a kernel can wait for.
        counters: u32,
        /// Always zero.
        reserved: u32,
        /// The rings: an array of peerway_ring.
        ring_table: u64,
        /// Counters, PEERWAY_LINES lines each, in host memory.
        counter_words: u64,
        /// For each peer, a word that becomes nonzero when the peer fails, in host memory.
        peer_faults: u64,
        /// The first fault, in host memory: a peerway_fault.
        fault: u64,
        /// The maximum duration of a wait in nanoseconds.
        timeout_ns: u64,
    }

    /// The first fault. The proxy writes the code last.
    RawFault = "peerway_fault" {
        /// One of PEERWAY_FAULT_*, or zero.
        code: u32,
        /// The peer of the failed command.
        peer: u32,
        /// The ring of the command.
        ring: u32,
        /// The operation of the command.
        op: u32,
        /// The position of the command in the ring.
        position: u64,
        /// The number of faults so far, including this one.
        count: u64,
    }
}

/// Why a command failed.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
#[repr(u32)]
pub enum FaultCode {
    /// The operation does not exist.
    Operation = 1,
    /// No peer has this number.
    Peer = 2,
    /// The source is outside the local windows.
    Source = 3,
    /// The destination is outside the peer's windows.
    Destination = 4,
    /// The peer has no such counter.
    Counter = 5,
    /// The peer is gone.
    PeerGone = 6,
    /// The peer revoked its memory, or does not allow the access.
    Refused = 7,
    /// The transfer did not end in time.
    TimedOut = 8,
    /// The transfer failed for another reason. The log has the details.
    Failed = 9,
    /// The transfer did not end in time and may still change the peer's memory.
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

    /// The code with this number.
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
            Self::Operation => "the operation does not exist",
            Self::Peer => "no peer has this number",
            Self::Source => "the source is not inside one of the local windows",
            Self::Destination => "the destination is not inside one of the peer's windows",
            Self::Counter => "the peer does not have this counter",
            Self::PeerGone => "the peer is gone",
            Self::Refused => "the peer revoked its memory, or does not allow the access",
            Self::TimedOut => "the transfer did not end in time",
            Self::Failed => "the transfer failed; see the log",
            Self::Unfenced => {
                "the transfer did not end in time and may still change the peer's memory"
            }
        })
    }
}

/// The content of `include/peerway_abi.h`.
pub fn header() -> String {
    let mut text = String::from(
        "// The interface between kernels and the proxy. `cargo xtask device-header` generates this file\n\
         // from crates/peerway-core/src/abi.rs; edit that file.\n\
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
        assert!(committed == header(), "the header is outdated: run `cargo xtask device-header`");
    }

    #[test]
    fn codes_have_their_numbers() {
        for code in FaultCode::ALL {
            assert_eq!(FaultCode::from_number(code as u32), Some(code));
        }
        assert_eq!(FaultCode::from_number(0), None);
    }
}
