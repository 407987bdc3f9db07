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
pub(crate) mod listening;
mod messages;
mod poller;
mod port;
pub(crate) mod queues;
mod receive;
mod reopening;
mod replacing;
mod replies;
pub(crate) mod request;
pub(crate) mod sessions;
pub(crate) mod shard;
pub(crate) mod shards;
mod staging;
mod sync;
mod timers;
mod transmit;
pub(crate) mod windows;
