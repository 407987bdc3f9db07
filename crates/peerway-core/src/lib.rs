//! The part of Peerway that does no input or output.
//!
//! This crate holds ids, region arithmetic, the shapes of work and their cursors, the striping
//! rule, wire frames, the protocol of lanes, credits, counters, leases, device locality, the
//! configuration table and transfer outcomes.
//!
//! Everything here is deterministic and free of `unsafe`, so tests and fuzzers run it without a
//! peer. The `peerway` crate drives it.

#![forbid(unsafe_code)]

pub mod abi;
pub mod command;
pub mod config;
pub mod counter;
pub mod credit;
pub mod descriptor;
pub mod fuzz;
pub mod ids;
pub mod lease;
pub mod metadata;
pub mod outcome;
pub mod protocol;
pub mod record;
pub mod region;
pub mod stripe;
pub mod topology;
pub mod wire;
pub mod work;
