//! The shards of an endpoint: those that sessions are dealt to, and those of strands.
//!
//! A strand's shard is made when the first session wants it and stays; it is driven by the proxy's thread that posts
//! there, as by any lender, and by its own service thread when nobody does.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::inner::Inner;
use crate::progress::driver::Driver;
use crate::progress::shard::Shard;
use crate::transport::verbs::port::PortCq;

/// The highest number of a strand: proxies have no more threads.
pub(crate) const MAX_STRANDS: u16 = 64;

/// See the module.
#[derive(Default)]
pub(crate) struct Shards {
    dealt: OnceLock<Vec<Arc<Shard>>>,
    next: AtomicUsize,
    strands: Strands,
    /// Held while a strand's is made.
    making: Mutex<()>,
}

/// By their number, less one.
struct Strands([OnceLock<Arc<Shard>>; MAX_STRANDS as usize]);

impl Default for Strands {
    fn default() -> Self {
        Self([const { OnceLock::new() }; MAX_STRANDS as usize])
    }
}

impl Shards {
    /// Gives the endpoint its shards, once.
    pub(crate) fn set(&self, shards: Vec<Arc<Shard>>) {
        let _ = self.dealt.set(shards);
    }

    /// All of them.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Shard>> {
        let strands = self.strands.0.iter().filter_map(OnceLock::get);
        self.dealt.get().into_iter().flatten().chain(strands)
    }

    /// The shard, where there is no other.
    pub(crate) fn only(&self) -> Option<&Arc<Shard>> {
        let mut all = self.all();
        let first = all.next()?;
        all.next().is_none().then_some(first)
    }
}

impl Inner {
    /// A shard without a driver, with a completion queue for each RDMA device.
    pub(crate) fn new_shard(&self) -> io::Result<Arc<Shard>> {
        let nics = self.rdma.iter().flat_map(|rdma| &rdma.nics);
        let ports: io::Result<Vec<_>> =
            nics.map(|nic| PortCq::new(nic).map_err(io::Error::other)).collect();
        Shard::new(self.config.spin, ports?)
    }

    /// The shard for a new session: the next in turn, or its strand's own.
    pub(crate) fn shard_of(self: &Arc<Self>, strand: u16) -> io::Result<Arc<Shard>> {
        let shards = &self.shards;
        let Some(at) = usize::from(strand).checked_sub(1) else {
            let dealt = shards.dealt.get().map_or(&[][..], Vec::as_slice);
            let next = shards.next.fetch_add(1, Ordering::Relaxed) % dealt.len().max(1);
            return dealt.get(next).cloned().ok_or_else(|| io::ErrorKind::NotConnected.into());
        };
        let place = shards.strands.0.get(at).ok_or(io::ErrorKind::InvalidInput)?;
        if let Some(shard) = place.get() {
            return Ok(shard.clone());
        }
        let _making = shards.making.lock().unwrap();
        if let Some(shard) = place.get() {
            return Ok(shard.clone());
        }
        // Whoever closes takes the lock too, so none is made that is not stopped.
        self.check_open().map_err(|_| io::ErrorKind::NotConnected)?;
        let shard = self.new_shard()?;
        shard.start(self, Driver::new(self.clone(), shard.clone(), None))?;
        Ok(place.get_or_init(|| shard).clone())
    }

    /// No more shards are made: the endpoint is closed.
    pub(crate) fn end_making(&self) {
        drop(self.shards.making.lock().unwrap());
    }
}
