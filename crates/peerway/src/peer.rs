//! A peer: one remote endpoint incarnation, and all operations on it.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use peerway_core::descriptor::DESCRIPTOR_LEN;
use peerway_core::ids::Incarnation;
use peerway_core::outcome::{Ended, Reason};
use peerway_core::region::Access;

use crate::batch::{Batch, check_notification};
use crate::connect::import;
use crate::error::{Error, ImportError, PostError, RegisterError};
use crate::inbox::Notification;
use crate::path::Path;
use crate::prepared::{Prepared, Staged};
use crate::progress::engine::Engine;
use crate::region::{LocalSlice, Region};
use crate::session::Session;
use crate::session::remote::{RemoteRegion, RemoteSlice};
use crate::transfer::{self, PostMode, Transfer};
use crate::work::Signal;

/// A connected peer. Cloning is cheap. A restarted peer is another peer.
#[derive(Clone)]
pub struct Peer {
    endpoint: Arc<Engine>,
    session: Arc<Session>,
}

impl Peer {
    pub(crate) fn new(endpoint: Arc<Engine>, session: Arc<Session>) -> Self {
        Self { endpoint, session }
    }

    pub(crate) fn endpoint(&self) -> &Arc<Engine> {
        &self.endpoint
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Turns a descriptor that the peer advertised into memory that can be read and written.
    ///
    /// The first import of an advertisement asks the peer once. Later imports cost nothing.
    pub fn import(&self, descriptor: &[u8]) -> Result<RemoteRegion, ImportError> {
        import::import(&self.endpoint, &self.session, descriptor)
    }

    /// Writes and waits for the end.
    pub fn write(&self, local: &LocalSlice, remote: &RemoteSlice) -> Result<(), Error> {
        self.finish(&Batch::write(local, remote)?)
    }

    /// Reads and waits for the end.
    pub fn read(&self, local: &LocalSlice, remote: &RemoteSlice) -> Result<(), Error> {
        self.finish(&Batch::read(local, remote)?)
    }

    fn finish(&self, batch: &Batch) -> Result<(), Error> {
        let transfer = self.begin(batch)?;
        if transfer.join().reason == Reason::Done {
            return Ok(());
        }
        transfer.failure().map_or(Ok(()), |failure| Err(Box::new(failure).into()))
    }

    /// Posts a batch. It returns within microseconds, whatever the size of the batch.
    pub fn post(&self, batch: &Batch) -> Result<Transfer, PostError> {
        transfer::post(&self.endpoint, &self.session, batch, PostMode::Leaves, None)
    }

    /// Posts a batch and waits for its end. The calling thread does the work.
    ///
    /// To learn more of a failure than its reason and fence, use [`Self::begin`],
    /// [`Transfer::join`] and [`Transfer::failure`].
    pub fn run(&self, batch: &Batch) -> Result<Ended, PostError> {
        Ok(self.begin(batch)?.join())
    }

    /// Posts a batch that the calling thread waits for next. The engine's threads do not work on
    /// it. A handle that the caller keeps without waiting for it or polling it may make no
    /// progress. The engine's threads continue the transfer after the caller drops the handle,
    /// awaits it, or asks for a wake-up ([`Transfer::on_end`]).
    pub fn begin(&self, batch: &Batch) -> Result<Transfer, PostError> {
        transfer::post(&self.endpoint, &self.session, batch, PostMode::Waits, None)
    }

    /// Keeps a checked batch that any thread can post many times without another check.
    ///
    /// If RDMA devices will carry it, this call registers its memory with them. Otherwise the first
    /// post does. For GPU memory it also prepares everything that a transfer in a stream must not
    /// ask the driver for.
    pub fn prepare(&self, batch: Batch) -> Result<Prepared, PostError> {
        if let Some(remote) = batch.work.remotes.as_slice().first()
            && !Arc::ptr_eq(&remote.session, &self.session)
        {
            return Err(PostError::OtherPeer);
        }
        Ok(Prepared::new(self.endpoint.clone(), self.session.clone(), batch))
    }

    /// Prepares a transfer in stages that the caller releases one by one. Each stage has its own
    /// counter and notification. Use it for layer-wise streaming.
    pub fn stage(&self, stages: Vec<Batch>) -> Result<Staged, PostError> {
        let stages: Result<_, _> = stages.into_iter().map(|batch| self.prepare(batch)).collect();
        self.stage_prepared(stages?)
    }

    /// Does [`Self::stage`] with stages that are already prepared.
    pub fn stage_prepared(&self, stages: Vec<Prepared>) -> Result<Staged, PostError> {
        if stages.iter().any(|stage| !stage.is_for(&self.session)) {
            return Err(PostError::OtherPeer);
        }
        Ok(Staged::new(stages))
    }

    /// Sends a message to the peer's notification queue.
    pub fn notify(&self, message: &[u8]) -> Result<Transfer, PostError> {
        check_notification(message)?;
        let signal = Signal { notify: Some(message.into()), count: None };
        transfer::post_signal(&self.endpoint, &self.session, signal)
    }

    /// Adds one to a counter of the peer.
    ///
    /// The peer must know this endpoint: it opened the session, or one of the two has imported
    /// memory of the other. Otherwise the count fails with
    /// [`TransferError::RemoteAccess`](crate::TransferError::RemoteAccess), so that an endpoint
    /// which merely reaches the port raises nothing.
    pub fn count(&self, id: u32) -> Result<Transfer, PostError> {
        transfer::post_signal(
            &self.endpoint,
            &self.session,
            Signal { notify: None, count: Some(id) },
        )
    }

    /// Waits for a notification from this peer and takes the oldest.
    pub fn notification(&self, timeout: Duration) -> Option<Notification> {
        self.endpoint.wait_notification(Some(&self.session.incarnation), timeout)
    }

    /// The path to this peer, and why it was chosen.
    pub fn path(&self) -> &Path {
        &self.session.path
    }

    /// The identity of this incarnation of the peer.
    pub fn incarnation(&self) -> Incarnation {
        self.session.incarnation
    }

    /// The address that the session was opened with.
    pub fn address(&self) -> SocketAddr {
        self.session.addr
    }

    /// Whether this endpoint opened the session.
    pub fn is_initiator(&self) -> bool {
        self.session.initiator
    }

    /// Whether transfers can be posted.
    pub fn is_alive(&self) -> bool {
        self.session.is_alive()
    }

    /// Closes the session.
    pub fn remove(&self) {
        self.session.remove();
    }

    /// Statistics of this peer, including the sub-sessions of proxy threads.
    pub fn stats(&self) -> PeerStats {
        let mut sum = PeerStats::default();
        let open = self.endpoint.check_open().is_ok();
        let sub_sessions =
            if open { self.endpoint.peers.sub_sessions_of(&self.session) } else { Vec::new() };
        for session in sub_sessions.iter().chain([&self.session]) {
            let stats = &session.stats;
            let load = |n: &std::sync::atomic::AtomicU64| n.load(Ordering::Relaxed);
            sum.transfers += load(&stats.transfers);
            sum.bytes_written += load(&stats.bytes_written);
            sum.bytes_read += load(&stats.bytes_read);
            sum.bytes_served += load(&stats.bytes_served);
            sum.bytes_landed += load(&stats.bytes_landed);
            sum.lanes_lost += load(&stats.lanes_lost);
            sum.lanes_reopened += load(&stats.lanes_reopened);
            sum.corrupt_records += load(&stats.corrupt_records);
        }
        sum
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Peer({}, {}, {})", self.incarnation(), self.address(), self.path().kind)
    }
}

impl PartialEq for Peer {
    /// Whether both handles name the same session.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.session, &other.session)
    }
}

