//! Parts that Peerway's tests share: controlled child processes, a proxy that breaks connections,
//! seeded randomness, and checked memory.
//!
//! The program `peerway-conformance` uses them and needs no other program to run.

pub mod cables;
pub mod child;
pub mod hex;
pub mod limits;
pub mod memory;
pub mod procfs;
pub mod proxy;
pub mod random;
pub mod raw;
pub mod tls;
