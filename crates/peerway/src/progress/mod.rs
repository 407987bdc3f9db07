//! How transfers make progress: the engine with its shards, whose drivers any thread may poll, and
//! the copies that threads and GPUs do.

pub(crate) mod copies;
pub(crate) mod driver;
mod ending;
pub(crate) mod engine;
#[cfg(any(test, fuzzing))]
pub(crate) mod holdings;
mod imports;
pub(crate) mod lane;
mod poller;
mod port;
pub(crate) mod queues;
mod receive;
pub(crate) mod request;
pub(crate) mod shard;
pub(crate) mod shards;
mod staging;
mod sync;
mod timers;
mod transmit;
