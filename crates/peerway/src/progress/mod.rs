//! How transfers make progress: shards with their drivers, which any thread may poll, and the copy
//! pool.

pub(crate) mod copy_pool;
pub(crate) mod driver;
mod ending;
mod poller;
pub(crate) mod queues;
mod receive;
pub(crate) mod request;
pub(crate) mod shard;
mod staging;
mod sync;
mod timers;
mod transmit;
