//! The shards of an endpoint: the shared ones, among which sessions are distributed, and those of
//! sub-sessions.
//!
//! A proxy creates the shard of a sub-session when it first has a thread for it. A peer's request
//! never creates one. The shard stays. The proxy thread that posts there polls it; its own progress
//! thread polls it when the proxy thread does not.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use peerway_core::wire::SubSession;

use super::driver::Driver;
use super::engine::Engine;
use super::listening::Listening;
use super::shard::Shard;
use crate::error::{BuildError, os};

/// The highest sub-session number. A proxy has no more threads than this.
pub(crate) const MAX_SUB_SESSIONS: u16 = 64;

/// See the module.
pub(crate) struct Shards {
    /// The shared shards, then those of sub-sessions by number.
    table: Box<[OnceLock<Arc<Shard>>]>,
    /// How many shards are shared.
    shared: usize,
    next: AtomicUsize,
    /// Held while the shard of a sub-session is created.
    making: Mutex<()>,
}

impl Shards {
    pub(crate) fn new(shared: usize) -> Self {
        let places = shared + usize::from(MAX_SUB_SESSIONS);
        let table = (0..places).map(|_| OnceLock::new()).collect();
        Self { table, shared, next: AtomicUsize::new(0), making: Mutex::default() }
    }

    /// The shard with this index. A session names only shards that exist.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> &Arc<Shard> {
        self.table[index].get().expect("the shard of a session exists")
    }

    /// The shared shards. Sessions are distributed among them, and waiting threads poll them.
    pub(crate) fn shared(&self) -> impl Iterator<Item = &Arc<Shard>> {
        self.table[..self.shared].iter().filter_map(OnceLock::get)
    }

    /// All shards.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Shard>> {
        self.table.iter().filter_map(OnceLock::get)
    }

    /// The shards that a proxy thread polls: the shared ones for the first thread, the shard of its
    /// sub-session for each other thread.
    pub(crate) fn of_worker(&self, worker: usize) -> Vec<Arc<Shard>> {
        match worker.checked_sub(1) {
            None => self.shared().cloned().collect(),
            Some(at) => self.table[self.shared..]
                .get(at)
                .and_then(OnceLock::get)
                .cloned()
                .into_iter()
                .collect(),
        }
    }

    /// The shard for a new session: that of its sub-session if there is one, else the next shared
    /// shard.
    pub(crate) fn of(&self, sub_session: Option<SubSession>) -> Arc<Shard> {
        let place = |sub_session: SubSession| {
            self.table[self.shared..].get(usize::from(sub_session.number).checked_sub(1)?)
        };
        if let Some(shard) = sub_session.and_then(place).and_then(OnceLock::get) {
            return shard.clone();
        }
        self.get(self.next.fetch_add(1, Ordering::Relaxed) % self.shared).clone()
    }
}

impl Engine {
    /// Creates the shared shards, without drivers.
    pub(crate) fn make_shards(&self) -> Result<(), BuildError> {
        for (index, place) in self.shards.table[..self.shards.shared].iter().enumerate() {
            let _ = place.set(self.new_shard(index)?);
        }
        Ok(())
    }

    /// Creates a shard without a driver, with a completion queue for each RDMA device.
    fn new_shard(&self, index: usize) -> Result<Arc<Shard>, BuildError> {
        let ports = self.rdma.as_ref().map_or(Ok(Vec::new()), |rdma| rdma.completion_queues());
        let pin = || self.config.transport.to_string();
        let ports = ports.map_err(|error| BuildError::NoRdma { pin: pin(), error })?;
        Shard::new(index, self.config.spin, ports).map_err(os("cannot create a shard"))
    }

    /// Starts the driver and the progress thread of a shard.
    pub(crate) fn start_shard(
        self: &Arc<Self>,
        shard: &Arc<Shard>,
        acceptor: Option<Box<dyn Listening>>,
    ) -> Result<(), BuildError> {
        let driver = Driver::new(self.clone(), shard.clone(), acceptor);
        // The driver and the shard hold each other until the shard is stopped.
        let started = shard.start(self, driver).inspect_err(|_| shard.stop());
        started.map_err(os("cannot start a progress thread"))
    }

    /// Ensures that the shards of the first `count` sub-sessions exist.
    pub(crate) fn have_sub_sessions(self: &Arc<Self>, count: usize) -> Result<(), BuildError> {
        let _making = self.shards.making.lock().unwrap();
        let sub_sessions = self.shards.table.iter().enumerate().skip(self.shards.shared);
        for (index, place) in sub_sessions.take(count).filter(|(_, place)| place.get().is_none()) {
            // `end_making` takes the same lock after the endpoint is closed, so every created shard
            // is stopped.
            let closed = |_| os("the endpoint is closed")(io::ErrorKind::NotConnected.into());
            self.check_open().map_err(closed)?;
            let shard = self.new_shard(index)?;
            self.start_shard(&shard, None)?;
            let _ = place.set(shard);
        }
        Ok(())
    }

    /// Waits for a shard in creation. The endpoint is closed, so no further one is created.
    pub(crate) fn end_making(&self) {
        drop(self.shards.making.lock().unwrap());
    }
}
