//! How transfers make progress: shards with their drivers, which any thread may poll, and the copy
//! crew.

pub(crate) mod crew;
pub(crate) mod driver;
mod ending;
pub(crate) mod flight;
mod poller;
pub(crate) mod queues;
mod receive;
pub(crate) mod shard;
mod staging;
mod sync;
mod timers;
mod transmit;
