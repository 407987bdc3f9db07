//! Pieces that tests of Peerway share: processes under control, a proxy that breaks connections,
//! seeded randomness, memory that is watched.
//!
//! The program `peerway-conformance` is built of them; it needs nothing but itself to run.

pub mod cables;
pub mod child;
pub mod hex;
pub mod limits;
pub mod memory;
pub mod procfs;
pub mod proxy;
pub mod random;
pub mod raw;
