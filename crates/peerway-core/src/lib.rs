//! The part of Peerway that does no input or output.
//!
//! Ids, region arithmetic, the shapes of work and their cursors, the striping rule, wire frames,
//! credits, counters, leases, the nearness of devices, the configuration table and the words in which a
//! transfer ends.
//! Everything here is deterministic and free of `unsafe`, so that it can be tested and fuzzed
//! without a peer. The `peerway` crate drives it.

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
pub mod region;
pub mod stripe;
pub mod topology;
pub mod wire;
pub mod work;
