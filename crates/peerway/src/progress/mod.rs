//! Who moves things along: shards that any thread may lend itself to, and the copy crew.

mod baton;
pub(crate) mod crew;
pub(crate) mod driver;
mod ending;
pub(crate) mod flight;
pub(crate) mod queues;
mod receive;
mod service;
pub(crate) mod shard;
mod staging;
mod timers;
mod transmit;