impl Eq for Peer {}

impl Hash for Peer {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.session).hash(state);
    }
}

/// Statistics of one peer. Lanes do not see bytes that this process copies directly, so such
/// transfers count only under `transfers`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct PeerStats {
    /// Transfers posted.
    pub transfers: u64,
    /// Bytes that lanes wrote to the peer.
    pub bytes_written: u64,
    /// Bytes that lanes read from the peer.
    pub bytes_read: u64,
    /// Bytes that the peer read from this endpoint by lanes.
    pub bytes_served: u64,
    /// Bytes that the peer wrote to this endpoint by lanes.
    pub bytes_landed: u64,
    /// Lanes that broke.
    pub lanes_lost: u64,
    /// TCP lanes that took the place of broken ones.
    pub lanes_reopened: u64,
    /// Lanes that were closed, because a record on them was not what the peer sent
    /// (`PEERWAY_DATA`). The last lane of a session counts here and not under `lanes_lost`.
    pub corrupt_records: u64,
}

/// Advertisements that name a peer.
impl Region {
    /// Advertises the whole region to one peer. Other peers cannot use the descriptor.
    pub fn advertise_to(
        &self,
        peer: &Peer,
        access: Access,
    ) -> Result<[u8; DESCRIPTOR_LEN], RegisterError> {
        self.advertise_range(0..self.len(), access, Some(peer))
    }

    /// Advertises a part of the region, to one peer or to every holder of the descriptor.
    ///
    /// The same part, rights and peer give the same descriptor again.
    pub fn advertise_range(
        &self,
        range: Range<u64>,
        access: Access,
        to: Option<&Peer>,
    ) -> Result<[u8; DESCRIPTOR_LEN], RegisterError> {
        self.advertise_bound(range, access, to.map(Peer::incarnation))
    }
}
