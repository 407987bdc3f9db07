//! The shards of an endpoint: those that sessions are dealt to, and those of sub-sessions.
//!
//! A sub-session's shard is made when a proxy first has a thread for it, never because a peer asks, and
//! stays. The proxy's thread that posts there polls it; its own progress thread polls when that
//! thread does not.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use peerway_core::wire::SubSession;

use crate::endpoint::os;
use crate::error::BuildError;
use crate::inner::Inner;
use crate::progress::driver::Driver;
use crate::progress::shard::Shard;
use crate::session::acceptor::Acceptor;
use crate::transport::verbs::port::PortCq;

/// The highest number of a sub-session: proxies have no more threads.
pub(crate) const MAX_SUB_SESSIONS: u16 = 64;

/// See the module.
#[derive(Default)]
pub(crate) struct Shards {
    dealt: OnceLock<Vec<Arc<Shard>>>,
    next: AtomicUsize,
    /// By the sub-session's number, less one.
    sub_sessions: SubSessions,
    /// Held while a sub-session's is made.
    making: Mutex<()>,
}

struct SubSessions([OnceLock<Arc<Shard>>; MAX_SUB_SESSIONS as usize]);

impl Default for SubSessions {
    fn default() -> Self {
        Self([const { OnceLock::new() }; MAX_SUB_SESSIONS as usize])
    }
}

impl Shards {
    /// Gives the endpoint its shards, once.
    pub(crate) fn set(&self, shards: Vec<Arc<Shard>>) {
        let _ = self.dealt.set(shards);
    }

    /// Those that sessions are dealt to, and that everybody waits on.
    pub(crate) fn dealt(&self) -> &[Arc<Shard>] {
        self.dealt.get().map_or(&[], Vec::as_slice)
    }

    /// All of them.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Shard>> {
        self.dealt().iter().chain(self.sub_sessions.0.iter().filter_map(OnceLock::get))
    }

    /// Those that a proxy's thread looks after: the first the ones that everybody has, each other one its sub-session's.
    pub(crate) fn of_worker(&self, worker: usize) -> Vec<Arc<Shard>> {
        match worker.checked_sub(1) {
            None => self.dealt().to_vec(),
            Some(at) => {
                self.sub_sessions.0.get(at).and_then(OnceLock::get).cloned().into_iter().collect()
            }
        }
    }

    /// The shard for a new session: its sub-session's own if there is one, or the next in turn.
    pub(crate) fn of(&self, sub_session: Option<SubSession>) -> Arc<Shard> {
        let place = |sub_session: SubSession| {
            self.sub_sessions.0.get(usize::from(sub_session.number).checked_sub(1)?)
        };
        if let Some(shard) = sub_session.and_then(place).and_then(OnceLock::get) {
            return shard.clone();
        }
        let dealt = self.dealt();
        dealt[self.next.fetch_add(1, Ordering::Relaxed) % dealt.len()].clone()
    }
}

impl Inner {
    /// A shard without a driver, with a completion queue for each RDMA device.
    pub(crate) fn new_shard(&self) -> Result<Arc<Shard>, BuildError> {
        let nics = self.rdma.iter().flat_map(|rdma| &rdma.nics);
        let ports: Result<Vec<_>, _> = nics.map(PortCq::new).collect();
        let ports = ports.map_err(|error| BuildError::NoRdma {
            pin: self.config.transport.to_string(),
            error: error.into(),
        })?;
        Shard::new(self.config.spin, ports).map_err(os("making a shard"))
    }

    /// Has it served.
    pub(crate) fn start_shard(
        self: &Arc<Self>,
        shard: &Arc<Shard>,
        acceptor: Option<Acceptor>,
    ) -> Result<(), BuildError> {
        let driver = Driver::new(self.clone(), shard.clone(), acceptor);
        // Driver and shard hold each other until it is stopped.
        let started = shard.start(self, driver).inspect_err(|_| shard.stop());
        started.map_err(os("starting a progress thread"))
    }

    /// Has the shards of so many sub-sessions.
    pub(crate) fn have_sub_sessions(self: &Arc<Self>, count: usize) -> Result<(), BuildError> {
        let _making = self.shards.making.lock().unwrap();
        for place in
            self.shards.sub_sessions.0.iter().take(count).filter(|place| place.get().is_none())
        {
            // Whoever closes takes the lock too, so none is made that is not stopped.
            let closed = |_| os("the endpoint is closed")(io::ErrorKind::NotConnected.into());
            self.check_open().map_err(closed)?;
            let shard = self.new_shard()?;
            self.start_shard(&shard, None)?;
            let _ = place.set(shard);
        }
        Ok(())
    }

    /// No more shards are made: the endpoint is closed.
    pub(crate) fn end_making(&self) {
        drop(self.shards.making.lock().unwrap());
    }
}
